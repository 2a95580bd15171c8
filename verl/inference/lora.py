"""LoRA adapters (arXiv 2106.09685): slots in the matmuls of a model, and adapters that requests select by name.

A model has a fixed number of slots, applied without merging. In a `FusedModel` the rows of A of all slots are part of
the weight that they adapt, so that `x A^T` needs no further matmul; a `GenericModel` computes it by a separate matmul.
The product of `x A^T` with the matrices B (`LowRankProduct`) is added by the kernels between the matmuls, or by a
matmul. Both mask `x A^T` in the slots that a token does not use, so tokens without an adapter add exact zeros.
Shapes and addresses never change, so CUDA graphs stay valid. The scale of an adapter is part of its B.

Files of named adapters have peft's format: adapter_config.json and adapter_model.safetensors. No code of an adapter is
executed. Shapes are checked before tensors are read, so that the size of a slot limits the memory in use.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.inference.async_engine import AsyncEngine
from verl.inference.low_rank import LowRankProduct
from verl.inference.sequence import Adapter
from verl.inference.weights import WeightShard

__all__ = [
    "AdaptedLayer",
    "AdapterFile",
    "AdapterGroup",
    "AdapterOptions",
    "LoraError",
    "LoraRegistry",
    "ModelAdapters",
    "UnknownAdapterError",
    "down_name",
    "read_adapter",
    "up_name",
]

# Ranks are padded to a multiple of this: rows of unaligned length make matmuls on GPUs slower.
_RANK_MULTIPLE = 8
_HALT_REASON = "adapters"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 2**20
_PREFIX = "base_model.model."
_FLOATS = ("F64", "F32", "F16", "BF16")
# Settings of peft that change what an adapter computes, and their supported values.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Other initialisations (PiSSA, OLoRA, LoftQ …) also change the weights of the model.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (None, []),
    "alpha_pattern": ({}, None),
    "rank_pattern": ({}, None),
    "target_parameters": (None, []),
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora"), (False, None)),
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "arrow_config",
            "kasa_config",
            "layer_replication",
            "monteclora_config",
            "trainable_token_indices",
            "use_bdlora",
        ),
        (None,),
    ),
}


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """Size of the adapter slots of a model."""

    rank: int
    """Largest rank of an adapter."""
    slots: int = 1
    layers: frozenset[str] | None = None
    """Names of the linear layers with adapters; None: all but the output head."""
    shared: bool = True
    """Every token uses slot 0; otherwise each sequence selects a slot, or none."""

    @property
    def padded_rank(self) -> int:
        return -(-self.rank // _RANK_MULTIPLE) * _RANK_MULTIPLE

    def selects(self, layer: str) -> bool:
        return self.layers is None or layer in self.layers


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer, whose outputs are columns `start` to `stop` of the output of a matmul."""

    name: str
    start: int
    stop: int
    shard: WeightShard | None = None
    """Shard of its weight on this rank."""


