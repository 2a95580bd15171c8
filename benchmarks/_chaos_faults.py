"""Which faults there are, and a seeded plan of them: every kind comes before any comes twice."""

from __future__ import annotations

import random
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass

# Where the actor and the rollout share their ranks, and where the rollout has a pool of its own.
LAYOUTS = {
    "together": ["trainer.n_gpus_per_node=2"],
    "apart": [
        "trainer.n_gpus_per_node=1",
        "resource_pool_spec={train: [1], generation: [2]}",
        "role_mapping={actor: train, rollout: generation}",
    ],
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# After these the run starts again. Any other must cost no more than the work that was under way.
RESTARTS = ("rank", "saver", "controller", "driver", "GCS", "raylet", "starting")
KINDS = {
    "together": (*RESTARTS, "scorer", "fork server", "Ray's others"),
    "apart": (*RESTARTS, "replica", "replica", "scorer", "fork server", "Ray's others"),
}
# "saver": whoever writes a checkpoint, while it is written; "starting": whoever, while the run starts or resumes.
TARGETS = {"saver": ("rank", "controller"), "starting": ("rank", "controller", "driver", "raylet", "GCS")}
# Of a step, as `_chaos_trainer` calls them.
_PHASES = (
    "hand-over",
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
    """What happens to whom, and when: `steps` after the last recovery, in a phase, when `share` of it is over."""

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


def planned(
    layout: str, rng: random.Random, kinds: Collection[str] = (), signals: Collection[str] = tuple(SIGNALS)
) -> Iterator[Fault]:
    """Faults for runs of a layout, without end."""
    deck = [(kind, done) for kind in KINDS[layout] if not kinds or kind in kinds for done in signals]
    while deck:
        for kind, done in rng.sample(deck, len(deck)):
            target = rng.choice(TARGETS.get(kind, (kind,)))
            phase = rng.choice(["start", "resume"]) if kind == "starting" else rng.choice(_PHASES)
            yield Fault(kind, target, done, phase, rng.randrange(3), rng.random())
