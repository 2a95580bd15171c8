"""Rules between keys, files on this machine, and what is only worth a notice."""

import pytest

from verl.config import ConfigError, PPOConfig, SFTConfig, load_config
from verl.config.devices import visible_gpu_count

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides, check_files=False):
    return load_config(None, [*GIVEN, *overrides], check_files=check_files)


def problems(*overrides, check_files=False):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, check_files=check_files)
    return {problem.key: problem for problem in caught.value.problems}


@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "gdpo"]
)
def test_one_answer_per_prompt_is_refused_where_answers_are_compared(estimator):
    found = problems(f"algorithm.adv_estimator={estimator}", f"{ROLLOUT}.n=1")
    assert found[f"{ROLLOUT}.n"].fix.startswith("Set it to 4 or more")
    config = load(f"algorithm.adv_estimator={estimator}")
    assert config.actor_rollout_ref.rollout.n == 4
    assert any("4 responses per prompt" in notice for notice in config.notices)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_other_estimators_take_one_answer(estimator):
    config = load(f"algorithm.adv_estimator={estimator}")
    assert config.actor_rollout_ref.rollout.n == 1
    assert config.critic.enable is (estimator == "gae")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["critic.enable=False"], "critic.enable"),
        ([f"{ROLLOUT}.max_new_tokens=600"], f"{ROLLOUT}.max_new_tokens"),
        ([f"{ROLLOUT}.max_model_len=1000"], f"{ROLLOUT}.max_model_len"),
        ([f"{ROLLOUT}.multi_turn.enable=True"], f"{ROLLOUT}.mode"),
        ([f"{ROLLOUT}.val_kwargs.do_sample=True"], f"{ROLLOUT}.val_kwargs.temperature"),
        (["algorithm.filter_groups.enable=True"], "algorithm.filter_groups.enable"),
        ([f"{ACTOR}.clip_ratio_low=1.2"], f"{ACTOR}.clip_ratio_low"),
        ([f"{ACTOR}.kl_loss_type=full"], f"{ACTOR}.kl_loss_type"),
        ([f"{ACTOR}.optim.betas=[0.9]"], f"{ACTOR}.optim.betas"),
        (
            [f"{ACTOR}.megatron.tensor_model_parallel_size=4"],
            f"{ACTOR}.megatron_config.tensor_model_parallel_size",
        ),
        (
            ["actor_rollout_ref=megatron", f"{ACTOR}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{ACTOR}.ulysses_sequence_parallel_size",
        ),
        (
            [
                "critic.ulysses_sequence_parallel_size=2",
                "critic.model.use_remove_padding=False",
                "trainer.n_gpus_per_node=2",
            ],
            "critic.ulysses_sequence_parallel_size",
        ),
        ([f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=2"], f"{ACTOR}.fsdp_config.fsdp_size"),
        (["reward_model.enable=True"], "reward_model.path"),
        (["reward_model.overlong_buffer.enable=True"], "reward_model.overlong_buffer.enable"),
        (
            ["reward_model={reward_manager: dapo, overlong_buffer: {enable: true, len: 600}}"],
            "reward_model.overlong_buffer.len",
        ),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
        (["trainer.val_only=True"], "data.val_files"),
        (["trainer.node_rank=1"], "trainer.node_rank"),
        (["trainer.node_rank=1", "trainer.nnodes=2"], "trainer.master_addr"),
        (["data.custom_cls.path=my.py"], "data.custom_cls.name"),
        (["data.sampler.class_name=Mine"], "data.sampler.path"),
        (["resource_pool_spec={}"], "resource_pool_spec"),
        (["resource_pool_spec={global_pool: [1, 0]}"], "resource_pool_spec.global_pool"),
        (["role_mapping={critik: global_pool}"], "role_mapping.critik"),
        (["role_mapping={critic: elsewhere}"], "role_mapping.critic"),
    ],
)
def test_what_cannot_work_together_is_one_problem_with_a_remedy(overrides, key):
    found = problems(*overrides)
    assert key in found
    assert set(found) <= {key, "trainer.master_addr"}
    assert found[key].fix


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "data.val_files is not set: no validation"),
        (["data.max_response_length=4096"], "algorithm.gamma = 0.99 over data.max_response_length = 4096"),
        (
            [f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.28"],
            "clip_ratio_high = 1.28 is a bound of the ratio",
        ),
        ([f"{ROLLOUT}.val_kwargs.n=8"], "greedy responses are all equal"),
        ([f"{ROLLOUT}.do_sample=False"], "do not explore"),
        (["algorithm.use_kl_in_reward=True", f"{ACTOR}.use_kl_loss=True"], "the KL is applied twice"),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=k1"], "the expected gradient of this estimate is 0"),
        (["algorithm.adv_estimator=grpo", "critic.enable=True"], "does not use its values"),
        (["resource_pool_spec={global_pool: [1], spare: [1]}"], "no role runs on it"),
        (["trainer.resume_from_path=/x"], "has no effect with trainer.resume_mode = auto"),
    ],
)
def test_what_may_surprise_is_a_notice(overrides, words):
    assert any(words in notice for notice in load(*overrides).notices)


