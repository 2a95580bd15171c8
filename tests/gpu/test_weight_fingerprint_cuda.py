"""Fingerprints on a GPU: the CPU's numbers, of parts at their place too."""

from __future__ import annotations

import pytest
import torch

from verl.utils.index_mix import BLOCK
from verl.utils.weight_fingerprint import Place, fingerprints, tensor_fingerprint

pytestmark = pytest.mark.gpu

CASES = {
    "few": ((3,), Place()),
    "block": ((BLOCK,), Place()),
    "unaligned": ((9 * BLOCK + 3,), Place(17 * BLOCK + 9)),
    "end of a block": ((2 * BLOCK,), Place(BLOCK - 1)),
    "rows": ((50, 777), Place.of_part((50, 777), 0, 7, 100)),
    "columns": ((100, 777), Place.of_part((100, 777), 1, 300, 2000)),
    "narrow columns": ((3000, 5), Place.of_part((3000, 5), 1, 5, 10)),
    "inner": ((4, 6, 500), Place.of_part((4, 6, 500), 1, 12, 24)),
    "empty": ((0, 4), Place()),
    "large": ((2000, 3000), Place()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_they_are_the_cpus(dtype):
    drawn = {name: torch.randn(*shape) for name, (shape, _) in CASES.items()}
    tensors = {name: t > 0 if dtype == torch.bool else (t * 100).to(dtype) for name, t in drawn.items()}
    places = {name: place for name, (_, place) in CASES.items()}
    expected = {name: int(tensor_fingerprint(tensor, place=places[name])) for name, tensor in tensors.items()}
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert fingerprints(there, places=places) == expected
    assert {name: int(tensor_fingerprint(t, place=places[name])) for name, t in there.items()} == expected
    turned = {name: tensor.T.contiguous() for name, tensor in there.items() if name in ("rows", "large")}
    found = fingerprints(turned)
    assert all(found[name] != fingerprints({name: there[name]})[name] for name in turned)


def test_no_more_than_256_mb_are_taken_without_the_kernel():
    tensor = torch.zeros(2**28, device="cuda", dtype=torch.bfloat16)
    tensor_fingerprint(tensor)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor_fingerprint(tensor)
    assert torch.cuda.max_memory_allocated() - before <= 2**28 + 2**22
