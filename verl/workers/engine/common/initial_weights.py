"""Digests of the weights that a run starts from, stored in its checkpoints to distinguish models of one architecture.

There is one digest per tensor, of a few hundred of its values: enough to tell a fine-tuned model from its base, and
cheap for large models, whose files are memory-mapped. Values are rounded to bfloat16, so that a copy of the model in
another precision has the same digests.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from verl.utils.torch_archive import load_archive

__all__ = ["FILE", "read_digests", "weight_differences", "weight_digests"]

FILE = "initial_weights.json"
Digests = Mapping[str, str]
"""Digest by tensor name, as in the model's files."""

# Values in each of three blocks of a tensor: at its start, in the middle and at its end.
_BLOCK = 256
_SHOWN = 3


def weight_digests(folder: str | Path) -> dict[str, str]:
    """Digests of all tensors in a model's folder; {} if it has no files that can be memory-mapped."""
    return {name: _digest(tensor) for name, tensor in _tensors(Path(folder))}


def read_digests(step: Path) -> dict[str, dict[str, str]]:
    """The digests stored in a checkpoint step, by model folder (actor, critic); {} if it has none."""
    file = step / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def weight_differences(stored: Digests, here: Digests) -> list[str]:
    """A list with one description if any tensor that both have differs; else []."""
    both = sorted(stored.keys() & here.keys())
    differing = [name for name in both if stored[name] != here[name]]
    if not differing:
        return []
    names = ", ".join(differing[:_SHOWN]) + (", …" if len(differing) > _SHOWN else "")
    return [
        f"the checkpoint was trained from another model of this architecture ({len(differing)} of {len(both)} tensors"
        f" differ: {names}), and resuming would continue with that one"
    ]


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
    for file in [] if files else sorted(folder.glob("pytorch_model*.bin")):
        if zipfile.is_zipfile(file):
            yield from load_archive(file, mapped=True).items()


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.reshape(-1)
    middle = max(0, len(flat) // 2 - _BLOCK // 2)
    values = torch.cat([flat[:_BLOCK], flat[middle : middle + _BLOCK], flat[-_BLOCK:]])
    if values.is_floating_point():
        values = values.to(torch.bfloat16)
    return hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