def test_a_plain_run_has_nothing_to_say_but_the_missing_validation():
    assert load().notices == ["data.val_files is not set: no validation."]
    assert load("data.val_files=a/b").notices == []


def test_clip_bounds_become_distances_only_with_the_vanilla_loss():
    bounds = (f"{ACTOR}.clip_ratio_low=0.8", f"{ACTOR}.clip_ratio_high=1.28")
    actor = load(*bounds).actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (pytest.approx(0.2), pytest.approx(0.28))
    distances = load(f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28").actor_rollout_ref.actor
    assert (distances.clip_ratio_low, distances.clip_ratio_high) == (0.2, 0.28)
    other = load(*bounds, f"{ACTOR}.policy_loss.loss_mode=gspo").actor_rollout_ref.actor
    assert (other.clip_ratio_low, other.clip_ratio_high) == (0.8, 1.28)


@pytest.mark.parametrize(
    ("low", "high", "read"),
    [
        (0.8, None, (0.2, 0.2)),
        (None, 1.28, (0.2, 0.28)),
        (0.8, 0.28, (0.2, 0.28)),
        (0.2, 1.28, (0.2, 0.28)),
        (0.8, 0.8, (0.8, 0.8)),
    ],
)
def test_one_clip_bound_is_recognised_and_said(low, high, read):
    given = [f"{ACTOR}.clip_ratio_{name}={value}" for name, value in (("low", low), ("high", high)) if value]
    config = load(*given)
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == pytest.approx(read)
    assert sum("is a bound of the ratio" in notice for notice in config.notices) == (0 if low == high else 1)


def test_role_groups_in_the_mapping_and_single_roles_above_them():
    pools = "resource_pool_spec={global_pool: [2], other: [2]}"
    config = load(pools, "role_mapping={ref: global_pool, actor_rollout_ref: other}")
    assert config.role_mapping["actor"] == config.role_mapping["rollout"] == "other"
    assert config.role_mapping["ref"] == config.role_mapping["critic"] == "global_pool"


def test_missing_files_are_reported_with_what_is_there(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").touch()
    monkeypatch.delenv("NO_SUCH_ROOT", raising=False)
    found = problems(
        f"data.train_files={tmp_path}/trian.parquet",
        f"data.val_files={tmp_path}/nowhere/test.parquet",
        "actor_rollout_ref.model.path=./no_model",
        "critic.model.path=$NO_SUCH_ROOT/model",
        "custom_reward_function.path=no_reward.py",
        f"{ROLLOUT}.multi_turn.tool_config_path=no_tools.yaml",
        check_files=True,
    )
    assert found["data.train_files"].fix == f"Did you mean {tmp_path}/train.parquet?"
    assert f"{tmp_path}/nowhere does not exist" in found["data.val_files"].why
    assert "NO_SUCH_ROOT is not set" in found["critic.model.path"].why
    assert set(found) >= {
        "actor_rollout_ref.model.path",
        "custom_reward_function.path",
        f"{ROLLOUT}.multi_turn.tool_config_path",
    }


def test_hub_names_urls_folders_and_modules_need_no_local_file(tmp_path):
    load(
        f"data.train_files=[openai/gsm8k,s3://bucket/x.parquet,{tmp_path}]",
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "custom_reward_function.path=my_package.rewards",
        check_files=True,
    )


def test_a_local_looking_model_path_must_exist():
    key = "actor_rollout_ref.model.path"
    assert key in problems(f"{key}=checkpoint/sft/global_step_372", check_files=True)


def test_trackers_that_are_not_installed_are_reported():
    found = problems("trainer.logger=[console,swanlab]", check_files=True)
    assert "swanlab is not installed" in found["trainer.logger"].why


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
def test_hidden_gpus_are_not_counted(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert visible_gpu_count() == 0


@pytest.mark.parametrize("name", ["project_name", "experiment_name"])
@pytest.mark.parametrize("value", ["../../x", "/tmp/x", "..", ".", "a/../../b", "''", "' '"])
def test_names_that_lead_out_of_the_folder_of_the_run_are_refused(name, value):
    for base, root in ((GIVEN, PPOConfig), (["data.train_files=a/b", "model.path=a/b"], SFTConfig)):
        with pytest.raises(ConfigError) as error:
            load_config({}, [*base, f"trainer.{name}={value}"], check_files=False, root=root)
        assert [problem.key for problem in error.value.problems] == [f"trainer.{name}"]


@pytest.mark.parametrize("value", ["run", "group/run", "..run", "run..", "a/../b"])
def test_names_inside_the_folder_of_the_run_are_accepted(value):
    config = load(f"trainer.experiment_name={value}")
    assert config.trainer.experiment_name == value


@pytest.mark.parametrize(
    ("value", "named", "not_named"),
    [
        ("dpo", "main_rm", "gdpo"),
        ("kto", "main_rm", "Known"),
        ("sft", "main_sft", "Known"),
        ("ppo", "Set gae", "Known"),
    ],
)
def test_another_training_method_is_no_misspelt_estimator(value, named, not_named):
    (problem,) = problems(f"algorithm.adv_estimator={value}").values()
    assert named in str(problem)
    assert not_named not in str(problem)
