#!/usr/bin/env bash
# On-policy distillation on GSM8K: teacher Qwen2.5-7B, student Qwen2.5-0.5B.
# Needs: GPUs, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/distillation/run_gsm8k.sh [key=value …]
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

exec python3 -m verl.trainer.main_ppo \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    distillation.enabled=True \
    distillation.teacher_models.big.model_path=Qwen/Qwen2.5-7B-Instruct \
    distillation.distillation_loss.loss_mode=reverse_kl_topk \
    distillation.distillation_loss.use_task_rewards=False \
    trainer.project_name=gsm8k-distillation \
    trainer.experiment_name=qwen2.5-7b-to-0.5b \
    trainer.total_epochs=2 \
    "$@"
