"""Fingerprints on a GPU: the CPU's numbers, of parts at their place too."""

from __future__ import annotations

import pytest
import torch

from verl.utils.weight_fingerprint import BLOCK, Placement, fingerprints, tensor_fingerprint

pytestmark = pytest.mark.gpu

CASES = {
    "few": ((3,), Placement()),
    "block": ((BLOCK,), Placement()),
    "unaligned": ((9 * BLOCK + 3,), Placement(17 * BLOCK + 9)),
    "end of a block": ((2 * BLOCK,), Placement(BLOCK - 1)),
    "rows": ((50, 777), Placement.of_shard((50, 777), 0, 7, 100)),
    "columns": ((100, 777), Placement.of_shard((100, 777), 1, 300, 2000)),
    "narrow columns": ((3000, 5), Placement.of_shard((3000, 5), 1, 5, 10)),
    "inner": ((4, 6, 500), Placement.of_shard((4, 6, 500), 1, 12, 24)),
    "empty": ((0, 4), Placement()),
    "large": ((2000, 3000), Placement()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_they_are_the_cpus(dtype):
    drawn = {name: torch.randn(*shape) for name, (shape, _) in CASES.items()}
    tensors = {name: t > 0 if dtype == torch.bool else (t * 100).to(dtype) for name, t in drawn.items()}
    places = {name: place for name, (_, place) in CASES.items()}
    expected = {name: int(tensor_fingerprint(tensor, placement=places[name])) for name, tensor in tensors.items()}
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert fingerprints(there, placements=places) == expected
    assert {name: int(tensor_fingerprint(t, placement=places[name])) for name, t in there.items()} == expected
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
