#!/usr/bin/env bash
# PPO on GSM8K with Gemma 2B: actor, critic and rollout share the devices.
# Needs: 2 GPUs, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/ppo_trainer/run_gemma.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=google/gemma-2b-it \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    critic.ppo_mini_batch_size=128 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    trainer.n_gpus_per_node=2 \
    trainer.nnodes=1 \
    trainer.total_epochs=15 \
    trainer.save_freq=20 \
    trainer.test_freq=10 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=ppo_gsm8k \
    trainer.experiment_name=gemma_2b \
    "$@"
