#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2-7B: no critic, eight responses per prompt, a KL loss to the reference.
# Needs: 8 GPUs, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/grpo_trainer/run_qwen2-7b.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm=grpo \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=15 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=grpo_gsm8k \
    trainer.experiment_name=qwen2_7b \
    "$@"
