#!/usr/bin/env bash
# PPO on GSM8K and MATH with Qwen2-7B on Megatron: the actor as TP 4 × PP 2, the critic as TP 4.
# Needs: 8 GPUs, `make setup-megatron`, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
#   python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
# Usage: bash examples/ppo_trainer/run_qwen2-7b_math_megatron.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    actor_rollout_ref=megatron \
    critic=megatron \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    data.train_files="['$HOME/data/gsm8k/train.parquet','$HOME/data/math/train.parquet']" \
    data.val_files="['$HOME/data/gsm8k/test.parquet','$HOME/data/math/test.parquet']" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron_config.pipeline_model_parallel_size=2 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    critic.optim.lr=1e-5 \
    critic.ppo_mini_batch_size=128 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    critic.megatron_config.tensor_model_parallel_size=4 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=15 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=ppo_math \
    trainer.experiment_name=qwen2_7b_megatron \
    "$@"
