#!/usr/bin/env bash
# Search-R1 with SmolLM2-135M-Instruct on HotpotQA, with its retriever.
# Needs: one GPU, `pip install -e .[search]`, and:
#   python examples/models/smollm2.py --local_dir ~/models/SmolLM2-135M-Instruct
# Usage: bash recipe/search_r1/run_smollm2.sh [key=value …]
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-$HOME/models/SmolLM2-135M-Instruct}
DATA=${DATA:-$HERE/../../../shared/data/hotpot_search}
FOLDER=${FOLDER:-runs/search_r1/smollm2}
PORT=${PORT:-8000}
SFT_STEPS=${SFT_STEPS:-60}
export PYTHONPATH="$HERE/../..${PYTHONPATH:+:$PYTHONPATH}"
export RAY_ADDRESS=${RAY_ADDRESS:-local}
source "$HERE/serve.bash"

rm -rf "$FOLDER"
mkdir -p "$FOLDER"
echo "== 1. Questions and demonstrations"
python3 -m recipe.search_r1.hotpot --source "$DATA" --folder "$FOLDER/data"

echo "== 2. Warm start: the format of searches and answers"
python3 -m verl.trainer.main_sft \
    data.train_files="$FOLDER/data/sft.parquet" \
    data.custom_cls.path="$HERE/demonstrations.py" \
    data.custom_cls.name=Demonstrations \
    data.train_batch_size=16 \
    data.micro_batch_size_per_gpu=16 \
    data.max_length=1536 \
    model.path="$MODEL" \
    optim.lr=5e-5 \
    optim.lr_scheduler=cosine \
    optim.lr_warmup_steps=5 \
    trainer.total_training_steps="$SFT_STEPS" \
    trainer.n_gpus_per_node=1 \
    trainer.default_local_dir="$FOLDER/sft" \
    trainer.project_name=search_r1 \
    trainer.experiment_name=smollm2_sft \
    trainer.logger=[file]

echo "== 3. The retriever: BM25 over HTTP"
start_retriever "$DATA/corpus.jsonl" "$PORT" "$FOLDER/retriever.log"

echo "== 4. GRPO: only the answer is rewarded"
data=(
    algorithm=grpo
    data.train_files="$FOLDER/data/train.parquet"
    data.val_files="$FOLDER/data/val.parquet"
    data.train_batch_size=32
    data.max_prompt_length=320
    data.max_response_length=768
    data.max_turn_length=96
    data.max_obs_length=448
)
search=(
    do_search=True
    actor_rollout_ref.rollout.mode=async
    max_turns=1
    retriever.url="http://127.0.0.1:$PORT/retrieve"
    retriever.topk=3
)
policy=(
    actor_rollout_ref.model.path="$FOLDER/sft/global_step_$SFT_STEPS"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.actor.optim.lr_warmup_steps=3
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.n=4
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.total_training_steps=40
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.default_local_dir="$FOLDER/grpo"
    trainer.validation_data_dir="$FOLDER/answers"
    trainer.project_name=search_r1
    trainer.experiment_name=smollm2
    trainer.logger=[console,file]
)
python3 -m verl.trainer.main_ppo "${data[@]}" "${search[@]}" "${policy[@]}" "${trainer[@]}" "$@"

echo "== 5. Before and after"
python3 -m recipe.report "$FOLDER/answers" --mark "<information>" --called searched
