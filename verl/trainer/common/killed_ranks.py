"""A rank that was killed for the machine's memory ends the run with the keys of its phase, cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from verl.config import PPOConfig, SFTConfig
from verl.planning.remedies import PHASES
from verl.single_controller.base.errors import WorkerDiedError
from verl.utils.exceptions import causes
from verl.workers.roles.memory import host_advice

# Phases that do the work of another.
_SAME = {"validation rollout": "gen", "validation reward": "reward"}


@contextmanager
def advises_on_memory(config: PPOConfig | SFTConfig) -> Iterator[None]:
    """Around a run: the group that lost the rank knows neither its phase nor the configuration."""
    try:
        yield
    except Exception as error:
        died = next((cause for cause in causes(error) if isinstance(cause, WorkerDiedError)), None)
        if died is not None and died.advice and died.phase is not None:
            phase = "sft" if isinstance(config, SFTConfig) else _SAME.get(died.phase, died.phase)
            if phase in PHASES:
                died.advise(host_advice(phase, config))
        raise
