"""Restores logging, which commands set up, and destroys the process group of one rank that engines create."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _logging(logging_as_before):
    return


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_before_or_after():
    _destroy_process_group()
    yield
    _destroy_process_group()


def _destroy_process_group():
    if dist.is_initialized():
        dist.destroy_process_group()
