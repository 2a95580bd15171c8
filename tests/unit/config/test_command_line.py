"""The commands users know compose through Hydra and validate."""

import hydra
import pytest

from verl.config import ConfigError, batch_plan, load_config
from verl.config.command_line import hydra_arguments

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"

GRPO = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=['~/data/gsm8k/train.parquet']",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
]
PPO = [
    "algorithm.adv_estimator=gae",
    "data.train_files=$HOME/data/gsm8k/train.parquet",
    "data.val_files=$HOME/data/gsm8k/test.parquet",
    "data.train_batch_size=256",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "critic.optim.lr=1e-5",
    "trainer.n_gpus_per_node=2",
    "trainer.total_epochs=15",
]
QWEN_7B = [
    *PPO,
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
    "critic.model.path=Qwen/Qwen2-7B-Instruct",
    "data.train_batch_size=512",
    f"{ACTOR}.ppo_mini_batch_size=128",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
]
RETOOL = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    f"{ACTOR}.use_kl_loss=False",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    "data.train_files=['$DATA_ROOT/dataset/BytedTsinghua-SIA/DAPO-Math-17k']",
    "data.val_files=['$DATA_ROOT/dataset/yentinglin/aime_2025']",
    "data.return_raw_chat=True",
    "data.train_batch_size=64",
    "data.max_prompt_length=2048",
    "data.max_response_length=16384",
    "actor_rollout_ref.model.path=checkpoint/multiturn-sft-qwen-2.5-7b-instruct/global_step_372",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ulysses_sequence_parallel_size=4",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.mode=async",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.gpu_memory_utilization=0.9",
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.max_user_turns=16",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=16",
    f"{ROLLOUT}.multi_turn.tool_config_path=recipe/retool/sandbox_fusion_tool_config.yaml",
    f"{ROLLOUT}.multi_turn.format=hermes",
    f"{ROLLOUT}.n=16",
    f"{ROLLOUT}.val_kwargs.n=30",
    f"{ROLLOUT}.val_kwargs.temperature=1.0",
    f"{ROLLOUT}.val_kwargs.top_p=0.6",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=1",
]
COMMANDS = {
    "grpo in one line": GRPO,
    "ppo": PPO,
    "small micro-batches": [
        *PPO,
        f"{ACTOR}.ppo_micro_batch_size=2",
        "critic.ppo_micro_batch_size=2",
        "trainer.logger=console",
    ],
    "7B": QWEN_7B,
    "reward model": [
        *PPO,
        "reward_model.enable=True",
        "reward_model.path=OpenAssistant/reward-model-deberta-v3-large",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.01",
    ],
    "KL loss": [*PPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.kl_loss_type=kl"],
    "72B on four nodes": [
        *QWEN_7B,
        "actor_rollout_ref.model.path=Qwen/Qwen2.5-72B-Instruct",
        "critic.model.path=Qwen/Qwen2.5-72B-Instruct",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        "trainer.nnodes=4",
    ],
    "megatron": [
        *QWEN_7B,
        "actor_rollout_ref=megatron",
        "critic=megatron",
        f"{ACTOR}.megatron_config.tensor_model_parallel_size=4",
        f"{ACTOR}.megatron_config.pipeline_model_parallel_size=2",
        "critic.megatron_config.tensor_model_parallel_size=4",
    ],
    "megatron by strategy": [
        *QWEN_7B,
        f"{ACTOR}.strategy=megatron",
        "critic.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size=4",
    ],
    "two loggers": [*PPO, 'trainer.logger=["console","wandb"]'],
    "logger list in a string": [*PPO, """trainer.logger='["console","tensorboard"]'"""],
    "joining nodes": [*PPO, "trainer.nnodes=4", "trainer.node_rank=1", "trainer.master_addr=10.0.0.1"],
    "retool": RETOOL,
}


def compose(*typed):
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=hydra_arguments(typed))


@pytest.mark.parametrize("name", COMMANDS)
def test_known_commands_compose_and_validate(name, monkeypatch):
    monkeypatch.setenv("DATA_ROOT", "/data")
    config = load_config(compose(*COMMANDS[name]), check_files=False)
    assert batch_plan(config).problems == ()
    assert config == load_config(None, [*_last_wins(COMMANDS[name])], check_files=False)


