"""Laws of the memory plan: it grows with what it is made of, remedies shrink it, it is what was measured; the host."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from verl.config import ConfigError, PPOConfig, load_config
from verl.config.schema import get_path, set_path
from verl.planning import check
from verl.planning.advice import apply_cheapest_changes, cheapest_changes, check_fits
from verl.planning.fsdp import FSDPModelMemory
from verl.planning.host import HostMemory, is_in_memory
from verl.planning.phases import GB, DeviceMemory, MemoryPlan
from verl.planning.plan import memory_plan
from verl.planning.remedies import applicable_remedies
from verl.planning.shapes import ModelShape

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def qwen(hidden, intermediate, layers, heads, kv_heads, vocab=151936, tied=True):
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab}
    return AutoConfig.for_model("qwen2", **sizes, tie_word_embeddings=tied)


QWEN_7B = qwen(3584, 18944, 28, 28, 4, 152064, tied=False)
SHAPES = {
    "0.5b": ModelShape.from_config(qwen(896, 4864, 24, 14, 2)),
    "1.5b": ModelShape.from_config(qwen(1536, 8960, 28, 12, 2)),
    "7b": ModelShape.from_config(QWEN_7B),
}
H200 = DeviceMemory("cuda", int(139.8 * GB), "H200")
GRPO = ("algorithm=grpo", f"{ROLLOUT}.n=8", "data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32")
LENGTHS = ("data.max_prompt_length=256", "data.max_response_length=512")


def load(*overrides: str, gpus: int = 1) -> PPOConfig:
    given = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.device=cuda"]
    return load_config(None, [*given, f"trainer.n_gpus_per_node={gpus}", *overrides], check_files=False)


def plan_of(config: PPOConfig, shape: str | ModelShape, device: DeviceMemory | None = H200, host=None) -> MemoryPlan:
    found = SHAPES[shape] if isinstance(shape, str) else shape
    return memory_plan(config, {"actor": found, "critic": found, "reward_model": found}, device, host)


# ---------------------------------------------------------------- it grows with what it is made of

PLAIN = load()
GROWING = {
    "data.max_prompt_length": st.integers(64, 4096),
    "data.max_response_length": st.integers(64, 4096),
    f"{ROLLOUT}.max_num_seqs": st.integers(1, 1024),
    f"{ROLLOUT}.max_model_len": st.integers(128, 8192),
    f"{ROLLOUT}.gpu_memory_utilization": st.floats(0.1, 0.9),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": st.integers(1, 64),
    "critic.ppo_micro_batch_size_per_gpu": st.integers(1, 64),
}


@pytest.mark.parametrize("key", GROWING)
@settings(max_examples=15)
@given(data=st.data())
def test_no_phase_shrinks_when_a_length_or_a_batch_grows(key, data):
    small, large = sorted((data.draw(GROWING[key]), data.draw(GROWING[key])))
    plans = []
    for value in (small, large):
        config = copy.deepcopy(PLAIN)
        set_path(config, key, value)
        plans.append(plan_of(config, "0.5b", host=HostMemory(64 * GB)))
    for before, after in zip(plans[0].phases, plans[1].phases, strict=True):
        assert after.total >= before.total, before.phase


@settings(max_examples=25)
@given(more=st.integers(1, 40), checkpointing=st.booleans(), reshard=st.sampled_from([None, True]))
def test_no_phase_shrinks_with_more_layers(more, checkpointing, reshard):
    shape = SHAPES["0.5b"]
    each = shape.layer_parameters // shape.layers
    deeper = replace(shape, layers=shape.layers + more, layer_parameters=shape.layer_parameters + more * each)
    config = copy.deepcopy(PLAIN)
    set_path(config, "actor_rollout_ref.model.enable_gradient_checkpointing", checkpointing)
    set_path(config, f"{ACTOR}.fsdp_config.reshard_after_forward", reshard)
    for before, after in zip(plan_of(config, shape).phases, plan_of(config, deeper).phases, strict=True):
        assert after.total > before.total or before.phase == "train"


# ---------------------------------------------------------------- remedies

TIGHT = load(
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=16",
    "critic.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "critic.model.enable_gradient_checkpointing=False",
    f"{ROLLOUT}.free_cache_engine=False",
    f"{ROLLOUT}.n=4",
    "reward_model.enable=True",
    "reward_model.path=z",
    gpus=4,
)


def on_megatron(config: PPOConfig) -> PPOConfig:
    changed = copy.deepcopy(config)
    for block in (ACTOR, "actor_rollout_ref.ref", "critic", "reward_model"):
        set_path(changed, f"{block}.strategy", "megatron")
    return changed


@pytest.mark.parametrize("tight", [TIGHT, on_megatron(TIGHT)], ids=["fsdp", "megatron"])
@pytest.mark.parametrize("phase", ["gen", "reward", "old_log_prob", "ref", "values", "update_critic", "update_actor"])
def test_every_remedy_shrinks_its_phase(phase, tight):
    before = plan_of(tight, "1.5b", DeviceMemory("cuda", 60 * GB, "")).phase(phase).total
    found = list(applicable_remedies(phase, lambda key: get_path(tight, key)))
    assert [remedy for remedy, _ in found if "_config" in remedy.key]
    for remedy, now in found:
        if remedy.key.endswith("reshard_after_forward"):
            continue  # with several ranks layers are freed already
        highest = 4 if remedy.action == "double" else 1
        changed = copy.deepcopy(tight)
        set_path(changed, remedy.key, list(remedy.values(now, highest=highest))[-1])
        after = plan_of(changed, "1.5b", DeviceMemory("cuda", 60 * GB, "")).phase(phase).total
        assert after < before, remedy.key


def test_7b_on_one_120_gb_gpu_starts_by_itself_and_says_at_what_cost():
    config, small = load(*GRPO, *LENGTHS), replace(H200, total=120 * GB)
    with pytest.raises(ValueError, match=r"(?s)update_actor.*trainer.auto_memory=True"):
        check_fits(config, lambda changed: plan_of(changed, "7b", small, HostMemory(119 * GB)))
    (change,) = apply_cheapest_changes(config, lambda changed: plan_of(changed, "7b", small, HostMemory(119 * GB)))
    assert config.actor_rollout_ref.actor.optim.state_dtype == "bf16"
    assert "fp32 -> bf16" in change.log_text()
    assert "stochastic rounding" in change.log_text()
    assert not plan_of(config, "7b", small, HostMemory(119 * GB)).excess
    assert check_fits(config, lambda changed: plan_of(changed, "7b", small, HostMemory(119 * GB))) == []


def test_a_run_with_auto_memory_is_repaired_before_anything_is_loaded(tmp_path, monkeypatch, caplog):
    """The folder has a config and no weights; a GPU and a host where nothing else is enough."""
    monkeypatch.setattr(check, "gpu_memory", lambda: (120 * GB, H200.name))
    monkeypatch.setattr(check, "host_memory_available", lambda: 120 * GB)
    QWEN_7B.save_pretrained(tmp_path)
    keys = (*GRPO, *LENGTHS, f"actor_rollout_ref.model.path={tmp_path}")
    with pytest.raises(ConfigError):
        check.check_memory(load(*keys))
    config = load(*keys, "trainer.auto_memory=True")
    check.check_memory(config)
    assert config.actor_rollout_ref.actor.optim.state_dtype == "bf16"
    assert "trainer.auto_memory set actor_rollout_ref.actor.optim.state_dtype: fp32 -> bf16" in caplog.text
    assert config.actor_rollout_ref.actor.checkpoint.snapshot is True
    monkeypatch.setattr(check, "host_memory_available", lambda: 30 * GB)
    small = load(*keys, "trainer.auto_memory=True")
    check.check_memory(small)
    assert small.actor_rollout_ref.actor.checkpoint.snapshot is False
    assert f"{ACTOR}.checkpoint.snapshot=False" in caplog.text


def test_casting_layer_by_layer_alone_is_chosen_where_it_is_enough():
    """7B with bf16 moments on 116 GB: 10 bytes per parameter of the one group become a layer's."""
    config = load(*GRPO, *LENGTHS, f"{ACTOR}.optim.state_dtype=bf16")
    changes, fits = cheapest_changes(config, lambda changed: plan_of(changed, "7b", replace(H200, total=116 * GB)))
    assert fits
    assert [change.key for change in changes] == [f"{ACTOR}.fsdp_config.reshard_after_forward"]


