"""Weights that give no numbers any more: noticed where they are made, used or saved, and said with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from verl.trainer.ppo.guard import REMEDIES, ROLES, NonFiniteError
from verl.trainer.restart import what_the_same_command_does
from verl.trainer.setbacks import causes
from verl.workers.roles.updates import LOST_AT


def check_weights(metrics: dict[str, float], step: int, trainer: Any, log: Callable[..., None]) -> None:
    """Log and raise where the updates of this step left weights that are lost. `trainer`: the run's block of it."""
    for role in ROLES:
        if f"{role}/{LOST_AT}" in metrics:
            log(metrics, step)
            update = round(metrics[f"{role}/{LOST_AT}"])
            by = f"by update {update} of step {step}" if update else f"before step {step}"
            raise NonFiniteError(
                f"the weights of the {role} were lost {by}: they are not finite, or give no finite numbers. They are"
                f" not saved; {what_the_same_command_does(trainer)}. The batch of step {step} is dumped. {REMEDIES}"
            )


@contextmanager
def explained(step: int, trainer: Any) -> Iterator[None]:
    """Whoever first finds the weights of the last update unusable (an engine that generates, a save) ends the run."""
    try:
        yield
    except Exception as error:
        found = next((cause for cause in causes(error) if isinstance(cause, FloatingPointError)), None)
        if found is None or isinstance(error, NonFiniteError):
            raise
        raise NonFiniteError(
            f"step {step}: {found}. The updates before it left weights that cannot be used, and they are not saved;"
            f" {what_the_same_command_does(trainer)}. {REMEDIES}"
        ) from error
