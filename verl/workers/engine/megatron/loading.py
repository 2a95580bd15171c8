"""Load the weights of a model on Megatron-Core from a Hugging Face folder or a model in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.loading import pretrained_model
from verl.models.megatron_core import CoreWeight, Piece
from verl.types.weights import bucketed, overlap
from verl.workers.engine.common import groups
from verl.workers.engine.megatron.optimizer import optimizer_parts
from verl.workers.engine.megatron.weights import CoreWeights, HFFiles

_BUCKET_BYTES = 2**28
logger = logging.getLogger(__name__)


class _Targets:
    """Destinations of loaded values: this rank's weights and, for those in half precision, the master weights."""

    def __init__(self, weights: CoreWeights, optimizer: Any) -> None:
        self._live = weights.live
        parts = optimizer_parts(optimizer, weights.live) if optimizer is not None else {}
        self._masters = {name: part for name, part in parts.items() if part.master.dtype != self._live[name].dtype}

    def zero(self, name: str) -> None:
        """Zero a weight: padded rows, and a head that is not stored, stay 0."""
        self._live[name].zero_()
        if name in self._masters:
            self._masters[name].master.zero_()

    def copy(self, name: str, piece: Piece, values: torch.Tensor) -> None:
        """Copy a piece (rows of a weight) into the weight, and into the elements that the master weight contains."""
        place = self._live[name][piece.place]
        place.copy_(values)
        part = self._masters.get(name)
        if part is None:
            return
        first = piece.place[0].start * self._live[name][0].numel()
        own = overlap(range(first, first + place.numel()), range(part.start, part.start + part.master.numel()))
        if own:
            flat = values.reshape(-1)[own.start - first : own.stop - first]
            part.master.view(-1)[own.start - part.start : own.stop - part.start].copy_(flat)


def load_weights(
    weights: CoreWeights,
    model: str | os.PathLike | nn.Module,
    hf_config: Any,
    trust_remote_code: bool = False,
    optimizer: Any = None,
) -> None:
    """Load from a folder, a hub name, or a model in memory (that of each node's leader). A collective.

    No rank holds the whole model, unless the folder has no safetensors files. Master weights in Core's `optimizer`
    receive the unrounded values.
    """
    targets = _Targets(weights, optimizer)
    if not isinstance(model, nn.Module) and _load_from_folder(weights, targets, Path(model), optimizer is not None):
        return
    if weights.requires_safetensors and not isinstance(model, nn.Module):
        raise ValueError(
            f"model.path: {model} has no safetensors files of this model, which Megatron-Bridge requires. Set "
            "megatron_config.use_mbridge=False."
        )
    node = groups.node_group()
    source: nn.Module | None = None
    with groups.raise_on_all_ranks():
        if node.is_leader and isinstance(model, nn.Module):
            source = model
        elif node.is_leader:
            logger.info("%s: no safetensors files; one rank of each node loads the whole model.", model)
            trains = optimizer is not None
            source = pretrained_model(str(model), hf_config, weights.kind, trust_remote_code, trains)
    _load_from_module(weights, targets, source, node)


@torch.no_grad()
def _load_from_folder(weights: CoreWeights, targets: _Targets, folder: Path, trains: bool) -> bool:
    """Read this rank's slices; return False, without effect, if the folder has no safetensors files of the model.

    A missing value head, or head of a trained classifier, is initialised to 0. A collective.
    """
    files = HFFiles(folder) if folder.is_dir() else None
    new_head = weights.kind == "value" or (trains and weights.kind == "sequence_classification")
    naming = None if files is None else _naming(weights, files, new_head)
    if groups.max_over_ranks(int(naming is None), weights.device):
        return False
    assert files is not None
    assert naming is not None
    with groups.raise_on_all_ranks():
        for name in weights.live:
            stored = naming[name]
            targets.zero(name)
            for piece, values in weights.read(name, files, stored=stored) if stored is not None else ():
                targets.copy(name, piece, values)
    return True


def _naming(weights: CoreWeights, files: HFFiles, new_head: bool) -> dict[str, bool | None] | None:
    """Return for every weight whether its tensors have the names of files (True) or of memory (False).

    The value is None for a missing head; the result is None if another weight is missing.
    """
    naming: dict[str, bool | None] = {}
    for name, weight in weights.table.items():
        matches = [stored for stored in (True, False) if _has(files, weight, stored)]
        if not matches and not (new_head and name.startswith("score.")):
            return None
        naming[name] = matches[0] if matches else None
    return naming


def _has(files: HFFiles, weight: CoreWeight, stored: bool) -> bool:
    """Return whether the files contain a weight under these names. ValueError if shapes differ from the config."""
    fused = not (stored and weight.stored)
    expected = [files.name_of(name) for name in (weight.hf if fused else weight.stored)]
    names = [name for name in expected if name is not None]
    if len(names) < len(expected):
        return False
    shapes = [files.shape(name) for name in names]
    rows = sum(shape[-len(weight.shape)] for shape in shapes)
    if (rows, *shapes[0][len(shapes[0]) - len(weight.shape) + 1 :]) != weight.shape:
        raise ValueError(
            f"model.path: {', '.join(names)} have shapes {shapes}, but the config requires {list(weight.shape)}."
        )
    return True


@torch.no_grad()
def _load_from_module(
    weights: CoreWeights, targets: _Targets, module: nn.Module | None, node: groups.NodeGroup
) -> None:
    """Load from the model in memory of each node's leader, which broadcasts it in buckets. A collective."""
    state: Mapping[str, torch.Tensor] = module.state_dict() if module is not None else {}
    dtypes = [{name: value.dtype for name, value in state.items()}]
    dist.broadcast_object_list(dtypes, src=node.leader, group=node.group)
    own: dict[str, list[tuple[str, Piece]]] = {}
    for name in weights.live:
        targets.zero(name)
        for piece in weights.pieces(name):
            own.setdefault(piece.hf, []).append((name, piece))
    shapes = {name: spec.shape for name, spec in weights.manifest.items() if weights.first_name(name) == name}
    sizes = ((name, dtypes[0][name].itemsize * torch.Size(shape).numel()) for name, shape in shapes.items())
    for bucket in bucketed(sizes, _BUCKET_BYTES):
        for name, tensor in _broadcast(bucket, shapes, dtypes[0], state, node, weights.device):
            for core_name, piece in own.get(name, ()):
                targets.copy(core_name, piece, tensor[piece.source])


def _broadcast(
    bucket: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    state: Mapping[str, torch.Tensor],
    node: groups.NodeGroup,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a bucket on every rank of the node."""
    if len(node.ranks) == 1:
        yield from ((name, state[name]) for name in bucket)
        return
    for dtype in dict.fromkeys(dtypes[name] for name in bucket):
        names = [name for name in bucket if dtypes[name] == dtype]
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if node.is_leader:
            for name, place in zip(names, flat.split(sizes), strict=True):
                place.copy_(state[name].flatten())
        dist.broadcast(flat, src=node.leader, group=node.group)
        yield from ((name, part.view(shapes[name])) for name, part in zip(names, flat.split(sizes), strict=True))
