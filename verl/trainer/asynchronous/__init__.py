"""Asynchronous PPO (`trainer.mode` one_step_off and async), and its entry point for commands of other verl versions."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

__all__ = ["train_with_mode"]

# Other versions have one default configuration per mode; its keys are the same as in `ppo_trainer` or its variant.
_CONFIG_NAME = re.compile(r"^(--config-name|-cn)=['\"]?(?:fully_async_|one_step_off_)(ppo_\w+?)(?:\.yaml)?['\"]?$")


def train_with_mode(mode: str) -> None:
    """Run `verl.trainer.main_ppo` with the arguments of the command line and this `trainer.mode` as the default."""
    from verl.trainer.main_ppo import main

    sys.argv[1:] = main_ppo_arguments(sys.argv[1:], mode)
    main()


def main_ppo_arguments(arguments: Sequence[str], mode: str) -> list[str]:
    """Translate the arguments of a command of another version into those of `verl.trainer.main_ppo`."""
    translated = [_CONFIG_NAME.sub(r"\1=\2", argument) for argument in arguments if argument != "--config-path=config"]
    keys = ("trainer.mode=", "trainer.v1.trainer_mode=")
    has_mode = any(argument.lstrip("+").startswith(keys) for argument in translated)
    return translated if has_mode else [f"trainer.mode={mode}", *translated]
