#!/usr/bin/env bash
# GRPO on GSM8K with Qwen2.5-0.5B in two small steps: checks that data, model and reward work together before a GPU is
# used. The accuracy does not change.
# Needs: two CPU cores, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/grpo_trainer/run_qwen2.5-0.5b_cpu.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm=grpo \
    algorithm.adv_estimator=grpo \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=4 \
    data.val_max_samples=8 \
    data.max_prompt_length=256 \
    data.max_response_length=128 \
    data.dataloader_num_workers=0 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.n=4 \
    trainer.device=cpu \
    trainer.n_gpus_per_node=2 \
    trainer.total_training_steps=2 \
    trainer.logger=console \
    trainer.project_name=grpo_gsm8k \
    trainer.experiment_name=qwen2.5_0.5b_cpu \
    "$@"
