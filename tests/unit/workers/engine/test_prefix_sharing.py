"""Shared prefixes change no result: fields, losses and gradients are those of every row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.engine_cases import (
    OUTPUTS_OF_KIND,
    assert_close,
    engine_gradients,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
)
from tests.support.prefix_cases import (
    BATCHES,
    RESPONSE,
    batch_of,
    computed_tokens,
    policy_columns,
    policy_config,
    shared_batch,
)
from tests.support.router_cases import moe_model
from verl.config.names import LOSS_AGG_MODES, POLICY_LOSSES
from verl.models import attention
from verl.models.forward import ResponseModel, enable_packed_attention
from verl.models.packing import packed_rows
from verl.models.shared_prefixes import share_prefixes
from verl.utils.balancing import SequenceCost
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.micro_batches import local_counts
from verl.workers.engine.common.prefix_sharing import PrefixSharing, build_prefix_tree, supported_mode
from verl.workers.roles.policy_loss import PolicyLoss

CPU = torch.device("cpu")
SPLITS = [MicroBatching(), MicroBatching(size=2), MicroBatching(max_tokens=14)]


def run(engine, data, micro):
    """Fields, loss, metrics of the pass and gradients."""
    outputs = OUTPUTS_OF_KIND[engine.kind]
    fields = dict(engine.infer(data, outputs, 0.7, micro).batch.items())
    metrics = engine.forward_backward(data, token_loss, outputs, 0.7, micro)
    gradients = engine_gradients(engine)
    engine.optimizer.zero_grad()
    return fields, metrics, gradients


# ---------------------------------------------------------------- against row by row in float64


@pytest.fixture(scope="module")
def wide_model():
    """A model in float64; transformers' normalisation layers compute in float32 and are replaced."""
    hf = model_of_kind("causal_lm")
    for layer in hf.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = torch.nn.RMSNorm(64), torch.nn.RMSNorm(64)
    hf.model.norm = torch.nn.RMSNorm(64)
    model = ResponseModel(hf.double(), "causal_lm")
    with torch.no_grad():
        assert enable_packed_attention(model.eval(), CPU)
    return model


def states_and_gradients(model, rows, index):
    """Hidden states of all tokens of the rows in float64, and gradients of a loss of each of them."""
    hidden = model(rows.to(CPU), ("hidden",), (1, 1))["hidden"].index_select(0, index)
    weight = torch.linspace(-1, 1, hidden.numel(), dtype=torch.float64).view_as(hidden)
    (hidden * weight + hidden**2).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"hidden": hidden.detach(), **gradients}


def check_states(model, plain):
    shared = share_prefixes(plain)
    index = getattr(shared.packing, "token_index", np.arange(plain.packing.total))
    expected = states_and_gradients(model, plain, torch.arange(plain.packing.total))
    actual = states_and_gradients(model, shared, torch.from_numpy(index))
    assert_equal_in_float64(actual, expected)
    return shared.packing.total


def assert_equal_in_float64(actual, expected):
    assert set(actual) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, atol=1e-10, rtol=1e-9, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize("name", BATCHES)
def test_states_and_gradients_equal_those_of_a_plain_pass_in_float64(wide_model, name):
    batch = shared_batch(name).batch
    computed = check_states(wide_model, packed_rows(batch["input_ids"], batch["attention_mask"], RESPONSE))
    assert computed == computed_tokens(name)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.lists(st.integers(5, 6), min_size=1, max_size=9), min_size=1, max_size=8))
def test_random_trees_have_the_states_and_gradients_of_a_plain_pass(wide_model, rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [99] * (width - len(row)) for row in rows])
    check_states(wide_model, packed_rows(ids, (torch.arange(width) < torch.tensor([[len(r)] for r in rows])).long()))


