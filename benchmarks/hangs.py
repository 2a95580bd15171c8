"""How soon a run that hangs says who waits for whom: one rank stopped in generation, update and hand-over of weights,
and a reward function that waits for itself.

Real runs of `main_ppo` on Ray, two ranks on CPU, a tiny model. A trainer of ours stops the rank (SIGSTOP) in the middle
of the phase; the clock runs from there to the line in the run's own output that names it, and to the run's end after
`trainer.hang_timeout`. Then what watching costs a step of a run in which nothing is wrong.
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


class Stopping(RayPPOTrainer):
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


class Stopping(RayPPOTrainer):
    def _compute_reward(self, *args, **kwargs):
        os.environ["STEP"] = str(self.global_steps)
        return super()._compute_reward(*args, **kwargs)
"""
WATCHED = """
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class Stopping(RayPPOTrainer):
    def _step(self, batch):
        ended = super()._step(batch)
        watched = self.hang_detector.seconds * 1e3 / self.global_steps
        print(f"WATCHED {watched} ms in {self.phases.seconds['step']} s", flush=True)
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
    """A run in which, by the files of the folder, something may go wrong in its second step."""
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
        command.append(f"trainer.cls_path={folder / 'trainer.py'}:Stopping")
    run = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(make_task(folder), folder, *command)]
    return subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def hang(folder: Path, name: str, timeout: float, limit: float) -> dict[str, Any]:
    """One run: what it said of the hang, and when."""
    folder.mkdir()
    more = [f"trainer.hang_timeout={timeout}"]
    if name in PHASES:
        after = 0 if name == "update_weights" else 0.2
        (folder / "trainer.py").write_text(TRAINER.format(method=PHASES[name], after=after))
        said = re.compile(r"(\w+ of step \d+ waits for .*is stopped.*)")
    else:
        reward = folder / "deadlock.py"
        reward.write_text(REWARD)
        (folder / "trainer.py").write_text(STEPPING)
        more += ["reward_model.reward_kwargs.num_processes=0", f"custom_reward_function.path={reward}"]
        said = re.compile(r"(\w+ of step \d+ (?:waits|hangs) for .*compute_score.*)")
    return {"hang": name, "hang_timeout s": timeout, **follow(start(folder, *more), said, limit)}


def follow(process: subprocess.Popen[str], said: re.Pattern[str], limit: float) -> dict[str, Any]:
    """From the moment of the stop to the line that names it, and to the end."""
    stopped, named, sentence, lines = None, None, None, []
    for line in output_of(process, limit):
        lines.append(line)
        if (found := re.search(r"STOPPED ([\d.]+)", line)) is not None:
            stopped = float(found[1])
        if named is None and (match := said.search(line)) is not None:
            named, sentence = time.time(), match[1]
    if stopped is None or named is None:
        sys.stderr.write("".join(lines[-60:]))
        return {"exit code": process.wait(), "sentence": "NOT NAMED"}
    since = {"named after s": round(named - stopped, 1), "ended after s": round(time.time() - stopped, 1)}
    return {**since, "exit code": process.wait(), "sentence": sentence}


def cost(folder: Path, limit: float) -> dict[str, Any]:
    """Processor time of the thread that watches, in a run of long phases in which nothing is wrong."""
    folder.mkdir()
    (folder / "trainer.py").write_text(WATCHED)
    process = start(folder, "data.max_response_length=384", "actor_rollout_ref.rollout.ignore_eos=True")
    told = [
        found for line in output_of(process, limit) if (found := re.search(r"WATCHED ([\d.]+) ms in ([\d.]+)", line))
    ]
    rate = {"watching, ms per step": float(told[-1][1]), "step s": float(told[-1][2])} if told else {}
    return {"ranks": 2, **rate, "exit code": process.wait()}


def output_of(process: subprocess.Popen[str], limit: float) -> Iterator[str]:
    """Its lines as they come; after the limit it is killed."""
    over = threading.Timer(limit, process.kill)
    over.start()
    assert process.stdout is not None
    yield from process.stdout
    over.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--timeout", type=float, default=20.0, help="trainer.hang_timeout")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds a run may take")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        names = [name for name in options.only if name != "cost"]
        rows = [hang(Path(folder) / name, name, options.timeout, options.limit) for name in names]
        costs = [cost(Path(folder) / "cost", options.limit)] if "cost" in options.only else []
    for title, found in {"Hangs: seconds from the stop to the sentence": rows, "What watching costs": costs}.items():
        if found:
            report(title, found, options.json)


if __name__ == "__main__":
    main()
