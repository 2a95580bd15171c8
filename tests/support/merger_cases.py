"""Checkpoints in third-party layouts, written by torch, and checks of merged folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from verl.model_merger.__main__ import main


def merge(local: Path, target: Path, *more: str, backend: str = "fsdp") -> int:
    arguments = ["--backend", backend, "--local_dir", str(local), "--target_dir", str(target)]
    return main(["merge", *arguments, *more])


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_holds(folder: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Check that the folder has exactly these tensors, bit-identical."""
    actual = tensors(folder)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """Act as one of several ranks with a fake process group, whose collectives do not communicate."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_dtensors(
    state: Mapping[str, torch.Tensor], folder: Path, mesh: Sequence[int] = (2,), placements: Sequence[Any] | None = None
) -> Path:
    """`model_world_size_W_rank_R.pt` of DTensors; by default each is sharded over the last axis of the mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    ranks = int(torch.tensor(mesh).prod())
    placed = placements or [*(Replicate() for _ in mesh[1:]), Shard(0)]
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with as_rank(rank, ranks):
            axes = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("ddp", "fsdp")[-len(mesh) :])
            parts = {
                name: distribute_tensor(value.clone(), axes, placed, src_data_rank=None)
                for name, value in state.items()
            }
            torch.save(parts, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    return folder


def write_sharded_tensors(state: Mapping[str, torch.Tensor], folder: Path, ranks: int = 2) -> Path:
    """`model_world_size_W_rank_R.pt` of ShardedTensors, as FSDP1 saves them."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with as_rank(rank, ranks):
            parts = {}
            for name, value in state.items():
                rows = torch.arange(len(value)).chunk(ranks)
                offsets = [0] * (value.dim() - 1)
                shards = [
                    ShardMetadata([int(span[0]), *offsets], [len(span), *value.shape[1:]], f"rank:{owner}/cpu")
                    for owner, span in enumerate(rows)
                ]
                local_shards = [Shard(value[rows[rank]].clone(), shards[rank])] if rank < len(rows) else []
                metadata = ShardedTensorMetadata(shards, value.shape, TensorProperties(dtype=value.dtype))
                parts[name] = ShardedTensor._init_from_local_shards_and_global_metadata(local_shards, metadata)
            torch.save(parts, folder / f"model_world_size_{ranks}_rank_{rank}.pt")
    return folder


def fsdp_files(rank: int, ranks: int, folder: str) -> None:
    """Write the checkpoint files of this rank for both versions of FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard

    from tests.support.tiny import tiny_model

    second = tiny_model()
    for layer in second.model.layers:
        fully_shard(layer)
    fully_shard(second)
    first = FullyShardedDataParallel(tiny_model(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(first, StateDictType.SHARDED_STATE_DICT):
        states = {"fsdp1": first.state_dict(), "fsdp2": second.state_dict()}
    for name, state in states.items():
        (Path(folder) / name).mkdir(exist_ok=True)
        torch.save(state, Path(folder) / name / f"model_world_size_{ranks}_rank_{rank}.pt")