@pytest.mark.parametrize(
    ("mode", "loss"),
    [(mode, "vanilla") for mode in LOSS_AGG_MODES]
    + [("token-mean", name) for name in POLICY_LOSSES if name != "vanilla"],
)
def test_losses_and_aggregations_of_the_actor(mode, loss):
    """Also in several micro-batches where the loss does not depend on them."""
    data, config = policy_columns(shared_batch("conversation")), policy_config(mode, loss)
    results = []
    splits = (MicroBatching(), MicroBatching(size=2)) if loss in ("vanilla", "gspo") else (MicroBatching(),)
    for sharing, splits_of_mode in (("false", splits[:1]), ("true", splits)):
        engine = make_engine(model_of_kind("causal_lm"), prefix_sharing=sharing)
        for micro in splits_of_mode:
            metrics = engine.forward_backward(data, PolicyLoss(config), ("log_probs", "entropy"), micro=micro)
            results.append((metrics["loss"][0], engine_gradients(engine)))
            engine.optimizer.zero_grad()
    for value, gradients in results[1:]:
        assert value == pytest.approx(results[0][0], rel=1e-5)
        assert_close(gradients, results[0][1])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_any_tree_on_any_ranks_in_any_micro_batches_trains_the_same(policy_engines, draw):
    """Ranks are parts of the rows with global counts; their gradients add up. All aggregations, in float32."""
    plain, shared = policy_engines
    tokens, few = st.integers(5, 6), {"min_size": 1, "max_size": 5}
    rows = draw.draw(st.lists(st.tuples(st.lists(tokens, **few), st.lists(tokens, **few)), min_size=1, max_size=8))
    data = policy_columns(batch_of(rows))
    mode = draw.draw(st.sampled_from(LOSS_AGG_MODES))
    loss = PolicyLoss(policy_config(mode, "vanilla"))
    counts = local_counts(data)
    expected = train_pass(plain, data, loss, MicroBatching(), counts)
    rank_of_row = np.array(draw.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    parts = []
    for rank in sorted(set(rank_of_row.tolist())):
        limit = draw.draw(st.one_of(st.none(), st.integers(1, 30)))
        micro = MicroBatching(max_tokens=limit) if draw.draw(st.booleans()) else MicroBatching(size=limit)
        shared.prefix_sharing.expands_rows = draw.draw(st.booleans())
        parts.append(train_pass(shared, data.select_idxs(rank_of_row == rank), loss, micro, counts))
    assert sum(value for value, _ in parts) == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
    gradients = {name: sum(part[name] for _, part in parts) for name in expected[1]}
    assert_close(gradients, expected[1])
    for micro in (MicroBatching(size=2), MicroBatching(max_tokens=12)):
        fields = dict(shared.infer(data, ("log_probs", "entropy"), 0.7, micro).batch.items())
        assert_close(fields, dict(plain.infer(data, ("log_probs", "entropy"), 0.7).batch.items()))


@pytest.fixture(scope="module")
def policy_engines():
    """Two engines with the same weights, without and with sharing."""
    return [make_engine(model_of_kind("causal_lm"), prefix_sharing=mode) for mode in ("false", "true")]


def train_pass(engine, data, loss, micro, counts):
    metrics = engine.forward_backward(data, loss, ("log_probs", "entropy"), micro=micro, counts=counts)
    gradients = {name: value.clone() for name, value in engine_gradients(engine).items()}
    engine.optimizer.zero_grad()
    return metrics["loss"][0], gradients


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=() if kind == "causal_lm" or name == "conversation" else pytest.mark.slow)
        for kind in OUTPUTS_OF_KIND
        for name in BATCHES
    ],
)
def test_an_engine_computes_the_same_for_every_kind_of_model_and_split(kind, name):
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


def test_the_most_likely_tokens_of_a_teacher():
    data, engine = shared_batch("conversation"), make_engine(model_of_kind("causal_lm"), train=False)
    plain, shared = {}, {}
    for mode, fields in (("false", plain), ("true", shared)):
        engine.prefix_sharing.mode = mode
        fields.update(engine.infer(data, ["log_probs"], 0.7, MicroBatching(max_tokens=16), top_k=3).batch.items())
    assert torch.equal(shared.pop("top_ids"), plain.pop("top_ids"))
    assert_close(shared, plain)


def test_auto_shares_only_if_enough_is_saved():
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="auto")
    assert run(engine, shared_batch("groups"), MicroBatching())[1]["prefix_saving"][0] > 0
    assert run(engine, make_batch(rows=6), MicroBatching())[1]["prefix_saving"][0] == 0


def test_a_budget_counts_computed_tokens_where_attention_has_a_kernel():
    data = shared_batch("groups")
    tokens, computed = int(data.batch["attention_mask"].sum()), computed_tokens("groups")
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="true")
    engine.prefix_sharing.expands_rows = False
    saved, _ = run(engine, data, MicroBatching(max_tokens=computed))[1]["prefix_saving"]
    assert tokens - saved == computed


def test_a_budget_counts_whole_rows_where_attention_expands_them(monkeypatch):
    """Attention has no more queries, keys and values at once than without sharing."""
    data, budget, sizes = shared_batch("groups"), 30, []
    expand = attention.grouped_attention

    def counted(query, *arguments):
        sizes.append(len(query))
        return expand(query, *arguments)

    monkeypatch.setattr(attention, "grouped_attention", counted)
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="auto")
    assert run(engine, data, MicroBatching(max_tokens=budget))[1]["prefix_saving"][0] > 0
    assert 0 < max(sizes) <= budget


@pytest.mark.parametrize("expands_rows", [False, True])
def test_the_operations_that_were_not_computed(expands_rows):
    data, cost = shared_batch("groups"), SequenceCost(token=10.0, head=3.0, pair=2.0)
    engine = make_engine(model_of_kind("causal_lm"), prefix_sharing="true")
    engine.prefix_sharing = PrefixSharing("true", cost, expands_rows)
    saved, required = run(engine, data, MicroBatching())[1]["prefix_saving_flops"]
    lengths = data.batch["attention_mask"].sum(1).numpy()
    assert required == cost(lengths, data.batch["attention_mask"][:, -RESPONSE:].sum(1)).sum()
    shared = build_prefix_tree(data).shared
    assert saved == (10 * shared if expands_rows else cost(shared)).sum()


def test_an_obstacle_disables_auto_and_rejects_true(caplog):
    assert supported_mode("true", None) == "true"
    assert supported_mode("false", "no kernel") == "false"
    with caplog.at_level("INFO"):
        assert supported_mode("auto", "no kernel") == "false"
    assert "no kernel" in caplog.text
    with pytest.raises(ValueError, match=r"^use_prefix_grouper: .*kernel"):
        supported_mode("true", "no kernel")


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
