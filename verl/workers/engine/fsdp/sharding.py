"""How a model is laid over ranks: the mesh, the modules gathered together, and where their weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.models.forward import ResponseModel
from verl.models.lora import Adapters
from verl.models.ulysses import SequenceParallel
from verl.workers.engine.common.groups import NodeGroup


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


def sequence_parallel(device: torch.device, size: int) -> SequenceParallel | None:
    """This rank's place among the `size` neighbours that share every sequence; None where each has its own."""
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(
            f"ulysses_sequence_parallel_size: {size} does not divide the {world} ranks. Use a divisor, or 1."
        )
    if size == 1:
        return None
    mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("data", "sequence"))
    return SequenceParallel(mesh.get_group("sequence"), size, mesh.get_local_rank("sequence"))


def shard(
    model: ResponseModel, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward: bool | None, prefetch: bool
) -> bool:
    """Shard every layer and the rest in place; gradients become the sum over all ranks, reduced in float32.

    Returns whether everything is one group (see `finish_with`).
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    gathers = mesh["shard"].size() > 1
    reshards, one_group = grouping(mesh["shard"].size(), reshard_after_forward)
    layers: list[Any] = [] if one_group else outermost_layers(model.hf)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    if prefetch and gathers:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
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
        if dist.get_world_size() > 1:  # one rank has nothing to divide by, and dividing by 1 takes a copy of all
            module.set_gradient_divide_factor(1.0)
    return one_group


def grouping(ranks: int, reshard_after_forward: bool | None) -> tuple[bool, bool]:
    """(whether layers are freed after their pass, whether all weights are one group).

    Where nothing is gathered and all weights may stay in the compute dtype, they are one group: the host, which is what
    small models wait for, does nothing between layers.
    """
    reshards = ranks > 1 if reshard_after_forward is None else reshard_after_forward
    return reshards, not (ranks > 1 or reshards)


def finish_with(model: Any, last: bool) -> None:
    """Of a model that is one group: its weights stay in the compute dtype, and its gradients where the backward pass
    leaves them (added up in float32), until the last micro-batch of an optimizer step.
    """
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def checkpoint_activations(model: ResponseModel) -> None:
    """Keep no activations within layers for the backward pass: they are computed again there."""
    base = model.hf.base_model
    if not base.supports_gradient_checkpointing:
        raise ValueError(
            f"model.enable_gradient_checkpointing: {type(base).__name__} does not support it. Set it to False."
        )
    base.gradient_checkpointing_enable({"use_reentrant": False})


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformer: the members of every ModuleList that is not inside another."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else outermost_layers(child)
    return found


def fill(
    model: nn.Module,
    source: nn.Module | None,
    node: NodeGroup,
    device: torch.device,
    adapters: Adapters | None = None,
) -> None:
    """Materialise a sharded meta `model` on `device` with the weights of the node leader's `source`; a collective.

    One tensor at a time: the leader sends it whole to its node, and every rank keeps its shard. Buffers travel too, so
    those that a checkpoint does not hold (rotary frequencies) are what the model itself computed. The source has no
    adapters; those of `model` get their first values.
    """
    model.to_empty(device=device)
    theirs = _all_tensors(source) if source is not None else {}
    described: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in theirs.items()}]
    if len(node.ranks) > 1:
        dist.broadcast_object_list(described, src=node.leader, group=node.group)
    mine = _all_tensors(model) if adapters is None else adapters.plain(_all_tensors(model))
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
    if adapters is not None:
        adapters.start(_copy_into)


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
