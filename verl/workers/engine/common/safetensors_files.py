"""Weights as safetensors files, tensor by tensor: nothing is held twice, and checksums are taken as the bytes go by."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from verl.utils.checkpoint.manifest import ChecksumRecorder

_NAMES = {
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


def write_weights(tensors: Mapping[str, torch.Tensor], folder: Path, max_shard_size: int | str = "5GB") -> None:
    """`model.safetensors` in `folder`, or several of them and their index where one would be larger than the limit.

    Tensors that share memory must have been reduced to one of them: a file has no second names.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    plan = split_torch_state_dict_into_shards(
        dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    with ChecksumRecorder(folder) as recorder:
        for file, names in plan.filename_to_tensors.items():
            with recorder.open(file) as stream:
                write_safetensors({name: tensors[name] for name in names}, stream)
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            with recorder.open("model.safetensors.index.json") as stream:
                stream.write(json.dumps(index, indent=2, sort_keys=True).encode())


def write_safetensors(tensors: Mapping[str, torch.Tensor], stream: io.BufferedIOBase) -> None:
    """The safetensors format: length of the header, header, and the tensors one after another without gaps."""
    unknown = sorted({str(value.dtype) for value in tensors.values() if value.dtype not in _NAMES})
    if unknown:
        raise ValueError(f"safetensors: no name is known for the dtype {', '.join(unknown)}. Convert these weights.")
    # Wide elements first, so that every tensor begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        value = tensors[name]
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        stream.write(flat.view(torch.uint8).numpy().data)
