#!/usr/bin/env bash
# ReTool with a tiny model that learns to run code in the sandbox, in minutes.
# Needs: two CPU cores; no downloads.
# Usage: bash recipe/retool/run_tiny_cpu.sh [key=value …]
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FOLDER=${FOLDER:-runs/retool/tiny}
SFT_STEPS=${SFT_STEPS:-400}
export PYTHONPATH="$HERE/../..${PYTHONPATH:+:$PYTHONPATH}"
# A model this small is slower on two threads.
export OMP_NUM_THREADS=1
# Start a new Ray cluster unless RAY_ADDRESS is set.
export RAY_ADDRESS=${RAY_ADDRESS:-local}

rm -rf "$FOLDER"
echo "== 1. Multiplication problems, and a model with random weights"
python3 -m recipe.retool.task --folder "$FOLDER/task"

echo "== 2. Warm start: supervised steps on demonstrations that mostly guess"
python3 -m verl.trainer.main_sft \
    data.train_files="$FOLDER/task/sft.parquet" \
    data.multiturn=True \
    data.train_batch_size=64 \
    data.micro_batch_size_per_gpu=64 \
    data.max_length=48 \
    data.dataloader_num_workers=0 \
    model.path="$FOLDER/task/model" \
    model.enable_gradient_checkpointing=False \
    optim.lr=2e-3 \
    optim.lr_scheduler=cosine \
    optim.lr_warmup_steps=20 \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.device=cpu \
    trainer.default_local_dir="$FOLDER/sft" \
    trainer.project_name=retool \
    trainer.experiment_name=sft \
    trainer.logger=[file]

echo "== 3. GRPO with clip-higher: only the answer is rewarded"
algorithm=(
    algorithm=grpo
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
data=(
    data.train_files="$FOLDER/task/train.parquet"
    data.val_files="$FOLDER/task/val.parquet"
    data.train_batch_size=32
    data.max_prompt_length=16
    data.max_response_length=64
    data.dataloader_num_workers=0
)
policy=(
    actor_rollout_ref.model.path="$FOLDER/sft/global_step_$SFT_STEPS"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
)
rollout=(
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.agent.max_concurrent_requests=512
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$HERE/sandbox_fusion_tool_config.yaml"
    actor_rollout_ref.rollout.multi_turn.format=hermes
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.device=cpu
    trainer.total_training_steps=20
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.default_local_dir="$FOLDER/grpo"
    trainer.validation_data_dir="$FOLDER/answers"
    trainer.project_name=retool
    trainer.experiment_name=tiny
    trainer.logger=[console,file]
)
python3 -m verl.trainer.main_ppo \
    "${algorithm[@]}" "${data[@]}" "${policy[@]}" "${rollout[@]}" "${trainer[@]}" "$@"

echo "== 4. Before and after"
python3 -m recipe.report "$FOLDER/answers" --mark "<tool_call>" --called "ran code"
