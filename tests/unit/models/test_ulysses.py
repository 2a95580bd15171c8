"""How a packed row is shared by ranks, and what cannot be; the exchange itself: tests/distributed/test_ulysses.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny import tiny_config
from verl.models.packing import SequenceParallelRows, packed_rows, sequence_parallel_rows
from verl.models.ulysses import SequenceParallel, check_heads
from verl.utils.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Left-padded prompts and right-padded responses; also rows without an answer and rows without any token."""
    rows, prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    mask = torch.zeros(rows, prompt + response, dtype=torch.long)
    for row in range(rows):
        prompt_length, response_length = draw(st.integers(0, prompt)), draw(st.integers(0, response))
        mask[row, prompt - prompt_length : prompt + (response_length if prompt_length else 0)] = 1
    ids = torch.arange(mask.numel()).view_as(mask) + 1
    return ids, mask, response


def shares(batch: tuple[torch.Tensor, torch.Tensor, int], size: int) -> list[SequenceParallelRows]:
    whole = packed_rows(*batch)
    return [sequence_parallel_rows(whole, SequenceParallel(None, size, rank)) for rank in range(size)]  # type: ignore[arg-type]


@given(batches(), st.integers(1, 5))
def test_the_parts_of_all_ranks_are_the_row_and_a_sequence_of_padding(batch, size):
    whole, parts = packed_rows(*batch), shares(batch, size)
    total, packing = whole.packing.total, parts[0].packing
    assert len({part.input_ids.shape for part in parts}) == 1
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined[:, :total], getattr(whole, name))
        assert joined.shape[1] == packing.total < total + size
    added = (packing.total - total,) if packing.total > total else ()
    assert packing.lengths == whole.packing.lengths + added
    assert packing.cu_seqlens.tolist()[-1] == packing.total
    assert packing.max_length == max(packing.lengths)


@given(batches(), st.integers(1, 5))
def test_every_prediction_is_made_by_the_rank_that_has_its_token(batch, size):
    whole, parts = packed_rows(*batch), shares(batch, size)
    width = parts[0].input_ids.shape[1]
    found: dict[str, list[int]] = {"before": [], "labels": [], "last": []}
    for rank, part in enumerate(parts):
        assert torch.equal(part.rows, whole.rows)
        for name, counts in (
            ("before", part.responses_per_rank),
            ("labels", part.responses_per_rank),
            ("last", part.rows_per_rank),
        ):
            values = getattr(part, name)
            assert len(values) == max(1, counts[rank]), "a rank without any still has one"
            first = 0 if name == "labels" else rank * width
            assert name == "labels" or bool(((values >= 0) & (values < width)).all())
            found[name] += [first + int(value) for value in values[: counts[rank]]]
    assert {name: getattr(whole, name).tolist() for name in found} == found


def test_a_share_moves_whole():
    ids = torch.arange(8)[None]
    share = shares((ids, torch.ones_like(ids), 3), 3)[2]
    moved = share.to(torch.device("cpu"))
    assert isinstance(moved, SequenceParallelRows)
    assert moved.packing.sequence_parallel is share.packing.sequence_parallel
    assert moved.responses_per_rank == (0, 2, 1)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do():
    config = tiny_config("qwen2", num_attention_heads=6, num_key_value_heads=2, hidden_size=96)
    for size in (1, 2, 3, 6):
        check_heads(config, size)
    with pytest.raises(ValueError, match=r"^ulysses_sequence_parallel_size: 4\b.*\b6\b.*\b1, 2, 3, 6\b"):
        check_heads(config, 4)


def test_public_helpers_do_nothing_where_no_rank_shares():
    ids = torch.arange(5)[None]
    assert ulysses_pad_and_slice_inputs(ids) == (ids, None, 0)
    assert gather_outputs_and_unpad(ids, gather_dim=1, padding_size=2).tolist() == [[0, 1, 2]]
    assert gather_outputs_and_unpad(ids.T, gather_dim=1, unpad_dim=0, padding_size=1).shape == (4, 1)
    with pytest.raises(ValueError, match="sp_size: 0"):
        ulysses_pad_and_slice_inputs(ids, sp_size=0)