def test_auto_memory_never_changes_lengths():
    config = load(*GRPO, *LENGTHS)
    small = DeviceMemory("cuda", 8 * GB, "")
    assert apply_cheapest_changes(config, lambda changed: plan_of(changed, "7b", small)) == []
    assert config == load(*GRPO, *LENGTHS)


# ---------------------------------------------------------------- measured

# Shape, keys, GB that torch allocated and the engine mapped by phase: benchmarks/memory_plan.py on one H200.
STEPS = (*GRPO, *LENGTHS, f"{ROLLOUT}.free_weights=False", f"{ROLLOUT}.max_num_seqs=1024")
PLAIN_LAYERS = ("actor_rollout_ref.model.enable_gradient_checkpointing=False",)
BUDGET = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=")
MEASURED = [
    ("0.5b", STEPS, {"gen": 15.85, "old_log_prob": 8.094, "update_actor": 11.14}),
    (
        "0.5b",
        (*STEPS, *PLAIN_LAYERS, BUDGET[0], BUDGET[1] + "15360"),
        {"gen": 15.85, "old_log_prob": 8.48, "update_actor": 25.46},
    ),
    ("1.5b", STEPS, {"gen": 41.8, "old_log_prob": 23.78, "update_actor": 32.26}),
    (
        "7b",
        (*STEPS, BUDGET[0], BUDGET[1] + "7680", f"{ACTOR}.optim.state_dtype=bf16"),
        {"gen": 111.7, "old_log_prob": 86.46, "update_actor": 128.2},
    ),
    # benchmarks/training_step.py, (a): 384 tokens a row, 37 rows a micro-batch
    (
        "0.5b",
        (
            *GRPO,
            f"{ROLLOUT}.free_weights=False",
            *PLAIN_LAYERS,
            "data.max_prompt_length=128",
            "data.max_response_length=256",
            BUDGET[0],
            BUDGET[1] + "14208",
        ),
        {"update_actor": 24.5},
    ),
]


