"""The peak of torch's allocator and of mappings outside of it."""

import pytest
import torch

from verl.utils.device import memory_in_use, record_mapped_bytes

pytestmark = pytest.mark.gpu
MB = 2**20


def test_the_peak_is_the_maximum_of_the_sum_not_the_sum_of_the_maxima():
    device = torch.device("cuda", torch.cuda.current_device())
    record_mapped_bytes(device.index, 100 * MB)
    memory_in_use(device, reset=True)
    _, before = memory_in_use(device)
    record_mapped_bytes(device.index, -100 * MB)
    block = torch.empty(64 * MB, dtype=torch.uint8, device=device)
    assert memory_in_use(device) == (before, before - 36 * MB)
    record_mapped_bytes(device.index, 50 * MB)
    del block
    record_mapped_bytes(device.index, -50 * MB)
    assert memory_in_use(device, reset=True) == (before + 14 * MB, before - 100 * MB)
    assert memory_in_use(device) == (before - 100 * MB, before - 100 * MB)
