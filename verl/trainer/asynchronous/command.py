"""Commands of other versions for asynchronous runs: `verl.trainer.main_ppo` with the mode that they stand for."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

__all__ = ["train_with_mode"]

# Their files of defaults hold what ours do, by these names.
_THEIR_DEFAULTS = re.compile(r"^(--config-name|-cn)=['\"]?(?:fully_async_|one_step_off_)(ppo_\w+?)(?:\.yaml)?['\"]?$")


def train_with_mode(mode: str) -> None:
    """Train as the command line says, with `trainer.mode` unless it says that, too."""
    from verl.trainer.main_ppo import main

    sys.argv[1:] = arguments(sys.argv[1:], mode)
    main()


def arguments(typed: Sequence[str], mode: str) -> list[str]:
    """The same for `verl.trainer.main_ppo`."""
    ours = [_THEIR_DEFAULTS.sub(r"\1=\2", each) for each in typed if each != "--config-path=config"]
    said = any(each.lstrip("+").startswith(("trainer.mode=", "trainer.v1.trainer_mode=")) for each in ours)
    return ours if said else [f"trainer.mode={mode}", *ours]