@pytest.mark.parametrize(("shape", "keys", "measured"), MEASURED)
def test_the_plan_is_never_below_and_at_most_7_percent_above_what_was_measured(shape, keys, measured):
    plan = plan_of(load(*keys), shape, replace(H200, total=int(140.4 * GB)))
    for phase, gigabytes in measured.items():
        assert gigabytes <= plan.phase(phase).allocated / GB <= 1.07 * gigabytes, phase


def test_an_engine_alone_takes_what_was_measured():
    """(a) without the rollout, 20 rows of 384 tokens a micro-batch: 16.9 GB."""
    model = FSDPModelMemory(SHAPES["0.5b"], checkpointing=False, compiled=True)
    planned = model.weights() + model.moments() + sum(model.update(20 * 384, 20 * 256, micro_batches=2).values())
    assert 16.9 <= planned / GB <= 1.07 * 16.9


# ---------------------------------------------------------------- the host

OFFLOADED = (*GRPO, *LENGTHS, f"{ACTOR}.optim.state_dtype=bf16", f"{ACTOR}.fsdp_config.optimizer_offload=True")
N = SHAPES["7b"].parameters


def test_what_is_offloaded_waits_in_host_memory_from_then_on():
    here, away = plan_of(load(*GRPO, *LENGTHS), "7b"), plan_of(load(*OFFLOADED), "7b")
    for phase in ("train", "save_checkpoint"):
        assert (here.phase(phase).parts["offloaded"], away.phase(phase).parts["offloaded"]) == (0, 4 * N)
    more = load(*OFFLOADED, f"{ACTOR}.fsdp_config.param_offload=True", f"{ACTOR}.fsdp_config.grad_offload=True")
    assert plan_of(more, "7b").phase("train").parts["offloaded"] == 12 * N


def test_a_checkpoint_is_copied_and_where_files_take_memory_they_count_too():
    on_disk = plan_of(load(*OFFLOADED), "7b").phase("save_checkpoint")
    assert on_disk.parts["snapshot"] == (4 + 4) * N
    assert on_disk.parts["copies"] < 4 * GB, "what a save takes beside the copy"
    assert on_disk.parts["files"] == 0
    config = load(*OFFLOADED, "trainer.save_freq=-1")
    host = HostMemory(108 * GB, checkpoints_in_memory=True)
    saving = plan_of(config, "7b", host=host).phase("save_checkpoint")
    assert saving.parts["files"] == (4 + 4 + 2) * N
    assert saving.excess
    changes, fits = cheapest_changes(config, lambda changed: plan_of(changed, "7b", host=host))
    assert (fits, [change.key for change in changes]) == (True, [f"{ACTOR}.checkpoint.save_contents"])
    several = load(*OFFLOADED, "trainer.save_freq=5", "trainer.max_actor_ckpt_to_keep=2")
    assert plan_of(several, "7b", host=host).phase("save_checkpoint").parts["files"] == 3 * 10 * N


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs here")
def test_a_tmpfs_keeps_files_in_memory_and_other_folders_do_not():
    assert is_in_memory("/dev/shm/a/folder/that/is/not/there/yet")
    assert not is_in_memory("/proc/nowhere")


