"""`load_config`: aliases, types, free-form keys, and all problems at once."""

import pickle

import pytest
from omegaconf import OmegaConf

from verl.config import ActorConfig, ConfigError, OptimConfig, PPOConfig, as_config, load_config
from verl.config.old_keys import OBSOLETE
from verl.config.schema import get_path

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides, cfg=None, check_files=False):
    return load_config(cfg, [*GIVEN, *overrides], check_files=check_files)


def problems(*overrides, cfg=None, check_files=False):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, cfg=cfg, check_files=check_files)
    return {problem.key: problem for problem in caught.value.problems}


# --- everything at once ---------------------------------------------------------------------------------------------


def test_all_problems_are_reported_together_and_numbered():
    with pytest.raises(ConfigError) as caught:
        load(
            f"{ACTOR}.ppo_mini_batch_size=100",
            "data.train_batch_size=256",
            f"{ROLLOUT}.temprature=0.7",
            "algorithm.gamma=abc",
            "algorithm.kl_penalty=full",
            "algorithm=gropo",
        )
    text = str(caught.value)
    assert "1. " in text
    assert "5. " in text
    assert (
        f"{ACTOR}.ppo_mini_batch_size = 100: does not divide data.train_batch_size = 256. Set it to 64 or 128." in text
    )
    assert f"{ROLLOUT}.temprature = 0.7: unknown key. Did you mean {ROLLOUT}.temperature?" in text
    assert "algorithm.gamma = abc: is not a number. Set a number at least 0 and at most 1." in text
    assert "Set it to low_var_kl." in text
    assert "algorithm = gropo: algorithm has no option of that name. Set one of grpo, ppo." in text
    assert len(caught.value.problems) == 5
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_a_broken_value_hides_only_its_own_consequences():
    found = problems(f"{ACTOR}.ppo_mini_batch_size=many", "data.train_batch_size=100", "critic.ppo_mini_batch_size=30")
    assert set(found) == {f"{ACTOR}.ppo_mini_batch_size", "critic.ppo_mini_batch_size"}
    assert "an integer" in found[f"{ACTOR}.ppo_mini_batch_size"].why


def test_what_must_be_given_is_asked_for():
    with pytest.raises(ConfigError) as caught:
        load_config(check_files=False)
    assert [problem.key for problem in caught.value.problems] == ["data.train_files", "actor_rollout_ref.model.path"]
    assert "data.train_files" in problems("data.train_files=[]")


@pytest.mark.parametrize(
    ("given", "tracked", "on_console"),
    [
        ([], 20, 5),
        (["trainer.log_val_generations=8"], 8, 8),
        (["trainer.log_val_generations=20"], 20, 20),
        (["trainer.log_val_generations=0"], 0, 0),
        (["trainer.console_val_generations=1"], 20, 1),
    ],
)
def test_a_console_shows_five_answers_unless_a_number_is_set(given, tracked, on_console):
    trainer = load(*given).trainer
    assert (trainer.log_val_generations, trainer.console_val_generations) == (tracked, on_console)
    again = load_config(load(*given).to_dict(), check_files=False).trainer
    assert again.console_val_generations == on_console


# --- unknown keys ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (f"{ACTOR}.clip_ration=0.1", f"{ACTOR}.clip_ratio"),
        (f"{ACTOR}.n=4", f"{ROLLOUT}.n"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_ctrl.kl_coef"),
        ("actor_rolout_ref.actor.optim.lr=1", f"{ACTOR}.optim.lr"),
        ("trainer.total_epoch=3", "trainer.total_epochs"),
        ("train_batch_size=3", "data.train_batch_size"),
        (f"{ACTOR}.max_grad_nrom=1", f"{ACTOR}.max_grad_norm"),
    ],
)
def test_unknown_key_names_its_nearest_neighbour(typed, meant):
    found = problems(typed)
    assert found[typed.partition("=")[0]].fix == f"Did you mean {meant}?"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("actor.use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("multi_turn.enable", "actor_rollout_ref.rollout.multi_turn.enable"),
        (
            "model.use_remove_padding",
            "actor_rollout_ref.model.use_remove_padding, critic.model.use_remove_padding "
            "or reward_model.model.use_remove_padding",
        ),
        ("optim.lr", "actor_rollout_ref.actor.optim.lr or critic.optim.lr"),
        ("nnodes", "actor_rollout_ref.rollout.nnodes, reward_model.nnodes or trainer.nnodes"),
        ("max_grad_norm", "actor_rollout_ref.actor.max_grad_norm or critic.max_grad_norm"),
        ("rollout.engine_kwargs.native.x", "actor_rollout_ref.rollout.engine_kwargs.native.x"),
    ],
)
def test_a_short_key_is_answered_with_every_full_key_that_ends_in_it(typed, meant):
    assert problems(f"{typed}=1")[typed].fix == f"Did you mean {meant}?"


