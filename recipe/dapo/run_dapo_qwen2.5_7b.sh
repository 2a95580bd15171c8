#!/usr/bin/env bash
# DAPO on DAPO-Math-17k with Qwen2.5-7B (a base model), validated on AIME 2024.
# Needs: 8 GPUs of 80 GB, and:
#   python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/dapo_math
#   python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
# Usage: bash recipe/dapo/run_dapo_qwen2.5_7b.sh [key=value …]
set -euo pipefail

# A response may have 8192 tokens; the length penalty grows over the last 2048.
max_response_length=8192
overlong_buffer=2048

dapo=(
    algorithm=grpo
    # dynamic sampling: replace prompts whose responses are all correct or all wrong
    algorithm.filter_groups.enable=True
    algorithm.filter_groups.metric=acc
    algorithm.filter_groups.max_num_gen_batches=10
    data.gen_batch_size=512
    # clip-higher, token-level loss, no KL
    actor_rollout_ref.actor.clip_ratio_low=0.2
    actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    actor_rollout_ref.actor.use_kl_loss=False
    algorithm.use_kl_in_reward=False
    # soft overlong punishment
    reward_model.reward_manager=dapo
    reward_model.overlong_buffer.enable=True
    reward_model.overlong_buffer.len=$overlong_buffer
    reward_model.overlong_buffer.penalty_factor=1.0
)
data=(
    data.train_files="$HOME/data/dapo_math/train.parquet"
    data.val_files="$HOME/data/math/aime24.parquet"
    data.train_batch_size=256
    data.max_prompt_length=2048
    data.max_response_length=$max_response_length
)
policy=(
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B
    actor_rollout_ref.model.use_remove_padding=True
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.lr_warmup_steps=80
    actor_rollout_ref.actor.optim.weight_decay=0.1
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20480
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
)
rollout=(
    actor_rollout_ref.rollout.n=16
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.val_kwargs.n=32
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)
trainer=(
    trainer.n_gpus_per_node=8
    trainer.nnodes=1
    trainer.total_training_steps=300
    trainer.save_freq=10
    trainer.test_freq=10
    trainer.logger='["console","tensorboard"]'
    trainer.project_name=dapo
    trainer.experiment_name=qwen2.5_7b
)

exec python3 -m verl.trainer.main_ppo "${dapo[@]}" "${data[@]}" "${policy[@]}" "${rollout[@]}" "${trainer[@]}" "$@"
