"""Megatron-Core on a machine without CUDA: what it asks of a GPU by name, the CPU gives. For tests only.

Python imports `sitecustomize` from PYTHONPATH when it starts, so spawned ranks and Ray workers have it as well. Nothing
happens before something imports `megatron.core`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class _Watch(importlib.abc.MetaPathFinder):
    """Calls a function before or after the first import of a module; who only looks whether it is there calls none."""

    def find_spec(self, name, path, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _AROUND else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _run(name, module, load)
        return spec


def _run(name, module, load):
    before, after = _AROUND.pop(name, (_nothing, None))
    before()
    load(module)
    if after is not None:
        after(module)


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


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of CUDA kernels that Megatron-Bridge imports at its start, those that are not there: any name of
    theirs is a class."""

    def __init__(self):
        packages = ("transformer_engine", "transformer_engine_torch", "triton")
        self._packages = [name for name in packages if importlib.util.find_spec(name) is None]

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in self._packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _AnyName.of
        return module

    def exec_module(self, module):
        pass


class _AnyName(type):
    """A class that takes any arguments, and has any attribute."""

    def of(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(
            name, (), {"__init__": lambda self, *args, **kwargs: None, "__call__": lambda self, *args: self}
        )

    def __getattr__(cls, name):
        return _AnyName.of(name)


def _kernels_absent():
    importlib.import_module("verl.workers.engine.megatron.engine")  # what trains has found out what is not there
    sys.meta_path.insert(0, _Absent())


def _as_before(_):
    """Nothing else takes them for the real ones."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Absent)]
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(module, "__loader__", None), _Absent):
            del sys.modules[name]


def _nothing():
    pass


_AROUND = {
    "megatron.core": (_torch_without_cuda, None),
    "megatron.bridge": (_kernels_absent, _as_before),
    "megatron.core.tensor_parallel.random": (_nothing, _random),
    "megatron.core.transformer.moe.token_dispatcher": (_nothing, _dispatcher),
}
sys.meta_path.insert(0, _Watch())
