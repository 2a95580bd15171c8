"""What an engine has started ends with the process that it runs in."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.engines.engines import EngineRow
from verl.utils.process_tree import why_not_running, with_descendants

_PROGRAM = """
import json, sys
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.workers.rollout import get_rollout_class

if __name__ == "__main__":
    path, keys = sys.argv[1], json.loads(sys.argv[2])
    model = as_config(ModelConfig, {"path": path}, "actor_rollout_ref.model")
    engine = get_rollout_class(keys["name"])(path, model, as_config(RolloutConfig, keys))
    print("built", flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_an_engine_whose_process_is_killed(
    engine_name: str, row: EngineRow, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    keys = {"name": engine_name, "max_model_len": 512, **row.keys}
    command = [sys.executable, str(program), str(model_folder("plain")), json.dumps(keys)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "built\n" for line in process.stdout)
        members = with_descendants(process.pid)
        process.kill()
    deadline = time.monotonic() + 20
    while left := [pid for pid in members if why_not_running(pid) not in ("gone", "ended")]:
        assert time.monotonic() < deadline, f"{left} of {members} go on"
        time.sleep(0.1)
