"""The batch plan: its numbers multiply up, and what does not work is said with values that do."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import ConfigError, batch_plan, load_config

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def load(*overrides):
    return load_config(None, [*GIVEN, *overrides], check_files=False)


def problems(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return {problem.key: problem for problem in caught.value.problems}


@st.composite
def valid_settings(draw):
    """Batch settings that obey the rules, built from their factors."""
    dp, ulysses, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    mini = dp * nodes * draw(st.integers(1, 5))
    return {
        "data.train_batch_size": mini * draw(st.integers(1, 6)),
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_epochs": draw(st.integers(1, 4)),
        f"{ACTOR}.ulysses_sequence_parallel_size": ulysses,
        "critic.ulysses_sequence_parallel_size": ulysses,
        f"{ACTOR}.use_dynamic_bsz": draw(st.booleans()),
        "critic.ppo_mini_batch_size": mini,
        f"{ROLLOUT}.n": draw(st.integers(1, 5)),
        "trainer.n_gpus_per_node": dp * ulysses,
        "trainer.nnodes": nodes,
    } | draw(st.sampled_from([{}, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}]))


@settings(max_examples=25)
@given(valid_settings())
def test_numbers_multiply_up(values):
    config = load(*(f"{key}={value}" for key, value in values.items()))
    plan = batch_plan(config)
    assert plan.problems == ()
    assert plan.prompts * plan.n == plan.samples
    assert sum(plan.pools.values()) == config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert plan.critic is not None
    for update in (plan.actor, plan.critic):
        layout = update.layout
        assert layout.dp_size * layout.ranks_per_copy == layout.world_size
        assert update.samples_per_rank * layout.dp_size == plan.samples
        assert update.mini_batches * update.mini_batch_prompts == plan.prompts
        assert update.mini_batch_samples_per_rank * layout.dp_size == update.mini_batch_samples
        assert update.mini_batch_samples == update.mini_batch_prompts * plan.n
        assert update.optimizer_steps == update.epochs * update.mini_batches
        assert (update.token_budget is None) != (update.micro_batch_size is None)
        if update.micro_batch_size is not None:
            assert update.micro_batches == math.ceil(update.mini_batch_samples_per_rank / update.micro_batch_size)
    assert plan.rollout_replicas * plan.rollout.ranks_per_copy == plan.rollout.world_size
    assert plan.samples_per_replica * plan.rollout_replicas >= plan.samples


@settings(max_examples=25)
@given(
    prompts=st.integers(1, 96),
    mini=st.integers(1, 96),
    n=st.integers(1, 4),
    ranks=st.integers(1, 6),
)
def test_every_remedy_for_a_mini_batch_is_a_working_one(prompts, mini, n, ranks):
    values = [
        "algorithm.adv_estimator=reinforce_plus_plus",
        f"data.train_batch_size={prompts}",
        f"{ROLLOUT}.n={n}",
        f"trainer.n_gpus_per_node={ranks}",
    ]
    valid = prompts % mini == 0 and mini * n % ranks == 0
    if valid:
        load(*values, f"{ACTOR}.ppo_mini_batch_size={mini}")
        return
    fix = problems(*values, f"{ACTOR}.ppo_mini_batch_size={mini}")[f"{ACTOR}.ppo_mini_batch_size"].fix
    if prompts * n % ranks:
        return  # no mini-batch works: the remedy is about other keys
    assert fix.startswith("Set it to ")
    for better in fix.removeprefix("Set it to ").split(" or "):
        load(*values, f"{ACTOR}.ppo_mini_batch_size={better}")


def test_mini_batch_must_divide_the_batch_and_its_samples_the_ranks():
    assert (
        "64 or 128"
        in problems("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=100")[f"{ACTOR}.ppo_mini_batch_size"].fix
    )
    small = ["data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=2", "critic.ppo_mini_batch_size=1"]
    found = problems(*small, "trainer.n_gpus_per_node=3")
    assert found[f"{ACTOR}.ppo_mini_batch_size"].why.startswith(
        "2 prompts × 1 response = 2 samples, which do not divide"
    )
    assert "critic.ppo_mini_batch_size" in found


@pytest.mark.parametrize(
    ("prompts", "n", "mini", "better"),
    [(8, 4, 16, "4"), (8, 4, 32, "8"), (6, 4, 8, "2"), (8, 3, 12, "4"), (8, 3, 6, "2"), (4, 6, 8, "4")],
)
def test_a_mini_batch_that_divides_samples_only_is_explained(prompts, n, mini, better):
    """`better`: the same number of samples per optimizer step where that works, the nearest size where it does not."""
    small = (f"data.train_batch_size={prompts}", f"{ROLLOUT}.n={n}", "algorithm.adv_estimator=grpo")
    assert prompts % mini != 0
    assert prompts * n % mini == 0
    problem = problems(*small, f"{ACTOR}.ppo_mini_batch_size={mini}")[f"{ACTOR}.ppo_mini_batch_size"]
    assert "counts prompts, not samples" in problem.why
    assert f"{prompts * n} samples" in problem.why
    assert f"{ROLLOUT}.n" in problem.involves
    assert problem.fix == f"Set it to {better}"
    load(*small, f"{ACTOR}.ppo_mini_batch_size={better}")
    other = problems(*small, f"{ACTOR}.ppo_mini_batch_size={prompts * n + 1}")[f"{ACTOR}.ppo_mini_batch_size"]
    assert "samples" not in other.why


def test_a_micro_batch_must_fit_its_mini_batch_and_the_default_does():
    small = ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=4", "trainer.n_gpus_per_node=2")
    assert load(*small).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2
    found = problems(*small, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3")
    assert found[f"{ACTOR}.ppo_micro_batch_size_per_gpu"].fix.startswith("Set it to 2 or less")


def test_a_token_budget_must_hold_one_sample():
    dynamic = (f"{ACTOR}.use_dynamic_bsz=True", "data.max_response_length=30000", "trainer.n_gpus_per_node=2")
    found = problems(*dynamic)
    assert found[f"{ACTOR}.ppo_max_token_len_per_gpu"].fix == "Set it to 31024 or more"
    shared = load(*dynamic, f"{ACTOR}.ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=2")
    assert batch_plan(shared).actor.token_budget == 16384


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ([f"{ROLLOUT}.tensor_model_parallel_size=3"], f"{ROLLOUT}.tensor_model_parallel_size"),
        ([f"{ACTOR}.ulysses_sequence_parallel_size=3"], f"{ACTOR}.ulysses_sequence_parallel_size"),
        (
            ["actor_rollout_ref=megatron", f"{ACTOR}.megatron_config.tensor_model_parallel_size=16"],
            f"{ACTOR}.megatron_config.tensor_model_parallel_size",
        ),
        (
            ["critic=megatron", "critic.megatron_config.pipeline_model_parallel_size=5"],
            "critic.megatron_config.pipeline_model_parallel_size",
        ),
    ],
)
def test_parallel_sizes_must_divide_their_pool(overrides, key):
    found = problems("trainer.n_gpus_per_node=8", *overrides)
    assert set(found) == {key}
    assert "8 ranks of global_pool" in found[key].why


def test_layouts_of_actor_and_critic_may_differ():
    plan = batch_plan(
        load(
            "trainer.n_gpus_per_node=8",
            "actor_rollout_ref=megatron",
            "critic=megatron",
            f"{ACTOR}.megatron.tensor_model_parallel_size=4",
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
            "critic.megatron.tensor_model_parallel_size=4",
        )
    )
    assert (plan.actor.layout.dp_size, plan.critic.layout.dp_size) == (1, 2)
    assert "TP 4 × PP 2" in plan.render()


def test_roles_in_pools_of_their_own():
    plan = batch_plan(
        load(
            "resource_pool_spec={train: [4], generate: [2], value: [2]}",
            "role_mapping={actor: train, ref: train, rollout: generate, critic: value}",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
        )
    )
    assert plan.pools == {"train": 4, "generate": 2, "value": 2}
    assert (plan.actor.layout.dp_size, plan.rollout_replicas, plan.critic.layout.dp_size) == (4, 1, 2)


def test_reward_pool_is_added_and_used():
    config = load(
        "trainer.n_gpus_per_node=2",
        "reward_model.enable=True",
        "reward_model.path=a/rm",
        "reward_model.enable_resource_pool=True",
        "reward_model.n_gpus_per_node=1",
        "reward_model.nnodes=2",
    )
    assert config.resource_pool_spec == {"global_pool": [2], "reward_pool": [1, 1]}
    assert config.role_mapping == {
        "actor": "global_pool",
        "rollout": "global_pool",
        "ref": "global_pool",
        "critic": "global_pool",
        "reward_model": "reward_pool",
        "teacher": "global_pool",
    }


def test_plan_reads_as_a_few_lines():
    text = batch_plan(load("trainer.n_gpus_per_node=2", "data.train_batch_size=256")).render()
    assert "256 prompts × 1 response = 256 samples of up to 1536 tokens" in text
    assert "2 mini-batches of 128 prompts (128 samples, 64 per rank in 16 micro-batches of 4 samples)" in text
    assert "vanilla, token-mean, clip 0.2/0.2" in text
    assert len(text.splitlines()) == 8
    assert "fsdp is the same engine as fsdp2" in text


def test_plan_names_the_reference_and_the_reward_model_with_their_micro_batches():
    overrides = [
        "trainer.n_gpus_per_node=2",
        "data.train_batch_size=256",
        f"{ACTOR}.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
        f"{ACTOR}.strategy=fsdp2",
        "critic.strategy=fsdp2",
    ]
    judge = ["reward_model.enable=True", "reward_model.path=a/rm", "reward_model.use_dynamic_bsz=True"]
    text = batch_plan(load(*overrides, *judge, "reward_model.forward_max_token_len_per_gpu=9000")).render()
    ranks = "2 ranks of global_pool = data-parallel 2; 128 samples per rank in"
    assert f"  ref      {ranks} 4 micro-batches of 32 samples" in text
    assert f"  reward   {ranks} micro-batches of up to 9000 tokens" in text
    assert "fully_shard" not in text
    adapters = batch_plan(load(*overrides, "actor_rollout_ref.model.lora_rank=8")).render()
    assert "  ref      the actor without adapters, 2 ranks" in adapters
    without = batch_plan(load(*overrides, f"{ACTOR}.use_kl_loss=False")).render()
    assert "  ref" not in without


def test_the_critic_takes_the_mini_batch_of_the_actor_unless_it_has_its_own():
    mine = load("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64")
    assert mine.critic.ppo_mini_batch_size == 64
    own = load("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=32")
    assert own.critic.ppo_mini_batch_size == 32


def test_a_critic_that_follows_a_wrong_mini_batch_is_no_second_problem():
    with pytest.raises(ConfigError) as caught:
        load("data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=100")
    assert [problem.key for problem in caught.value.problems] == [f"{ACTOR}.ppo_mini_batch_size"]
