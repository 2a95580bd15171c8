"""Which workers are restarted after a loss, and how often. Real processes: `tests/e2e/test_revival.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verl.single_controller.base.worker_group import Failure, WorkerCallError, WorkerDiedError, WorkerError
from verl.single_controller.ray import ResourceError
from verl.trainer.common.run_status import RunStatus
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.weight_sync import ReplicaWeights
from verl.trainer.ppo.worker_recovery import MAX_RESTARTS_PER_STEP, WorkerRecovery
from verl.types.request import EngineDiedError
from verl.utils.transfer_group import TransferLostError

POOLS = ({Role.Actor, Role.Critic}, {Role.Rollout, Role.RefPolicy}, {Role.RewardModel})


class Groups:
    """Who would be started anew, in the place of real groups."""

    def __init__(self) -> None:
        self.restarted: list[frozenset[Role]] = []
        self.revived = 0
        self.failures: list[Exception] = []

    def restartable_with(self, role: str) -> frozenset[Role]:
        pool = next(pool for pool in POOLS if role in map(str, pool))
        return frozenset() if Role.Actor in pool else frozenset(pool)

    def restart_engines(self) -> None:
        self.revived += 1
        if self.failures:
            raise self.failures.pop(0)

    def restart(self, roles: frozenset[Role]) -> None:
        self.restarted.append(roles)
        if self.failures:
            raise self.failures.pop(0)


class Weights:
    def __init__(self) -> None:
        self.did: list[Any] = []
        self.replica_weights = ReplicaWeights(current_version=4, verified_version=4)

    def connect(self) -> None:
        self.did.append("connect")

    def sync(self, version: int) -> None:
        self.did.append(version)


@pytest.fixture
def made():
    groups, weights, state = Groups(), Weights(), SimpleNamespace(step=1)
    recovery = WorkerRecovery(groups, weights, state, RunStatus(total_steps=1))  # type: ignore[arg-type]
    retry = recovery.retry_on_worker_loss
    return SimpleNamespace(groups=groups, weights=weights, state=state, retry=retry, metrics=recovery.metrics)


def died(role: str) -> WorkerDiedError:
    return WorkerDiedError("worker process died", role, 1, "host", "generate_sequences")


def lost_transfer() -> WorkerError:
    return WorkerCallError(Failure.from_exception(TransferLostError("gone")), "actor", 0, "host", "send_weights")


def lost_engine(role: str) -> WorkerError:
    error = Failure.from_exception(EngineDiedError("rollout: the engine's process 7 was killed by SIGKILL."))
    return WorkerCallError(error, role, 0, "host", "generate_sequences")


def fails(*errors: Exception) -> Any:
    left = list(errors)

    def ask() -> str:
        if left:
            raise left.pop(0)
        return "answered"

    return ask


@pytest.mark.parametrize("error", [died("rollout"), died("ref"), lost_transfer()])
def test_a_rollouts_pool_is_started_anew_with_weights_and_asked_again(made, error):
    assert made.retry(fails(error)) == "answered"
    assert made.groups.restarted == [{Role.Rollout, Role.RefPolicy}]
    assert made.weights.did == ["connect", 4]
    assert made.metrics() == {"training/generation_restarts": 1.0, "training/reference_restarts": 1.0}


@pytest.mark.parametrize("role", ["actor_rollout", "rollout"])
def test_an_engines_own_process_is_started_anew_beside_its_rank_wherever_that_is(made, role):
    made.groups.failures = [lost_engine(role)]  # the next one dies as it starts
    assert made.retry(fails(lost_engine(role))) == "answered"
    assert (made.groups.revived, made.groups.restarted) == (2, [])
    assert made.weights.did == [4]
    assert made.metrics() == {"training/generation_restarts": 2.0}


def test_every_attempt_gets_the_arguments(made):
    attempts: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> str:
        attempts.append((args, kwargs))
        if len(attempts) == 1:
            raise died("rollout")
        return "answered"

    assert made.retry(call, 3, "x", validate=True) == "answered"
    assert attempts == [((3, "x"), {"validate": True})] * 2


def test_a_reward_model_needs_no_weights(made):
    assert made.retry(fails(died("rm"))) == "answered"
    assert made.groups.restarted == [{Role.RewardModel}]
    assert made.weights.did == []


@pytest.mark.parametrize(
    "error",
    [
        died("actor"),
        died("critic"),
        WorkerCallError(Failure.from_exception(KeyError("x")), "rollout", 0, "host", "generate_sequences"),
        FloatingPointError("weights"),
    ],
)
def test_what_a_restart_would_lose_or_not_mend_goes_up_as_it_is(made, error):
    with pytest.raises(type(error)) as raised:
        made.retry(fails(error))
    assert raised.value is error
    assert made.groups.restarted == []
    assert made.metrics() == {}


def test_a_step_has_so_many_restarts_and_no_more(made):
    deaths = [died("rollout") for _ in range(MAX_RESTARTS_PER_STEP)]
    assert made.retry(fails(*deaths)) == "answered"
    made.state.step = 2
    made.groups.failures = [died("rollout")]  # one in the restart itself counts
    assert made.retry(fails(*deaths[1:])) == "answered"
    last = died("rollout")
    with pytest.raises(WorkerDiedError) as raised:
        made.retry(fails(last))
    assert raised.value is last
    assert len(made.groups.restarted) == 2 * MAX_RESTARTS_PER_STEP


def test_where_there_is_no_place_to_start_the_death_is_what_ends_the_run(made):
    made.groups.failures = [ResourceError("a node is gone")]
    with pytest.raises(WorkerDiedError) as raised:
        made.retry(fails(died("rollout")))
    assert isinstance(raised.value.__cause__, ResourceError)
