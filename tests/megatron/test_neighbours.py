"""Engines of different layouts in the same processes do not notice each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import make_engine, run_ranks, token_loss
from tests.support.megatron_ranks import (
    KINDS,
    MODELS,
    RANKS,
    STEPS,
    model_of,
    rows,
    rows_of_dp_rank,
    train_colocated_engines,
)

pytestmark = pytest.mark.timeout(900)


def steps_alone(name: str) -> list[tuple[float, float]]:
    kind = MODELS[name][0]
    engine = make_engine(model_of(name), kind, lr=1e-3)
    found = []
    for _ in range(STEPS):
        loss = engine.forward_backward(rows(), token_loss, KINDS[kind], 0.7)["loss"][0]
        found.append((loss, engine.optimizer_step()["grad_norm"]))
    return found


def test_actor_critics_and_reference_of_four_layouts_take_turns(tmp_path):
    run_ranks(train_colocated_engines, tmp_path, ranks=RANKS)
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"results-{rank}.pt", weights_only=False) for rank in range(4)]
    for name, model in {"actor": "qwen2", "critic": "value", "fsdp critic": "value"}.items():
        for step, (loss, norm) in enumerate(steps_alone(model)):
            assert sum(rank[name][step][0] for rank in found) == pytest.approx(loss, rel=1e-5)
            assert all(rank[name][step][1] == pytest.approx(norm, rel=1e-5) for rank in found)
    wanted = make_engine(model_of("qwen2"), train=False).infer(rows(), ["log_probs"], 0.7).batch["log_probs"]
    for rank in found:
        for fields in rank["reference"]:
            if fields is not None:
                torch.testing.assert_close(fields, wanted[rows_of_dp_rank(*rank["place"])], atol=1e-5, rtol=0.0)
    dist.destroy_process_group()
