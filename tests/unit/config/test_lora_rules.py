"""LoRA keys: what names mean, what is refused before a run, and which roles it starts."""

import importlib.util

import pytest

from verl.config import ConfigError, load_config
from verl.config.block_rules import module_matcher
from verl.config.layout import active_roles, actor_is_reference, layout_of, needs_reference

BASE = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo"]
GROUP = ["actor_rollout_ref.rollout.n=4", "trainer.device=cpu", "actor_rollout_ref.model.lora_rank=8"]


def config(*more):
    return load_config(None, [*BASE, *GROUP, *more], check_files=False)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["all-linear"], "all-linear"),
        (["q_proj"], ["q_proj"]),
        (["self_attn.q_proj", "v_proj"], ["self_attn.q_proj", "v_proj"]),
        ([r".*\.(q|v)_proj"], r".*\.(q|v)_proj"),
        ([], None),
        (None, None),
    ],
)
def test_one_expression_stands_alone_and_names_are_a_list(names, found):
    assert module_matcher(names) == found


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("target_modules=[]", "lora_rank = 8"),
        ("target_modules=[q_proj,'.*v_proj']", r": .*: '\.\*v_proj'"),
        ("target_modules=[all-linear,q_proj]", ": .*: 'all-linear'"),
        ("exclude_modules=['(q_proj']", "position 0"),
    ],
)
def test_what_cannot_be_matched_is_refused_with_its_key(override, why):
    key = f"actor_rollout_ref.model.{override.partition('=')[0]}"
    with pytest.raises(ConfigError, match=why) as caught:
        config(f"actor_rollout_ref.model.{override}")
    assert [problem.key for problem in caught.value.problems] == [key]


def test_a_missing_peft_is_said_before_anything_starts(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else real(name))
    with pytest.raises(ConfigError, match=r"pip install -e \.\[lora\]"):
        load_config(None, [*BASE, *GROUP])
    assert config(), "verl plan needs no packages of engines"


def test_the_actor_is_its_own_reference():
    asked = config("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1")
    assert needs_reference(asked)
    assert actor_is_reference(asked)
    assert active_roles(asked) == ["actor", "rollout"]
    assert layout_of(asked, "ref") == layout_of(asked, "actor")
    assert not needs_reference(config())
