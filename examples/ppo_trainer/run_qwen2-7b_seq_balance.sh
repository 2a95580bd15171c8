#!/usr/bin/env bash
# PPO with Qwen2-7B for responses of very different lengths: micro-batches by tokens, rows balanced over ranks.
# Needs: 8 GPUs, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/ppo_trainer/run_qwen2-7b_seq_balance.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.gamma=1.0 \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152 \
    critic.optim.lr=1e-5 \
    critic.ppo_mini_batch_size=128 \
    critic.ppo_max_token_len_per_gpu=49152 \
    critic.forward_max_token_len_per_gpu=98304 \
    trainer.balance_batch=True \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=15 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=ppo_gsm8k \
    trainer.experiment_name=qwen2_7b_seq_balance \
    "$@"