def test_each_short_key_of_a_block_that_does_not_exist_is_answered():
    found = problems("actor.clip_ratio=0.1", "actor.use_kl_loss=True", "actor.foo=1")
    assert found["actor.clip_ratio"].fix == "Did you mean actor_rollout_ref.actor.clip_ratio?"
    assert found["actor.use_kl_loss"].fix == "Did you mean actor_rollout_ref.actor.use_kl_loss?"
    assert found["actor.foo"].fix.startswith("Known keys of the top level")


def test_unknown_key_like_nothing_lists_the_keys_of_its_block():
    assert "topk" in problems("retriever.zzzz=1")["retriever.zzzz"].fix


def test_keys_of_other_versions_are_accepted_with_a_notice():
    config = load(
        "actor_rollout_ref.hybrid_engine=True",
        f"{ROLLOUT}.prompt_length=3",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.fsdp_config.wrap_policy.min_num_params=0",
    )
    text = "\n".join(config.notices)
    assert "actor_rollout_ref.hybrid_engine is not needed and ignored" in text
    assert "rollout.prompt_length" in text
    assert "wrap_policy" in text


@pytest.mark.parametrize("pattern", OBSOLETE)
def test_every_entry_of_the_table_of_old_keys_is_accepted(pattern):
    key = pattern.replace("*.model", "critic.model").replace("*.megatron*", f"{ACTOR}.megatron_config")
    key = f"{ACTOR}{key[1:]}" if key.startswith("*.") else key.replace("*", "x")
    assert any(key in notice for notice in load(f"{key}=1").notices), key


# --- other spellings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alias", "key", "value"),
    [
        (f"{ACTOR}.max_grad_norm", f"{ACTOR}.grad_clip", 0.5),
        ("critic.max_grad_norm", "critic.grad_clip", 0.5),
        (f"{ACTOR}.optim.warmup_steps", f"{ACTOR}.optim.lr_warmup_steps", 7),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size", 1),
        (
            f"{ACTOR}.fsdp_config.gradient_checkpointing",
            "actor_rollout_ref.model.enable_gradient_checkpointing",
            False,
        ),
        ("critic.fsdp_config.gradient_checkpointing", "critic.model.enable_gradient_checkpointing", False),
        (
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size",
            f"{ACTOR}.megatron_config.virtual_pipeline_model_parallel_size",
            2,
        ),
        ("reward_model.model.path", "reward_model.path", "a/rm"),
        (f"{ROLLOUT}.response_length", f"{ROLLOUT}.max_new_tokens", 99),
        ("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus", 3),
    ],
)
def test_both_spellings_mean_the_same(alias, key, value):
    assert get_path(load(f"{alias}={value}"), key) == get_path(load(f"{key}={value}"), key) == value


def test_two_spellings_that_disagree_are_a_problem():
    found = problems(f"{ACTOR}.max_grad_norm=0.5", f"{ACTOR}.grad_clip=0.7")
    assert "they differ" in found[f"{ACTOR}.max_grad_norm"].why
    assert load(f"{ACTOR}.max_grad_norm=0.5", f"{ACTOR}.grad_clip=0.5").actor_rollout_ref.actor.grad_clip == 0.5


