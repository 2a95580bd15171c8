#!/usr/bin/env bash
# SFT of SmolLM2-135M-Instruct on the worked answers of GSM8K, in minutes, with accuracy before and after.
# Needs: one GPU, and:
#   python examples/models/smollm2.py --local_dir ~/models/SmolLM2-135M-Instruct
#   python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Usage: bash examples/sft/run_smollm2_gsm8k.sh [key=value …]
set -euo pipefail

MODEL=${MODEL:-$HOME/models/SmolLM2-135M-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}

exec python3 -m verl.trainer.main_sft \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.response_key=extra_info.answer \
    data.val_prompt_files="$DATA/test.parquet" \
    data.max_prompt_length=512 \
    data.max_length=1024 \
    data.train_batch_size=64 \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=32768 \
    rollout.max_new_tokens=384 \
    model.path="$MODEL" \
    model.enable_gradient_checkpointing=False \
    optim.lr=1e-3 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=3 \
    trainer.save_freq=0 \
    trainer.project_name=smollm2 \
    trainer.experiment_name=gsm8k_sft \
    trainer.default_local_dir=checkpoints/smollm2/gsm8k_sft \
    trainer.logger=[console,file] \
    "$@"
