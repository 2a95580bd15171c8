"""How soon a run that hangs says who waits for whom: one rank stopped in generation, update and hand-over of weights,
and a reward function that waits for itself.

Real runs of `main_ppo` on Ray, two ranks on CPU, a tiny model. A trainer of ours stops the rank (SIGSTOP) in the middle
of the phase; the clock runs from there to the line in the run's own output that names it, and to the run's end after
`trainer.hang_timeout`. The last row is what watching costs a step of a run in which nothing is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import report

from tests.support.training_harness import make_task, overrides

PHASES = {"gen": "_generate_rows", "update_actor": "_update", "update_weights": "_hand_over_weights"}
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
REWARD = """
import threading, time

calls, lock = 0, threading.Lock()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    global calls
    calls += 1
    if calls > 40:
        lock.acquire()
        print(f"STOPPED {time.time()} pid 0", flush=True)
        lock.acquire()
    return float(len(solution_str) % 3)
"""


def hang(folder: Path, name: str, timeout: float, limit: float) -> dict[str, Any]:
    """One run: what it said of the hang, and when."""
    folder.mkdir()
    task = make_task(folder)
    more = [
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        f"trainer.hang_timeout={timeout}",
        "trainer.max_restarts=0",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "data.max_response_length=64",
        "data.val_files=[]",
    ]
    if name in PHASES:
        after = 0 if name == "update_weights" else 0.2
        (folder / "stopping.py").write_text(TRAINER.format(method=PHASES[name], after=after))
        more.append(f"trainer.cls_path={folder / 'stopping.py'}:Stopping")
        said = re.compile(r"(\w+ of step \d+ waits for .*is stopped.*)")
    else:
        Path(task["reward"]).write_text(REWARD)
        more += ["reward_model.reward_kwargs.num_processes=0", "reward_model.overlap=False"]
        said = re.compile(r"(\w+ of step \d+ (?:waits|hangs) for .*compute_score.*)")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(task, folder, *more)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {"hang": name, "hang_timeout s": timeout, **follow(process, said, limit)}


def follow(process: subprocess.Popen[str], said: re.Pattern[str], limit: float) -> dict[str, Any]:
    stopped, named, lines, sentence = None, None, [], None
    deadline = time.monotonic() + limit
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if (found := re.search(r"STOPPED ([\d.]+)", line)) is not None:
            stopped = float(found[1])
        if named is None and (match := said.search(line)) is not None:
            named, sentence = time.time(), match[1]
        if time.monotonic() > deadline:
            process.kill()
    code = process.wait()
    if stopped is None or named is None:
        sys.stderr.write("".join(lines[-60:]))
    since = lambda then: None if stopped is None or then is None else round(then - stopped, 1)  # noqa: E731
    return {"named after s": since(named), "ended after s": since(time.time()), "exit code": code, "sentence": sentence}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*PHASES, "reward"], default=[*PHASES, "reward"])
    parser.add_argument("--timeout", type=float, default=20.0, help="trainer.hang_timeout")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds a run may take")
    parser.add_argument("--json", help="append the result to this file")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        rows = [hang(Path(folder) / name, name, options.timeout, options.limit) for name in options.only]
    report("Hangs: seconds from SIGSTOP to the sentence that names the rank", rows, options.json)


if __name__ == "__main__":
    main()
