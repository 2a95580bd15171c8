"""The FSDP engine records the experts that transformers chooses, and replays the experts of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine_cases import assert_close, make_engine, model_gradients, plain_fields, run_ranks, token_loss
from tests.support.router_cases import (
    CHOSEN,
    EXPERTS,
    FAMILIES,
    LAYERS,
    OUTPUTS,
    UNKNOWN,
    hf_experts,
    moe_model,
    random_experts,
    replay_results,
    replay_with_sequence_parallel,
    rows,
    with_replayed_experts,
)
from tests.support.tiny import tiny_model
from verl.models.routing import routers
from verl.workers.engine.base import MicroBatching


def assert_replayed(found: dict[str, Any], family: str) -> None:
    """Recorded experts are those of transformers; so are outputs and gradients if it replays the same experts."""
    data, experts = rows(), random_experts(rows(), LAYERS, EXPERTS, CHOSEN)
    own = hf_experts(moe_model(family), data, experts)
    assert found["recorded"]["routed_experts"].dtype == torch.uint8
    assert torch.equal(found["recorded"]["routed_experts"].sort(-1).values, own.sort(-1).values)
    fields = plain_fields(with_replayed_experts(moe_model(family), data, experts), data, 0.7)
    assert_close({name: found["replayed"][name] for name in OUTPUTS}, fields, 1e-5)
    assert not torch.allclose(found["recorded"]["log_probs"], fields["log_probs"], atol=1e-3), "experts matter"
    known = data.batch["attention_mask"].bool() & (experts[:, :, 0, 0] != UNKNOWN)
    for layer in range(LAYERS):
        sparse = layer in routers(moe_model(family))
        wanted = experts[known][:, layer] if sparse else torch.full_like(experts[known][:, layer], UNKNOWN)
        assert torch.equal(found["replayed"]["routed_experts"][known][:, layer], wanted)
    gradients = model_gradients(with_replayed_experts(moe_model(family), data, experts), data, 0.7)
    assert_close(found["gradients"], {name: value for name, value in gradients.items() if value is not None}, 1e-5)
    assert 0.1 < found["metrics"]["moe/replaced"][0] < 0.9
    assert found["metrics"]["moe/busiest"][0] > 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_recorded_and_replayed_in_outputs_and_gradients(family):
    micro = MicroBatching(max_tokens=25) if family == "mixtral" else MicroBatching(size=2)
    assert_replayed(replay_results(family, micro), family)


@pytest.mark.slow
def test_ranks_that_share_sequences_do_so_too(tmp_path):
    run_ranks(replay_with_sequence_parallel, tmp_path, ranks=2)
    for rank in range(2):
        assert_replayed(torch.load(tmp_path / f"replay-{rank}.pt", weights_only=False), "qwen3_moe")


def test_without_replay_routers_choose_whatever_a_batch_says():
    engine, data = make_engine(moe_model("mixtral")), rows()
    alone = engine.infer(data, OUTPUTS).batch
    data.batch["routed_experts"] = random_experts(data, LAYERS, EXPERTS, CHOSEN)
    experts = engine.infer(data, OUTPUTS).batch
    assert torch.equal(experts["log_probs"], alone["log_probs"])
    metrics = engine.forward_backward(data, token_loss, OUTPUTS)
    assert metrics["moe/replaced"] == (0.0, 1.0)
    assert 0.0 <= metrics["moe/idle"][0] < 1.0


def test_what_cannot_be_replayed_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"^router_replay\.mode: Qwen2ForCausalLM\b"):
        make_engine(tiny_model(), router_replay=True)
    with pytest.raises(ValueError, match=r"router_replay\.mode: .*use_remove_padding"):
        make_engine(moe_model("mixtral"), router_replay=True, use_remove_padding=False)
    with pytest.raises(ValueError, match=r"routed_experts"):
        make_engine(tiny_model()).infer(rows(), ["routed_experts", "log_probs"])
    model = moe_model("mixtral")
    own = type(next(iter(routers(model).values())))
    usual = own.forward

    def scaled(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits, weights, experts = usual(router, hidden)
        return logits, 2.5 * weights, experts

    monkeypatch.setattr(own, "forward", scaled)
    with pytest.raises(ValueError, match=r"router_replay\.mode: MixtralTopKRouter"):
        make_engine(model, router_replay=True)
