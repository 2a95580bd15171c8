#!/usr/bin/env bash
# bash run.sh [key=value …]         create the data and the tiny model, warm-start it, train it with GRPO
# bash run.sh check [key=value …]   check data, reward, tool and chat template of that training, without training
# bash run.sh plan [key=value …]    memory and time of that training, e.g. on other hardware: --gpu h100-80g --gpus 8
set -euo pipefail
cd "$(dirname "$0")"
action=train
case "${1:-}" in train | check | plan) action=$1 && shift ;; esac
python="${PYTHON:-python}"
"$python" -c "import verl" || { echo "run.sh: activate the environment that has verl, or set PYTHON." >&2 && exit 1; }
export RAY_ADDRESS="${RAY_ADDRESS:-local}" # starts an own Ray, also if another one runs on this machine
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the model is tiny; delete this line for a real one

# 1. Data and a model with random weights. For a real model: only the data.
[ -e model/config.json ] || "$python" prepare.py

# 2. A random model knows nothing: a few hundred supervised steps teach it the format. Not needed for a real model.
[ -e sft/global_step_300 ] || "$python" -m verl sft \
    data.train_files=data/sft.parquet \
    data.multiturn=True \
    data.train_batch_size=64 \
    data.micro_batch_size_per_gpu=64 \
    data.max_length=96 \
    model.path=model \
    model.enable_gradient_checkpointing=False \
    optim.lr=2e-3 \
    optim.lr_warmup_steps=20 \
    trainer.device=cpu \
    trainer.total_training_steps=300 \
    trainer.default_local_dir=sft \
    trainer.tracking_dir=sft \
    trainer.logger=[file]

# 3. Reinforcement learning. README.md explains which values to change for a real model.
rollout=actor_rollout_ref.rollout
overrides=(
    algorithm=grpo
    data.train_files=data/train.parquet
    data.val_files=data/val.parquet
    data.train_batch_size=64
    data.max_prompt_length=24
    data.max_response_length=64
    data.dataloader_num_workers=0
    custom_reward_function.path=reward.py
    actor_rollout_ref.model.path=sft/global_step_300
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
    $rollout.n=4
    $rollout.log_prob_micro_batch_size_per_gpu=64
    $rollout.max_model_len=96
    $rollout.mode=async
    $rollout.agent.num_workers=1
    $rollout.multi_turn.enable=True
    $rollout.multi_turn.max_assistant_turns=2
    $rollout.multi_turn.function_tool_path=tools.py
    trainer.device=cpu
    trainer.n_gpus_per_node=1
    trainer.total_training_steps=30
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.project_name="$(basename "$PWD")"
    trainer.experiment_name=grpo
    trainer.default_local_dir=checkpoints
    trainer.rollout_data_dir=conversations
    trainer.tracking_dir=metrics
    "trainer.logger=[console,file]"
)
exec "$python" -m verl "$action" "${overrides[@]}" "$@"