def test_the_config_of_megatron_is_the_usual_one_on_that_engine():
    name, typed = "ppo_megatron_trainer", [*PPO, "algorithm=grpo"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose(name, overrides=hydra_arguments([f"--config-name={name}", *typed])[: len(typed)])
    options = ["actor_rollout_ref=megatron", "critic=megatron"]
    assert load_config(composed, check_files=False) == load_config(None, [*options, *typed], check_files=False)


def _last_wins(overrides):
    return list({override.partition("=")[0]: override for override in overrides}.values())


def test_the_one_line_command_gets_four_answers_and_no_validation():
    config = load_config(compose(*GRPO), check_files=False)
    assert config.actor_rollout_ref.rollout.n == 4
    assert len(config.notices) == 2


def test_retool_plan():
    plan = batch_plan(load_config(compose(*RETOOL), check_files=False))
    assert (plan.samples, plan.rollout_replicas, plan.actor.layout.dp_size) == (1024, 2, 2)
    assert (plan.actor.mini_batches, plan.actor.mini_batch_samples_per_rank, plan.critic) == (4, 128, None)


def test_groups_select_their_files():
    config = load_config(compose(*PPO, "algorithm=grpo", "actor_rollout_ref=megatron"), check_files=False)
    assert config.algorithm.gamma == 1.0
    assert config.actor_rollout_ref.actor.strategy == config.actor_rollout_ref.ref.strategy == "megatron"
    assert config.algorithm.adv_estimator == "gae"  # typed, so it wins over the file


@pytest.mark.parametrize("off", ["critic=null", "~critic", "critic.enable=False"])
def test_the_critic_can_be_turned_off(off):
    assert load_config(compose(*GRPO, off), check_files=False).critic.enable is False
    with pytest.raises(ConfigError, match=r"critic\.enable = False"):
        load_config(compose(*PPO, off), check_files=False)


def test_a_wrong_option_is_reported_with_the_known_ones_and_the_other_problems():
    with pytest.raises(ConfigError) as caught:
        load_config(compose(*GRPO, "algorithm=gropo", "data.shufle=True"), check_files=False)
    assert [problem.key for problem in caught.value.problems] == ["algorithm", "data.shufle"]
    assert "grpo, ppo" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("data.seed=3", "++data.seed=3"),
        ("+data.seed=3", "++data.seed=3"),
        ("++data.seed=3", "++data.seed=3"),
        ("data.train_files=~/x.parquet", "++data.train_files='~/x.parquet'"),
        ("data.train_files=/a=b/it's", "++data.train_files='/a=b/it\\'s'"),
        ("data.train_files=[a,b]", "++data.train_files=[a,b]"),
        ("algorithm=grpo", "algorithm=grpo"),
        ("hydra.run.dir=x", "hydra.run.dir=x"),
        ("~data.seed", "~data.seed"),
        ("--multirun", "--multirun"),
    ],
)
def test_what_hydra_is_given(typed, given):
    assert hydra_arguments([typed]) == [given]


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        (["a=1", "--cfg", "job", "b=2"], ["++a=1", "++b=2", "--cfg", "job"]),
        (["--cfg=job", "a=1"], ["++a=1", "--cfg=job"]),
        (["a=1", "-c", "job", "--resolve", "-p", "trainer"], ["++a=1", "-c", "job", "--resolve", "-p", "trainer"]),
        (["--info", "a=1"], ["++a=1", "--info"]),
        (["--info", "searchpath", "a=1"], ["++a=1", "--info", "searchpath"]),
    ],
)
def test_options_of_hydra_may_stand_anywhere_with_their_value_as_the_next_word(typed, given):
    assert hydra_arguments(typed) == given


def test_values_with_special_characters_arrive_as_typed():
    config = compose(*GRPO, "data.val_files=/a=b/(c) d/it's.parquet", "trainer.experiment_name=a,b:{x}")
    assert config.data.val_files == "/a=b/(c) d/it's.parquet"


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("foo", "Write it as key=value"),
        ("data.train_files", "Write it as key=value"),
        ("runs/mine.yaml", "--config-path runs --config-name mine"),
        ("mine.yml", "--config-path . --config-name mine"),
    ],
)
def test_an_argument_without_value_is_a_problem_with_a_remedy(word, fix):
    for read in (hydra_arguments, lambda words: load_config(overrides=words, check_files=False)):
        with pytest.raises(ConfigError) as caught:
            read([*GRPO, word])
        problem = next(problem for problem in caught.value.problems if problem.key == word)
        assert fix in str(problem)
