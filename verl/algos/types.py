"""The shapes of what algorithms take and return, named once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from omegaconf import DictConfig

from verl.config import ActorConfig, AlgorithmConfig

# Where a function takes a configuration, users may hand in ours, a DictConfig, a dict, or nothing (the defaults).
AlgorithmLike: TypeAlias = AlgorithmConfig | DictConfig | Mapping[str, Any] | None
ActorLike: TypeAlias = ActorConfig | DictConfig | Mapping[str, Any] | None

# (advantages, returns), both [batch, response], 0 where the mask is 0.
Advantages: TypeAlias = tuple[torch.Tensor, torch.Tensor]
# A scalar with a gradient, and detached scalars, each a mean over the model tokens of this (micro-)batch.
PolicyLoss: TypeAlias = tuple[torch.Tensor, dict[str, torch.Tensor]]
