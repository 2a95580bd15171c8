#!/usr/bin/env bash
# GRPO on two-step arithmetic with SmolLM2-135M-Instruct, in minutes.
# Needs: one GPU, and:
#   python examples/models/smollm2.py --local_dir ~/models/SmolLM2-135M-Instruct
#   python examples/smollm2/make_data.py --local_save_dir ~/data/two_step
# Usage: bash examples/smollm2/run.sh [key=value …]
set -euo pipefail

MODEL=${MODEL:-$HOME/models/SmolLM2-135M-Instruct}
DATA=${DATA:-$HOME/data/two_step}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

data=(
    algorithm=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=64
    data.max_prompt_length=192
    data.max_response_length=40
    custom_reward_function.path="$HERE/reward.py"
)
policy=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=2e-5
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    actor_rollout_ref.rollout.n=16
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.total_training_steps=80
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.logger=[console,file]
    trainer.project_name=smollm2
    trainer.experiment_name=two_step
    trainer.validation_data_dir=runs/smollm2/two_step/answers
)

exec python3 -m verl.trainer.main_ppo "${data[@]}" "${policy[@]}" "${trainer[@]}" "$@"
