"""Checkpoints that four Megatron ranks write for the merger (imported by name in the rank processes)."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import LAYOUTS, MODELS, model_of


def write_checkpoints(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Write our checkpoint, a Megatron Core checkpoint and the HF model of each (layout, model)."""
    from megatron.core import dist_checkpointing

    for layout, name in cases:
        target = Path(folder) / name
        model = model_of(name)
        if rank == 0:
            model.save_pretrained(target / "model")
            for part in ("ours", "core"):
                model.config.save_pretrained(target / part / "huggingface")
            (target / "core" / "dist_ckpt").mkdir()
        dist.barrier()
        engine = make_megatron(model, MODELS[name][0], **LAYOUTS[layout])
        engine.save(target / "ours", ("model",))
        with engine.layout.activate():
            parts = {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(engine.models)}
            dist_checkpointing.save(parts, str(target / "core" / "dist_ckpt"))
        dist.barrier()
