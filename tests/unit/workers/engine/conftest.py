"""Destroys the process group of one rank that engines create, after each test file."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_left_behind():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
