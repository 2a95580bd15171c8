"""Half precision, recomputation, and steps that are not taken, on one rank."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from tests.support.engine_cases import make_batch, make_engine, token_loss
from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import EXPERTS
from tests.support.tiny import tiny_config, tiny_model
from verl.workers.engine.megatron.layers import GroupedExperts

BOTH = ["log_probs", "entropy"]


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "distributed"), [("bf16", True), ("bf16", False), ("fp16", True)])
def test_half_precision_trains_as_fsdp_does(dtype, distributed):
    data = make_batch()
    ours = make_megatron(tiny_model(), lr=1e-3, dtype=dtype, use_distributed_optimizer=distributed)
    theirs = make_engine(tiny_model(), lr=1e-3, mixed_precision=dtype)
    for _ in range(3):
        losses, steps = [], []
        for engine in (ours, theirs):
            losses.append(engine.forward_backward(data, token_loss, BOTH)["loss"][0])
            steps.append(engine.optimizer_step())
        assert losses[0] == pytest.approx(losses[1], rel=0.02)
        assert {k: v for k, v in steps[0].items() if k != "grad_norm"} == {
            k: v for k, v in steps[1].items() if k != "grad_norm"
        }
        if not steps[0]["loss_scale_search"]:
            assert steps[0]["grad_norm"] == pytest.approx(steps[1]["grad_norm"], rel=0.05)
    fields = [engine.infer(data, BOTH).batch["log_probs"] for engine in (ours, theirs)]
    torch.testing.assert_close(fields[0], fields[1], atol=0.1, rtol=0.0)


def test_experts_multiplied_together_are_those_one_after_the_other(monkeypatch):
    """Many experts for few tokens: some have none."""
    model = lambda: tiny_model("qwen3_moe", **EXPERTS | {"num_experts": 32})  # noqa: E731
    data, found = make_batch(rows=2), []
    for together in (False, True):
        monkeypatch.setattr(GroupedExperts, "supports_grouped", lambda *_, together=together: together)
        engine = make_megatron(model(), lr=1e-3, dtype="bf16")
        losses = []
        for _ in range(2):
            losses.append(float(engine.forward_backward(data, token_loss, BOTH)["loss"][0]))
            losses.append(engine.optimizer_step()["grad_norm"])
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {},
    ],
)
def test_recomputation_does_not_change_the_gradient(recompute):
    data = make_batch()
    plain = make_megatron(tiny_model(), enable_gradient_checkpointing=False)
    again = make_megatron(tiny_model(), override_transformer_config=recompute)
    norms = []
    for engine in (plain, again):
        engine.forward_backward(data, token_loss, BOTH)
        norms.append(engine.optimizer_step()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    data = make_batch()
    engine = make_megatron(tiny_model())
    before = engine.infer(data, BOTH).batch

    def broken(outputs, batch, counts):
        loss, metrics = token_loss(outputs, batch, counts)
        return loss * math.nan, metrics

    engine.forward_backward(data, broken, BOTH)
    assert engine.optimizer_step()["skipped"] == 1
    assert engine.weights_finite(thorough=True)
    after = engine.infer(data, BOTH).batch
    assert all(torch.equal(after[name], before[name]) for name in BOTH)
    engine.forward_backward(data, token_loss, BOTH)
    assert engine.optimizer_step()["skipped"] == 0


def test_gradients_that_take_no_memory_between_steps_change_nothing():
    data = make_batch()
    kept, released = (make_megatron(tiny_model(), grad_offload=offload) for offload in (False, True))
    norms: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(2):
        for released_ones, engine in ((False, kept), (True, released)):
            for half in (data[:3], data[3:]):  # two passes of one step
                engine.forward_backward(half, token_loss, BOTH)
            norms[released_ones].append(engine.optimizer_step()["grad_norm"])
    sizes = [engine.chunks[0].buffers[0].grad_data.untyped_storage().nbytes() for engine in (kept, released)]
    assert sizes[0] > 0
    assert sizes[1] == 0
    assert norms[True] == norms[False]
    with pytest.raises(RuntimeError, match=r"^optimizer_step: .*forward_backward"):
        released.optimizer_step()


def test_weights_that_are_lost_are_noticed():
    engine = make_megatron(tiny_model())
    next(engine.models[0].parameters()).data[0] = math.nan
    assert not engine.weights_finite(thorough=False)


def test_what_the_engine_cannot_do_is_refused_by_name():
    with pytest.raises(ValueError, match=r"override_transformer_config.*no_such_key"):
        make_megatron(tiny_model(), override_transformer_config={"no_such_key": 1})
    with pytest.raises(ValueError, match=r"override_ddp_config.*no_such_key"):
        make_megatron(tiny_model(), override_ddp_config={"no_such_key": 1})
    for_engine = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with pytest.raises(ValueError, match=r"recompute_modules: layernorm .*Transformer Engine"):
        make_megatron(tiny_model(), override_transformer_config=for_engine)
    with pytest.raises(ValueError, match=r"^optim: "):
        make_megatron(tiny_model(), train=False).forward_backward(make_batch(), token_loss, BOTH)
    several = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=2))
    with pytest.raises(ValueError, match=r"^reward_model\.path: .*\b2 labels.*num_labels=1"):
        make_megatron(several, "sequence_classification", train=False)
    with pytest.raises(ValueError, match=r"^outputs: \['values'\] .*causal_lm"):
        make_megatron(tiny_model(), train=False).infer(make_batch(), ["values"])
