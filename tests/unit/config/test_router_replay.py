"""Replayed experts: one key for both training engines, and what nobody records is refused before the start."""

from __future__ import annotations

import json

import pytest

from verl.config import ConfigError, load_config
from verl.config.megatron import model_layout_rules
from verl.config.problems import Report

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODE, EXPERTS = f"{ACTOR}.router_replay.mode", f"{ROLLOUT}.return_routed_experts"
BYPASS = "algorithm.rollout_correction.bypass_mode"
RUN = [
    "algorithm=grpo",
    "data.train_files=openai/gsm8k",
    "actor_rollout_ref.model.path=org/model",
    "trainer.n_gpus_per_node=8",
]


def load(*overrides: str):
    return load_config(None, [*RUN, *overrides], check_files=False)


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
@pytest.mark.parametrize(("mode", "told"), [("disabled", False), ("R2", False), ("R3", True)])
def test_the_rollout_says_experts_where_the_actor_replays_those_of_the_generation(strategy, mode, told):
    config = load(f"{ACTOR}.strategy={strategy}", f"{MODE}={mode}").actor_rollout_ref
    assert config.rollout.return_routed_experts is told


@pytest.mark.parametrize("spelled", ["megatron", "megatron_config"])
def test_the_key_of_the_megatron_engine_is_the_same_one_and_other_roles_have_none(spelled):
    config = load(f"{ACTOR}.strategy=megatron", f"{ACTOR}.{spelled}.router_replay.mode=R2")
    assert config.actor_rollout_ref.actor.router_replay.mode == "R2"
    config = load("algorithm.adv_estimator=gae", f"critic.{spelled}.router_replay.mode=R2")
    assert [notice for notice in config.notices if "only the actor replays" in notice]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([f"{MODE}=R3", f"{ROLLOUT}.name=hf"], MODE, "Set it to R2"),
        ([f"{MODE}=R3", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://one:8000]"], MODE, "server_urls"),
        ([f"{MODE}=R3", f"{EXPERTS}=False"], EXPERTS, "router_replay.mode = R3 needs them"),
        ([f"{MODE}=R2", f"{EXPERTS}=True"], EXPERTS, "router_replay.mode = R2 replays"),
        ([f"{MODE}=R2", f"{BYPASS}=True"], MODE, "skips the pass"),
    ],
)
def test_what_nobody_records_is_refused_with_what_to_set(overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    found = {problem.key: f"{problem.why}. {problem.fix}" for problem in caught.value.problems}
    assert list(found) == [key]
    assert words in found[key]


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_a_model_without_experts_is_refused(tmp_path, strategy):
    numbers = {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 8}
    for experts, refused in ((0, [MODE]), (8, [])):
        (tmp_path / "config.json").write_text(json.dumps({**numbers, "num_experts": experts}))
        report = Report()
        config = load(f"{ACTOR}.strategy={strategy}", f"{MODE}=R2")
        model_layout_rules(config, report, {"org/model": str(tmp_path)})
        assert [problem.key for problem in report.problems] == refused
