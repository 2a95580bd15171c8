"""A model on Megatron-Core filled from a Hugging Face folder, or from a model in memory: no rank holds it whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.core.weight_map import CoreWeight, Piece
from verl.models.loading import pretrained_model
from verl.workers.engine.common import groups
from verl.workers.engine.common.weights import bucketed
from verl.workers.engine.megatron.gathering import common
from verl.workers.engine.megatron.optimizer import optimizer_parts
from verl.workers.engine.megatron.weights import CoreWeights, HFFiles

# What is sent at a time.
_BUCKET = 2**28
logger = logging.getLogger(__name__)


class _Places:
    """Where values go: this rank's weights and, of those in half precision, what the optimizer steps in float32."""

    def __init__(self, weights: CoreWeights, optimizer: Any) -> None:
        self._live = weights.live
        parts = optimizer_parts(optimizer, weights.live) if optimizer is not None else {}
        self._masters = {name: part for name, part in parts.items() if part.master.dtype != self._live[name].dtype}

    def clear(self, name: str) -> None:
        """Rows of padding, and a head that is not stored, are 0."""
        self._live[name].zero_()
        if name in self._masters:
            self._masters[name].master.zero_()

    def put(self, name: str, piece: Piece, values: torch.Tensor) -> None:
        """A piece is some rows of a weight; a master is a run of its elements."""
        place = self._live[name][piece.place]
        place.copy_(values)
        part = self._masters.get(name)
        if part is None:
            return
        first = piece.place[0].start * self._live[name][0].numel()
        mine = common(range(first, first + place.numel()), range(part.start, part.start + part.master.numel()))
        if mine:
            flat = values.reshape(-1)[mine.start - first : mine.stop - first]
            part.master.view(-1)[mine.start - part.start : mine.stop - part.start].copy_(flat)


def fill(
    weights: CoreWeights,
    model: str | os.PathLike | nn.Module,
    hf_config: Any,
    trust_remote_code: bool = False,
    optimizer: Any = None,
) -> None:
    """From a folder or hub name, or a model in memory: that of each node's leader. A collective.

    Core's `optimizer`, where there is one, starts from the same values, unrounded.
    """
    places = _Places(weights, optimizer)
    if not isinstance(model, nn.Module) and _fill_from_folder(weights, places, Path(model), optimizer is not None):
        return
    if weights.only_files and not isinstance(model, nn.Module):
        raise ValueError(
            f"model.path: {model} has no safetensors files of this model, which Megatron-Bridge reads. Set "
            "megatron_config.use_mbridge=False."
        )
    node = groups.node_group()
    source: nn.Module | None = None
    with groups.failing_together():
        if node.is_leader and isinstance(model, nn.Module):
            source = model
        elif node.is_leader:
            logger.info("%s: no safetensors files to read slices of; one rank of each node loads all of it.", model)
            learns = optimizer is not None
            source = pretrained_model(str(model), hf_config, weights.kind, trust_remote_code, learns)
    _fill_from_module(weights, places, source, node)


@torch.no_grad()
def _fill_from_folder(weights: CoreWeights, places: _Places, folder: Path, learns: bool) -> bool:
    """Each rank reads its own slices. False, and nothing is done, where the files are of another form.

    A value head, or that of a classifier that `learns`, starts at 0 if it is not there. A collective.
    """
    files = HFFiles(folder) if folder.is_dir() else None
    new_head = weights.kind == "value" or (learns and weights.kind == "sequence_classification")
    spelling = None if files is None else _spelling(weights, files, new_head)
    if groups.largest(int(spelling is None), weights.device):
        return False
    assert files is not None
    assert spelling is not None
    with groups.failing_together():
        for name in weights.live:
            stored = spelling[name]
            places.clear(name)
            for piece, values in weights.read(name, files, stored=stored) if stored is not None else ():
                places.put(name, piece, values)
    return True


def _spelling(weights: CoreWeights, files: HFFiles, new_head: bool) -> dict[str, bool | None] | None:
    """Of every weight of the model, whether its names are those of the disk; None for a head that is not there."""
    found: dict[str, bool | None] = {}
    for name, weight in weights.table.items():
        spellings = [stored for stored in (True, False) if _has(files, weight, stored)]
        if not spellings and not (new_head and name.startswith("score.")):
            return None
        found[name] = spellings[0] if spellings else None
    return found


def _has(files: HFFiles, weight: CoreWeight, stored: bool) -> bool:
    """ValueError where they are there, and not as large as the config says."""
    fused = not (stored and weight.stored)
    spelled = [files.name_of(name) for name in (weight.hf if fused else weight.stored)]
    names = [name for name in spelled if name is not None]
    if len(names) < len(spelled):
        return False
    shapes = [files.shape(name) for name in names]
    rows = sum(shape[-len(weight.shape)] for shape in shapes)
    if (rows, *shapes[0][len(shapes[0]) - len(weight.shape) + 1 :]) != weight.shape:
        raise ValueError(f"model.path: {', '.join(names)} are {shapes}; the config makes them {list(weight.shape)}.")
    return True


@torch.no_grad()
def _fill_from_module(weights: CoreWeights, places: _Places, module: nn.Module | None, node: groups.NodeGroup) -> None:
    """The leader of each node has the model in memory and sends it to the others in buckets. A collective."""
    state: Mapping[str, torch.Tensor] = module.state_dict() if module is not None else {}
    dtypes = [{name: value.dtype for name, value in state.items()}]
    dist.broadcast_object_list(dtypes, src=node.leader, group=node.group)
    mine: dict[str, list[tuple[str, Piece]]] = {}
    for name in weights.live:
        places.clear(name)
        for piece in weights.pieces(name):
            mine.setdefault(piece.hf, []).append((name, piece))
    shapes = {name: spec.shape for name, spec in weights.manifest.items() if weights.first(name) == name}
    sizes = ((name, dtypes[0][name].itemsize * torch.Size(shape).numel()) for name, shape in shapes.items())
    for bucket in bucketed(sizes, _BUCKET):
        for name, tensor in _sent(bucket, shapes, dtypes[0], state, node, weights.device):
            for own, piece in mine.get(name, ()):
                places.put(own, piece, tensor[piece.source])


def _sent(
    bucket: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    state: Mapping[str, torch.Tensor],
    node: groups.NodeGroup,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a bucket, on every rank of the node."""
    if len(node.ranks) == 1:
        yield from ((name, state[name]) for name in bucket)
        return
    for dtype in dict.fromkeys(dtypes[name] for name in bucket):
        alike = [name for name in bucket if dtypes[name] == dtype]
        sizes = [torch.Size(shapes[name]).numel() for name in alike]
        flat = torch.empty(sum(sizes), dtype=dtype, device=device)
        if node.is_leader:
            for name, place in zip(alike, flat.split(sizes), strict=True):
                place.copy_(state[name].flatten())
        dist.broadcast(flat, src=node.leader, group=node.group)
        yield from ((name, part.view(shapes[name])) for name, part in zip(alike, flat.split(sizes), strict=True))
