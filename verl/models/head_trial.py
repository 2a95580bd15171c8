"""A trial instead of trust: a causal LM's head is ours to compute, if that gives the model's own logits."""

from __future__ import annotations

import torch

from verl.models.forward import ResponseModel, front_rows

# Half precision alone makes a part of this.
_LARGEST_GAP = 0.02


def check_head(model: ResponseModel, device: torch.device) -> None:
    """Refuse a causal LM whose logits are not what our head gives for a few tokens; other kinds have none of ours.

    A pass of the model, hence a collective where it is sharded; needs no_grad and eval mode.
    """
    if model.kind != "causal_lm":
        return
    probe = torch.arange(1, 9)[None] % model.hf.config.get_text_config().vocab_size
    front = front_rows(probe, torch.ones_like(probe), response_length=1).to(device)
    gap = float(model(front, ("head_gap",), (1, 1))["head_gap"])
    if gap > _LARGEST_GAP:
        raise ValueError(
            f"model.path: {type(model.hf).__name__} changes its logits after the output layer in a way that is not "
            f"known here (they differ by {gap:.1%}). Use another model, or add it to verl.models.heads."
        )
