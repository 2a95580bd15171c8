"""Commands set up logging, and engines make a process group of one rank: no test leaves them to the next."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _logging(logging_as_before):
    return


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_left_behind():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
