"""Keys as scripts from elsewhere spell them: each is accepted by itself, means ours, and the log says which."""

import pytest
from omegaconf import OmegaConf

from verl.config import ConfigError, SFTConfig, load_config
from verl.config.schema import get_path

ROLLOUT = "actor_rollout_ref.rollout"
PPO = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=2")
SFT = ("data.train_files=openai/gsm8k", "model.path=a/b", "trainer.n_gpus_per_node=2", "trainer.device=cpu")


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("reward.num_workers=3", "reward_model.reward_kwargs", {"num_processes": 3}),
        ("reward.custom_reward_function.path=/rewards.py", "custom_reward_function.path", "/rewards.py"),
        ("reward.reward_manager.name=dapo", "reward_model.reward_manager", "dapo"),
        ("reward.sandbox_fusion.url=http://host:8080", "sandbox_fusion.url", "http://host:8080"),
        ("reward_model.sandbox_fusion.max_concurrent=3", "sandbox_fusion.max_concurrent", 3),
        ("actor_rollout_ref.actor.max_grad_norm=2", "actor_rollout_ref.actor.grad_clip", 2.0),
        (f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n", 5),
        ("rollout.nnodes=1", f"{ROLLOUT}.nnodes", 1),
        ("rollout.test_freq=7", "trainer.test_freq", 7),
        ("rollout.total_rollout_steps=51200", "trainer.total_training_steps", 100),
        ("async_training.staleness_threshold=0.5", "trainer.max_staleness", 1),
        ("async_training.partial_rollout=False", "trainer.partial_rollout", False),
        ("trainer.v1.trainer_mode=separate_async", "trainer.mode", "async"),
        ("trainer.v1.sampler.max_off_policy_threshold=8", "trainer.max_staleness", 8),
        ("trainer.v1.sampler.max_off_policy_strategy=drop", "trainer.staleness_strategy", "drop"),
    ],
)
def test_another_spelling_is_read_as_ours_and_the_log_says_so(typed, key, value):
    config, spelled = load_config(None, [*PPO, typed], check_files=False), typed.partition("=")[0]
    assert any(notice.startswith(f"{spelled} is ") and key in notice for notice in config.notices), config.notices
    assert get_path(config, key) == value


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("trainer.v1.sampler.max_off_policy_threshold=-1", "trainer.max_staleness (given as {}) = -1: "),
        ("async_training.staleness_threshold=-1", "trainer.max_staleness (given as {}) = -1: "),
        (f"{ROLLOUT}.n_agent=many", f"{ROLLOUT}.n (given as {{}}) = many: "),
    ],
)
def test_an_error_names_what_was_typed_beside_ours(typed, said):
    with pytest.raises(ConfigError) as error:
        load_config(None, [*PPO, "trainer.mode=async", typed], check_files=False)
    assert said.format(typed.partition("=")[0]) in str(error.value)


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (["reward=naive"], {"reward"}),
        (["reward.num_workers=2", "reward_model=x"], {"reward.num_workers", "reward_model"}),
        (
            ["reward.num_workers=2", "reward_model.reward_kwargs=x"],
            {"reward.num_workers", "reward_model.reward_kwargs"},
        ),
        (["async_training.staleness_threshold=1", "trainer=x"], {"trainer"}),
    ],
)
def test_a_value_in_place_of_a_block_is_reported_under_its_key(typed, keys):
    values = dict(override.split("=") for override in PPO)
    nested = OmegaConf.from_dotlist(
        [f"{key}={value}" for key, value in values.items() if key.split(".")[0] != "trainer"]
    )
    with pytest.raises(ConfigError) as error:
        load_config(OmegaConf.merge(nested, OmegaConf.from_dotlist(typed)), check_files=False)
    assert {problem.key for problem in error.value.problems} == keys


@pytest.mark.parametrize("value", [5, True, {"question": 1}])
def test_names_of_nested_columns_must_be_a_list(value):
    with pytest.raises(ConfigError) as error:
        load_config({"data": {"prompt_dict_keys": value}}, SFT, check_files=False, root=SFTConfig)
    assert [problem.key for problem in error.value.problems] == ["data.prompt_dict_keys"]


def test_a_whole_block_under_another_name_is_said_once():
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    typed = [f"actor_rollout_ref.actor.megatron.{name}={size}" for name, size in sizes.items()]
    config = load_config(None, [*PPO, "actor_rollout_ref=megatron", *typed], check_files=False)
    said = [notice for notice in config.notices if "is an alias" in notice]
    assert said == ["actor_rollout_ref.actor.megatron.* is an alias of actor_rollout_ref.actor.megatron_config.*."]
    assert config.actor_rollout_ref.actor.megatron_config.tensor_model_parallel_size == 2


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("data.multiturn.enable=True", "data.multiturn", True),
        ("data.multiturn.messages_key=chat", "data.messages_key", "chat"),
        ("optim.clip_grad=2", "optim.grad_clip", 2.0),
        ("optim.warmup_steps_ratio=0.5", "optim.lr_warmup_steps_ratio", 0.5),
        ("model.strategy=fsdp2", "strategy", "fsdp2"),
        ("engine=megatron", "strategy", "megatron"),
        ("use_remove_padding=False", "model.use_remove_padding", False),
    ],
)
def test_so_is_one_of_supervised_runs(typed, key, value):
    config, spelled = load_config(None, [*SFT, typed], check_files=False, root=SFTConfig), typed.partition("=")[0]
    assert get_path(config, key) == value
    assert any(notice.startswith(f"{spelled} is an alias: {key} = ") for notice in config.notices), config.notices
