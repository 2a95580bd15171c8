"""Shared prefixes change no result: fields, losses and gradients are those of every row alone."""

from __future__ import annotations

import pytest
import torch

from tests.support.engine_cases import (
    OUTPUTS_OF_KIND,
    assert_close,
    engine_gradients,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
)
from tests.support.prefix_cases import BATCHES, computed_tokens, shared_batch
from tests.support.router_cases import moe_model
from verl.models.forward import ResponseModel
from verl.models.model_checks import enable_packed_attention
from verl.models.packing import packed_rows
from verl.models.shared_prefixes import shared_rows
from verl.workers.engine.base import Counts, MicroBatching

CPU = torch.device("cpu")
SPLITS = [MicroBatching(), MicroBatching(size=2), MicroBatching(max_tokens=14)]


def run(engine, data, micro):
    """Fields, loss, metrics of the pass and gradients."""
    outputs = OUTPUTS_OF_KIND[engine.kind]
    fields = dict(engine.infer(data, outputs, 0.7, micro).batch.items())
    metrics = engine.forward_backward(data, token_loss, outputs, 0.7, micro)
    gradients = engine_gradients(engine)
    engine._optimizer.zero_grad()
    return fields, metrics, gradients


# ---------------------------------------------------------------- against row by row in float64


@pytest.mark.parametrize("name", BATCHES)
def test_loss_and_gradients_equal_those_of_a_plain_pass_in_float64(name):
    data = shared_batch(name)
    model = ResponseModel(model_of_kind("causal_lm").double(), "causal_lm")
    with torch.no_grad():
        assert enable_packed_attention(model.eval(), CPU)
    mask = data.batch["response_mask"]
    counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
    plain = packed_rows(data.batch["input_ids"], data.batch["attention_mask"], mask.shape[1])
    results = []
    for rows in (plain, shared_rows(plain)):
        fields = model(rows.to(CPU), ("log_probs", "entropy"), tuple(mask.shape), 0.7)
        loss, _ = token_loss(fields, data, counts)
        loss.backward()
        gradients = {key: weight.grad for key, weight in model.named_parameters()}
        results.append({"loss": loss.detach(), **{key: value.detach() for key, value in fields.items()}, **gradients})
        model.zero_grad(set_to_none=True)
    assert shared_rows(plain).packing.total == computed_tokens(name)
    for key, value in results[0].items():
        # The fields are float32; attention, layers and gradients are float64.
        torch.testing.assert_close(results[1][key], value, atol=1e-6, rtol=1e-5, msg=lambda text, key=key: key + text)


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("kind", OUTPUTS_OF_KIND)
def test_an_engine_computes_the_same_for_every_kind_of_model_and_split(name, kind):
    data = shared_batch(name)
    fields, metrics, gradients = run(make_engine(model_of_kind(kind), kind), data, MicroBatching())
    engine = make_engine(model_of_kind(kind), kind, prefix_sharing="true")
    for micro in SPLITS:
        shared_fields, shared_metrics, shared_gradients = run(engine, data, micro)
        assert_close(shared_fields, fields)
        assert shared_metrics["loss"][0] == pytest.approx(metrics["loss"][0], rel=1e-5)
        assert_close(shared_gradients, gradients)
        saved, required = shared_metrics["prefix_saving"]
        assert required == data.batch["attention_mask"].sum()
        if micro == MicroBatching():
            assert required - saved == computed_tokens(name)


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("qwen2", {}, {"enable_gradient_checkpointing": True}),
        ("qwen2", {}, {"lora_rank": 4, "enable_gradient_checkpointing": True}),
        ("mistral", {"sliding_window": 3}, {}),
        ("gemma2", {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 4}, {}),
    ],
)
def test_checkpointing_adapters_and_windows(family, changes, options):
    data = shared_batch("conversation")
    results = []
    for mode in ("false", "true"):
        torch.manual_seed(0)
        engine = make_engine(model_of_kind("causal_lm", family, **changes), prefix_sharing=mode, **options)
        results.append(run(engine, data, MicroBatching(max_tokens=16)))
    for plain, shared in zip(results[0][::2], results[1][::2], strict=True):
        assert_close(shared, plain)


def test_auto_shares_only_if_enough_is_saved():
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="auto")
    assert run(engine, shared_batch("groups"), MicroBatching())[1]["prefix_saving"][0] > 0
    assert run(engine, make_batch(rows=6), MicroBatching())[1]["prefix_saving"][0] == 0


def test_a_budget_counts_computed_tokens():
    data = shared_batch("groups")
    tokens, computed = int(data.batch["attention_mask"].sum()), computed_tokens("groups")
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="true")
    saved, _ = run(engine, data, MicroBatching(max_tokens=computed))[1]["prefix_saving"]
    assert tokens - saved == computed


def test_padded_models_reject_sharing():
    with pytest.raises(ValueError, match="use_prefix_grouper"):
        make_engine(model_of_kind("causal_lm"), prefix_sharing="true", use_remove_padding=False)


# ---------------------------------------------------------------- mixtures of experts


@pytest.mark.parametrize("replay", [False, True])
def test_experts_statistics_and_recorded_routes_are_those_of_every_row(replay):
    data = shared_batch("groups")
    outputs = ["log_probs", "routed_experts"]
    results = []
    for mode in ("false", "true"):
        engine = make_engine(moe_model("qwen3_moe"), prefix_sharing=mode, router_replay=replay)
        if replay and mode == "false":
            experts = engine.infer(data, outputs).batch["routed_experts"].flip(-2)
            # Rows of one group that were sampled with different experts.
            experts[1, 6:, :, :] = experts[1, 6:, :, :].roll(1, -1)
            experts[2, 7, 0, 0] = (experts[2, 7, 0, 0] + 1) % 2
            data.batch["routed_experts"] = experts
        infer = dict(engine.infer(data, outputs, micro=MicroBatching(size=4)).batch.items())
        metrics = engine.forward_backward(data, token_loss, ["log_probs"])
        results.append((infer, metrics, engine_gradients(engine)))
    (plain, plain_metrics, plain_gradients), (shared, metrics, gradients) = results
    assert torch.equal(shared.pop("routed_experts"), plain.pop("routed_experts"))
    assert_close(shared, plain)
    assert_close(gradients, plain_gradients)
    for name in ("moe/busiest", "moe/idle", "moe/replaced"):
        assert metrics[name] == pytest.approx(plain_metrics[name])
    assert metrics["prefix_saving"][0] > 0
