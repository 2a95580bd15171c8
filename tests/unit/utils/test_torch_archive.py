"""What `torch.save` writes is read back the same, without torch's own unpickler."""

from __future__ import annotations

import gc
import os
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.utils.safe_pickle import load_records, read_regular
from verl.utils.torch_archive import load_archive, read_archive, read_tensor

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint64, torch.bool),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return False
        whole = (value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right))
        return torch.equal(*whole)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right)) and len(left) == len(right)
    return type(left) is type(right) and left == right


@pytest.mark.parametrize("mapped", [True, False])
def test_values_come_back_the_same(mapped: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0)
    value = {
        "dtypes": [torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES],
        "views": [
            base.view(4, 6).T,
            base[3:7],
            base.view(2, 3, 4).permute(2, 0, 1)[1:],
            torch.empty(0, 3),
            torch.empty(0, 2)[:, 1:],
        ],
        "scalar": torch.tensor(1.5),
        "parameter": torch.nn.Parameter(torch.ones(2)).data,
        "plain": [1, -(2**40), 2**200, 1.5, True, None, "text", b"bytes", (1, (2,)), {"a": []}],
        3: torch.Size([2, 3]) + (4,),
    }
    torch.save(value, tmp_path / "file.pt")
    assert same(load_archive(tmp_path / "file.pt", mapped), {**value, 3: (2, 3, 4)})


def test_tensors_of_one_storage_share_it_and_the_file_stays(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    torch.save([base, base[2:]], tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    for mapped in (True, False):
        whole, part = load_archive(tmp_path / "file.pt", mapped)
        whole[2] = 9.0
        assert part[0] == 9.0
    assert (tmp_path / "file.pt").read_bytes() == content


def test_a_module_s_state_is_a_dict_of_tensors(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 3)
    torch.save(OrderedDict(module.state_dict()), tmp_path / "plain.pt")
    torch.save(module.state_dict(), tmp_path / "state.pt")  # has an attribute with versions
    for name in ("plain.pt", "state.pt"):
        assert same(dict(load_archive(tmp_path / name)), dict(module.state_dict()))


def test_parts_of_files_are_read(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "one.pt")
    inner = (tmp_path / "one.pt").read_bytes()
    (tmp_path / "all").write_bytes(b"before" + inner + b"after")
    place = read_archive(tmp_path / "all", lambda each: each, 6, len(inner))
    assert (place.shape, place.dtype, place.contiguous) == ((3,), torch.int64, True)
    with pytest.raises(ValueError, match=r"/all: .*bytes \d+ to \d+ .*\d+ bytes"):
        read_archive(tmp_path / "all", lambda each: each, 6, len(inner) + 99)


def test_the_reason_names_the_file(tmp_path: Path) -> None:
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "module.pt")
    with pytest.raises(ValueError, match=r"module\.pt.*torch\.nn\.modules\.linear\.Linear"):
        load_archive(tmp_path / "module.pt")
    with pytest.raises(FileNotFoundError):
        load_archive(tmp_path / "none.pt")


def test_pickles_with_sets_and_files_without_end_are_refused(tmp_path):
    with pytest.raises(ValueError, match="opcode 0x8f"):
        load_records(b"\x80\x04](" + b"\x8f" * 100 + b"e.", {})
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    for path in (link, pipe, tmp_path):
        with pytest.raises((ValueError, OSError)):
            read_regular(path)


def test_a_tensor_is_freed_with_its_last_reference(tmp_path: Path) -> None:
    """Without a garbage collection: loading a checkpoint would hold many tensors until the next one."""
    path = tmp_path / "tensor.pt"
    torch.save(torch.arange(8), path)
    gc.disable()
    try:
        tensor = read_tensor(path, 0, path.stat().st_size)
        reference = weakref.ref(tensor)
        del tensor
        assert reference() is None
    finally:
        gc.enable()
