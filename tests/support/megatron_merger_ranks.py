"""What four Megatron ranks write for the merger; the processes import it by name."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import LAYOUTS, MODELS, model_of


def saved(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Of each (layout, model) our checkpoint, Core's own and the model itself."""
    from megatron.core import dist_checkpointing

    for layout, name in cases:
        place = Path(folder) / name
        model = model_of(name)
        if rank == 0:
            model.save_pretrained(place / "model")
            for part in ("ours", "core"):
                model.config.save_pretrained(place / part / "huggingface")
            (place / "core" / "dist_ckpt").mkdir()
        dist.barrier()
        engine = make_megatron(model, MODELS[name][0], **LAYOUTS[layout])
        engine.save(place / "ours", ("model",))
        with engine.layout.active():
            parts = {f"model{number}": each.sharded_state_dict() for number, each in enumerate(engine.models)}
            dist_checkpointing.save(parts, str(place / "core" / "dist_ckpt"))
        dist.barrier()
