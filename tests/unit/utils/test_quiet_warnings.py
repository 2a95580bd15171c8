"""Warnings that nobody can act on are not shown; all others are, and our own code raises none of them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from verl.utils.logging_setup import HIDDEN_WARNINGS


def stderr_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_program_of_ours_shows_every_warning_but_those():
    shown = stderr_of(
        """
        import warnings
        from verl.utils.logging_setup import HIDDEN_WARNINGS, setup_logging
        setup_logging()
        for kind, beginning in HIDDEN_WARNINGS:
            warnings.warn(beginning + " and so on", kind)
            warnings.warn("Yours: " + beginning, kind)
        """
    )
    assert shown.count("Warning: ") == shown.count("Warning: Yours: ") == len(HIDDEN_WARNINGS)


@pytest.mark.slow
def test_gathering_shards_raises_no_warning():
    stderr_of(
        """
        import warnings
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        from verl.workers.engine.fsdp.weights import _all_gather_batch

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        value = torch.arange(6.0).reshape(3, 2)
        shards = distribute_tensor(value, mesh, [Shard(0)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (whole,) = _all_gather_batch([shards], mesh, torch.float32, torch.device("cpu"))
        assert torch.equal(whole, value)
        dist.destroy_process_group()
        """
    )
