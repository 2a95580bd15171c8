"""Explain weights that were not finite before any update: the model or checkpoint that holds them, and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

from verl.utils.fs import expand_path

_SHOWN_NAMES = 3


def explain_initial_weights(key: str, path: str, resumed_from: Path | None) -> str:
    """Return source and remedy of non-finite weights that no update of this run has changed; without a final period."""
    if resumed_from is not None:
        return (
            f"No update has changed the weights since the run resumed from {resumed_from}: that checkpoint holds them."
            " Resume from an earlier step (trainer.resume_mode=resume_path trainer.resume_from_path=…)"
        )
    names = non_finite_tensors(path)
    start = f"No update has changed the weights: they are those of {key}={path}"
    if names:
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        shown = ", ".join(names[:_SHOWN_NAMES]) + more
        return f"{start}, whose files hold NaN or inf in {shown}. Use another copy of the model"
    return (
        f"{start}. No NaN or inf was found in its files: the weights may overflow in this precision. Check the model"
        " with transformers, or compute in float32 (actor_rollout_ref.rollout.dtype, fsdp_config.mixed_precision)"
    )


def non_finite_tensors(path: str) -> list[str]:
    """Return the names of tensors with NaN or inf in the safetensors files of a local folder."""
    folder = expand_path(path)
    if not os.path.isdir(folder):
        return []
    from safetensors import safe_open

    names = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    names.append(name)
    return names
