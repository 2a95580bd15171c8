#!/usr/bin/env bash
# SFT on the worked answers of GSM8K.
# Needs: one GPU or more, and:
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/sft/run_gsm8k_sft.sh [key=value …]
set -euo pipefail

DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

exec python3 -m verl.trainer.main_sft \
    data.train_files="$DATA_DIR/train.parquet" \
    data.val_files="$DATA_DIR/test.parquet" \
    data.prompt_key=prompt \
    data.response_key=extra_info.answer \
    data.train_batch_size=256 \
    data.micro_batch_size_per_gpu=4 \
    data.max_length=1024 \
    model.path=Qwen/Qwen2.5-0.5B-Instruct \
    optim.lr=1e-5 \
    trainer.project_name=gsm8k-sft \
    trainer.experiment_name=qwen2.5-0.5b-instruct \
    trainer.total_epochs=3 \
    trainer.logger=console \
    "$@"
