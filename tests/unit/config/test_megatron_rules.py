"""Layouts and keys of the megatron engine that cannot work: all at once, with the numbers that would."""

from __future__ import annotations

import json
import re

import pytest

from verl.config import ConfigError, load_config, megatron, names
from verl.config.engine import UNEVEN, MegatronConfig
from verl.config.megatron import ModelDimensions, model_layout_rules, split_evenly
from verl.config.problems import Report
from verl.config.unused_keys import check_supported

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron_config"
FIRST, LAST = UNEVEN
EMBEDDING, LOSS = (f"account_for_{name}_in_pipeline_split" for name in ("embedding", "loss"))
RUN = [
    "algorithm=grpo",
    "actor_rollout_ref=megatron",
    "data.train_files=openai/gsm8k",
    "actor_rollout_ref.model.path=org/model",
    "trainer.n_gpus_per_node=8",
]
QWEN2_7B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
}
MIXTRAL = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
}


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides], check_files=False)


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return {problem.key: f"{problem.why}. {problem.fix}" for problem in caught.value.problems}


def sized(**sizes: object) -> list[str]:
    long = {"tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model", "cp": "context"}
    long |= {"ep": "expert_model", "etp": "expert_tensor"}
    return [f"{MEGATRON}.{long[name]}_parallel_size={value}" for name, value in sizes.items()]


def model_problems(tmp_path, model, *overrides: str) -> dict[str, str]:
    (tmp_path / "config.json").write_text(json.dumps(model))
    report = Report()
    model_layout_rules(load(*overrides), report, {"org/model": str(tmp_path)})
    return {problem.key.removeprefix(f"{MEGATRON}."): f"{problem.why}. {problem.fix}" for problem in report.problems}


# ---------------------------------------------------------------- keys


def test_every_key_of_the_convention_is_accepted_and_seed_is_told():
    spelled = f"{ACTOR}.megatron"
    config = load(
        f"{spelled}.tensor_model_parallel_size=2",
        f"{spelled}.dtype=bfloat16",
        f"{spelled}.override_transformer_config.recompute_granularity=selective",
        f"{spelled}.override_transformer_config.recompute_modules=[core_attn]",
        f"{spelled}.override_ddp_config.pad_buckets_for_high_nccl_busbw=True",
        f"{spelled}.use_mbridge=True",
        f"{spelled}.seed=7",
    )
    block = config.actor_rollout_ref.actor.megatron_config
    assert (block.dtype, block.expert_tensor_parallel_size, block.sequence_parallel) == ("bf16", 2, True)
    assert block.use_mbridge
    assert config.actor_rollout_ref.ref.megatron_config == block  # what it leaves out is the actor's, mappings too
    assert [notice for notice in config.notices if ".seed is not needed" in notice]


@pytest.mark.parametrize(("there", "lines"), [(False, 1), (True, 0)])
def test_one_line_says_that_a_bridge_is_not_installed(monkeypatch, there, lines):
    monkeypatch.setattr(megatron, "is_installed", lambda package: there or package != "megatron.bridge")
    critic = ["algorithm.adv_estimator=gae", "critic=megatron", "critic.model.path=org/model"]
    config = load(*critic, f"{MEGATRON}.use_mbridge=True", "critic.megatron_config.use_mbridge=True")
    assert len([notice for notice in config.notices if "use_mbridge" in notice]) == lines
    assert not [notice for notice in load(*critic).notices if "use_mbridge" in notice]


def test_a_reference_of_another_layout_keeps_what_it_sets():
    ref = "actor_rollout_ref.ref.megatron_config"
    config = load(*sized(tp=4, pp=2), f"{ref}.tensor_model_parallel_size=2", f"{ACTOR}.use_kl_loss=True")
    found = config.actor_rollout_ref.ref.megatron_config
    assert (found.tensor_model_parallel_size, found.expert_tensor_parallel_size) == (2, 2)
    assert found.pipeline_model_parallel_size == 2


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], f"{ACTOR}.ulysses_sequence_parallel_size", "context_parallel"),
        (["actor_rollout_ref.model.lora_rank=8"], "actor_rollout_ref.model.lora_rank", "does not support LoRA"),
        ([f"{ACTOR}.optim.state_dtype=bf16"], f"{ACTOR}.optim.state_dtype", "float32"),
        (sized(vpp=2), f"{MEGATRON}.virtual_pipeline_model_parallel_size", "there is one stage"),
        (sized(tp=2, ep=3), f"{MEGATRON}.expert_model_parallel_size", "Set it to 2 or 4"),
        ([f"{MEGATRON}.use_dist_checkpointing=True"], f"{MEGATRON}.dist_checkpointing_path", "global_step_N"),
    ],
)
def test_what_it_does_not_do_is_refused_with_what_to_set(overrides, key, words):
    found = problems(*overrides)
    assert list(found) == [key]
    assert words in found[key]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("override_transformer_config.tensor_model_parallel_size=2", "is a key of this engine"),
        ("override_transformer_config.num_layers=2", "config.json"),
        ("override_transformer_config.hidden_dropout=0.1", "dropout is disabled"),
        ("override_transformer_config.moe_aux_loss_coeff=0.1", "only the loss of the policy or critic"),
        ("override_transformer_config.recompute_granualrity=full", "Did you mean recompute_granularity?"),
        ("override_transformer_config.recompute_granularity=all", "Set full or selective"),
        ("override_transformer_config.recompute_method=every", "Set uniform or block"),
        ("override_transformer_config.recompute_modules=[mlp]", "selective"),
        ("override_transformer_config.num_layers_in_last_pipeline_stage=0", "at least 1"),
        ("override_ddp_config.average_in_collective=True", "summed"),
        ("override_ddp_config.overlap_grad_reduce=True", "reduced once per optimizer step"),
        ("override_ddp_config.grad_reduce_in_fp32=False", "always accumulated in float32"),
    ],
)
def test_values_of_core_that_are_decided_elsewhere_are_refused(given, words):
    (said,) = problems(f"{MEGATRON}.{given}").values()
    assert words in said


