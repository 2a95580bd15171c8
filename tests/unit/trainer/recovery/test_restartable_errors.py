"""What another attempt may help against, and what would only happen again."""

from __future__ import annotations

import pytest
import ray
import torch

from verl.config import ConfigError
from verl.single_controller.base.worker_group import Failure, HangError, WorkerCallError, WorkerDiedError
from verl.trainer.common.training_health import TrainingStoppedError
from verl.trainer.recovery.exit_messages import failure_location, is_restartable
from verl.trainer.recovery.ray_monitor import RayLostError, RayUnavailableError

WHERE = ("actor", 1, "host", "update_actor")


def raised_by_a_worker(error: BaseException) -> WorkerCallError:
    return WorkerCallError(Failure.from_exception(error), *WHERE)


def because_of(cause: BaseException) -> RuntimeError:
    try:
        raise RuntimeError("the last step could not be saved") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        WorkerDiedError("worker process died", *WHERE),
        HangError("rank 1 hangs", *WHERE),
        RayLostError("Ray's own processes ended"),
        because_of(WorkerDiedError("worker process died", *WHERE)),
        ray.exceptions.ObjectLostError("0" * 56, None, ""),
        raised_by_a_worker(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1")),
        raised_by_a_worker(torch.distributed.DistBackendError("NCCL error in: x, remote process exited")),
        raised_by_a_worker(RuntimeError("CUDA error: uncorrectable ECC error encountered")),
    ],
)
def test_what_died_or_lost_its_peers_is_started_again(error):
    assert is_restartable(error)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([]),
        TrainingStoppedError("3 steps in a row without an update"),
        FloatingPointError("weights are lost"),
        ValueError("data.train_batch_size"),
        KeyboardInterrupt(),
        raised_by_a_worker(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
        raised_by_a_worker(LookupError("Connection reset by peer")),
        RayUnavailableError("nothing answers"),
    ],
)
def test_what_would_happen_again_is_not(error):
    assert not is_restartable(error, is_retry=False)


def test_a_cluster_that_is_not_there_yet_is_waited_for_once_a_run_ran():
    assert is_restartable(RayUnavailableError("nothing answers"), is_retry=True)


def test_a_place_is_step_phase_and_role():
    error = WorkerDiedError("worker process died", *WHERE)
    assert failure_location(error) == "while starting, in update_actor, role actor"
    error.phase, error.step = "update_actor", 14
    assert failure_location(error) == "update_actor of step 14, role actor"
    assert failure_location(RayLostError("gone")) is None


def test_a_controller_that_dies_twice_while_it_starts_died_at_no_known_place():
    error = WorkerDiedError("the controller's process died", "TaskRunner", 0, "of the controller", "run")
    assert failure_location(error) is None
    error.phase, error.step = "gen", 3
    assert failure_location(error) == "gen of step 3, role TaskRunner"
