"""Generation time of a training step by mode: `rollout.mode` sync, `trainer.mode` async and agents, on one device.

    python benchmarks/rollout_modes.py --json FILE
    python benchmarks/rollout_modes.py --trees old=../old_tree new=. --modes sync async --json FILE
    python benchmarks/rollout_modes.py --modes sync agent --more actor_rollout_ref.rollout.agent.num_workers=8
    python benchmarks/rollout_modes.py --tiny              # small model, two rounds: tests the script

1,024 responses of equal length (128 prompts × 8, 104 prompt and 288 response tokens, `ignore_eos`), the shape of
Qwen2.5-0.5B with random weights, native engine. Every pair of source tree and mode is a `main_ppo` program on Ray with
the ordinary trainer; all of them stay loaded on the device and execute their steps in turn, A B C, B C A, …
(`InterleavedRuns`): clock and temperature drift affects all runs equally, and only one run computes at a time. By
default no weights are updated (`trainer.critic_warmup`, old log-probs from the rollout): `--update` trains as well.
Without `--trees`, the package on PYTHONPATH is measured.

`gen` is the logged `timing_s/gen`: from the request to the complete batch of responses on the controller. Asynchronous
runs use `max_staleness=0`: no prompt is sent before the weights of the step are synchronised, so nothing overlaps and
`timing_s/gen` contains the whole generation: the wait for the responses, their assembly into a batch, and sampling the
prompts, which a synchronous run does before its step. `update_weights`, which includes waking the engines, is a
separate column that shows time moved between the phases. The limit is a lower bound for this device: every prompt
computed once at the rate of a large matrix product; then, for each response token, weights read or multiplied and KV
read at the bandwidth of a large copy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from _generation import HardwareLimits
from _ours_step import ACTOR, ROLLOUT, base, command
from _report import report
from _shapes import SHAPES
from _training_work import Work

import verl
from verl.utils.process_tree import kill_tree

HERE = Path(__file__).resolve().parent
TRAINERS = HERE / "_gated_trainers.py"
_SYNC = ["trainer.mode=sync", f"trainer.cls_path={TRAINERS}:GatedSyncTrainer"]
_ASYNC = ["trainer.mode=async", "trainer.max_staleness=0", f"trainer.cls_path={TRAINERS}:GatedAsyncTrainer"]
_AGENT = [f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.default_agent_loop={HERE / '_agent_loops.py'}:OneTurn"]
MODES: dict[str, list[str]] = {
    "sync": [*_SYNC, f"{ROLLOUT}.mode=sync"],
    "async": [*_ASYNC, f"{ROLLOUT}.mode=async"],
    "agent": [*_SYNC, *_AGENT],
    "async agent": [*_ASYNC, *_AGENT],
}
# Skips log-prob passes and updates: they take most of a step and are not measured.
_NO_UPDATE = [
    "trainer.critic_warmup=1000000",
    "algorithm.rollout_correction.bypass_mode=True",
    f"{ACTOR}.old_log_prob_from_update=False",
]
_PHASES = ("gen", "update_weights", "reward")


def work_of(shape: str, steps: int, tiny: bool) -> Work:
    prompts, n, prompt, response = (4, 4, 32, 16) if tiny else (128, 8, 104, 288)
    return Work("modes", shape, prompts, n, prompt, response, response, steps)


def overrides(mode: str, work: Work, update: bool, budget: int) -> list[str]:
    """The overrides of a run of this mode, on top of those of `_ours_step.command`."""
    common = [
        *base(work, budget, checkpointing=False, compiled=False),
        *([] if update else _NO_UPDATE),
        f"{ROLLOUT}.max_num_seqs={work.samples}",
        "trainer.max_restarts=0",
        "trainer.hang_timeout=3600",  # a run waits for the steps of the others
        "external_libs=[]",
    ]
    return [*common, *MODES[mode]]


def read_steps(metrics: Path) -> list[dict[str, float]]:
    """The logged metrics of every step of a run."""
    records = [json.loads(line)["data"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return [data for data in records if "timing_s/gen" in data]


def summarize(
    steps: Mapping[tuple[str, str], Sequence[Mapping[str, float]]], work: Work, limit_s: float
) -> list[dict[str, Any]]:
    """One row per (tree, mode), from the metrics of its measured steps; ratios are medians over pairs of steps of the
    same round."""
    seconds = {key: np.array([step["timing_s/gen"] for step in run_steps]) for key, run_steps in steps.items()}
    first_tree = next(iter(steps))[0]
    several = len({tree for tree, _ in steps}) > 1
    rows: list[dict[str, Any]] = []
    for (tree, mode), gen in seconds.items():
        low, median, high = np.percentile(gen, [10, 50, 90])
        tokens = work.samples * float(np.mean([step["response_length/mean"] for step in steps[tree, mode]]))
        row: dict[str, Any] = {"tree": tree, "mode": mode, "gen s": float(median), "p10 s": float(low)}
        row |= {"p90 s": float(high), "tokens/s": tokens / float(median)}
        row["× sync"] = _paired_ratio(gen, seconds.get((tree, "sync")))
        if several:
            row[f"× {first_tree}"] = _paired_ratio(gen, seconds.get((first_tree, mode)))
        row |= {"limit s": limit_s, "× limit": float(median) / limit_s}
        for phase in _PHASES[1:]:
            row[f"{phase} s"] = float(np.median([step.get(f"timing_s/{phase}", 0.0) for step in steps[tree, mode]]))
        rows.append({**row, "tokens": int(tokens), "steps": len(gen)})
    return rows


def _paired_ratio(seconds: np.ndarray, reference: np.ndarray | None) -> float | None:
    return None if reference is None else float(np.median(seconds / reference))


def violations(steps: Mapping[tuple[str, str], Sequence[Mapping[str, float]]], work: Work) -> list[str]:
    """Reasons why the figures are incomparable: wrong response lengths, or generation outside of the phase `gen`."""
    problems = []
    for (tree, mode), run_steps in steps.items():
        if any(step[f"response_length/{name}"] != work.mean for step in run_steps for name in ("min", "max")):
            problems.append(f"{tree} {mode}: not every response has {work.mean} tokens.")
        ahead = ("async/in_flight", "async/queue_depth") if "async" in mode else ()
        if any(step[name] for step in run_steps for name in ahead):
            problems.append(f"{tree} {mode}: responses of the next step were requested before it began.")
    return problems


def generation_limit(work: Work) -> float:
    """Lower bound for the seconds of the generation of one step on this device."""
    limits = HardwareLimits(work.model_config(), "cuda" if torch.cuda.is_available() else "cpu")
    prefill = limits.matmul_ms(work.prompts * work.prompt_length)
    decode = work.mean * limits.lower_bound_ms(work.samples, work.prompt_length + work.mean / 2)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return (prefill + decode) / 1e3


def measure(options: argparse.Namespace, work: Work, folder: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    """The metrics of every measured step, by (tree, mode)."""
    deadline = time.monotonic() + options.limit
    runs, files = [], {}
    for tree, path in options.trees.items():
        for mode in options.modes:
            name = f"{tree}-{mode}".replace(" ", "-")
            run_overrides = [*overrides(mode, work, options.update, options.budget), *options.more]
            runs.append(Run(name, command(work, folder, name, run_overrides), environment_for(path), folder))
            files[tree, mode] = folder / "runs" / "training_step" / name / "metrics.jsonl"
            files[tree, mode].unlink(missing_ok=True)
    with InterleavedRuns(runs, options.limit, options.limit) as interleaved:
        rounds = interleaved.interleave(options.warm + options.steps, deadline)
        if rounds == options.warm + options.steps:
            for failure in interleaved.finish():
                print(failure, file=sys.stderr, flush=True)
    steps = {key: read_steps(path)[options.warm : rounds] for key, path in files.items()}
    if not all(steps.values()):
        raise SystemExit(f"no step was measured within {options.limit:.0f} s (--limit); logs are in {folder}.")
    return steps


def trees_of(arguments: Sequence[str]) -> dict[str, Path]:
    """`NAME=PATH` arguments; without any, the tree of the imported package."""
    named = dict(tree.split("=", 1) for tree in arguments) or {"this": str(Path(verl.__file__).parents[1])}
    trees = {name: Path(path).resolve() for name, path in named.items()}
    for name, path in trees.items():
        if not (path / "verl" / "__init__.py").is_file():
            raise SystemExit(f"--trees {name}={path}: the folder has no package verl.")
    return trees


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--modes", nargs="+", choices=list(MODES), default=["sync", "async", "agent"])
    add("--trees", nargs="+", default=[], metavar="NAME=PATH", help="source trees to compare")
    add("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    add("--steps", type=int, help="measured steps of every run; default 30 (--tiny: 2)")
    add("--warm", type=int, default=3, help="warm-up steps, not counted")
    add("--tiny", action="store_true", help="a tiny model and 16 short responses")
    add("--update", action="store_true", help="update the weights in every step")
    add("--budget", type=int, default=16384, help="tokens of a micro-batch, with --update")
    add("--limit", type=float, default=540.0, help="seconds after which no further round of steps starts")
    add("--folder", type=Path, help="keeps models and logs; default: a temporary one")
    add("--more", nargs="+", default=[], help="overrides for every run")
    add("--json", help="append the table to this file")
    return parser


def main() -> None:
    options = _parser().parse_args()
    options.trees = trees_of(options.trees)
    options.steps = options.steps or (2 if options.tiny else 30)
    work = work_of("tiny" if options.tiny else options.shape, options.warm + options.steps + 1, options.tiny)
    with tempfile.TemporaryDirectory() as scratch:
        folder = work.write((options.folder or Path(scratch)).resolve())
        limit_s = generation_limit(work)
        steps = measure(options, work, folder)
    report(f"generation of a step by mode: {work.title()}", summarize(steps, work, limit_s), options.json)
    if problems := violations(steps, work):
        sys.exit("\n".join(problems))


_ACCEPT_TIMEOUT_S = 0.5
_EXIT_TIMEOUT_S = 60.0
_LOG_TAIL = 4000


@dataclass
class Run:
    """One program, which calls `StepGate.wait` before every step, and its connection."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    stream: TextIO | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"

    def start(self, address: Path) -> None:
        environment = {**self.environment, "STEP_GATE": str(address), "STEP_GATE_NAME": self.name}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def failure(self, reason: str) -> RuntimeError:
        """An error with the end of the run's log."""
        return RuntimeError(f"{self.name}: {reason}\n{self.log.read_text(errors='replace')[-_LOG_TAIL:]}")


