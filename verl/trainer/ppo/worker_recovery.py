"""WorkerRecovery: restart lost replicas and worker groups in place, readmit them, and retry the call that failed.

Only groups without training state (rollout, reference, reward model, teachers and loop workers on their own pools) are
restarted; the training state is not affected.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from verl.single_controller.base.worker_group import WorkerDiedError, WorkerError
from verl.single_controller.ray import ResourceError
from verl.trainer.common.run_status import RunStatus
from verl.trainer.ppo.state import TrainerState
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.weight_sync import WeightSync, engine_died, is_lost_transfer
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.trainer.recovery.hang_detector import RESTART_PHASE

logger = logging.getLogger(__name__)

# A failure that recurs after every restart must end the run.
MAX_RESTARTS_PER_STEP = 3

_METRIC_NAMES = {
    Role.Rollout: "generation",
    Role.RefPolicy: "reference",
    Role.RewardModel: "reward_model",
    Role.Agents: "agents",
    Role.Teacher: "teacher",
}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class WorkerRecovery:
    """Runs calls and repeats them after a worker loss. A repeated call must give the same result, even if it runs in
    other processes."""

    def __init__(self, groups: WorkerGroups, weight_sync: WeightSync, state: TrainerState, status: RunStatus) -> None:
        """`state`: provides the current step; restarts are limited per step. `status`: shows a restart as a phase."""
        self._groups, self._weight_sync, self._state, self._status = groups, weight_sync, state, status
        self._step, self._restarts_in_step = 0, 0
        self._counts: Counter[str] = Counter()
        self.on_restart: Callable[[int, str], None] = lambda step, cause: None
        """Called with the step and the cause of every restart."""

    def retry_on_worker_loss(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Return `call(*args, **kwargs)`. If workers are lost, restart them and repeat the call.

        Raises errors that a restart in place cannot fix, and a loss after `MAX_RESTARTS_PER_STEP` restarts.
        """
        while True:
            try:
                return call(*args, **kwargs)
            except WorkerError as error:
                self._recover(error)

    def metrics(self) -> dict[str, float]:
        """Return the number of restarts so far, per kind of group that was restarted."""
        return {f"training/{name}_restarts": float(count) for name, count in self._counts.items()}

    def _recover(self, error: WorkerError) -> None:
        """Restart the workers that this error reports as lost and sync their weights; raise the error if that is not
        possible. A loss during the restart is handled in the same way."""
        while True:
            only_engine = engine_died(error)
            roles = frozenset({Role.Rollout}) if only_engine else self._lost_roles(error)
            if not roles:
                raise error
            self._count(error, roles)
            try:
                with self._status.phase(f"{RESTART_PHASE}{error.role}"):
                    self._readmit(roles, only_engine)
                return
            except ResourceError as no_resources:
                raise error from no_resources
            except WorkerError as next_error:
                error = next_error

    def _readmit(self, roles: frozenset[Role], only_engine: bool) -> None:
        """Readmit lost workers: restart the processes of these roles (or only the separate processes of engines),
        reconnect, sync and verify weights. Then `RolloutManager.open` sends rows to them again, and
        `EngineClient.reconnect` requests of agents."""
        weights = self._weight_sync.replica_weights
        if Role.Rollout in roles:
            weights.verified_version = None
        if only_engine:
            self._groups.restart_engines()
        else:
            self._groups.restart(roles)
        if Role.Rollout in roles:
            if not only_engine:
                self._weight_sync.connect()
            self._weight_sync.sync(weights.current_version)

    def _lost_roles(self, error: WorkerError) -> frozenset[Role]:
        """Return the roles to restart; empty if a restart would lose training state or not fix the error."""
        if is_lost_transfer(error):
            return self._groups.restartable_with(str(Role.Rollout))
        return self._groups.restartable_with(error.role) if isinstance(error, WorkerDiedError) else frozenset()

    def _count(self, error: WorkerError, roles: frozenset[Role]) -> None:
        """Count and log a restart; raise the error if the step has reached its limit of restarts."""
        step = self._state.step
        self._restarts_in_step = self._restarts_in_step + 1 if step == self._step else 1
        self._step = step
        if self._restarts_in_step > MAX_RESTARTS_PER_STEP:
            logger.error("step %d: %d restarts in place did not help.", step, MAX_RESTARTS_PER_STEP)
            raise error
        self._counts.update(_METRIC_NAMES[role] for role in roles)
        self.on_restart(step, f"{error.role} rank {error.rank} was lost in {error.method}: {error.summary}")
        logger.warning(
            "step %d: %s rank %d on %s was lost in %s (%s). Its %s is restarted and the call is retried; the state of"
            " the trainer is kept (restart %d of at most %d in this step).",
            *(step, error.role, error.rank, error.host, error.method, error.summary),
            *("engine" if engine_died(error) else "group", self._restarts_in_step, MAX_RESTARTS_PER_STEP),
        )
