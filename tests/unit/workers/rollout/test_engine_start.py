"""The start of an engine is reported with its step while it lasts, and hang diagnosis names it."""

from __future__ import annotations

import logging
import threading

import pytest

from verl.single_controller.base.heartbeat import ComputeTracker, Heartbeat, RankReport
from verl.trainer.common.run_status import RunStatus
from verl.trainer.recovery.hang_detector import HangDetector
from verl.trainer.recovery.hang_diagnosis import diagnose_hang
from verl.utils.progress import Activity, activity, current_activity, pulse_count
from verl.utils.stacks import Frame
from verl.workers.rollout.placement import engine_start, start_step

VLLM = "/bundle/vllm/v1"
INSIDE = Frame("/bundle/torch/nn/modules/module.py", 9, "_call_impl")


@pytest.mark.parametrize(
    ("functions", "step"),
    [
        (["load_weights", "load_model", "_init_executor"], "loading weights"),
        (["_dummy_run", "profile_run", "determine_available_memory"], "profiling memory"),
        (["_dummy_run", "capture_model", "compile_or_warm_up_model"], "capturing CUDA graphs"),
        (["_dummy_run", "compile_or_warm_up_model"], "warming up"),
        (["exec_module", "_find_and_load", "<module>", "__init__"], "importing packages"),
        (["__init__", "from_engine_args"], None),
    ],
)
def test_the_innermost_known_function_is_the_step(functions, step):
    assert start_step((INSIDE, *(Frame(f"{VLLM}/x.py", 1, name) for name in functions))) == step


def test_the_compiler_is_the_step_wherever_it_is_called():
    compiler = Frame("/v/torch/_inductor/compile_fx.py", 5, "compile_fx")
    assert start_step((compiler, Frame(f"{VLLM}/x.py", 1, "profile_run"))) == "compiling the model"
    imported = (compiler._replace(function="<module>"), Frame("<frozen importlib>", 1, "_find_and_load"))
    assert start_step(imported) == "importing packages"


def load_model(inside: threading.Event, over: threading.Event) -> None:
    inside.set()
    over.wait(60)


def test_a_rank_whose_engine_starts_says_so_and_is_not_blamed_for_other_threads():
    tracker, inside, over = ComputeTracker(), threading.Event(), threading.Event()

    def start() -> None:
        with tracker.running("init_model", lambda: 0), engine_start("vllm"):
            load_model(inside, over)

    thread = threading.Thread(target=start)
    thread.start()
    inside.wait(30)
    beat = tracker.heartbeat(all_threads=True)
    over.set()
    thread.join()
    assert beat.activity.label == "starting the vllm engine: loading weights"
    diagnosis = diagnose_hang([RankReport("actor_rollout", 0, "node-0", 4710, "runs", beat)])
    assert diagnosis.kind == "starting"
    assert diagnosis.sentence.startswith(
        "rank 0 of actor_rollout (host node-0, pid 4710) is starting the vllm engine: loading weights ("
    )
    assert current_activity() is None


def test_a_new_step_is_progress_and_the_last_known_one_stays():
    steps = iter(["loading weights", "loading weights", None, "warming up"])
    with activity("starting the vllm engine", lambda: next(steps)):
        before = pulse_count()
        seen = [(current_activity().step, pulse_count() - before) for _ in range(4)]
    assert seen == [("loading weights", 1), ("loading weights", 1), ("loading weights", 1), ("warming up", 2)]


def test_the_watch_logs_a_start_every_ten_seconds_and_shows_it_in_the_status(caplog):
    status = RunStatus(10)
    watch = HangDetector(status, None)
    with caplog.at_level(logging.INFO):
        for seconds in (0.0, 4.0, 9.0, 11.0, 14.0, 22.0):
            beat = Heartbeat("init_model", activity=Activity("starting the vllm engine", "loading weights", seconds))
            watch.log_activity([RankReport("actor_rollout", n, "h", 7, "runs", beat) for n in (0, 1)], seconds)
    lines = [record.message for record in caplog.records]
    said = "rank 0 of actor_rollout (and 1 more) is starting the vllm engine: loading weights"
    assert lines == [f"{said} ({seconds} s)" for seconds in (0, 11, 22)]
    assert status.snapshot().label == "starting the vllm engine: loading weights"
    watch.log_activity([RankReport("actor_rollout", 0, "h", 7, "runs", Heartbeat())], 30.0)
    assert status.snapshot().label == ""
