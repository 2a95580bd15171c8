#!/usr/bin/env bash
# DAPO on the word problems of the quick start with a small model, in minutes.
# Needs: two CPU cores, and once:
#   python examples/quickstart/run.py
# Usage: bash recipe/dapo/run_dapo_quickstart_cpu.sh [key=value …]
set -euo pipefail

QUICKSTART=${QUICKSTART:-runs/quickstart}
# A model this small is slower on two threads; each of the two worker processes has one core.
export OMP_NUM_THREADS=1
# Start a new Ray cluster unless RAY_ADDRESS is set.
export RAY_ADDRESS=${RAY_ADDRESS:-local}

dapo=(
    algorithm=grpo
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10
    data.gen_batch_size=96
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    reward_model.reward_manager=dapo
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=4
)
data=(
    data.train_files="$QUICKSTART/task/train.parquet"
    data.val_files="$QUICKSTART/task/val.parquet"
    data.train_batch_size=64
    data.max_prompt_length=16
    data.max_response_length=12
    data.dataloader_num_workers=0
)
policy=(
    actor_rollout_ref.model.path="$QUICKSTART/sft/global_step_300"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=2e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
    actor_rollout_ref.rollout.n=4
)
trainer=(
    trainer.n_gpus_per_node=2
    trainer.device=cpu
    trainer.total_training_steps=40
    trainer.test_freq=5
    trainer.save_freq=-1
    trainer.project_name=dapo
    trainer.experiment_name=quickstart
)

exec python3 -m verl.trainer.main_ppo "${dapo[@]}" "${data[@]}" "${policy[@]}" "${trainer[@]}" "$@"
