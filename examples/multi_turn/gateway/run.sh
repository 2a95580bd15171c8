#!/usr/bin/env bash
# Trains an agent that only uses the OpenAI API, through the gateway: a small model, in minutes.
# Needs: two CPU cores; no downloads.
# Usage: bash examples/multi_turn/gateway/run.sh [key=value …]
set -euo pipefail

cd "$(dirname "$0")/../../.."
FOLDER=${FOLDER:-runs/gateway}
# A model this small is slower on two threads.
export OMP_NUM_THREADS=1
# Start a new Ray cluster unless RAY_ADDRESS is set.
export RAY_ADDRESS=${RAY_ADDRESS:-local}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

agents=(
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/multi_turn/gateway/agents.yaml
    actor_rollout_ref.rollout.agent.default_agent_loop=guesser
    actor_rollout_ref.rollout.agent.num_workers=1
)
data=(
    data.train_files="$FOLDER/train.parquet"
    data.val_files="$FOLDER/val.parquet"
    data.train_batch_size=16
    data.max_prompt_length=8
    data.max_response_length=16
    data.dataloader_num_workers=0
)
policy=(
    algorithm=grpo
    actor_rollout_ref.model.path="$FOLDER/model"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=2e-3
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256
    actor_rollout_ref.actor.entropy_coeff=0.01
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256
    actor_rollout_ref.rollout.n=16
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.device=cpu
    trainer.total_training_steps=60
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.default_local_dir="$FOLDER/checkpoints"
    trainer.validation_data_dir="$FOLDER/games"
    trainer.project_name=gateway
    trainer.experiment_name=guesser
)

python3 examples/multi_turn/gateway/game.py "$FOLDER"
exec python3 -m verl.trainer.main_ppo "${agents[@]}" "${data[@]}" "${policy[@]}" "${trainer[@]}" "$@"