class InterleavedRuns:
    """Context manager: starts all runs, and kills those that are still alive at the end."""

    def __init__(self, runs: Sequence[Run], start_timeout: float, step_timeout: float) -> None:
        self._runs = {run.name: run for run in runs}
        self._start_timeout, self._step_timeout = start_timeout, step_timeout

    def __enter__(self) -> InterleavedRuns:
        # Addresses of Unix sockets are limited to about 100 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="gate")
        address = Path(self._scratch.name) / "socket"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(len(self._runs))
        self._listener.settimeout(_ACCEPT_TIMEOUT_S)
        try:
            for run in self._runs.values():
                run.start(address)
            self._accept_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for run in self._runs.values():
            if run.process is not None and run.process.poll() is None:
                kill_tree(run.process.pid)
                run.process.wait()
        self._listener.close()
        self._scratch.cleanup()

    def _accept_all(self) -> None:
        """Wait until every run is ready for its first step."""
        deadline = time.monotonic() + self._start_timeout
        while missing := [run for run in self._runs.values() if run.stream is None]:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                for run in missing:
                    assert run.process is not None
                    if run.process.poll() is not None:
                        raise run.failure(f"exited with code {run.process.returncode} before its first step") from None
                    if time.monotonic() > deadline:
                        raise run.failure(f"not ready after {self._start_timeout:.0f} s") from None
                continue
            connection.settimeout(self._step_timeout)
            stream = connection.makefile("rw", encoding="utf-8")
            if name := stream.readline().strip():  # empty: the run has ended, which the loop detects above
                self._runs[name].stream = stream

    def interleave(self, rounds: int, deadline: float) -> int:
        """Let every run execute `rounds` steps in turn; return the completed rounds. No round starts after `deadline`
        (`time.monotonic()`). The first run of a round changes from round to round."""
        runs = list(self._runs.values())
        for completed in range(rounds):
            if time.monotonic() > deadline:
                return completed
            first = completed % len(runs)
            for run in (*runs[first:], *runs[:first]):
                self._step(run)
        return rounds

    def _step(self, run: Run) -> None:
        """Release one run, and return when it waits for its next step."""
        assert run.stream is not None
        try:
            self._release(run)
            message = run.stream.readline()
        except TimeoutError:
            raise run.failure(f"a step took more than {self._step_timeout:.0f} s") from None
        except ConnectionError:
            message = ""
        if not message:
            raise run.failure("ended before its last step")

    def _release(self, run: Run) -> None:
        assert run.stream is not None
        run.stream.write("go\n")
        run.stream.flush()

    def finish(self) -> list[RuntimeError]:
        """Release the last step of every run, all at the same time, and wait for their exit; return the failures."""
        failures = []
        for run in self._runs.values():
            with suppress(ConnectionError):  # the run has ended: its exit code is checked below
                self._release(run)
        for run in self._runs.values():
            assert run.process is not None
            try:
                if code := run.process.wait(_EXIT_TIMEOUT_S):
                    failures.append(run.failure(f"exited with code {code} after the measurement"))
            except subprocess.TimeoutExpired:
                failures.append(run.failure(f"still running {_EXIT_TIMEOUT_S:.0f} s after its last step was allowed"))
        return failures


def environment_for(tree: Path) -> dict[str, str]:
    """The environment of a run that imports `verl` from `tree` and the files of this folder."""
    inherited = [path] if (path := os.environ.get("PYTHONPATH")) else []
    path = os.pathsep.join([str(tree), str(Path(__file__).parent), *inherited])
    variables = {"PYTHONPATH": path, "STEP_GATE_TREE": str(tree.resolve()), "HF_HUB_OFFLINE": "1"}
    return {"RAY_ADDRESS": "local", **os.environ, **variables}


if __name__ == "__main__":
    main()
