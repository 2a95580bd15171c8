"""Checkpoints of an engine in the background: its state is copied to host memory, and the copy is written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.utils.background import OneAfterTheOther
from verl.workers.engine.common import groups
from verl.workers.engine.common.export import HFExport
from verl.workers.engine.common.frozen import Frozen, SavedState
from verl.workers.engine.common.offload import EngineMemory, local_shard, sharded_like
from verl.workers.engine.common.snapshot import HostSnapshot


class BackgroundSaves:
    """One at a time: there is one place in host memory for copies. Made by all ranks together."""

    def __init__(self, device: torch.device, mesh: DeviceMesh | None, expected: Collection[str]) -> None:
        """`mesh` is that of tensors which torch shards; `expected`: contents of checkpoints for which there is to be
        memory beforehand."""
        self._expected = expected
        self._group = groups.group_for_files()
        # Copies are laid out as the tensors on the devices are; nothing is sent over this mesh.
        if mesh is not None and device.type != "cpu":
            mesh = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.mesh_dim_names)
        self._mesh = mesh
        self._snapshot = HostSnapshot(device)
        self._writing = OneAfterTheOther("checkpoint")

    def make_room(self, state: SavedState) -> None:
        """For what is expected, in the background, once."""
        expected, self._expected = self._expected, ()
        if expected:
            self._snapshot.prepare(state.sizes(expected))

    def settle(self) -> None:
        """Wait for the save before this one; raise what went wrong with it if nobody asked for that."""
        self._writing.settle()

    def begin(
        self, state: SavedState, frozen: Frozen, memory: EngineMemory, folder: Path, export: HFExport | None
    ) -> None:
        """Copy the tensors of `frozen` from where they are now, and write the copy under `folder`."""

        def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            mine = {name: local_shard(value) for name, value in tensors.items()}
            taken = self._snapshot.take(mine, memory.lend(mine, self._snapshot.wait))
            return {name: sharded_like(value, taken[name], self._mesh) for name, value in tensors.items()}

        # A rank that has no room for its copy leaves none of the others waiting for it in the writing.
        with groups.failing_together(self._group):
            copy = frozen.with_tensors(copied)

        def write() -> None:
            with groups.failing_together(self._group):
                self._snapshot.check()
            state.write(copy, folder, export, self._group)

        self._writing.begin(write)

    def finish(self) -> None:
        """Wait until the save begun last is written, and raise what went wrong."""
        self._writing.finish()
