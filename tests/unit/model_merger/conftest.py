"""Commands set up logging, and engines make a process group of one rank: none is met or left to the next."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _logging(logging_as_before):
    return


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_met_or_left():
    _leave()
    yield
    _leave()


def _leave():
    if dist.is_initialized():
        dist.destroy_process_group()
