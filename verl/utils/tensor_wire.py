"""Tensors as flat byte arrays: what crosses process boundaries out-of-band, without a copy on either side."""

from __future__ import annotations

import numpy as np
import torch

WireTensor = tuple[np.ndarray, str, tuple[int, ...]]


def tensor_to_wire(tensor: torch.Tensor) -> WireTensor:
    """Bytes, dtype name and shape of a tensor; the bytes alias it when it is a contiguous CPU tensor.

    Only the rows a view covers travel, never the whole storage behind it. numpy has no bfloat16, hence bytes.
    """
    # Empty and one-element tensors count as contiguous with any strides, hence as_strided and not reshape.
    flat = tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def tensor_from_wire(wire: WireTensor) -> torch.Tensor:
    """The tensor over the received bytes, without a copy.

    torch knows no read-only tensors: who receives read-only bytes must not let the tensor be written (see DataProto).
    """
    data, dtype_name, shape = wire
    dtype = getattr(torch, dtype_name)
    if data.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    writable = data if data.flags.writeable else np.asarray(_SameMemory(data))
    return torch.from_numpy(writable).view(dtype).reshape(shape)


class _SameMemory:
    """An array's memory without its read-only mark, about which torch would warn on every start."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
