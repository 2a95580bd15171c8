"""Shard a model with `fully_shard`: meshes, groups of modules, and loading of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.models.forward import ResponseModel
from verl.models.loading import outermost_layers
from verl.models.lora import Adapters
from verl.models.ulysses import SequenceParallel
from verl.utils.buffer_sizes import grouping
from verl.workers.engine.common.groups import NodeGroup
from verl.workers.engine.common.offload import local_shard


def build_mesh(device: torch.device, fsdp_size: int | None) -> DeviceMesh:
    """Return a mesh in which all ranks, or every `fsdp_size` neighbouring ranks (hybrid sharding), share one copy."""
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
    """Return the group of `size` neighbouring ranks that share every sequence; None if `size` is 1."""
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
    """Shard every layer and the remaining modules in place; gradients are summed over all ranks in float32.

    Returns whether all weights form one group (see `set_last_micro_batch`).
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    gathers = mesh["shard"].size() > 1
    score = getattr(model.hf, "score", None)
    # Frozen weights that are neither gathered nor cast are used as they are; fully_shard would copy them in each pass.
    # Those of the score head are cast to float32.
    frozen = {p for p in model.parameters() if not p.requires_grad and p.dtype == dtype}
    unmanaged = set() if gathers else frozen - set(score.parameters() if score is not None else ())
    reshards, one_group = grouping(mesh["shard"].size(), reshard_after_forward)
    layers: list[Any] = [] if one_group else outermost_layers(model.hf)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards, ignored_params=unmanaged)
    if prefetch and gathers:
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    if score is not None:  # one value per token, for which half precision is too coarse
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(score, mesh=mesh, mp_policy=exact)
    # Embeddings and heads are used at the start and end of the pass: resharding them in between saves nothing.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=unmanaged)
    for module in sharded_modules(model):
        # Losses are divided by global counts, so gradients are summed, not averaged as by default. Plain SUM is the
        # only reduction that both gloo and nccl support.
        module.set_force_sum_reduction_for_comms(True)
        if dist.get_world_size() > 1:  # on one rank, dividing by 1 would copy all gradients
            module.set_gradient_divide_factor(1.0)
    return one_group


def set_last_micro_batch(model: Any, last: bool) -> None:
    """For a model with one group: keep weights in the compute dtype and accumulate unreduced gradients (in float32)
    until the last micro-batch of an optimizer step.
    """
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def accumulate_in_place(model: nn.Module) -> None:
    """For a single rank: add the gradients of all micro-batches but the first to the existing ones, one parameter at a
    time. Otherwise `fully_shard` copies them twice in float32, with nothing to reduce.
    """
    for module in sharded_modules(model):
        sharded = dict(module.named_parameters())
        module.unshard()
        for name, parameter in module.named_parameters():
            # Parameters of other groups stay sharded.
            if parameter is not sharded[name] and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_add_gradient, sharded[name]))
        module.reshard()


def _add_gradient(sharded: nn.Parameter, parameter: torch.Tensor) -> None:
    """Add the gradient of an unsharded parameter to that of its only shard, if this has one."""
    if sharded.grad is not None and parameter.grad is not None:
        total, gradient = local_shard(sharded.grad), parameter.grad
        if total.is_cuda and total.dtype != gradient.dtype and total.is_contiguous() and gradient.is_contiguous():
            from verl.workers.engine.fsdp.gradient_kernel import add_gradient

            add_gradient(total, gradient)
        else:
            total.add_(gradient)
        parameter.grad = None


def checkpoint_activations(model: ResponseModel) -> None:
    """Enable activation checkpointing of every layer."""
    base = model.hf.base_model
    if not base.supports_gradient_checkpointing:
        raise ValueError(
            f"model.enable_gradient_checkpointing: {type(base).__name__} does not support it. Set it to False."
        )
    base.gradient_checkpointing_enable({"use_reentrant": False})
    # The hook of transformers also sets requires_grad in passes without gradients; a compiled first layer would then
    # need another graph.
    base.disable_input_require_grads()
    require_input_gradients(model)


def require_input_gradients(model: ResponseModel) -> None:
    """In passes with gradients, set requires_grad of the first layer's input, also if the embeddings are frozen."""
    model.hf.base_model.get_input_embeddings().register_forward_hook(_require_grad)


def _require_grad(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def sharded_modules(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def load_weights(
    model: nn.Module,
    source: nn.Module | None,
    node: NodeGroup,
    device: torch.device,
    adapters: Adapters | None = None,
) -> None:
    """Materialise a sharded meta `model` on `device` with the weights of the node leader's `source`. A collective.

    The leader broadcasts one full tensor at a time to its node, and every rank keeps its shard. Buffers are sent too,
    because checkpoints lack some of them (rotary frequencies). `source` has no adapters; the adapters of `model` are
    initialised.
    """
    _allocate(model, device)
    source_tensors = _all_tensors(source) if source is not None else {}
    specs: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in source_tensors.items()}]
    if len(node.ranks) > 1:
        dist.broadcast_object_list(specs, src=node.leader, group=node.group)
    targets = _all_tensors(model) if adapters is None else adapters.plain(_all_tensors(model))
    unmatched = sorted(set(targets) ^ set(specs[0]))
    if unmatched:
        raise ValueError(
            f"model.path: the weights do not fit the model built from its config: {', '.join(unmatched[:5])}. "
            "Remove keys from model.override_config that change its shape."
        )
    for name, target in targets.items():
        shape, dtype = specs[0][name]
        if shape != target.shape:
            raise ValueError(f"model.path: {name} has shape {tuple(shape)}, but {tuple(target.shape)} by the config.")
        full = torch.empty(shape, dtype=dtype, device=device)
        if node.is_leader:
            full.copy_(source_tensors[name].detach())
        if len(node.ranks) > 1:
            dist.broadcast(full, src=node.leader, group=node.group)
        _copy_into(target, full)
    if adapters is not None:
        adapters.initialize(_copy_into)


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Allocate all tensors of a meta model, and tie the parameters again that `to_empty` unties: those that FSDP does
    not manage."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    for (module, name), *others in places.values():
        parameter = module.get_parameter(name)
        for other, other_name in others:
            if other.get_parameter(other_name) is not parameter:
                setattr(other, other_name, parameter)


def _copy_into(target: torch.Tensor, full: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(target, DTensor):
            part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(full)


def _all_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return parameters and all buffers; tied tensors once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