def test_sizes_over_all_ranks_and_per_rank():
    both = problems(f"{ACTOR}.ppo_micro_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4")
    assert "is set too" in both[f"{ACTOR}.ppo_micro_batch_size"].why
    two = load(f"{ACTOR}.ppo_micro_batch_size=8", "critic.ppo_micro_batch_size=4", "trainer.n_gpus_per_node=2")
    assert two.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert two.critic.ppo_micro_batch_size_per_gpu == 2
    assert two.critic.forward_micro_batch_size_per_gpu == 2
    odd = problems("actor_rollout_ref.ref.log_prob_micro_batch_size=3", "trainer.n_gpus_per_node=2")
    assert "multiple of 2" in odd["actor_rollout_ref.ref.log_prob_micro_batch_size"].fix


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("""trainer.logger='["console","wandb"]'""", "trainer.logger", ["console", "wandb"]),
        ("""trainer.logger="['console', 'wandb']" """, "trainer.logger", ["console", "wandb"]),
        ("trainer.dump_steps=[1,2]", "trainer.dump_steps", [1, 2]),
        ("trainer.dump_steps=null", "trainer.dump_steps", []),
        ("data.val_files=''", "data.val_files", []),
        ("trainer.total_training_steps=None", "trainer.total_training_steps", None),
        (f"{ROLLOUT}.stop_token_ids=5", f"{ROLLOUT}.stop_token_ids", [5]),
        ("data.train_batch_size=1e3", "data.train_batch_size", 1000),
        ("data.train_batch_size='128'", "data.train_batch_size", 128),
        ("data.shuffle='False'", "data.shuffle", False),
        (f"{ACTOR}.optim.lr='1e-6'", f"{ACTOR}.optim.lr", 1e-6),
        (f"{ACTOR}.optim.lr=0", f"{ACTOR}.optim.lr", 0.0),
        ("trainer.experiment_name=123", "trainer.experiment_name", "123"),
        (f"{ACTOR}.fsdp_config.mixed_precision=True", f"{ACTOR}.fsdp_config.mixed_precision", "bf16"),
        (f"{ACTOR}.optim.total_training_steps=-1", f"{ACTOR}.optim.total_training_steps", None),
        ("external_libs=json", "external_libs", ["json"]),
    ],
)
def test_values_are_read_as_users_write_them(override, key, value):
    extra = ["data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=1000"] if value == 1000 else []
    read = get_path(load(*extra, override), key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.gamma=abc", "number"),
        ("algorithm.gamma=1.5", "at most 1"),
        ("data.train_batch_size=2.5", "an integer"),
        ("data.train_batch_size=true", "an integer"),
        ("data.train_batch_size=0", "at least 1"),
        ("data.shuffle=maybe", "true or false"),
        ("data.truncation=up", "known"),
        (f"{ROLLOUT}.temperature=0", "at least 1e-05"),
        (f"{ROLLOUT}.gpu_memory_utilization=1.2", "at most 1"),
        ("trainer.logger=[console,wand]", "known"),
        ("trainer.nnodes=null", "must have a value"),
        (f"{ACTOR}.fsdp_config.param_offload=null", "must have a value"),
        ("resource_pool_spec=8", "mapping"),
        ("data={train_batch_size: [1]}", "an integer"),
        ("algorithm.kl_ctrl=3", "block"),
    ],
)
def test_values_that_cannot_be_are_refused_with_the_reason(override, words):
    (found,) = problems(override).values()
    assert words in found.why


def test_user_paths_are_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA_ROOT", "/big")
    config = load("data.train_files=[~/a.parquet,$DATA_ROOT/b.parquet]", "actor_rollout_ref.model.path=~/m")
    assert config.data.train_files == ["/home/me/a.parquet", "/big/b.parquet"]
    assert config.actor_rollout_ref.model.path == "/home/me/m"
    assert load("trainer.default_hdfs_dir=s3://b/~x").trainer.default_hdfs_dir == "s3://b/~x"


def test_free_form_slots_stay_open():
    config = load(
        "+actor_rollout_ref.model.override_config.attn.kind=sdpa",
        f"++{ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        "custom_reward_function.reward_kwargs.format_score=0.1",
        "custom.mine.deep=[1,{a: 2}]",
    )
    assert config.actor_rollout_ref.model.override_config == {"attn": {"kind": "sdpa"}}
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"vllm": {"swap_space": 4}}
    assert config.custom_reward_function.reward_kwargs == {"format_score": 0.1}
    assert config.custom == {"mine": {"deep": [1, {"a": 2}]}}


