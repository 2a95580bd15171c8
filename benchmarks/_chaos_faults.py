"""Kinds of faults and a seeded plan: every kind occurs once before any is repeated."""

from __future__ import annotations

import random
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# "together": actor and rollout share their ranks; "apart": the rollout has its own pool.
LAYOUTS = {
    "together": ["trainer.n_gpus_per_node=2"],
    "apart": [
        "trainer.n_gpus_per_node=1",
        "resource_pool_spec={train: [1], generation: [2]}",
        "role_mapping={actor: train, rollout: generation}",
    ],
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# Faults that restart the run. All others may only repeat the work in progress.
RESTARTS = ("rank", "saver", "controller", "driver", "GCS", "raylet", "starting")
KINDS = {
    "together": (*RESTARTS, "scorer", "fork server", "Ray's others"),
    "apart": (*RESTARTS, "replica", "replica", "scorer", "fork server", "Ray's others"),
}
# "saver": a process that writes a checkpoint, during the write; "starting": any of these while the run starts.
TARGETS = {"saver": ("rank", "controller"), "starting": ("rank", "controller", "driver", "raylet", "GCS")}
# Phases of a step, named as in `_chaos_trainer`.
_PHASES = (
    "weight sync",
    "generation",
    "reward",
    "old log-probs",
    "advantages",
    "update",
    "save",
    "validation",
)


@dataclass(frozen=True)
class Fault:
    """Signal, target process and time: `steps` steps after the last recovery, at the fraction `share` of a phase."""

    kind: str
    target: str
    done: str
    phase: str
    steps: int
    share: float

    @property
    def restarts(self) -> bool:
        return self.kind in RESTARTS

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS[self.done]


def plan_faults(
    layout: str, rng: random.Random, kinds: Collection[str] = (), signals: Collection[str] = tuple(SIGNALS)
) -> Iterator[Fault]:
    """An infinite sequence of faults for runs of a layout."""
    deck = [(kind, done) for kind in KINDS[layout] if not kinds or kind in kinds for done in signals]
    while deck:
        for kind, done in rng.sample(deck, len(deck)):
            target = rng.choice(TARGETS.get(kind, (kind,)))
            phase = rng.choice(["start", "resume"]) if kind == "starting" else rng.choice(_PHASES)
            yield Fault(kind, target, done, phase, rng.randrange(3), rng.random())
