"""The benchmark of rollout modes: runs take turns, ratios are paired by round, every mode is a valid configuration."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _ours_step import command
from rollout_modes import (
    MODES,
    InterleavedRuns,
    Run,
    environment_for,
    overrides,
    summarize,
    trees_of,
    violations,
    work_of,
)

from verl.config import load_config

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WORK = work_of("tiny", steps=3, tiny=True)
GATED = """
import sys
from _step_gate import StepGate
gate, (name, order, steps) = StepGate(), sys.argv[1:]
for step in range(int(steps)):
    gate.wait()
    with open(order, "a") as out:
        print(name, step, file=out)
"""


def step(seconds: float, **more: float) -> dict[str, float]:
    lengths = {f"response_length/{name}": float(WORK.mean) for name in ("mean", "min", "max")}
    return {"timing_s/gen": seconds, "timing_s/update_weights": 0.5, **lengths, **more}


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_a_valid_configuration(mode: str, update: bool):
    _, _, _, *common = command(WORK, Path("a/b"), "name", [])
    given = [*common, *overrides(mode, WORK, update, budget=256), "trainer.device=cpu"]
    config = load_config(None, given, check_files=False)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.mode == ("sync" if mode == "sync" else "async")
    assert (config.trainer.mode, config.trainer.max_staleness) == (
        ("async", 0) if "async" in mode else ("sync", config.trainer.max_staleness)
    )
    assert config.data.train_batch_size * rollout.n == rollout.max_num_seqs == WORK.samples
    assert (config.trainer.critic_warmup > WORK.steps) != update


def test_ratios_are_medians_over_the_steps_of_the_same_round():
    steps = {
        ("old", "sync"): [step(1.0), step(2.0), step(4.0)],
        ("old", "async"): [step(2.0), step(6.0), step(8.0)],
        ("new", "sync"): [step(1.0), step(1.0), step(8.0)],
    }
    old, streamed, new = summarize(steps, WORK, limit_s=0.5)
    assert (old["gen s"], old["× sync"], old["× old"], old["× limit"]) == (2.0, 1.0, 1.0, 4.0)
    assert (streamed["gen s"], streamed["× sync"]) == (6.0, 2.0)
    assert (new["gen s"], new["× sync"], new["× old"]) == (1.0, 1.0, 1.0)
    assert old["tokens/s"] == WORK.samples * WORK.mean / 2.0
    assert (old["update_weights s"], old["reward s"], old["steps"]) == (0.5, 0.0, 3)
    assert "× old" not in summarize({("old", "async"): [step(1.0)]}, WORK, 1.0)[0]


def test_figures_that_cannot_be_compared_are_reported():
    nothing_ahead = {"async/in_flight": 0.0, "async/queue_depth": 0.0}
    good = {("this", "sync"): [step(1.0)], ("this", "async"): [step(1.0, **nothing_ahead)]}
    assert violations(good, WORK) == []
    shorter = {("this", "agent"): [step(1.0) | {"response_length/min": 3.0}]}
    ahead = {("this", "async"): [step(1.0, **{**nothing_ahead, "async/queue_depth": 2.0})]}
    assert [len(violations(steps, WORK)) for steps in (shorter, ahead)] == [1, 1]


def test_trees_are_named_folders_with_the_package(tmp_path: Path):
    root = BENCHMARKS.parent
    assert trees_of([f"old={root}", f"new={root}/tests/.."]) == {"old": root, "new": root}
    assert trees_of([]).keys() == {"this"}
    with pytest.raises(SystemExit, match=r"--trees old=.*\bverl\b"):
        trees_of([f"old={tmp_path}"])


def gated(name: str, folder: Path, steps: int) -> Run:
    arguments = [sys.executable, "-c", GATED, name, str(folder / "order"), str(steps)]
    return Run(name, arguments, environment_for(BENCHMARKS.parent), folder)


@pytest.mark.processes
def test_runs_execute_their_steps_in_turn(tmp_path: Path):
    with InterleavedRuns([gated(name, tmp_path, steps=4) for name in "ab"], 60.0, 60.0) as runs:
        assert runs.interleave(0, deadline=time.monotonic() + 60) == 0
        assert runs.interleave(3, deadline=time.monotonic() - 1) == 0
        assert runs.interleave(3, deadline=time.monotonic() + 60) == 3
        assert (tmp_path / "order").read_text().split("\n")[:-1] == ["a 0", "b 0", "b 1", "a 1", "a 2", "b 2"]
        assert runs.finish() == []
    assert sorted((tmp_path / "order").read_text().split("\n")[-3:-1]) == ["a 3", "b 3"]


@pytest.mark.processes
def test_a_run_that_ends_early_is_an_error_with_its_log(tmp_path: Path):
    broken = Run("b", [sys.executable, "-c", "raise SystemExit('no such model')"], {}, tmp_path)
    waiting = gated("a", tmp_path, steps=2)
    message = r"(?s)^b: .*code 1\b.*first step.*no such model"
    with pytest.raises(RuntimeError, match=message), InterleavedRuns([waiting, broken], 60.0, 60.0):
        pass
    assert waiting.process is not None
    assert waiting.process.poll() is not None


@pytest.mark.processes
def test_a_run_with_too_few_steps_is_an_error(tmp_path: Path):
    runs = InterleavedRuns([gated("a", tmp_path, steps=1)], 60.0, 60.0)
    with runs, pytest.raises(RuntimeError, match=r"^a: .*last step"):
        runs.interleave(1, deadline=time.monotonic() + 60)
