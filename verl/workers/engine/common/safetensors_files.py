"""Weights as safetensors files, tensor by tensor: nothing is held twice, and checksums are taken as the bytes go by."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.utils.checkpoint.manifest import ChecksumRecorder

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class WeightFiles:
    """Which file holds which tensors, in the order in which they are written."""

    files: Mapping[str, Mapping[str, torch.Tensor]]
    """By file, and by name what each tensor is like; they may be on the meta device."""
    index: Mapping[str, Any] | None
    """Where there are several."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = "5GB") -> WeightFiles:
        """`model.safetensors`, or several of them and their index where one would be larger than the limit.

        Tensors that share memory must have been reduced to one of them: a file has no second names.
        """
        from huggingface_hub import split_torch_state_dict_into_shards

        plan = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename} if plan.is_sharded else None
        # Wide elements first, so that every tensor begins at a multiple of its element size.
        width = lambda name: -tensors[name].element_size()  # noqa: E731
        split = plan.filename_to_tensors.items()
        return cls({file: {name: tensors[name] for name in sorted(names, key=width)} for file, names in split}, index)

    @property
    def order(self) -> list[str]:
        """All names as they are written."""
        return [name for names in self.files.values() for name in names]

    def write(self, tensors: Iterator[torch.Tensor], folder: Path) -> None:
        """`tensors` come in `order`, one at a time."""
        with ChecksumRecorder(folder) as recorder:
            for file, like in self.files.items():
                with recorder.open(file) as stream:
                    write_safetensors(like, tensors, stream)
            if self.index is not None:
                with recorder.open("model.safetensors.index.json") as stream:
                    stream.write(json.dumps(self.index, indent=2, sort_keys=True).encode())


def write_safetensors(
    like: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor], stream: io.BufferedIOBase
) -> None:
    """The safetensors format: length of the header, header, and the tensors one after another without gaps.

    `like` says what each will be; those with wide elements come first. `tensors` may hold more than these.
    """
    unknown = sorted({str(value.dtype) for value in like.values() if value.dtype not in DTYPE_NAMES})
    if unknown:
        raise ValueError(f"safetensors: no name is known for the dtype {', '.join(unknown)}. Convert these weights.")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in like.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    given = iter(tensors)
    for _ in like:
        stream.write(_bytes_of(next(given)))  # and no name for it: it goes before the next is made


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
