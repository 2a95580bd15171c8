"""The FSDP engine's experts: those it notes are transformers', those it is told are what tokens go through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine_cases import assert_close, gradients_of, make_engine, plain_fields, run_ranks, token_loss
from tests.support.router_cases import (
    CHOSEN,
    EXPERTS,
    FAMILIES,
    LAYERS,
    OUTPUTS,
    UNKNOWN,
    mixture,
    own_experts,
    replayed,
    rows,
    sharing_ranks_replay,
    told_experts,
    with_told,
)
from tests.support.tiny import tiny_model
from verl.models.routing import routers
from verl.workers.engine.base import MicroBatching


def assert_replayed(found: dict[str, Any], family: str) -> None:
    """Noted as transformers chooses; fields and gradients of transformers where it is told the same."""
    data, told = rows(), told_experts(rows(), LAYERS, EXPERTS, CHOSEN)
    own = own_experts(mixture(family), data, told)
    assert found["noted"]["routed_experts"].dtype == torch.uint8
    assert torch.equal(found["noted"]["routed_experts"].sort(-1).values, own.sort(-1).values)
    fields = plain_fields(with_told(mixture(family), data, told), data, 0.7)
    assert_close({name: found["told"][name] for name in OUTPUTS}, fields, 1e-5)
    assert not torch.allclose(found["noted"]["log_probs"], fields["log_probs"], atol=1e-3), "experts matter"
    known = data.batch["attention_mask"].bool() & (told[:, :, 0, 0] != UNKNOWN)
    for layer in range(LAYERS):
        sparse = layer in routers(mixture(family))
        wanted = told[known][:, layer] if sparse else torch.full_like(told[known][:, layer], UNKNOWN)
        assert torch.equal(found["told"]["routed_experts"][known][:, layer], wanted)
    gradients = gradients_of(with_told(mixture(family), data, told), data, 0.7)
    assert_close(found["gradients"], {name: value for name, value in gradients.items() if value is not None}, 1e-5)
    assert 0.1 < found["metrics"]["moe/replaced"][0] < 0.9
    assert found["metrics"]["moe/busiest"][0] > 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_noted_and_told_in_fields_and_gradients(family):
    micro = MicroBatching(max_tokens=25) if family == "mixtral" else MicroBatching(size=2)
    assert_replayed(replayed(family, micro), family)


@pytest.mark.slow
def test_ranks_that_share_sequences_do_so_too(tmp_path):
    run_ranks(sharing_ranks_replay, tmp_path, ranks=2)
    for rank in range(2):
        assert_replayed(torch.load(tmp_path / f"replay-{rank}.pt", weights_only=False), "qwen3_moe")


def test_without_replay_routers_choose_whatever_a_batch_says():
    engine, data = make_engine(mixture("mixtral")), rows()
    alone = engine.infer(data, OUTPUTS).batch
    data.batch["routed_experts"] = told_experts(data, LAYERS, EXPERTS, CHOSEN)
    told = engine.infer(data, OUTPUTS).batch
    assert torch.equal(told["log_probs"], alone["log_probs"])
    metrics = engine.forward_backward(data, token_loss, OUTPUTS)
    assert metrics["moe/replaced"] == (0.0, 1.0)
    assert 0.0 <= metrics["moe/idle"][0] < 1.0


def test_what_cannot_be_replayed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no routers"):
        make_engine(tiny_model(), router_replay=True)
    with pytest.raises(ValueError, match="use_remove_padding=True"):
        make_engine(mixture("mixtral"), router_replay=True, use_remove_padding=False)
    with pytest.raises(ValueError, match="outputs: routed_experts of a qwen2 model"):
        make_engine(tiny_model()).infer(rows(), ["routed_experts", "log_probs"])
    model = mixture("mixtral")
    own = type(next(iter(routers(model).values())))
    usual = own.forward

    def scaled(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = usual(router, hidden)
        return logits, 2.5 * weights, experts

    monkeypatch.setattr(own, "forward", scaled)
    with pytest.raises(ValueError, match=r"router_replay\.mode: MixtralTopKRouter"):
        make_engine(model, router_replay=True)
