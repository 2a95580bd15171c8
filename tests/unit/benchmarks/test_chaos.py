"""The chaos benchmark sees what it is there to see: half checkpoints, other prompts, other weights, what is left."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from _chaos_run import KINDS, SIGNALS, plan_faults
from _chaos_watch import Checkpoints, PhaseLog, Position, ReferenceRun, by_kind, leftover_processes
from chaos import differing_rollouts, differing_weights

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager


@pytest.fixture
def checkpoints(tmp_path):
    watched = Checkpoints(tmp_path)
    yield watched
    watched.close()


def save(root: Path, step: int, weights: str) -> Path:
    manager = CheckpointManager(root)
    folder = manager.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "0.distcp").write_text(weights)
    return manager.commit(step)


@pytest.mark.parametrize("layout", KINDS)
def test_every_kind_is_killed_and_stopped_before_one_comes_again_and_a_seed_gives_one_plan(layout):
    pairs = len(KINDS[layout]) * len(SIGNALS)
    faults = list(islice(plan_faults(layout, random.Random(3)), pairs))
    assert {(fault.kind, fault.action) for fault in faults} == {
        (kind, action) for kind in KINDS[layout] for action in SIGNALS
    }
    assert faults == list(islice(plan_faults(layout, random.Random(3)), pairs))
    assert faults != list(islice(plan_faults(layout, random.Random(4)), pairs))


def test_a_whole_step_is_the_newest_and_half_a_step_under_a_steps_name_is_noticed(tmp_path, checkpoints):
    save(tmp_path, 2, "two")
    assert (checkpoints.newest(), checkpoints.incomplete) == (2, set())
    half = save(tmp_path, 4, "four")
    (half / "actor" / "0.distcp").write_text("fo")
    (tmp_path / "global_step_6").mkdir()
    assert checkpoints.newest() <= 4
    assert any("global_step_6: manifest.json: missing" in problem for problem in checkpoints.incomplete)
    seen_whole = 4 in checkpoints.saved  # the thread may have looked before it was cut
    assert seen_whole or any(
        "global_step_4: actor/0.distcp: truncated" in problem for problem in checkpoints.incomplete
    )


def test_other_weights_and_a_step_that_was_never_saved_are_noticed(tmp_path):
    runs = []
    for name, contents in {"undisturbed": ("a", "b", "c"), "same": ("a", "b", "c"), "other": ("a", "B")}.items():
        watched = Checkpoints(tmp_path / name)
        for step, weights in enumerate(contents, start=1):
            save(tmp_path / name, step, weights)
        watched.close()
        runs.append(SimpleNamespace(checkpoints=watched))
    _, same, other = runs
    undisturbed = ReferenceRun.of(PhaseLog(tmp_path / "none"), runs[0].checkpoints)
    assert differing_weights(same, undisturbed) == []
    assert differing_weights(other, undisturbed) == ["step 2: actor/0.distcp differ", "step 3 was never saved"]


def test_a_step_done_again_with_other_prompts_is_noticed_though_its_last_time_was_right(tmp_path):
    def noted(name: str, digests: list[tuple[int, str]]) -> SimpleNamespace:
        lines = [json.dumps({"pid": 1, "step": step, "rollout_digest": digest}) for step, digest in digests]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        notes = PhaseLog(tmp_path / name)
        notes.read_new()
        return SimpleNamespace(phase_log=notes)

    plain = noted("undisturbed", [(1, "p"), (2, "q"), (3, "r")])
    undisturbed = ReferenceRun(plain.phase_log.rollout_digests(), {}, {})
    assert differing_rollouts(noted("again", [(1, "p"), (2, "q"), (2, "q"), (3, "r")]), undisturbed) == []
    found = differing_rollouts(noted("wrong", [(1, "p"), (2, "r"), (2, "q")]), undisturbed)
    assert [problem.rpartition(" ")[2] for problem in found] == ["2", "3"]


def test_notes_are_read_line_by_line_and_places_follow_the_order_of_a_step(tmp_path):
    path, notes = tmp_path / "notes.jsonl", PhaseLog(tmp_path / "notes.jsonl")
    assert notes.read_new() == []
    path.write_text('{"pid": 7, "step": 1, "phase": "update", "number": 7}\n{"pid": 7, "st')
    (update,) = notes.read_new()
    with path.open("a") as out:
        out.write(
            'ep": 2, "phase": "weight sync", "number": 2}\n{"pid": 7, "step": 0, "phase": "resume", "number": 1}\n'
        )
    following, resume = notes.read_new()
    assert Position.of(following) > Position.of(update)
    assert Position.of(resume) is None


def test_processes_are_told_apart_by_what_they_run_and_what_is_left_of_them_is_found():
    program = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', input()]); sys.stdin.read()"
    server = b"import time; time.sleep(60)  # verl.utils.process_pool.fork_server\n"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as parent:
        parent.stdin.write(server)
        parent.stdin.flush()
        found, deadline = {}, time.monotonic() + 60
        while "fork server" not in found and time.monotonic() < deadline:
            found = by_kind(parent.pid, None)
        (pid,) = found["fork server"]
        try:
            assert found["driver"] == [parent.pid]
            assert any(line.startswith(f"{pid} ") for line in leftover_processes([]))
            assert not any(line.startswith(f"{pid} ") for line in leftover_processes([parent.pid]))
        finally:
            os.kill(pid, signal.SIGKILL)
