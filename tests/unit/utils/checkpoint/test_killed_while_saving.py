"""SIGKILL at any moment of a save leaves the old state or the new one, whole."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, resolve_resume

REPOSITORY = Path(__file__).parents[4]

SAVE = """
import json, os, shutil, signal, sys
from pathlib import Path
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager

def save(root, step, content, max_to_keep=None):
    manager = CheckpointManager(root, max_to_keep)
    folder = manager.begin(step)
    (folder / "actor").mkdir()
    for shard in range(2):
        (folder / "actor" / f"shard_{shard}").write_bytes(content)
    if isinstance(max_to_keep, dict):
        (folder / "critic").mkdir()
        (folder / "critic" / "shard_0").write_bytes(content)
    manager.commit(step)
"""

# The audit hook sees every open, mkdir, rename, unlink and rmdir before it happens: the child dies at the nth.
KILLED_AT_EVERY_OPERATION = """
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}
counted = 0

def die_at(number):
    def hook(event, arguments):
        global counted
        if event in OPERATIONS:
            counted += 1
            if counted == number:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

before, limits = Path(sys.argv[1]) / "before", json.loads(sys.argv[3])
for step in json.loads(sys.argv[2]):
    save(before, step, b"old", limits if isinstance(limits, dict) else None)
for number in range(1, 1000):
    root = Path(shutil.copytree(before, before.with_name(str(number))))
    child = os.fork()
    if child == 0:
        die_at(number)
        save(root, 2, b"new", limits)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(number)
        break
"""


def newest(root: Path) -> str:
    """What the newest step holds; everything that can be wrong with the folder fails here."""
    manager = CheckpointManager(root)
    path = resolve_resume("auto", root)
    assert manager.verify(path) == []
    assert manager.verify(root / (root / "latest").read_text()) == []
    problems = [problem for step in root.glob("global_step_*") for problem in manager.verify(step)]
    assert all(problem.startswith("critic: deleted, ") for problem in problems), problems
    assert [name for name in root.glob(".*") if name.name != ".lock"] == []
    return (path / "actor" / "shard_0").read_text()


PARTS = {"actor": 2, "critic": 1}


@pytest.mark.parametrize(("before", "max_to_keep"), [([1], 1), ([2], None), ([1, 2], 1), ([1], PARTS)])
def test_killed_before_every_single_file_operation(tmp_path, before, max_to_keep):
    command = [sys.executable, "-c", SAVE + KILLED_AT_EVERY_OPERATION, str(tmp_path), json.dumps(before)]
    result = subprocess.run(
        [*command, json.dumps(max_to_keep)], cwd=REPOSITORY, check=True, capture_output=True, text=True
    )
    survived = int(result.stdout)
    states = [newest(tmp_path / str(number)) for number in range(1, survived + 1)]
    assert survived > 15
    assert set(states) == {"old", "new"}
    assert states == sorted(states, reverse=True), "once the new step is there it stays"


SAVES_FOR_EVER = """
root, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    step += 1
    save(root, step, str(step).encode() * 200_000, max_to_keep=2)
    print(step, flush=True)
"""


def test_killed_at_random_moments_the_run_goes_on_from_the_last_step_it_saw(tmp_path):
    moments = random.Random(7)
    step = 0
    for _ in range(12):
        command = [sys.executable, "-c", SAVE + SAVES_FOR_EVER, str(tmp_path), str(step)]
        saver = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        told = int(saver.stdout.readline())
        time.sleep(moments.uniform(0, 0.05))
        saver.kill()
        rest = saver.communicate()[0].split()
        assert saver.returncode == -signal.SIGKILL
        told = int(rest[-1]) if rest else told
        path = resolve_resume("auto", tmp_path)
        assert CheckpointManager.verify(path) == []
        step = int(path.name.removeprefix("global_step_"))
        assert told <= step <= told + 1
        assert (path / "actor" / "shard_1").read_text() == str(step) * 200_000
