#!/usr/bin/env bash
# ReTool with DAPO: a model that was fine-tuned on tool use learns when to call a code interpreter in competition
# mathematics.
# Needs: 8 GPUs, `make setup-vllm`; data and model in $DATA_ROOT (default: the current folder).
# Usage: bash recipe/retool/run_qwen2_7b_dapo.sh [key=value …]
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
DATA_ROOT=${DATA_ROOT:-$PWD}

# grpo without any KL, asymmetric clipping (DAPO's clip-higher)
algorithm=(
    algorithm.adv_estimator=grpo
    algorithm.gamma=1.0
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
)
data=(
    data.train_files="['$DATA_ROOT/dataset/BytedTsinghua-SIA/DAPO-Math-17k']"
    data.val_files="['$DATA_ROOT/dataset/yentinglin/aime_2025']"
    data.return_raw_chat=True
    data.train_batch_size=64
    data.max_prompt_length=2048
    data.max_response_length=16384
)
policy=(
    actor_rollout_ref.model.path=checkpoint/multiturn-sft-qwen-2.5-7b-instruct/global_step_372
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)
# conversations proceed independently; tool results are masked from the loss
rollout=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_user_turns=16
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$here/sandbox_fusion_tool_config.yaml"
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.val_kwargs.n=30
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.6
)
trainer=(
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.project_name=retool
    trainer.experiment_name=qwen2.5_7b_dapo
)

exec python3 -m verl.trainer.main_ppo \
    "${algorithm[@]}" "${data[@]}" "${policy[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
