#!/usr/bin/env bash
# PPO of SmolLM2-135M-Instruct with the reward model of run_smollm2_rm.sh, which also initialises the critic. The KL to
# the initial policy is part of the reward.
# Needs: one GPU; the results of run_smollm2_rm.sh.
# Usage: bash examples/rm/run_smollm2_ppo.sh [key=value …]
set -euo pipefail

MODEL=${MODEL:-$HOME/models/SmolLM2-135M-Instruct}
REWARD_MODEL=${REWARD_MODEL:-checkpoints/smollm2/reward_model}
DATA=${DATA:-$HOME/data/ultrafeedback}

data=(
    algorithm.adv_estimator=gae
    algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.02
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=128
    data.max_prompt_length=512
    data.max_response_length=256
    data.filter_overlong_prompts=True
)
policy=(
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.actor.optim.lr=1e-5
    actor_rollout_ref.actor.optim.lr_warmup_steps=5
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768
    actor_rollout_ref.rollout.n=4
)
scoring=(
    critic.model.path="$REWARD_MODEL"
    critic.model.enable_gradient_checkpointing=False
    critic.optim.lr=1e-5
    reward_model.enable=True
    reward_model.path="$REWARD_MODEL"
)
trainer=(
    trainer.n_gpus_per_node=1
    trainer.total_training_steps=40
    trainer.test_freq=10
    trainer.save_freq=-1
    trainer.logger=[console,file]
    trainer.project_name=smollm2
    trainer.experiment_name=ppo_reward_model
    trainer.validation_data_dir=runs/smollm2/ppo_reward_model/answers
)

exec python3 -m verl.trainer.main_ppo "${data[@]}" "${policy[@]}" "${scoring[@]}" "${trainer[@]}" "$@"
