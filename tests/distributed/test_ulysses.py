"""Ranks that share every sequence give what one rank gives: fields, losses, gradients, weights after steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.engine_cases import assert_close, make_engine, run_ranks
from tests.support.tiny import tiny_model
from tests.support.ulysses_ranks import HEADS, MODELS, rows, rows_of_group, run_cases, train_case

# Processes, and ranks per group: one group of two or of four; two groups of two. The models of the quick tests.
LAYOUTS = {
    (2, 2): ["two key heads"],
    (4, 4): ["one key head", "sliding window"],
    (4, 2): ["value", "scores"],
}
EVERY_CASE = [
    pytest.param(ranks, size, name, marks=() if name in quick else pytest.mark.slow)
    for (ranks, size), quick in LAYOUTS.items()
    for name in MODELS
]


class Runs:
    """What every rank found, by layout; processes start when a test asks for theirs."""

    def __init__(self, folder: Any) -> None:
        self._folder, self._found = folder, {}

    def __call__(self, ranks: int, size: int, name: str | None = None) -> list[dict[str, Any]]:
        quick = name is None or name in LAYOUTS[ranks, size]
        if (ranks, quick) not in self._found:
            plan = {
                size: [name for name in MODELS if (name in names) == quick]
                for (many, size), names in LAYOUTS.items()
                if many == ranks
            }
            folder = self._folder / f"{ranks}-{quick}"
            folder.mkdir()
            run_ranks(run_cases, folder, plan, ranks=ranks)
            self._found[ranks, quick] = [
                torch.load(folder / f"results-{ranks}-{rank}.pt", weights_only=False) for rank in range(ranks)
            ]
        found = [rank[size] for rank in self._found[ranks, quick]]
        return found if name is None else [rank[name] for rank in found]

    def faces(self, ranks: int) -> list[dict[str, Any]]:
        self(ranks, ranks)
        return [rank["public helpers"] for rank in self._found[ranks, True]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("ulysses"))


@pytest.fixture(scope="module")
def alone():
    """What one rank finds with all rows."""
    seen: dict[str, Any] = {}

    def one_rank(name: str) -> dict[str, Any]:
        if name not in seen:
            seen[name] = train_case(name, rows())
        return seen[name]

    yield one_rank
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_attention_and_its_gradients_are_those_of_whole_heads(found, ranks, size):
    for rank in found(ranks, size):
        assert len(rank["attention"]) == len(HEADS)
        assert max(rank["attention"]) < 1e-5


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_gathered_values_stand_in_order_and_take_their_gradient_once(found, ranks, size):
    wanted = [float(rank) for rank in range(size) for _ in range(2 * rank)]
    for rank, seen in enumerate(found(ranks, size)):
        values, gradient = seen["gathered"]
        assert values == wanted
        places = [place + 1.0 for place, owner in enumerate(wanted) if owner == rank % size]
        assert gradient == (places or [0.0])


@pytest.mark.parametrize("ranks", [2, 4])
def test_public_helpers_slice_with_padding_and_gather_without_it(found, ranks):
    for rank, face in enumerate(found.faces(ranks)):
        part = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)
        assert face["padding"] == 1
        assert face["part"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 0][part]]
        assert face["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 0][part]]
        assert face["gathered"].tolist() == [[1.0, 2, 3, 4, 5, 6, 7]]
        assert face["gradient"].tolist() == [[1.0, 2, 3, 4, 5, 6, 7, 0][part]]


@pytest.mark.parametrize(("ranks", "size", "name"), EVERY_CASE)
def test_every_rank_infers_whole_fields_of_its_groups_rows(found, alone, ranks, size, name):
    for rank, seen in enumerate(found(ranks, size, name)):
        assert seen["place"] == (rank // size, ranks // size, rank % size == 0)
        for cut in ("fixed", "dynamic"):
            wanted = {field: value[rows_of_group(rank, ranks, size)] for field, value in alone(name)[cut].items()}
            assert_close(seen[cut], wanted, tolerance=1e-5)


@pytest.mark.parametrize(("ranks", "size", "name"), [case for case in EVERY_CASE if case.values[2] != "scores"])
def test_losses_gradients_and_weights_after_two_steps_are_those_of_one_rank(found, alone, ranks, size, name):
    wanted, seen = alone(name), found(ranks, size, name)
    answers = seen[::size]
    for metric in ("loss", "tokens"):
        total = sum(answer["metrics"][metric][0] for answer in answers)
        assert total == pytest.approx(wanted["metrics"][metric][0], rel=1e-5)
    for rank in range(ranks):
        assert seen[rank]["metrics"] == answers[rank // size]["metrics"]
        assert_close(seen[rank]["gradients"], wanted["gradients"], tolerance=1e-5)
        assert seen[rank]["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
        assert_close(seen[rank]["weights"], wanted["weights"], tolerance=1e-5)


def test_the_token_budgets_of_ranks_that_share_add_up(found, alone):
    """Rows within 15 tokens on one rank stand within 30 on two and within 60 on four."""
    two, four = (found(ranks, ranks, LAYOUTS[ranks, ranks][0])[0]["passes"] for ranks in (2, 4))
    assert four < two < alone("two key heads")["passes"]


@pytest.mark.parametrize(("ranks", "size"), LAYOUTS)
def test_a_model_whose_tokens_or_heads_cannot_be_shared_is_refused_on_every_rank(found, ranks, size):
    for rank in found(ranks, size):
        heads, padded = rank["rejected"]
        assert heads.startswith(f"ulysses_sequence_parallel_size: {size} does not divide the model's 9 attention heads")
        assert "runs with padding" in padded


def test_a_size_that_does_not_fit_the_ranks_is_refused_with_the_key():
    with pytest.raises(ValueError, match=r"ulysses_sequence_parallel_size"):
        make_engine(tiny_model(), sequence_parallel_size=2)
