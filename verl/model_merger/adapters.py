"""LoRA adapters among the tensors of a checkpoint: found by their names, merged, or kept as peft loads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.model_merger.stored import Adapted, Stored
from verl.models.loading import ModelKind

PREFIX = "base_model.model."
CONFIG = "adapter_config.json"
_MATRIX = re.compile(r"(.+)\.lora_([AB])\.(?:[^.]+\.)?weight")
# peft's own copies of modules that are trained whole.
_TRAINED_WHOLE = re.compile(r"(.+)\.modules_to_save\.[^.]+\.(.+)")
_TASKS = {"causal_lm": "CAUSAL_LM", "value": "TOKEN_CLS", "sequence_classification": "SEQ_CLS"}
# Settings of peft under which a merged weight is more than base + scale * B A.
_REFUSED = ("use_dora", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass
class Adapters:
    """What was trained beside a model's own weights, by plain names: those without adapters."""

    matrices: dict[str, dict[str, Stored]] = field(default_factory=dict)
    """By layer: "A" [rank, in] and "B" [out, rank]."""
    heads: dict[str, Stored] = field(default_factory=dict)
    """Weights that were trained whole."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """As in adapter_config.json, as far as it is known."""

    def scale(self, layer: str) -> float:
        """How much the product of the matrices of a layer counts. ValueError where nobody knows."""
        refused = [key for key in _REFUSED if self.settings.get(key)]
        if refused:
            raise ValueError(
                f"{CONFIG}: {refused[0]} is set, which is not merged here. Keep the adapter: --lora adapter."
            )
        alpha = self.settings.get("lora_alpha")
        if alpha is None:
            raise ValueError(f"adapters: there is no {CONFIG} that says lora_alpha. Give it with --lora-alpha.")
        rank = self.matrices[layer]["A"].shape[0]
        return float(alpha) / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def merged(self, layer: str, base: Stored, transposed: bool) -> Adapted:
        """The weight of a layer with its adapter; `transposed`: it is [in, out]."""
        pair = self.matrices[layer]
        return Adapted(base, pair["A"], pair["B"], self.scale(layer), transposed)

    def peft_tensors(self) -> dict[str, Stored]:
        """Under the names of adapter_model.safetensors."""
        found = {
            f"{PREFIX}{layer}.lora_{side}.weight": pair[side] for layer, pair in self.matrices.items() for side in "AB"
        }
        return found | {f"{PREFIX}{name}": value for name, value in self.heads.items()}

    def peft_config(self, kind: ModelKind, base_model: str) -> dict[str, Any]:
        """All of adapter_config.json: what the checkpoint says of it comes first."""
        made = {
            "peft_type": "LORA",
            "task_type": _TASKS[kind],
            "r": next(iter(self.matrices.values()))["A"].shape[0],
            "target_modules": sorted(self.matrices),
            "modules_to_save": sorted({name.partition(".")[0] for name in self.heads}) or None,
            "inference_mode": True,
        }
        if "lora_alpha" not in self.settings:
            self.scale(next(iter(self.matrices)))
        return {**made, **self.settings, "base_model_name_or_path": base_model}


def split_adapters(tensors: Mapping[str, Stored]) -> tuple[dict[str, Stored], Adapters | None]:
    """(a model's own weights by plain name, what adapters there are)."""
    plain: dict[str, Stored] = {}
    found = Adapters()
    for full, value in tensors.items():
        name = full.removeprefix(PREFIX)
        if matrix := _MATRIX.fullmatch(name):
            found.matrices.setdefault(matrix[1], {})[matrix[2]] = value
        elif trained := _TRAINED_WHOLE.fullmatch(name):
            found.heads[f"{trained[1]}.{trained[2]}"] = value
        else:
            plain.setdefault(name.replace(".base_layer.", ".").replace(".original_module.", "."), value)
    single = sorted(layer for layer, pair in found.matrices.items() if len(pair) == 1)
    if single:
        raise ValueError(f"adapters: {single[0]} has one of two matrices. The checkpoint is not whole.")
    if not found.matrices:
        return {**plain, **found.heads}, None
    return {**plain, **found.heads}, found


def stored_settings(*folders: Path) -> dict[str, Any]:
    """adapter_config.json in the first folder that has one; {}: none has."""
    file = next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)
    return json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
