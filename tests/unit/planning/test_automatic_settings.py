"""Settings that a run derives from its memory plan: placement of state, KV of unfinished responses, engine size."""

import copy
import logging

import pytest

from tests.unit.planning.test_plan_laws import ACTOR, GRPO, H200, LENGTHS, QWEN_7B, ROLLOUT, load, plan_of
from verl.planning import check
from verl.planning.advice import apply_memory_settings
from verl.planning.phases import GB

RESHARD = f"{ACTOR}.fsdp_config.reshard_after_forward"


@pytest.fixture
def h200(monkeypatch, tmp_path):
    """One H200 and a 7B model of which only the configuration exists; returns the keys of a GRPO run."""
    monkeypatch.setattr(check, "gpu_memory", lambda: (H200.total, H200.name))
    monkeypatch.setattr(check, "host_memory_available", lambda: 126 * GB)
    QWEN_7B.save_pretrained(tmp_path)
    return (*GRPO, *LENGTHS, f"actor_rollout_ref.model.path={tmp_path}")


def test_full_fine_tuning_of_7b_on_one_h200_needs_no_key(h200, caplog):
    config = load(*h200)
    assert not check.check_memory(config).excess
    assert config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward is True
    assert f"trainer.auto_memory set {RESHARD}: None -> True" in caplog.text
    assert config.actor_rollout_ref.actor.optim.state_dtype == "fp32", "results of training do not change"


def test_lora_of_7b_on_one_h200_takes_less_than_60_gb(h200):
    config = load(*h200, "actor_rollout_ref.model.lora_rank=32")
    plan = check.check_memory(config)
    assert max(phase.total for phase in plan.phases if not phase.on_host) < 60 * GB
    assert config.actor_rollout_ref.rollout.max_num_seqs == 256, "32 x 8 responses"


def test_keys_that_were_set_are_kept(h200):
    config = load(*h200, f"{RESHARD}=False")
    check.check_memory(config)  # within the uncertainty of the plan: a warning
    assert config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward is False
    config = load(*h200, "trainer.auto_memory=False")
    assert check.check_memory(config).excess
    assert config.actor_rollout_ref.actor.fsdp_config.reshard_after_forward is None


def test_only_the_placement_changes_without_auto_memory():
    for gigabytes in range(40, 140, 10):
        config = load(*GRPO, *LENGTHS)
        before = copy.deepcopy(config)
        device = type(H200)("cuda", gigabytes * GB, "")
        changes = apply_memory_settings(config, lambda changed, device=device: plan_of(changed, "7b", device))
        assert all(change.remedy.places_state for change in changes)
        assert bool(changes) == (config != before)


@pytest.mark.parametrize(("more", "decided"), [(("actor_rollout_ref.model.lora_rank=32",), "keep"), ((), "recompute")])
def test_the_plan_decides_whether_the_kv_of_unfinished_responses_is_kept(h200, caplog, more, decided):
    caplog.set_level(logging.INFO)
    config = load(*h200, "trainer.mode=async", *more)
    assert config.trainer.partial_kv == "auto"
    plan = check.check_memory(config)
    assert not plan.excess
    assert config.trainer.partial_kv == decided
    assert f"trainer.partial_kv=auto: {decided}, because" in caplog.text
    held = plan.phase("update_actor").parts["rollout"] > 20 * GB
    assert held == (decided == "keep"), "recomputed KV is freed during updates"


def test_without_a_plan_the_kv_is_recomputed(caplog):
    caplog.set_level(logging.INFO)
    config = load(*GRPO, "trainer.mode=async")
    assert check.check_memory(config) is None
    assert config.trainer.partial_kv == "recompute"
    assert "the memory of the run is unknown" in caplog.text


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ((), "recompute"),  # nothing continues
        (("trainer.mode=one_step_off",), "recompute"),
        (("trainer.mode=async", "trainer.max_staleness=0"), "recompute"),
        (("trainer.mode=async", "trainer.partial_rollout=False"), "recompute"),
        (("trainer.mode=async",), "auto"),
        (("trainer.mode=async", "trainer.partial_kv=keep"), "keep"),
        (("trainer.mode=async", "trainer.overlap=True"), "keep"),  # the KV memory is in use in any case
        (("trainer.mode=async", f"{ROLLOUT}.nnodes=1"), "keep"),
        (("trainer.mode=async", f"{ROLLOUT}.name=vllm"), "recompute"),
    ],
)
def test_the_plan_is_needed_only_where_memory_matters(keys, expected):
    assert load(*keys).trainer.partial_kv == expected


@pytest.mark.parametrize(
    ("keys", "gpus", "expected"),
    [
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8"), 1, 256),
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8"), 4, 128),  # twice a replica's share
        (("data.train_batch_size=256", f"{ROLLOUT}.n=8"), 1, 1024),
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8", "trainer.mode=async", "trainer.max_staleness=2"), 1, 768),
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8", "data.val_files=v.parquet"), 1, 1024),
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8", f"{ROLLOUT}.max_num_seqs=64"), 1, 64),
        (("data.train_batch_size=32", f"{ROLLOUT}.n=8", f"{ROLLOUT}.agent.default_agent_loop=tool_agent"), 1, 1024),
    ],
)
def test_an_engine_has_room_for_the_responses_of_a_step(keys, gpus, expected):
    small_updates = f"{ACTOR}.ppo_mini_batch_size=32"
    assert load(*keys, small_updates, gpus=gpus).actor_rollout_ref.rollout.max_num_seqs == expected
