#!/usr/bin/env bash
# GRPO on GSM8K with a calculator and Qwen2.5-3B-Instruct.
# Needs: 8 GPUs, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/multi_turn/run_qwen2.5-3b_gsm8k_calculator.sh [key=value …]
set -euo pipefail
rollout=actor_rollout_ref.rollout
exec python3 -m verl.trainer.main_ppo \
    algorithm=grpo \
    data.train_files="$HOME/data/gsm8k/train.parquet" \
    data.val_files="$HOME/data/gsm8k/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    $rollout.n=8 \
    $rollout.mode=async \
    $rollout.multi_turn.enable=True \
    $rollout.multi_turn.format=hermes \
    $rollout.multi_turn.max_assistant_turns=5 \
    $rollout.multi_turn.function_tool_path=examples/multi_turn/calculator.py \
    trainer.n_gpus_per_node=8 \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    trainer.total_epochs=15 \
    trainer.project_name=multi_turn \
    trainer.experiment_name=qwen2.5-3b-calculator \
    "$@"
