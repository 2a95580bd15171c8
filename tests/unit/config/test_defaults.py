"""Every default of the specification, written out."""

import pytest

from verl.config import load_config

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct")

DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.95,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.state_masking.start_state_marker": "<information>",
    "algorithm.state_masking.end_state_marker": "</information>",
    "algorithm.filter_groups.enable": False,
    "data.train_batch_size": 512,
    "data.gen_batch_size": 512,
    "data.val_batch_size": None,
    "data.val_files": [],
    "data.max_prompt_length": 1024,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "data.shuffle": True,
    "data.dataloader_num_workers": 8,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "actor_rollout_ref.actor.ppo_micro_batch_size": None,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "kl",
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.optim.lr_scheduler": "constant",
    "actor_rollout_ref.actor.optim.total_training_steps": None,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.actor.fsdp_config.grad_offload": False,
    "actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.name": "native",
    "actor_rollout_ref.rollout.mode": "sync",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.max_new_tokens": 512,
    "actor_rollout_ref.rollout.agent.num_workers": 4,
    "actor_rollout_ref.rollout.agent.max_concurrent_requests": 512,
    "actor_rollout_ref.rollout.multi_turn.enable": False,
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": 16,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 16,
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": 1,
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 256,
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "middle",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": "strict",
    "critic.enable": True,
    "critic.strategy": "fsdp",
    "critic.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "critic.model.enable_gradient_checkpointing": True,
    "critic.optim.lr": 1e-5,
    "critic.ppo_mini_batch_size": 128,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    "critic.forward_micro_batch_size_per_gpu": 4,
    "critic.ppo_epochs": 1,
    "critic.cliprange_value": 0.5,
    "critic.grad_clip": 1.0,
    "reward_model.enable": False,
    "reward_model.enable_resource_pool": False,
    "reward_model.reward_manager": "naive",
    "trainer.nnodes": 1,
    "trainer.total_epochs": 15,
    "trainer.total_training_steps": None,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.critic_warmup": 0,
    "trainer.save_freq": 5,
    "trainer.test_freq": 5,
    "trainer.resume_mode": "auto",
    "trainer.logger": ["console"],
    "trainer.log_val_generations": 20,
    "trainer.console_val_generations": 5,
    "trainer.dump_steps": [],
    "trainer.master_port": 29500,
    "ray_init.num_cpus": None,
    "ray_init.start_timeout": None,
    "external_libs": [],
    "custom": {},
    "do_search": False,
    "max_turns": 10,
    "retriever.url": "http://127.0.0.1:8000/retrieve",
    "retriever.topk": 3,
}


@pytest.fixture(scope="module")
def config():
    return load_config(overrides=GIVEN, check_files=False)


@pytest.mark.parametrize("key", DEFAULTS)
def test_default_is_the_one_of_the_specification(config, key):
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    assert value == DEFAULTS[key]
    assert type(value) is type(DEFAULTS[key])


def test_grpo_option_changes_estimator_and_gamma_and_needs_no_critic():
    grpo = load_config(overrides=[*GIVEN, "algorithm=grpo"], check_files=False)
    assert (grpo.algorithm.adv_estimator, grpo.algorithm.gamma) == ("grpo", 1.0)
    assert grpo.actor_rollout_ref.rollout.n == 4
    assert grpo.critic.enable is False


def test_checkpoints_go_under_project_and_experiment():
    named = load_config(overrides=[*GIVEN, "trainer.project_name=p", "trainer.experiment_name=7"], check_files=False)
    assert named.trainer.default_local_dir == "./checkpoints/p/7"


def test_reference_follows_the_actor_unless_set():
    config = load_config(
        overrides=[
            *GIVEN,
            "actor_rollout_ref.actor.fsdp_config.param_offload=True",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
            "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
            "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True",
        ],
        check_files=False,
    )
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    assert ref.fsdp_config == actor.fsdp_config
    assert ref.fsdp_config.param_offload is True
    assert ref.log_prob_micro_batch_size_per_gpu == 8
    assert (ref.log_prob_use_dynamic_bsz, actor.use_dynamic_bsz) == (True, False)
    assert ref.strategy == "fsdp"


def test_critic_mini_batch_is_the_actors_where_128_does_not_divide():
    config = load_config(
        overrides=[*GIVEN, "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16"],
        check_files=False,
    )
    assert config.critic.ppo_mini_batch_size == 16


def test_device_and_processes_without_a_gpu(monkeypatch):
    monkeypatch.setattr("verl.config.resolve.visible_gpu_count", lambda: 0)
    config = load_config(overrides=GIVEN, check_files=False)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cpu", 1)
    assert config.actor_rollout_ref.rollout.dtype == "float32"
    assert config.actor_rollout_ref.ref.fsdp_config.mixed_precision == "fp32"


def test_device_and_processes_with_eight_gpus(monkeypatch):
    monkeypatch.setattr("verl.config.resolve.visible_gpu_count", lambda: 8)
    config = load_config(overrides=GIVEN, check_files=False)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cuda", 8)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert config.critic.fsdp_config.mixed_precision == "bf16"
    on_cpu = load_config(overrides=[*GIVEN, "trainer.device=cpu"], check_files=False)
    assert on_cpu.trainer.n_gpus_per_node == 1
