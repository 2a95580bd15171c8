#!/usr/bin/env bash
# SFT on conversations that call a Python interpreter: the initial model of recipe/retool/run_qwen2_7b_dapo.sh.
# Needs: 8 GPUs; rows with `messages` (calls as `tool_calls` or in the text, results as role `tool`) and `tools`.
# Usage: bash examples/sft/run_retool_sft.sh [key=value …]
set -euo pipefail

DATA_ROOT=${DATA_ROOT:-$HOME}

exec python3 -m verl.trainer.main_sft \
    data.train_files="$DATA_ROOT/dataset/ReTool-SFT/train.parquet" \
    data.val_files="$DATA_ROOT/dataset/ReTool-SFT/test.parquet" \
    data.messages_key=messages \
    data.tools_key=tools \
    data.multiturn=True \
    data.train_batch_size=32 \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=16384 \
    data.max_length=16384 \
    model.path=Qwen/Qwen2.5-7B-Instruct \
    ulysses_sequence_parallel_size=4 \
    optim.lr=1e-5 \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=6 \
    trainer.project_name=retool \
    trainer.experiment_name=multiturn-sft-qwen-2.5-7b-instruct \
    trainer.default_local_dir=checkpoint/multiturn-sft-qwen-2.5-7b-instruct \
    "$@"
