"""Revival: engines that lose a process of their own, and groups without training state (rollout, reference, reward
model, teachers on pools of their own) that lose a rank, are started anew in their place, and asked again. The
trainer's state stays where it is."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from verl.single_controller.base.errors import WorkerDiedError, WorkerError
from verl.single_controller.ray import ResourceError
from verl.trainer.common.hang_limits import RESTART
from verl.trainer.common.status_line import StatusLine
from verl.trainer.ppo.groups import WorkerGroups
from verl.trainer.ppo.state import TrainerState
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.weight_sync import WeightSync, engine_died, is_lost_transfer

logger = logging.getLogger(__name__)

# A cause that comes back with every attempt must not keep the run: then its error goes up.
MOST_PER_STEP = 3

_COUNTED_AS = {
    Role.Rollout: "generation",
    Role.RefPolicy: "reference",
    Role.RewardModel: "reward_model",
    Role.Agents: "agents",
    Role.Teacher: "teacher",
}

Result = TypeVar("Result")


class Revival:
    """Around calls that may be made again: what they answer does not depend on who answers, nor on when."""

    def __init__(
        self,
        groups: WorkerGroups,
        weight_sync: WeightSync,
        state: TrainerState,
        status: StatusLine,
    ) -> None:
        """Restarts are counted per step of `state` and shown as a phase of `status`."""
        self._groups, self._weight_sync, self._state, self._status = groups, weight_sync, state, status
        self._in_step = (0, 0)
        self._counts: Counter[str] = Counter()

    def __call__(self, ask: Callable[[], Result]) -> Result:
        """The result of `ask`. Errors that a restart in place does not mend are raised as they are."""
        while True:
            try:
                return ask()
            except WorkerError as error:
                self._revive(error)

    def metrics(self) -> dict[str, float]:
        """How many restarts so far, of what was restarted at all."""
        return {f"training/{what}_restarts": float(count) for what, count in self._counts.items()}

    def _revive(self, error: WorkerError) -> None:
        """Start the group anew that this error is of, and bring it to where the others are; or raise the error."""
        while True:
            engine = engine_died(error)
            roles = frozenset({Role.Rollout}) if engine else self._lost_roles(error)
            if not roles:
                raise error
            self._count(error, roles)
            try:
                with self._status.phase(f"{RESTART}{error.role}"):
                    self._start_anew(engine, roles)
                return
            except ResourceError as gone:
                raise error from gone
            except WorkerError as again:
                error = again

    def _start_anew(self, engine: bool, roles: frozenset[Role]) -> None:
        """The engines' own processes, or the processes of these roles."""
        if engine:
            self._groups.revive_engines()
        else:
            self._groups.restart(roles)
        if Role.Rollout in roles:
            if not engine:
                self._weight_sync.connect()
            self._weight_sync.hand_over(self._groups.replicas.current)

    def _lost_roles(self, error: WorkerError) -> frozenset[Role]:
        """Those whose processes are to be started anew; none where that would lose training state, or mend nothing."""
        if is_lost_transfer(error):
            return self._groups.restartable_with(str(Role.Rollout))
        return self._groups.restartable_with(error.role) if isinstance(error, WorkerDiedError) else frozenset()

    def _count(self, error: WorkerError, roles: frozenset[Role]) -> None:
        step, count = self._state.step, self._in_step[1]
        self._in_step = step, count + 1 if step == self._in_step[0] else 1
        if self._in_step[1] > MOST_PER_STEP:
            logger.error("step %d: %d restarts in place did not help.", step, MOST_PER_STEP)
            raise error
        self._counts.update(_COUNTED_AS[role] for role in roles)
        logger.warning(
            "step %d: %s rank %d on %s was lost in %s (%s). Its %s is started anew and asked again; the trainer's"
            " state is kept (restart %d of at most %d in this step).",
            *(step, error.role, error.rank, error.host, error.method, error.summary),
            *("engine" if engine_died(error) else "group", self._in_step[1], MOST_PER_STEP),
        )