class AdapterGroup:
    """The adapters of one matmul, which may be that of several layers (query, key and value).

    `down` [slots * layers * rank, inputs]: the matrices A. `up` [outputs, slots * layers * rank]: the matrices B, zero
    where row and column belong to different layers. `bias` [slots * layers * rank]: added to `x A^T`, always zero.
    """

    def __init__(
        self,
        layers: Sequence[AdaptedLayer],
        down: torch.Tensor,
        up: torch.Tensor,
        options: AdapterOptions,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.layers, self.down, self.up, self._bias = tuple(layers), down, up, bias
        self.outputs = len(up)
        self._slots, self._rank = options.slots, options.padded_rank
        self.clear()

    def matrices(self, slot: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of A [padded rank, inputs] and B [outputs of the layer, padded rank]."""
        start, rows = (slot * len(self.layers) + layer) * self._rank, self.layers[layer]
        stop = start + self._rank
        return self.down[start:stop], self.up[rows.start : rows.stop, start:stop]

    def clear(self) -> None:
        """Set all matrices to zero."""
        self.down.zero_()
        self.up.zero_()
        if self._bias is not None:
            self._bias.zero_()

    def product(self, inner: torch.Tensor, unused: torch.Tensor | None) -> LowRankProduct:
        """Return the adapters' part of the output. `inner` [T, slots * layers * rank]: x A^T.

        `unused` [T, slots, 1]: whether a token does not use a slot; None: every token uses all slots.
        """
        return LowRankProduct(inner, self.up, self._slots, len(self.layers), unused)


class ModelAdapters:
    """All adapter slots of a model."""

    def __init__(self, groups: Iterable[AdapterGroup], options: AdapterOptions) -> None:
        self.options = options
        self._groups = list(groups)
        names = {layer.name for group in self._groups for layer in group.layers}
        missing = sorted((options.layers or frozenset()) - names)
        if missing:
            raise ValueError(f"LoRA: this model has no linear layer {missing[0]!r} below its output head.")
        if not self._groups:
            raise ValueError("LoRA: this model has no linear layers.")
        self.device = self._groups[0].up.device
        self._slots = torch.arange(options.slots, device=self.device)

    def weights(self, slot: int = 0, rank: int | None = None) -> dict[str, torch.Tensor]:
        """The matrices of a slot by name, as views: `<layer>.lora_A.weight` [rank, inputs], `<layer>.lora_B.weight`
        [outputs, rank]. `rank` defaults to the largest one."""
        tensors, rank = {}, self.options.rank if rank is None else rank
        for group in self._groups:
            for index, layer in enumerate(group.layers):
                down, up = group.matrices(slot, index)
                tensors[down_name(layer.name)] = down[:rank]
                tensors[up_name(layer.name)] = up[:, :rank]
        return tensors

    def shards(self) -> dict[str, WeightShard]:
        """Shards on this tensor-parallel rank of the sharded matrices returned by `weights`."""
        layers = [layer for group in self._groups for layer in group.layers if layer.shard is not None]
        return {
            (down_name if layer.shard.dim else up_name)(layer.name): layer.shard
            for layer in layers
            if layer.shard is not None
        }

    def clear(self, slot: int | None = None) -> None:
        """Set the matrices of a slot to zero. None: all slots and padding; the memory may be uninitialised."""
        if slot is None:
            for group in self._groups:
                group.clear()
            return
        for group in self._groups:
            for index in range(len(group.layers)):
                for matrix in group.matrices(slot, index):
                    matrix.zero_()

    def unused_by(self, slots: torch.Tensor) -> torch.Tensor:
        """The argument `unused` of `AdapterGroup.product` for tokens with these slots [T] (-1: none)."""
        return (slots.unsqueeze(1) != self._slots).unsqueeze(2)


def down_name(layer: str) -> str:
    """Name of a layer's matrix A."""
    return f"{layer}.lora_A.weight"


def up_name(layer: str) -> str:
    """Name of a layer's matrix B, which includes the scale of the adapter."""
    return f"{layer}.lora_B.weight"


class LoraError(ValueError):
    """An adapter cannot be loaded or unloaded."""

    def __init__(self, field: str, problem: str) -> None:
        """`field`: lora_name or lora_path."""
        super().__init__(field, problem)
        self.field, self.problem = field, problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class UnknownAdapterError(LoraError):
    """No adapter with this name is loaded."""

    def __init__(self, name: str) -> None:
        super().__init__("lora_name", f"{name!r} is not loaded.")
        self.args = (name,)  # pickling calls the constructor with them


class LoraRegistry:
    """The adapters of a serving engine. Thread-safe.

    Requests of an unloaded adapter that are still running are completed; its slot is reused afterwards.
    """

    def __init__(self, engine: AsyncEngine, adapters: ModelAdapters, reserved_names: Collection[str] = ()) -> None:
        """`reserved_names`: the names of the model, which adapters cannot have."""
        self._engine, self._adapters, self._reserved_names = engine, adapters, frozenset(reserved_names)
        self._lock = threading.Lock()
        self._last_id = 0

    def names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, in the order in which they were loaded."""
        return tuple(self._engine.adapters)

    def load(self, name: str, folder: str, root: Path | None = None) -> None:
        """Load the adapter in a folder (see `read_adapter`). LoraError if it does not fit; nothing is changed then."""
        with self._lock:
            if name in self._reserved_names:
                raise LoraError("lora_name", f"{name!r} is the name of the model.")
            if name in self._engine.adapters:
                raise LoraError("lora_name", f"{name!r} is already loaded. Unload it first.")
            adapter = read_adapter(folder, self._adapters, root)
            with self._halted():
                slot = self._free_slot()
                self._copy(slot, adapter)
                self._last_id += 1
                self._engine.adapters[name] = Adapter(self._last_id, slot)

    def unload(self, name: str) -> None:
        """Unload an adapter: later requests cannot select it. UnknownAdapterError if it is not loaded."""
        with self._lock:
            if name not in self._engine.adapters:
                raise UnknownAdapterError(name)
            del self._engine.adapters[name]

    def _free_slot(self) -> int:
        occupied = {adapter.slot for adapter in (*self._engine.adapters.values(), *self._engine.used_adapters())}
        free = [slot for slot in range(self._adapters.options.slots) if slot not in occupied]
        if not free:
            raise LoraError(
                "lora_name",
                f"all {self._adapters.options.slots} slots are in use. Unload an adapter, wait until its requests are"
                " finished, or start the server with a larger --max-loras.",
            )
        return free[0]

    @torch.no_grad()
    def _copy(self, slot: int, adapter: AdapterFile) -> None:
        self._adapters.clear(slot)
        places = self._adapters.weights(slot, adapter.rank)
        for name, tensor in adapter.tensors.items():
            places[name].copy_(tensor)
        if self._adapters.device.type == "cuda":
            torch.cuda.synchronize(self._adapters.device)  # steps run on another stream

    @contextmanager
    def _halted(self) -> Iterator[None]:
        self._engine.halt(_HALT_REASON)
        try:
            yield
        finally:
            self._engine.resume(_HALT_REASON)


@dataclass(frozen=True)
class AdapterFile:
    """An adapter in host memory, in the dtype of the model."""

    rank: int
    tensors: dict[str, torch.Tensor]
    """`<layer>.lora_A.weight` [rank, inputs] and `<layer>.lora_B.weight` [outputs, rank], which includes the scale."""


def read_adapter(folder: str, slots: ModelAdapters, root: Path | None = None) -> AdapterFile:
    """Read the adapter in `folder`, which may also be a checkpoint's step or role that contains `lora_adapter`.

    LoraError if files are missing, are outside of `root`, do not fit `slots`, or use an unsupported feature of peft.
    """
    try:
        path = _find_folder(folder, root)
        rank, scale = _read_settings(path / _CONFIG, slots.options.rank)
        return AdapterFile(rank, _read_tensors(path / _WEIGHTS, slots.weights(0, rank), scale))
    except LoraError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # the path is not valid, or a file cannot be read
        raise LoraError("lora_path", f"{folder[:200]!r} cannot be read: {error}") from error


def _find_folder(folder: str, root: Path | None) -> Path:
    path = Path(folder).expanduser().absolute()
    for candidate in (path, path / "lora_adapter", path / "actor" / "lora_adapter"):
        files = [(candidate / name).resolve() for name in (_CONFIG, _WEIGHTS)]
        if root is not None and not all(file.is_relative_to(root.resolve()) for file in files):
            raise LoraError("lora_path", f"{folder[:200]!r} is not below --lora-root {str(root)!r}.")
        if files[0].is_file():
            if not files[1].is_file():
                raise LoraError("lora_path", f"{str(candidate)!r} has no {_WEIGHTS}; other formats are not loaded.")
            return candidate
    raise LoraError("lora_path", f"{folder[:200]!r} is not a folder with {_CONFIG} on this machine.")


def _read_settings(path: Path, max_rank: int) -> tuple[int, float]:
    """Return the rank and the scale of an adapter_config.json."""
    with path.open("rb") as file:
        text = file.read(_MAX_CONFIG_BYTES + 1)
    if len(text) > _MAX_CONFIG_BYTES:
        raise LoraError("lora_path", f"{str(path)!r} has more than {_MAX_CONFIG_BYTES} bytes.")
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoraError("lora_path", f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise LoraError("lora_path", f"{str(path)!r} is not an object.")
    for key, allowed in _SUPPORTED.items():
        if key in settings and settings[key] not in allowed:
            value = repr(settings[key])[:200]
            raise LoraError("lora_path", f"{str(path)!r} has {key} = {value}, which is not supported.")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise LoraError("lora_path", f"{str(path)!r} has no valid rank r.")
    if rank > max_rank:
        raise LoraError("lora_path", f"the adapter has rank {str(rank)[:20]}, more than --max-lora-rank {max_rank}.")
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not abs(alpha) <= torch.finfo(torch.float32).max
    ):
        raise LoraError("lora_path", f"{str(path)!r} has no finite lora_alpha.")
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _read_tensors(path: Path, places: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Read matrices with the names, shapes and dtype of `places`; those of some layers may be missing."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            names = {name.removeprefix(_PREFIX): name for name in file.keys()}
            for name, stored in names.items():
                _check_stored(name, file.get_slice(stored), places)
            for name, stored in names.items():
                tensor = file.get_tensor(stored).float()
                tensor = (tensor * scale if name.endswith(".lora_B.weight") else tensor).to(places[name].dtype)
                if not tensor.isfinite().all():
                    raise LoraError("lora_path", f"{name!r} has values that are not finite in {tensor.dtype}.")
                tensors[name] = tensor
    except SafetensorError as error:
        raise LoraError("lora_path", f"{str(path)!r} cannot be read: {error}") from error
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    if not layers:
        raise LoraError("lora_path", f"{str(path)!r} has no tensors.")
    for name in (matrix_name(layer) for layer in sorted(layers) for matrix_name in (down_name, up_name)):
        if name not in tensors:
            raise LoraError("lora_path", f"{name!r} is missing; both matrices of a layer are needed.")
    return tensors


def _check_stored(name: str, stored: Any, places: Mapping[str, torch.Tensor]) -> None:
    """Check the name, shape and dtype of a tensor that is not read yet."""
    if name not in places:
        raise LoraError(
            "lora_path", f"{name[:200]!r} is not a matrix of a linear layer of this model below its output head."
        )
    shape, expected = list(stored.get_shape()), list(places[name].shape)
    if shape != expected:
        raise LoraError("lora_path", f"{name!r} is {shape}; this model and rank need {expected}.")
    if stored.get_dtype() not in _FLOATS:
        raise LoraError("lora_path", f"{name!r} has dtype {stored.get_dtype()}. Use one of {', '.join(_FLOATS)}.")
