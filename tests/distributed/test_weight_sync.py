"""Weight sync from a sharded trainer: each receiver gets exactly the rows it requests, large tensors in slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine_cases import run_ranks
from tests.support.tiny import save_tiny_model, tiny_model
from tests.support.weight_sync_ranks import LIMIT, SIZES, run_rank

LAYOUTS = {"plain": 2, "adapters": 2, "hybrid": 4}


@pytest.fixture(scope="module", params=["plain", "adapters", pytest.param("hybrid", marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("weight-sync")
    save_tiny_model(folder / "model", **SIZES[request.param])
    run_ranks(run_rank, folder, request.param, ranks=LAYOUTS[request.param])
    ranks = [torch.load(folder / f"weight-sync-{rank}.pt") for rank in range(LAYOUTS[request.param])]
    return request.param, ranks


@pytest.mark.parametrize("request_kind", ["rows", "all", "one"])
def test_every_rank_gets_exactly_the_rows_it_wants(found, request_kind):
    _, ranks = found
    for rank, seen in enumerate(ranks):
        assert seen[request_kind]["equal"], rank
        assert seen[request_kind]["complete"], rank
    assert ranks[0][request_kind]["slices"], "tensors above a bucket come in pieces"
    if request_kind != "all":
        assert ranks[-1][request_kind]["largest"] == 0, "a rank that wants nothing gathers nothing"


def test_nothing_larger_than_a_bucket_is_put_together(found):
    kind, ranks = found
    # Pieces are whole rows of every shard; a tensor with an adapter is put together whole.
    room = 38_400 if kind == "adapters" else LIMIT + 4 * 64 * 2
    for request_kind in ("rows", "all", "one"):
        assert max(seen[request_kind]["largest"] for seen in ranks) <= room


@pytest.mark.parametrize("found", ["plain"], indirect=True)  # one layout is enough
def test_a_tensor_parallel_engine_takes_only_its_part_and_it_is_exact(found):
    kind, ranks = found
    whole = sum(tensor.nbytes for tensor in tiny_model(**SIZES[kind]).state_dict().values())
    for seen in (rank["tensor parallel"] for rank in ranks):
        assert seen["version"] == 3
        assert seen["same"]
        assert seen["compared"] > 8
        assert seen["bytes"] < 0.75 * whole
    # What every rank has a copy of is checked on every rank.
    assert ["'model.norm.weight' differs" in rank["tensor parallel"]["changed"] for rank in ranks] == [False, True]


@pytest.mark.parametrize("found", ["plain"], indirect=True)
def test_a_sets_engine_gets_all_from_the_first_rank_and_the_others_want_nothing(found):
    kind, ranks = found
    first, second = (rank["hosted"] for rank in ranks)
    weights = tiny_model(**SIZES[kind])
    assert (first["kind"], second["kind"]) == ("ProcessRollout", "FollowerRollout")
    assert (first["version"], second["bytes"]) == (2, 0)
    assert first["bytes"] == sum(tensor.nbytes for tensor in weights.state_dict().values())
    # The rank whose engine died raises; the sync ends on the other rank, too.
    assert ["was killed by SIGKILL" in error for error in first["errors"]] == [True]
    assert second["errors"] == []
    greedy = weights.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert first["answer"] == greedy[0, 3:].tolist()
