"""How a model is laid over ranks: the mesh, the modules gathered together, and where their weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.config.engine import FSDPConfig
from verl.models.forward import ResponseModel
from verl.workers.engine.common.groups import NodeGroup

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compute_dtype(engine_config: FSDPConfig, device: torch.device) -> torch.dtype:
    """What matrices are multiplied in; unset: bfloat16 on CUDA, float32 on CPU."""
    name = engine_config.mixed_precision or ("bf16" if device.type == "cuda" else "fp32")
    return _DTYPES[name]


def build_mesh(device: torch.device, fsdp_size: int | None) -> DeviceMesh:
    """All ranks share one copy of the weights, or every `fsdp_size` neighbours have one."""
    world = dist.get_world_size()
    size = world if fsdp_size in (None, -1, 0) else min(int(fsdp_size or world), world)
    if world % size:
        raise ValueError(
            f"fsdp_config.fsdp_size: {size} does not divide the {world} ranks. Use a divisor, or -1 for all of them."
        )
    if size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicate", "shard"))


def shard(model: ResponseModel, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Shard every layer and the rest in place; gradients become the sum over all ranks, reduced in float32."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in outermost_layers(model.hf):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    score = getattr(model.hf, "score", None)
    if score is not None:  # one number per token: half precision would show in it
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(score, mesh=mesh, mp_policy=exact)
    # Embeddings and heads are used at both ends of the pass: gathering them twice saves nothing.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(model):
        # Losses are divided by global counts, so the gradient is a sum, not fully_shard's average. Plain SUM is the
        # one reduction that gloo and nccl both have.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the members of every ModuleList that is not inside another."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else outermost_layers(child)
    return found


def fill(model: nn.Module, source: nn.Module | None, node: NodeGroup, device: torch.device) -> None:
    """Materialise a sharded meta `model` on `device` with the weights of the node leader's `source`; a collective.

    One tensor at a time: the leader sends it whole to its node, and every rank keeps its shard. Buffers travel too, so
    those that a checkpoint does not hold (rotary frequencies) are what the model itself computed.
    """
    model.to_empty(device=device)
    theirs = _all_tensors(source) if source is not None else {}
    described: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()}]
    if len(node.ranks) > 1:
        dist.broadcast_object_list(described, src=node.leader, group=node.group)
    mine = _all_tensors(model)
    odd = sorted(set(mine) ^ set(described[0]))
    if odd:
        raise ValueError(
            f"model.path: the weights do not fit the model built from its config: {', '.join(odd[:5])}. "
            "Remove keys from model.override_config that change its shape."
        )
    for name, target in mine.items():
        shape, dtype = described[0][name]
        if shape != target.shape:
            raise ValueError(f"model.path: {name} has shape {tuple(shape)}, the config says {tuple(target.shape)}.")
        whole = torch.empty(shape, dtype=dtype, device=device)
        if node.is_leader:
            whole.copy_(theirs[name].detach())
        if len(node.ranks) > 1:
            dist.broadcast(whole, src=node.leader, group=node.group)
        _copy_into(target, whole)


def whole_tensor(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The full tensor on `device`, also when shards wait in host memory; a collective for sharded ones."""
    value = value.detach().to(dtype)
    if not isinstance(value, DTensor):
        return value.to(device)
    local = value.to_local().to(device)
    moved = DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
    return moved.full_tensor()


def _copy_into(target: torch.Tensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(whole)


def _all_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Parameters and all buffers; tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
