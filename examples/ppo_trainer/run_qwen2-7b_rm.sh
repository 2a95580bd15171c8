#!/usr/bin/env bash
# PPO with Qwen2-7B and a reward model. The KL to the reference is part of the reward, so that the policy does not exploit
# errors of the reward model.
# Needs: 8 GPUs, and:
#   python examples/data_preprocess/hh_rlhf.py --local_save_dir ~/data/hh_rlhf
# Usage: bash examples/ppo_trainer/run_qwen2-7b_rm.sh [key=value …]
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=True \
    algorithm.kl_ctrl.kl_coef=0.01 \
    data.train_files="$HOME/data/hh_rlhf/train.parquet" \
    data.val_files="$HOME/data/hh_rlhf/test.parquet" \
    data.train_batch_size=512 \
    data.max_prompt_length=1024 \
    data.max_response_length=512 \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.ref.fsdp_config.param_offload=True \
    critic.optim.lr=1e-5 \
    critic.ppo_mini_batch_size=128 \
    critic.ppo_micro_batch_size_per_gpu=8 \
    reward_model.enable=True \
    reward_model.path=OpenAssistant/reward-model-deberta-v3-large \
    reward_model.micro_batch_size_per_gpu=32 \
    reward_model.max_length=512 \
    trainer.n_gpus_per_node=8 \
    trainer.nnodes=1 \
    trainer.total_epochs=1 \
    trainer.save_freq=20 \
    trainer.test_freq=5 \
    trainer.logger='["console","tensorboard"]' \
    trainer.project_name=ppo_hh_rlhf \
    trainer.experiment_name=qwen2_7b_reward_model \
    "$@"
