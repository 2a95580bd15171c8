#!/usr/bin/env bash
# Trains a reward model from SmolLM2-135M-Instruct on pairs of UltraFeedback, in a minute.
# Needs: one GPU, and:
#   python examples/models/smollm2.py --local_dir ~/models/SmolLM2-135M-Instruct
#   python examples/data_preprocess/ultrafeedback.py --local_save_dir ~/data/ultrafeedback
# Usage: bash examples/rm/run_smollm2_rm.sh [key=value …]
set -euo pipefail

MODEL=${MODEL:-$HOME/models/SmolLM2-135M-Instruct}
DATA=${DATA:-$HOME/data/ultrafeedback}

exec python3 -m verl.trainer.main_rm \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=32 \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=32768 \
    data.max_length=1024 \
    data.truncation=left \
    model.path="$MODEL" \
    model.enable_gradient_checkpointing=False \
    optim.lr=1e-4 \
    trainer.n_gpus_per_node=1 \
    trainer.total_epochs=2 \
    trainer.save_freq=0 \
    trainer.test_freq=5 \
    trainer.project_name=smollm2 \
    trainer.experiment_name=reward_model \
    trainer.default_local_dir=checkpoints/smollm2/reward_model \
    trainer.logger=[console,file] \
    "$@"
