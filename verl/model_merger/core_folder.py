"""A checkpoint that Megatron-Core itself wrote (`dist_checkpointing`), by the Hugging Face names of its weights.

Core need not be installed: its files are torch's, and the weights in them are whole, whatever layout wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.model_merger.dcp_folder import METADATA, dcp_tensors
from verl.model_merger.stored import Indexed, Piece, Stored, assembled
from verl.models.core.architecture import CoreArchitecture
from verl.models.core.weight_map import shard_slices, weight_map
from verl.models.loading import ModelKind

_EMBEDDING = "embedding.word_embeddings.weight"
# Norms, where a layer has them as part of the linear map after them.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def core_folder(folder: Path) -> Path | None:
    """Where in a checkpoint Core's files are; None: nowhere."""
    places = (folder, folder / "dist_ckpt", folder / "model" / "dist_ckpt")
    return next((place for place in places if (place / METADATA).is_file() and (place / "common.pt").is_file()), None)


def core_tensors(folder: Path, hf_config: object, kind: ModelKind) -> dict[str, Stored]:
    """By name, as models have them on disk: each expert for itself. Rows that pad the vocabulary are left out."""
    there = _without_prefix(folder, dcp_tensors(folder))
    arch = CoreArchitecture.of(hf_config)
    pieces: dict[str, list[Piece]] = {}
    for weight in weight_map(arch, kind):
        if weight.copy_of is not None:
            continue
        tensor = _found(there, weight.name)
        if tensor is None:
            if weight.name == "score.bias":  # heads of other frameworks have none
                continue
            raise ValueError(
                f"{folder}: has no {weight.name}. It is a checkpoint of another model than config.json says."
            )
        for part in shard_slices(weight, arch, 0, 1, stored=True):
            rows = [(at, at + 1) if isinstance(at, int) else (at.start, at.stop) for at in part.source]
            shape = tuple(stop - start for start, stop in rows)
            start = tuple(each.start for each in part.place)
            if any(begin + length > size for begin, length, size in zip(start, shape, tensor.shape, strict=True)):
                raise ValueError(
                    f"{folder}: {weight.name} is {list(tensor.shape)}, by config.json {list(weight.shape)}. Give the "
                    "config.json of this model."
                )
            pieces.setdefault(part.hf, []).append(Piece(tuple(begin for begin, _ in rows), shape, tensor, start))
    return {name: _joined(folder, name, parts) for name, parts in pieces.items()}


def _joined(folder: Path, name: str, parts: list[Piece]) -> Stored:
    ends = [tuple(at + length for at, length in zip(part.at, part.shape, strict=True)) for part in parts]
    shape = tuple(max(each) for each in zip(*ends, strict=True))
    return assembled(f"{folder}: {name}", shape, parts[0].tensor.dtype, parts)


def _without_prefix(folder: Path, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Some put `model.` or `module.` before all names; an optimizer's have others."""
    found = [name.removesuffix(_EMBEDDING) for name in tensors if name.endswith(_EMBEDDING)]
    if not found:
        raise ValueError(f"{folder}: holds no {_EMBEDDING}: no weights of a model of Megatron-Core.")
    prefix = min(found, key=len)
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _found(there: Mapping[str, Stored], name: str) -> Stored | None:
    """Core's weight `name`, under any of the names it may have: layers and experts are stacked, or have their own."""
    for key, index in _spellings(name):
        if key in there:
            return Indexed(there[key], index) if index else there[key]
    return None


def _spellings(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, place in the stack)."""
    layer = re.fullmatch(r"(decoder\.layers\.)(\d+)\.(.+)", name)
    if layer is None:
        yield name, ()
        if name.startswith("score."):
            yield name.replace("score.", "output_layer."), ()
        return
    for part in (layer[3], *(layer[3].replace(*each) for each in _FUSED.items() if layer[3].startswith(each[0]))):
        expert = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", part)
        for stacked in (True, False):
            head, at = (layer[1], (int(layer[2]),)) if stacked else (f"{layer[1]}{layer[2]}.", ())
            if expert is None:
                yield head + part, at
            else:
                yield f"{head}{expert[1]}experts.{expert[3]}", (*at, int(expert[2]))
                yield f"{head}{expert[1]}experts.{expert[2]}.{expert[3]}", at