def test_registered_names_are_open_once_external_libs_are_given():
    assert "algorithm.adv_estimator" in problems("algorithm.adv_estimator=mine")
    config = load("algorithm.adv_estimator=mine", f"{ACTOR}.policy_loss.loss_mode=mine", "external_libs=[my_lib]")
    assert config.algorithm.adv_estimator == "mine"
    assert config.critic.enable is False


def test_interpolations_resolve_and_broken_ones_are_problems(monkeypatch):
    monkeypatch.setenv("LR", "3e-6")
    cfg = OmegaConf.create(
        {
            "data": {"max_response_length": 64},
            "actor_rollout_ref": {
                "actor": {"optim": {"lr": "${oc.env:LR}"}},
                "rollout": {"max_new_tokens": "${data.max_response_length}"},
            },
        }
    )
    config = load(cfg=cfg)
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6
    assert config.actor_rollout_ref.rollout.max_new_tokens == 64
    found = problems(cfg={"data": {"seed": "${nope}"}, "trainer": {"project_name": "${oc.env:NO_SUCH_VARIABLE}"}})
    assert {"data.seed", "trainer.project_name"} <= set(found)


# --- whole blocks ---------------------------------------------------------------------------------------------------


def test_a_null_block_is_turned_off_or_left_at_its_defaults():
    config = load("algorithm=grpo", cfg={"critic": None, "reward_model": None, "custom_reward_function": None})
    assert config.critic.enable is False
    assert config.reward_model.enable is False
    assert config.custom_reward_function.name == "compute_score"
    assert "critic.enable" in problems(cfg={"critic": None})


def test_user_values_may_come_as_dict_dictconfig_or_overrides():
    wanted = {"actor_rollout_ref": {"actor": {"clip_ratio": 0.3}}}
    frozen = OmegaConf.create(wanted)
    OmegaConf.set_struct(frozen, True)
    OmegaConf.set_readonly(frozen, True)
    assert load(cfg=wanted) == load(cfg=frozen) == load(f"{ACTOR}.clip_ratio=0.3")
    assert load_config(load(cfg=wanted), ["trainer.nnodes=2"], check_files=False).trainer.nnodes == 2


def test_as_config_takes_ours_a_dict_or_a_dictconfig():
    ours = load().actor_rollout_ref.actor
    assert as_config(ActorConfig, ours) is ours
    for given in ({"clip_ratio": 0.3, "max_grad_norm": 2.0}, OmegaConf.create({"clip_ratio": 0.3, "max_grad_norm": 2})):
        actor = as_config(ActorConfig, given)
        assert (actor.clip_ratio, actor.clip_ratio_high, actor.grad_clip) == (0.3, 0.3, 2.0)
        assert actor.optim.lr == 1e-6
    assert as_config(OptimConfig, {"lr": 1}, at="critic.optim").weight_decay == 0.01
    assert isinstance(as_config(PPOConfig, None), PPOConfig)
    with pytest.raises(ValueError, match=r"^at: OptimConfig .*actor_rollout_ref\.actor\.optim, critic\.optim"):
        as_config(OptimConfig, {})
    with pytest.raises(ConfigError, match=r"actor\.clip_ration = 0\.3: .*actor\.clip_ratio\?"):
        as_config(ActorConfig, {"clip_ration": 0.3})


def test_as_config_of_a_child_node_keeps_its_interpolations():
    tree = OmegaConf.create({"n": 3, "actor": {"ppo_epochs": "${n}"}})
    assert as_config(ActorConfig, tree.actor).ppo_epochs == 3


def test_loading_leaves_the_defaults_as_they_are():
    changed = load("custom.a=1", f"{ACTOR}.max_grad_norm=9", "trainer.dump_steps=[4]")
    changed.trainer.logger.append("file")
    changed.custom["b"] = 2
    fresh = load()
    assert fresh.custom == {}
    assert fresh.trainer.logger == ["console"]
    assert fresh.actor_rollout_ref.actor.grad_clip == 1.0
