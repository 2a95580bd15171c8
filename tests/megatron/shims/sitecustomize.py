"""Megatron-Core on a machine without CUDA: what it asks of a GPU by name, the CPU gives. For tests only.

Python imports `sitecustomize` from PYTHONPATH when it starts, so spawned ranks and Ray workers have it as well. Nothing
happens before something imports `megatron.core`.
"""

import importlib.abc
import importlib.machinery
import sys


class _Watch(importlib.abc.MetaPathFinder):
    """Calls a function before or after the first import of a module."""

    def find_spec(self, name, path, target=None):
        if name not in _AROUND:
            return None
        before, after = _AROUND.pop(name)
        before()
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and after is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), after(module))
        return spec


def _torch_without_cuda():
    import torch

    if torch.cuda.is_available():
        _AROUND.clear()
        return
    from torch.utils._device import _device_constructors

    _device_constructors()  # remembers torch's own functions: `with torch.device("meta")` still knows them
    generator = torch.Generator()  # the GPU's

    def on_cpu(make):
        def made(*args, **kwargs):
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.manual_seed = generator.manual_seed
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: generator.get_state()
    torch.cuda.set_rng_state = lambda state, *args: generator.set_state(state)
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor
    type_of = torch.Tensor.type

    def gpu_type(tensor, *args, **kwargs):
        found = type_of(tensor, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = gpu_type


def _random(module):
    import torch

    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.cuda.set_rng_state(state)


def _dispatcher(module):
    """Sizes go to the host by a stream of their own; here they are there."""

    def stay(self, point, tokens_per_expert=None):
        for name in ("input_splits", "output_splits", "output_splits_tp"):
            if hasattr(getattr(self, name, None), "numpy"):
                setattr(self, name, getattr(self, name).numpy())
        return tokens_per_expert

    module.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"
    module.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = stay


def _nothing():
    pass


_AROUND = {
    "megatron.core": (_torch_without_cuda, None),
    "megatron.core.tensor_parallel.random": (_nothing, _random),
    "megatron.core.transformer.moe.token_dispatcher": (_nothing, _dispatcher),
}
sys.meta_path.insert(0, _Watch())
