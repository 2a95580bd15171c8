"""Shapes of local models, cached by the content of their config.json: a plan of a known model imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.planning import shapes
from verl.planning.shapes import CoreShape, ModelShape
from verl.utils.fs import cache_root

if TYPE_CHECKING:
    from verl.models.loading import ModelKind

logger = logging.getLogger(__name__)

# Keys of a model's block that change its shape.
_SHAPE_KEYS = ("override_config", "lora_rank", "target_modules", "exclude_modules")


def model_shape(folder: str, model_config: Any, kind: ModelKind = "causal_lm") -> ModelShape | None:
    """Return `ModelShape.from_folder`, from the folder `shapes` of the cache if it is there.

    Models that execute their own code (`trust_remote_code`) are not cached.
    """
    key = None if model_config.trust_remote_code else _key(folder, model_config, kind)
    if key is None:
        return ModelShape.from_folder(folder, model_config, kind)
    file = cache_root() / "shapes" / f"{key}.json"
    shape = _read(file)
    if shape is None:
        shape = ModelShape.from_folder(folder, model_config, kind)
        if shape is not None:
            _write(file, shape)
    return shape


def _key(folder: str, model_config: Any, kind: str) -> str | None:
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
