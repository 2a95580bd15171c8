#!/usr/bin/env bash
# SFT on conversations: every assistant message is trained, rows are packed.
# Needs: 8 GPUs; rows with `messages` of {role, content}; `loss` of a message is its weight (0: not trained).
# Usage: bash examples/sft/run_multiturn_sft.sh [key=value …]
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/conversations}

exec python3 -m verl.trainer.main_sft \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.messages_key=messages \
    data.multiturn=True \
    data.train_batch_size=64 \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=16384 \
    data.max_length=8192 \
    data.truncation=right \
    model.path=Qwen/Qwen2.5-7B-Instruct \
    ulysses_sequence_parallel_size=2 \
    optim.lr=1e-5 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=2 \
    trainer.project_name=multiturn-sft \
    trainer.experiment_name=qwen2.5-7b-instruct \
    "$@"
