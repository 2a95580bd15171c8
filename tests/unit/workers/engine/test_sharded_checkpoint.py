"""Tensors written as rectangles are read as other rectangles, or as torch's own sharded tensors are."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import TensorProperties

from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups, sharded_checkpoint
from verl.workers.engine.common.sharded_checkpoint import Chunk, load_chunks, save_chunks

WHOLE = torch.arange(48, dtype=torch.float32).view(6, 8)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two columns of rectangles, views of one tensor; and a number."""
    groups.ensure_process_group(torch.device("cpu"))
    chunks = [Chunk("matrix", (6, 8), (0, start), WHOLE[:, start : start + 4]) for start in (0, 4)]
    with ChecksumRecorder(tmp_path) as recorder:
        save_chunks([*chunks, Chunk("step", (), (), torch.tensor(3.0))], tmp_path / "model", recorder, None)
    return tmp_path / "model"


def test_other_rectangles_are_read_into_the_memory_they_are_views_of(saved: Path) -> None:
    flat, step = torch.zeros(17), torch.zeros(())
    rows = [Chunk("matrix", (6, 8), (1, 7), flat[:1].view(1, 1)), Chunk("matrix", (6, 8), (2, 0), flat[1:].view(2, 8))]
    load_chunks([*rows, Chunk("step", (), (), step)], saved)
    assert torch.equal(flat, WHOLE.view(-1)[15:32])
    assert step == 3


def test_tensors_are_read_whole_by_who_knows_no_rectangles(saved: Path) -> None:
    assert {name: spec.shape for name, spec in sharded_checkpoint.stored_tensors(saved).items()} == {
        "matrix": (6, 8),
        "step": (),
    }
    whole = torch.zeros(6, 8)
    sharded_checkpoint.load_tensors({"matrix": whole}, saved)
    assert torch.equal(whole, WHOLE)


def test_what_is_not_there_is_named(saved: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0: matrix: .*\[5, 8\].*\[6, 8\]"):
        load_chunks([Chunk("matrix", (5, 8), (0, 0), torch.zeros(5, 8))], saved)
    with pytest.raises(RuntimeError, match=r"rank 0: other: .*\[1\].*missing"):
        load_chunks([Chunk("other", (1,), (0,), torch.zeros(1))], saved)


def test_what_two_would_write_is_refused(tmp_path: Path) -> None:
    groups.ensure_process_group(torch.device("cpu"))
    chunks = [Chunk("matrix", (6, 8), (start, 0), WHOLE[start : start + 4]) for start in (0, 2)]
    with pytest.raises(RuntimeError, match=r"rank 0: .*key:matrix"), ChecksumRecorder(tmp_path) as recorder:
        save_chunks(chunks, tmp_path, recorder, None)


@pytest.mark.parametrize("state", [(), (None,), ("torch.float32",), [torch.float32]])
def test_metadata_without_the_dtype_of_a_tensor_is_damaged(
    saved: Path, monkeypatch: pytest.MonkeyPatch, state: Any
) -> None:
    """torch stores the properties of a tensor as a tuple, the state of a pickled object; another may be empty."""
    file = saved / sharded_checkpoint.METADATA
    metadata = pickle.loads(file.read_bytes())
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: state)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata: (matrix|step) has no dtype\. Copy the checkpoint again"):
        sharded_checkpoint.read_folder(saved)
