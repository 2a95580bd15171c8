"""Every exception class of the package can be pickled: Ray and scorer processes send them."""

from __future__ import annotations

import builtins
import functools
import importlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


CLASS = re.compile(r"^ *class (\w+)\(([^)]*)\)", re.MULTILINE)


@functools.cache
def exception_classes() -> list[str]:
    """`module:Class` of all subclasses of an exception, determined from the source without importing it."""
    bases = {
        f"{path.relative_to(ROOT).with_suffix('').as_posix().replace('/', '.')}:{name}": {
            base.strip().rpartition(".")[2] for base in parents.split(",")
        }
        for path in sorted((ROOT / "verl").rglob("*.py"))
        for name, parents in CLASS.findall(path.read_text())
    }
    known = {
        name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    while found := {place.partition(":")[2] for place, names in bases.items() if names & known} - known:
        known |= found
    return [place for place in bases if place.partition(":")[2] in known]


def made(place: str) -> BaseException:
    """One of a class: of a message, or as below where its constructor takes something else."""
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    return MADE_OF[name](kind) if name in MADE_OF else kind("something went wrong")


def _problems(kind: type) -> BaseException:
    from verl.config.problems import Problem

    return kind([Problem("data.train_files", "x", "is missing", "Set it", ("trainer.nnodes",))])


def _call_error(kind: type) -> BaseException:
    from verl.single_controller.base.worker_group import Failure

    where = ("node-3 pid 17", "update_actor")
    other = kind(Failure.from_exception(ConnectionError("closed by a peer")), "actor", 2, *where)
    return kind(Failure.from_exception(KeyError("no such column")), "actor", 1, *where, [other])


MADE_OF: dict[str, Callable[[type], BaseException]] = {
    "ConfigError": _problems,
    "DataError": lambda kind: kind(["row 3 has no prompt", "row 5 has no answer"]),
    "DriverError": lambda kind: kind("cuMemAlloc_v2 failed: out of memory", 2),
    "FolderTakenError": lambda kind: kind(Path("/checkpoints"), None),
    "LoraError": lambda kind: kind("lora_path", "it has no adapter_config.json"),
    "HttpError": lambda kind: kind(404, "no such path"),
    "PromptRejected": lambda kind: kind(3, [{"role": "user", "content": "Hi"}], TypeError("roles must alternate")),
    "InvalidValue": lambda kind: kind("is no number", "Set a number"),
    "ApiError": lambda kind: kind("no such model", "model", 404, "model_not_found"),
    "_NotANumberError": lambda kind: kind("rollout.total_rollout_steps", "some"),
    "_Refused": lambda kind: kind(413, "too long"),
    "WorkerError": lambda kind: kind("it failed", "critic", 0, "node-1 pid 5", "update_critic", "in detail"),
    "WorkerDiedError": lambda kind: kind("it died", "critic", 0, "node-1 pid 5", "update_critic", "in detail"),
    "HangError": lambda kind: kind("it hangs", "critic", 0, "node-1 pid 5", "update_critic", "in detail"),
    "WorkerCallError": _call_error,
}


def facts(error: BaseException) -> tuple[object, ...]:
    # Failures and exceptions have no equality of their own that says anything; what they print does.
    state = {name: repr(value) for name, value in vars(error).items()}
    return type(error), str(error), repr(error.args), state, repr(error.__cause__)


@pytest.mark.parametrize("place", exception_classes())
def test_an_exception_arrives_as_it_left(place):
    error = made(place)
    error.phase, error.step = "update_actor", 7  # what the trainer writes on errors on their way
    assert facts(pickle.loads(pickle.dumps(error))) == facts(error)


def test_the_classes_are_found():
    assert {"verl.single_controller.base.worker_group:WorkerDiedError", "verl.config.problems:ConfigError"} <= {
        *exception_classes()
    }
