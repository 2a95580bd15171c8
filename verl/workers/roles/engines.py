"""Which training engine a strategy names, and how a configuration block becomes one."""

from __future__ import annotations

from typing import Any

import torch

from verl.workers.engine.base import TrainEngine


def make_engine(
    strategy: str,
    model_path: str,
    kind: str,
    model_config: Any,
    block: Any,
    device: torch.device,
    optim: Any = None,
    grad_clip: float | None = None,
    total_steps: int | None = None,
) -> TrainEngine:
    """The engine of `strategy` for a model; without `optim` it is frozen."""
    if strategy not in ("fsdp", "fsdp2"):
        raise ValueError(f"strategy = {strategy}: this engine is not built yet. Set it to fsdp2.")
    from verl.workers.engine.fsdp.engine import FSDPEngine

    return FSDPEngine(
        model_path,
        kind,  # type: ignore[arg-type]
        model_config=model_config,
        engine_config=block.fsdp_config,
        optim=optim,
        grad_clip=grad_clip,
        total_steps=total_steps,
        device=device,
        sequence_parallel_size=block.ulysses_sequence_parallel_size,
        compile_layers=block.use_torch_compile,
    )