def test_values_of_core_that_ask_for_what_is_so_are_accepted():
    load(
        f"{MEGATRON}.override_transformer_config.attention_dropout=0.0",
        f"{MEGATRON}.override_ddp_config.grad_reduce_in_fp32=True",
        f"{MEGATRON}.override_ddp_config.overlap_grad_reduce=False",
    )


def test_token_budgets_add_up_over_context_ranks_only():
    lengths = ["data.max_prompt_length=1000", "data.max_response_length=1000", f"{ACTOR}.use_dynamic_bsz=True"]
    budget = [*lengths, f"{ACTOR}.ppo_max_token_len_per_gpu=1000", f"{ROLLOUT}.log_prob_max_token_len_per_gpu=2000"]
    load(*budget, *sized(cp=2))
    assert "Set it to 2000 or more" in problems(*budget, *sized(tp=2))[f"{ACTOR}.ppo_max_token_len_per_gpu"]


@pytest.mark.parametrize(
    ("overrides", "checkpointing", "expected"),
    [
        ({}, True, ("full", "uniform", 1)),
        ({}, False, ()),
        ({"recompute_granularity": None}, True, ()),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}, False, None),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, True, None),
    ],
)
def test_gradient_checkpointing_means_every_layer_unless_core_is_told_more(overrides, checkpointing, expected):
    config = load().actor_rollout_ref.actor.megatron_config
    config.override_transformer_config = overrides | {"moe_token_dispatcher_type": "alltoall"}
    found = MegatronConfig.recompute(config, checkpointing)
    assert tuple(found[name] for name in sorted(found)) == expected if expected is not None else found == overrides


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    row = names.TrainingEngine("some.engine:Engine", "megatron_config", "no_such.package", "make setup-megatron")
    monkeypatch.setitem(names.TRAINING_ENGINES, "megatron", row)
    report = Report()
    check_supported(load(f"{ACTOR}.use_kl_loss=True"), report)
    (problem,) = report.problems  # the reference follows the actor: said once
    assert (problem.key, problem.why) == (f"{ACTOR}.strategy", "no_such.package is not installed")
    assert problem.fix.startswith("Run make setup-megatron; or set")


# ---------------------------------------------------------------- models


def test_sizes_that_do_not_divide_the_model_are_told_together_with_those_that_would(tmp_path):
    found = model_problems(tmp_path, QWEN2_7B, *sized(tp=8))
    assert found == {"tensor_model_parallel_size": "does not divide the model's 28 attention heads. Set it to 4"}
    six = QWEN2_7B | {"num_attention_heads": 24, "num_key_value_heads": 6}
    found = model_problems(tmp_path, six, *sized(tp=4))
    assert found == {"tensor_model_parallel_size": "does not divide the model's 6 key heads. Set it to 2"}
    found = model_problems(tmp_path, QWEN2_7B, *sized(pp=8, ep=2), "trainer.n_gpus_per_node=16")
    assert set(found) == {"pipeline_model_parallel_size", "expert_model_parallel_size"}
    assert "Set it to 4 or set" in found["pipeline_model_parallel_size"]
    assert "stage=2 and num_layers_in_last_pipeline_stage=2" in found["pipeline_model_parallel_size"]
    assert found["expert_model_parallel_size"] == "the model has no experts. Set it to 1"
    found = model_problems(tmp_path, QWEN2_7B, *sized(tp=1, cp=8))
    assert "28 attention heads of a tensor rank" in found["context_parallel_size"]
    assert "Set it to 4" in found["context_parallel_size"]


