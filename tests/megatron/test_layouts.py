"""Every layout gives what one rank of FSDP gives: fields, losses, gradients, weights after steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import engine_gradients, make_engine, run_ranks, token_loss, whole_weights
from tests.support.megatron_ranks import (
    KINDS,
    LAYOUTS,
    MODELS,
    RANKS,
    STEPS,
    model_of,
    rows,
    rows_of_dp_rank,
    train_cases,
)

pytestmark = pytest.mark.timeout(1800)
CASES = [(layout, model) for layout in LAYOUTS if "EP" not in layout for model in ("tied", "value")]
CASES += [(layout, model) for layout in ("TP2", "PP2", "CP2") for model in ("qwen2", "qwen3", "window")]
CASES += [(layout, "experts") for layout in ("DP4", "EP2", "EP4", "TP2 EP2", "PP2 EP2", "CP2 EP2")]
CASES += [("EP2", model) for model in ("unnormalized", "mixtral")]
CASES += [(layout, "shared") for layout in ("EP2", "TP2 EP2")]
CASES += [(layout, "scores") for layout in ("TP2 PP2", "CP2")]
EVERY = pytest.mark.parametrize(("layout", "model"), CASES)
TRAINED = pytest.mark.parametrize(("layout", "model"), [case for case in CASES if case[1] != "scores"])
Found = list[dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str]]) -> Found:
    """What each of the ranks found, by layout and model."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(train_cases, folder, cases, ranks=RANKS)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[[str], dict[str, Any]]]:
    """What one rank of FSDP finds with all rows at once."""
    seen: dict[str, dict[str, Any]] = {}

    def one_rank(name: str) -> dict[str, Any]:
        if name not in seen:
            seen[name] = _trained(name)
        return seen[name]

    yield one_rank
    if dist.is_initialized():
        dist.destroy_process_group()


def _trained(name: str) -> dict[str, Any]:
    kind = MODELS[name][0]
    engine = make_engine(model_of(name), kind, train=kind != "sequence_classification", lr=1e-3)
    found: dict[str, Any] = {"fields": dict(engine.infer(rows(), KINDS[kind], 0.7).batch.items()), "steps": []}
    if kind == "sequence_classification":
        return found
    for step in range(STEPS):
        loss = engine.forward_backward(rows(), token_loss, KINDS[kind], 0.7)["loss"][0]
        if step == 0:
            found["gradients"] = {name: value.clone() for name, value in engine_gradients(engine).items()}
        found["steps"].append((loss, engine.optimizer_step()["grad_norm"]))
    found["weights"] = whole_weights(engine)
    return found


@EVERY
def test_fields_are_those_of_one_rank_however_rows_are_cut(found, alone, gap, layout, model):
    wanted = alone(model)["fields"]
    for cut in ("fixed", "dynamic"):
        parts = set()
        for rank in found:
            dp_rank, dp_size, collects = rank[layout, model]["place"]
            fields = rank[layout, model][cut]
            if collects:
                parts.add(dp_rank)
                assert fields.keys() == wanted.keys()
                for name, value in wanted.items():
                    gap(name, furthest(fields[name], value[rows_of_dp_rank(dp_rank, dp_size)]))
        assert parts == set(range(dp_size))


@TRAINED
def test_gradients_are_those_of_one_rank(found, alone, gap, layout, model):
    wanted = alone(model)["gradients"]
    for rank in found:
        gradients = rank[layout, model]["gradients"]
        assert set(gradients) == set(wanted)
        for name, value in wanted.items():
            gap("gradients", furthest(gradients[name], value))


@TRAINED
def test_three_steps_are_those_of_one_rank(found, alone, gap, layout, model):
    wanted = alone(model)
    for rank in found:
        ours = rank[layout, model]
        for (_, norm), (_, expected) in zip(ours["steps"], wanted["steps"], strict=True):
            gap("gradient norm", abs(norm - expected) / expected)
        for name, value in ours["weights"].items():
            gap("weights after 3", furthest(value, wanted["weights"][name]))
        assert ours["sound"]
    for step, (expected, _) in enumerate(wanted["steps"]):
        losses = [rank[layout, model]["steps"][step][0] for rank in found if rank[layout, model]["place"][2]]
        gap("loss", abs(sum(losses) - expected) / abs(expected))


@pytest.mark.parametrize(("layout", "model"), [("TP2 PP2", "tied")])
def test_ranks_without_outputs_give_none(found, layout, model):
    for rank in found:
        ours = rank[layout, model]
        last_stage = bool(ours["metrics"])
        assert last_stage == bool(ours["fixed"])
        assert last_stage or not ours["place"][2]
    assert sum(bool(rank[layout, model]["metrics"]) for rank in found) == 2


def furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in units of the largest value where that is above 1."""
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
