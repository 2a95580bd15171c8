#!/usr/bin/env bash
# Search-R1 with its retriever: a tiny model learns to search, in minutes. With SmolLM2 on a GPU: run_smollm2.sh.
# Needs: two CPU cores, `pip install -e .[search]`; no downloads.
# Usage: bash recipe/search_r1/run.sh [key=value …]
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
FOLDER=${FOLDER:-runs/search_r1/tiny}
PORT=${PORT:-8000}
export PYTHONPATH="$HERE/../..${PYTHONPATH:+:$PYTHONPATH}"
# A model this small is slower on two threads.
export OMP_NUM_THREADS=1
# Start a new Ray cluster unless RAY_ADDRESS is set.
export RAY_ADDRESS=${RAY_ADDRESS:-local}
source "$HERE/serve.bash"

rm -rf "$FOLDER"
mkdir -p "$FOLDER"
echo "== 1. Facts, questions about them, and a model with random weights"
python3 -m recipe.search_r1.task --folder "$FOLDER/task"

echo "== 2. Warm start: supervised steps on demonstrations that mostly guess"
python3 -m verl.trainer.main_sft \
    data.train_files="$FOLDER/task/sft.parquet" \
    data.custom_cls.path="$HERE/demonstrations.py" \
    data.custom_cls.name=Demonstrations \
    data.train_batch_size=64 \
    data.micro_batch_size_per_gpu=64 \
    data.max_length=80 \
    data.dataloader_num_workers=0 \
    model.path="$FOLDER/task/model" \
    model.enable_gradient_checkpointing=False \
    optim.lr=2e-3 \
    optim.lr_scheduler=cosine \
    optim.lr_warmup_steps=20 \
    trainer.total_training_steps="${SFT_STEPS:-400}" \
    trainer.device=cpu \
    trainer.default_local_dir="$FOLDER/sft" \
    trainer.project_name=search_r1 \
    trainer.experiment_name=sft \
    trainer.logger=[file]

echo "== 3. The retriever: BM25 over HTTP"
start_retriever "$FOLDER/task/corpus.jsonl" "$PORT" "$FOLDER/retriever.log"

echo "== 4. GRPO: only the answer is rewarded"
data=(
    algorithm=grpo
    data.train_files="$FOLDER/task/train.parquet"
    data.val_files="$FOLDER/task/val.parquet"
    data.train_batch_size=32
    data.max_prompt_length=24
    data.max_response_length=96
    data.max_obs_length=40
    data.dataloader_num_workers=0
)
search=(
    do_search=True
    actor_rollout_ref.rollout.mode=async
    max_turns=2
    retriever.url="http://127.0.0.1:$PORT/retrieve"
    retriever.topk=2
)
policy=(
    actor_rollout_ref.model.path="$FOLDER/sft/global_step_${SFT_STEPS:-400}"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=3e-4
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.agent.num_workers=1
    actor_rollout_ref.rollout.agent.max_concurrent_requests=512
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.device=cpu
    trainer.total_training_steps=40
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.default_local_dir="$FOLDER/grpo"
    trainer.validation_data_dir="$FOLDER/answers"
    trainer.project_name=search_r1
    trainer.experiment_name=tiny
    trainer.logger=[console,file]
)
python3 -m verl.trainer.main_ppo "${data[@]}" "${search[@]}" "${policy[@]}" "${trainer[@]}" "$@"

echo "== 5. Before and after"
python3 -m recipe.report "$FOLDER/answers" --mark "<information>" --called searched
