"""Known GPUs (memory and peak rates) and known models, for plans of other machines and the largest model.

Shapes of Qwen2.5 models are computed by formula, and shapes of local models are read from a cache, because building a
model imports torch. The largest model that fits is searched among the Qwen2.5 models. Their shapes are also used for
hub models of these names whose config.json is not on this machine.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.planning import shapes
from verl.planning.phases import GB, DeviceMemory
from verl.planning.shapes import CoreShape, ModelShape
from verl.utils.fs import cache_root

if TYPE_CHECKING:
    from verl.models.loading import ModelKind

_SIZE = re.compile(r"(\d+(\.\d+)?)\s*(g|gb|gib)?", re.IGNORECASE)


@dataclass(frozen=True)
class Rates:
    """Rates of a GPU per second; `flops` and `bandwidth` are peaks of the data sheet."""

    flops: float
    """Dense bf16 matrix products."""
    bandwidth: float
    """Bytes read or written in device memory."""
    link: float
    """Bytes sent to another GPU of the node: NVLink, or PCIe where there is none."""
    host_link: float
    """Bytes copied between device and host memory in one direction: PCIe 5 (Hopper) or PCIe 4."""


@dataclass(frozen=True)
class GPU:
    """A type of GPU."""

    name: str
    memory_gb: float
    """Memory that a process can allocate, in GB of 2^30 bytes."""
    rates: Rates | None = None
    """None: unknown, only the memory was given."""

    @property
    def memory(self) -> DeviceMemory:
        return DeviceMemory("cuda", int(self.memory_gb * GB), self.name)


_H200 = Rates(989e12, 4.80e12, 350e9, 55e9)
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h200", 139.8, _H200),
        GPU("h100-80g", 79.1, Rates(989e12, 3.35e12, 350e9, 55e9)),
        GPU("a100-80g", 79.1, Rates(312e12, 2.04e12, 230e9, 25e9)),
        GPU("a100-40g", 39.4, Rates(312e12, 1.56e12, 230e9, 25e9)),
        GPU("l40s", 44.4, Rates(362e12, 0.86e12, 25e9, 25e9)),
        GPU("4090", 23.5, Rates(165e12, 1.01e12, 20e9, 25e9)),
    )
}
MEASURED_GPU, MEASURED_GPU_RATES = "h200", _H200
"""Name and rates of the GPU on which the plan was measured."""


def find_gpu(name: str) -> GPU:
    """Return the GPU of this name, or one with this number of GB (`80`, `80GB`). Raises ValueError that lists the known
    names."""
    known = GPUS.get(name.lower())
    if known is not None:
        return known
    size = _SIZE.fullmatch(name.strip())
    if size is not None and 1 <= float(size[1]) <= 1024:
        return GPU(f"GPU of {float(size[1]):g} GB", float(size[1]))
    near = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ValueError(f"--gpu: {name!r} is unknown. {hint}Use one of {', '.join(GPUS)}, or its memory in GB (48).")


def peak_flops(device: DeviceMemory) -> float | None:
    """Return the peak rate of dense bf16 matrix products of a device; None if the device is unknown."""
    rates = gpu_of_device(device.name, device.total).rates if device.kind == "cuda" else None
    return None if rates is None else rates.flops


def gpu_of_device(name: str, total: int) -> GPU:
    """Return the known GPU that NVML calls `name`, with its real memory; rates are None if it is unknown."""
    words = name.lower()
    for gpu in GPUS.values():
        model = gpu.name.split("-")[0]
        if re.search(rf"\b{model}\b", words) and abs(gpu.memory_gb * GB - total) < 0.15 * total:
            return GPU(gpu.name, total / GB, gpu.rates)
    return GPU(name, total / GB)


logger = logging.getLogger(__name__)

# hidden, layers, attention heads, key heads, MLP width, vocabulary, tied embeddings.
_QWEN = {
    "Qwen2.5-0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936, True),
    "Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064, False),
    "Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064, False),
    "Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064, False),
    "Qwen2.5-72B": (8192, 80, 64, 8, 29568, 152064, False),
}
_POSITIONS = 32768
KNOWN_MODELS = tuple(_QWEN)
"""Names, smallest first."""
_VARIANT = re.compile(r"(?:Qwen/)?(Qwen2\.5(?:-Math|-Coder)?)(-[\d.]+B)(-Instruct|-Base)?", re.IGNORECASE)
# Keys of a model's block that change its shape.
_SHAPE_KEYS = ("override_config", "lora_rank", "target_modules", "exclude_modules")


def known_name(path: str) -> str | None:
    """Return the known model with the shape of a hub name, e.g. Qwen2.5-7B for Qwen/Qwen2.5-7B-Instruct; else None."""
    match = _VARIANT.fullmatch(path)
    name = f"Qwen2.5{match[2].upper()}" if match else ""
    return name if name in _QWEN else None


def known_shape(name: str, kind: str = "causal_lm", lora_rank: int = 0) -> ModelShape:
    """Return the shape of a known model. `kind` as in `models.loading`; `lora_rank`: adapters of all linear layers."""
    hidden, layers, heads, kv_heads, inner, vocab, tied = _QWEN[name]
    head_dim = hidden // heads
    query, key = heads * head_dim, kv_heads * head_dim
    attention = (2 * query + 2 * key) * hidden + query + 2 * key  # queries, keys and values have biases
    layer = attention + 3 * hidden * inner + 2 * hidden
    embeddings = vocab * hidden
    head = {"causal_lm": 0 if tied else embeddings, "value": hidden + 1, "sequence_classification": hidden}[kind]
    projections = [(hidden, query), (hidden, key), (hidden, key), (query, hidden)]
    projections += [(hidden, inner), (hidden, inner), (inner, hidden)]
    adapters = lora_rank * layers * sum(map(sum, projections)) + (0 if kind == "causal_lm" else head)
    return ModelShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=inner,
        vocab=vocab,
        tied=tied,
        layer_parameters=layers * layer,
        root_parameters=embeddings + hidden + head,
        largest_parameters=embeddings,
        adapter_parameters=adapters if lora_rank else None,
        core=CoreShape(layers, hidden, heads, query, key, inner, vocab, tied, attention, 2 * hidden),
        positions=_POSITIONS,
    )


def model_shape(folder: str, model_config: Any, kind: ModelKind = "causal_lm") -> ModelShape | None:
    """Return `ModelShape.from_folder`, from the folder `shapes` of the cache if it is there.

    Models that execute their own code (`trust_remote_code`) are not cached.
    """
    key = None if model_config.trust_remote_code else cache_key(folder, model_config, kind)
    if key is None:
        return ModelShape.from_folder(folder, model_config, kind)
    file = cache_root() / "shapes" / f"{key}.json"
    shape = _read(file)
    if shape is None:
        shape = ModelShape.from_folder(folder, model_config, kind)
        if shape is not None:
            _write(file, shape)
    return shape


def cache_key(folder: str, model_config: Any, kind: str) -> str | None:
    """Return the hash of everything that determines the shape: config.json, overrides, adapters, and the code."""
    config = Path(folder) / "config.json"
    if not config.is_file():
        return None
    settings = {name: model_config[name] for name in _SHAPE_KEYS if name in model_config}
    parts = (
        config.read_bytes(),
        json.dumps([kind, settings], sort_keys=True, default=str).encode(),
        importlib.metadata.version("transformers").encode(),
        Path(shapes.__file__).read_bytes(),
    )
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _read(file: Path) -> ModelShape | None:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        core = values.pop("core")
        if core is not None:
            core = CoreShape(**{**core, "sparse": tuple(core["sparse"])})
        return ModelShape(**values, core=core)
    except (OSError, ValueError, KeyError, TypeError):  # absent, or damaged: it is written again
        return None


def _write(file: Path, shape: ModelShape) -> None:
    temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(dataclasses.asdict(shape)), encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:  # a full or read-only disk only costs time
        logger.debug("memory plan: the shape of the model is not cached: %s", error)
