"""Which accelerator this process computes on, asked of torch only when first needed."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    is_cuda_available: bool

__all__ = ["get_device_id", "get_device_name", "get_torch_device", "is_cuda_available", "resolve_dtype"]


def get_device_name() -> str:
    """`"cuda"` where torch sees a GPU, else `"cpu"`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def get_torch_device() -> ModuleType:
    """torch's module for that device (`torch.cuda` or `torch.cpu`): `synchronize`, `current_device`, `Stream`, …"""
    import torch

    return getattr(torch, get_device_name())


def get_device_id() -> int | str:
    """What `tensor.to(...)` takes for this process's device: the current GPU's index, or `"cpu"`."""
    return get_torch_device().current_device()


def resolve_dtype(name: str, device: torch.device | str) -> torch.dtype:
    """A `dtype` key as torch's type; auto is bfloat16 on a GPU and float32 on a CPU."""
    import torch

    if name == "auto":
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def __getattr__(name: str) -> Any:
    if name != "is_cuda_available":
        raise AttributeError(f"module 'verl.utils.device' has no attribute {name!r}")
    return get_device_name() == "cuda"
