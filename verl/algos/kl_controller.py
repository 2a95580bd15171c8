"""The coefficient of the KL in the reward: constant, or steered towards a target (arXiv 1909.08593)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl.config import KLControllerConfig, as_config


class FixedKLController:
    """`value` never moves."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        pass


class AdaptiveKLController:
    """`value` grows while the KL is above `target_kl` and falls while it is below."""

    # One observation counts for at most this relative error.
    MAX_ERROR = 0.2

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl: target_kl={target_kl} and horizon={horizon} must both be above 0.")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """`current_kl` was measured over `n_steps` samples."""
        error = min(max(current_kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.value *= 1.0 + error * n_steps / self.horizon


def get_kl_controller(
    kl_ctrl: KLControllerConfig | DictConfig | Mapping[str, Any],
) -> FixedKLController | AdaptiveKLController:
    config = as_config(KLControllerConfig, kl_ctrl)
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
