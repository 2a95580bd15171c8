"""Time until a hanging run reports its diagnosis: a rank stopped in generation, update and weight sync, and a reward
function in a deadlock.

Real runs of `main_ppo` on Ray, two ranks on CPU, a tiny model. A trainer subclass stops the rank (SIGSTOP) during
the phase; measured are the seconds until the run's output contains the diagnosis, and until the run ends after
`trainer.hang_timeout`. In addition: the cost of hang detection per step of a healthy run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _report import report

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.training_harness import make_task, overrides

PHASES = {"gen": "_generate_rows", "update_actor": "_update", "update_weights": "_sync_weights"}
CASES = [*PHASES, "reward", "cost"]
TRAINER = """
import os, signal, threading, time

from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class BenchmarkTrainer(RayPPOTrainer):
    def {method}(self, *args, **kwargs):
        if self.global_steps == 2:
            pid = self.actor_wg.processes[1].pid

            def stop():
                os.kill(pid, signal.SIGSTOP)
                print(f"STOPPED {{time.time()}} pid {{pid}}", flush=True)

            threading.Timer({after}, stop).start() if {after} else stop()
        return super().{method}(*args, **kwargs)
"""
STEPPING = """
import os

from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class BenchmarkTrainer(RayPPOTrainer):
    def _compute_reward(self, *args, **kwargs):
        os.environ["STEP"] = str(self.global_steps)
        return super()._compute_reward(*args, **kwargs)
"""
DETECTOR = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class BenchmarkTrainer(RayPPOTrainer):
    def _step(self, batch):
        ended = super()._step(batch)
        detector_ms = self.hang_detector.seconds * 1e3 / self.global_steps
        print(f"DETECTOR {detector_ms} ms in {self.phases.seconds['step']} s", flush=True)
        return ended
"""
REWARD = """
import os, threading, time

lock = threading.Lock()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ.get("STEP") == "2":
        lock.acquire()
        print(f"STOPPED {time.time()} pid 0", flush=True)
        lock.acquire()
    return float(len(solution_str) % 3)
"""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run; a `trainer.py` in the folder may cause a hang in the second step."""
    command = [
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainer.max_restarts=0",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=64",
        "data.val_files=[]",
        *more,
    ]
    if (folder / "trainer.py").exists():
        command.append(f"trainer.cls_path={folder / 'trainer.py'}:BenchmarkTrainer")
    run = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(make_task(folder), folder, *command)]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def hang(folder: Path, name: str, timeout: float, limit: float) -> dict[str, Any]:
    """Run one case; return its diagnosis and times."""
    folder.mkdir()
    more = [f"trainer.hang_timeout={timeout}"]
    if name in PHASES:
        after = 0 if name == "update_weights" else 0.2
        (folder / "trainer.py").write_text(TRAINER.format(method=PHASES[name], after=after))
        pattern = re.compile(r"(\w+ of step \d+ waits for .*is stopped.*)")
    else:
        reward = folder / "deadlock.py"
        reward.write_text(REWARD)
        (folder / "trainer.py").write_text(STEPPING)
        more += ["reward_model.reward_kwargs.num_processes=0", f"custom_reward_function.path={reward}"]
        pattern = re.compile(r"(\w+ of step \d+ (?:waits|hangs) for .*compute_score.*)")
    return {"hang": name, "hang_timeout s": timeout, **follow(start(folder, *more), pattern, limit)}


def follow(process: subprocess.Popen[str], pattern: re.Pattern[str], limit: float) -> dict[str, Any]:
    """Seconds from the stop to the line with the diagnosis, and to the end of the run."""
    stopped, reported, diagnosis, lines = None, None, None, []
    for line in output_of(process, limit):
        lines.append(line)
        if (stop := re.search(r"STOPPED ([\d.]+)", line)) is not None:
            stopped = float(stop[1])
        if reported is None and (match := pattern.search(line)) is not None:
            reported, diagnosis = time.time(), match[1]
    if stopped is None or reported is None:
        sys.stderr.write("".join(lines[-60:]))
        return {"exit code": process.wait(), "diagnosis": "NOT REPORTED"}
    seconds = {"reported after s": round(reported - stopped, 1), "ended after s": round(time.time() - stopped, 1)}
    return {**seconds, "exit code": process.wait(), "diagnosis": diagnosis}


def cost(folder: Path, limit: float) -> dict[str, Any]:
    """CPU time of the hang detector per step, in a healthy run with long phases."""
    folder.mkdir()
    (folder / "trainer.py").write_text(DETECTOR)
    process = start(folder, "data.max_response_length=384", "actor_rollout_ref.rollout.ignore_eos=True")
    matches = [
        match for line in output_of(process, limit) if (match := re.search(r"DETECTOR ([\d.]+) ms in ([\d.]+)", line))
    ]
    rate = {"hang detection, ms per step": float(matches[-1][1]), "step s": float(matches[-1][2])} if matches else {}
    return {"ranks": 2, **rate, "exit code": process.wait()}


def output_of(process: subprocess.Popen[str], limit: float) -> Iterator[str]:
    """Yield the output lines of the process; kill it after `limit` seconds."""
    timer = threading.Timer(limit, process.kill)
    timer.start()
    assert process.stdout is not None
    yield from process.stdout
    timer.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--timeout", type=float, default=20.0, help="trainer.hang_timeout")
    parser.add_argument("--limit", type=float, default=400.0, help="maximum seconds of a run")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in options.only if name != "cost"]
        rows = [hang(Path(folder) / name, name, options.timeout, options.limit) for name in names]
        costs = [cost(Path(folder) / "cost", options.limit)] if "cost" in options.only else []
    for title, table in {
        "Hangs: seconds from the stop to the diagnosis": rows,
        "Cost of hang detection": costs,
    }.items():
        if table:
            report(title, table, options.json)


if __name__ == "__main__":
    main()