@pytest.mark.parametrize(
    ("pp", "overrides", "expected"),
    [
        (
            4,
            {FIRST: 5},
            "3 stages do not divide 23 layers (28 without the first or last stage's 5). Set it to 2 or set",
        ),
        (
            2,
            {FIRST: 5, LAST: 5},
            "0 stages do not divide 18 layers (28 without the first or last stage's 5 and 5). Set it",
        ),
        (4, {EMBEDDING: True}, "4 stages do not divide 29 layers (28 and the embedding). Set"),
        (
            8,
            {EMBEDDING: True, LOSS: True},
            "8 stages do not divide 30 layers (28 and the embedding and the loss). Set it",
        ),
        (4, {FIRST: 7, LOSS: True}, f"{LOSS} cannot be combined with the first or last stage's 7 layers. Set"),
    ],
)
def test_remedies_for_stages_work_with_the_users_overrides(tmp_path, pp, overrides, expected):
    def problem_of(stages: int, overrides: dict[str, object]) -> str:
        typed = [f"{MEGATRON}.override_transformer_config.{name}={value}" for name, value in overrides.items()]
        return "".join(model_problems(tmp_path, QWEN2_7B, *sized(pp=stages), *typed).values())

    problem = problem_of(pp, overrides)
    assert problem.startswith(expected)
    for size in re.findall(r"Set it to (\d+)", problem):
        assert problem_of(int(size), overrides) == ""
    assert problem_of(pp, dict(re.findall(r"(num_layers_in_\w+)=(\d+)", problem))) == ""
    assert all(name in problem.partition(", without ")[2] for name in overrides if name in (EMBEDDING, LOSS))


def test_layouts_that_fit_are_not_told(tmp_path):
    uneven = f"{MEGATRON}.override_transformer_config"
    stages = [f"{uneven}.num_layers_in_first_pipeline_stage=2", f"{uneven}.num_layers_in_last_pipeline_stage=2"]
    for overrides in (sized(tp=4, pp=2), sized(tp=2, cp=2, pp=2, vpp=7), [*sized(pp=8), *stages], []):
        assert model_problems(tmp_path, QWEN2_7B, *overrides) == {}
    assert model_problems(tmp_path, MIXTRAL, *sized(tp=2, ep=4, etp=1)) == {}


def test_experts_divide_over_their_own_ranks(tmp_path):
    mixtral = MIXTRAL | {"num_local_experts": 6}
    found = model_problems(tmp_path, mixtral, *sized(tp=2, ep=4, etp=1), f"{MEGATRON}.sequence_parallel=False")
    assert found["expert_model_parallel_size"] == "does not divide 6 experts. Set it to 2"
    assert "requires it with tensor parallelism" in found["sequence_parallel"]


def test_a_critic_of_another_model_is_checked_by_its_own_numbers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_7B | {"num_attention_heads": 6, "num_key_value_heads": 6}))
    critic = ["critic=megatron", "critic.model.path=org/judge", "critic.megatron_config.tensor_model_parallel_size=4"]
    report = Report()
    config = load("algorithm.adv_estimator=gae", *sized(tp=4), *critic)
    model_layout_rules(config, report, {"org/judge": str(tmp_path)})
    assert [problem.key for problem in report.problems] == ["critic.megatron_config.tensor_model_parallel_size"]


@pytest.mark.parametrize(("layers", "stages", "parts"), [(61, 16, 1), (28, 8, 1), (94, 8, 2), (7, 2, 1), (30, 4, 3)])
def test_an_uneven_split_places_every_layer_and_keeps_the_fullest_stage_small(layers, stages, parts):
    split = split_evenly(layers, stages, parts)
    if split is None:
        assert layers % parts
        return
    rest = layers - sum(split)
    middle = rest // (stages - 2) if stages > 2 else 0
    assert middle * (stages - 2) == rest
    assert all(number % parts == 0 for number in (*split, middle))
    assert max(*split, middle) <= -(-layers // stages) + 2 * parts


def test_numbers_are_read_from_any_usual_config():
    assert ModelDimensions.from_config(MIXTRAL) == ModelDimensions(32, 32, 8, 14336, experts=8, moe_ffn=14336)
    assert ModelDimensions.from_config({"text_config": QWEN2_7B}) == ModelDimensions(28, 28, 4, 18944)
    assert ModelDimensions.from_config({"n_layer": 12}) is None


def test_shared_prefixes_are_rejected_with_the_engine_that_supports_them():
    fix = problems(f"{ACTOR}.use_prefix_grouper=True")[f"{ACTOR}.use_prefix_grouper"]
    assert f"{ACTOR}.strategy=fsdp2" in fix
    config = load()
    assert config.actor_rollout_ref.actor.use_prefix_grouper == "false", "the default is auto"
    assert any("use_prefix_grouper" in notice and "megatron" in notice for notice in config.notices)
    assert load(f"{ACTOR}.use_prefix_grouper=auto").actor_rollout_ref.actor.use_prefix_grouper == "false"