def test_a_host_that_is_too_small_is_refused_with_the_cheapest_change():
    config = load(*OFFLOADED)
    with pytest.raises(ConfigError) as caught:
        check_fits(config, lambda changed: plan_of(changed, "7b", host=HostMemory(36 * GB)))
    (problem,) = caught.value.problems
    assert problem.key == f"{ACTOR}.fsdp_config.optimizer_offload"
    assert "the save_checkpoint phase is planned to take" in problem.why
    assert "of the host's 36.0 GB" in problem.why
    assert "optimizer_offload=False" in problem.fix


def test_memory_that_other_processes_hold_is_reported_and_no_devices_are_advised(tmp_path, monkeypatch):
    """A tiny model on a CPU host of 24 GB, of which others hold 22.5."""
    monkeypatch.setattr(check, "host_memory_available", lambda: int(1.5 * GB))
    monkeypatch.setattr(check, "host_memory_total", lambda: 24 * GB)
    qwen(64, 128, 2, 2, 2, 512).save_pretrained(tmp_path)
    keys = (*GRPO, "trainer.device=cpu", f"actor_rollout_ref.model.path={tmp_path}")
    with pytest.raises(ConfigError) as caught:
        check.check_memory(load(*keys))
    (problem,) = caught.value.problems
    assert "of the host's 1.4 GB of available host memory" in problem.why
    assert "(the host has 24.0 GB, of which other processes hold 22.5 GB)" in problem.why
    assert "`ps aux --sort=-rss`" in problem.fix
    assert "devices" not in problem.fix
    assert "smaller model" not in problem.fix


def test_a_model_too_large_for_the_host_is_reported_whatever_others_use():
    host = HostMemory(int(30 * GB), installed=36 * GB, used=4 * GB)
    config = load(*OFFLOADED, f"{ACTOR}.optim.state_dtype=bf16")
    plan = plan_of(config, "7b", host=host)
    assert plan.excess
    assert not plan.fits_without_other_processes(plan.worst_phase)
    with pytest.raises(ConfigError) as caught:
        check_fits(config, lambda changed: plan_of(changed, "7b", host=host))
    assert "Stop other processes" not in caught.value.problems[0].fix


@pytest.mark.parametrize(("room", "missing"), [(None, (0, 0)), (44, (0, 0)), (30, (0, 11)), (20, (5, 5))])
def test_copies_of_checkpoints_are_made_where_the_host_has_room_the_actors_first(room, missing):
    """At 1.5B a copy takes 17 GB, and everything else 8."""
    plan = plan_of(load(), "1.5b", host=HostMemory(room * GB) if room else None)
    assert not plan.excess
    assert [round(size / GB) for size in plan.snapshot_shortfall.values()] == list(missing)


def test_a_requested_snapshot_is_made_or_rejected():
    config = load(*OFFLOADED, f"{ACTOR}.checkpoint.snapshot=True")
    with pytest.raises(ConfigError) as caught:
        check_fits(config, lambda changed: plan_of(changed, "7b", host=HostMemory(60 * GB)))
    (problem,) = caught.value.problems
    assert problem.key == f"{ACTOR}.checkpoint.snapshot"
    assert "snapshot=False" in problem.fix
    never = plan_of(load(*OFFLOADED, f"{ACTOR}.checkpoint.snapshot=False"), "7b", host=HostMemory(200 * GB))
    assert never.phase("train").parts["snapshot"] == 0


@pytest.mark.parametrize(("room", "wanted"), [(40, 0), (15, 1), (10, 2), (6, None)])
def test_changes_for_the_host_and_for_the_device_fit_together(room, wanted):
    """Moments that the host has no room for come back to a device that must make room for them first."""
    keys = ("critic.fsdp_config.optimizer_offload=True", "critic.optim.state_dtype=bf16")
    config = load(*keys, f"{ACTOR}.optim.state_dtype=bf16")
    device = DeviceMemory("cuda", 38 * GB, "")
    changes, fits = cheapest_changes(config, lambda changed: plan_of(changed, "1.5b", device, HostMemory(room * GB)))
    assert fits is (wanted is not None)
    for change in changes:
        set_path(config, change.key, change.value)
    assert (plan_of(config, "1.5b", device, HostMemory(room * GB)).excess == 0) is fits
    assert not fits or len(changes) == wanted
