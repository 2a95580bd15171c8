"""Model inputs derived from masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def compute_position_id_with_mask(mask: torch.Tensor) -> torch.Tensor:
    """Positions that count attended tokens only: `mask` [..., seq] of 0/1 → [..., seq], 0 on leading padding."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)
