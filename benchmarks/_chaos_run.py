"""A seeded plan of faults, and a training run into which they are injected.

The phase log of the run determines the time of each fault and shows when the run has recovered.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _chaos_watch import STARTING, Checkpoints, PhaseLog, Position, by_kind, command_line, identity, send, state_of

from verl.utils.process_tree import die_with_parent, kill_tree, with_descendants

# "colocated": actor and rollout share their ranks; "separate": the rollout has its own resource pool.
LAYOUTS = {
    "colocated": ["trainer.n_gpus_per_node=2"],
    "separate": [
        "trainer.n_gpus_per_node=1",
        "resource_pool_spec={train: [1], generation: [2]}",
        "role_mapping={actor: train, rollout: generation}",
    ],
}
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# Faults that restart the run. All others may only repeat the work in progress.
RESTARTS = ("rank", "saver", "controller", "driver", "GCS", "raylet", "starting")
KINDS = {
    "colocated": (*RESTARTS, "scorer", "fork server", "other Ray process"),
    "separate": (*RESTARTS, "replica", "replica", "scorer", "fork server", "other Ray process"),
}
# "saver": a process that writes a checkpoint, during the write; "starting": any of these while the run starts.
TARGETS = {"saver": ("rank", "controller"), "starting": ("rank", "controller", "driver", "raylet", "GCS")}
# Phases of a step, named as in `_chaos_trainer`.
_PHASES = (
    "weight sync",
    "generation",
    "reward",
    "old log-probs",
    "advantages",
    "update",
    "save",
    "validation",
)


@dataclass(frozen=True)
class Fault:
    """Signal, target process and time: `steps` steps after the last recovery, at the fraction `share` of a phase."""

    kind: str
    target: str
    action: str
    phase: str
    steps: int
    share: float

    @property
    def restarts(self) -> bool:
        return self.kind in RESTARTS

    @property
    def signal(self) -> signal.Signals:
        return SIGNALS[self.action]


def plan_faults(
    layout: str, rng: random.Random, kinds: Collection[str] = (), signals: Collection[str] = tuple(SIGNALS)
) -> Iterator[Fault]:
    """Yield faults for runs of a layout, without end; every kind occurs once before any is repeated."""
    pairs = [(kind, action) for kind in KINDS[layout] if not kinds or kind in kinds for action in signals]
    while pairs:
        for kind, action in rng.sample(pairs, len(pairs)):
            target = rng.choice(TARGETS.get(kind, (kind,)))
            phase = rng.choice(["start", "resume"]) if kind == "starting" else rng.choice(_PHASES)
            yield Fault(kind, target, action, phase, rng.randrange(3), rng.random())


ROOT = Path(__file__).parents[1]
REWARD = '''
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Slow enough for a scorer to be hit during a call."""
    time.sleep(0.02)
    return sum(c < "P" for c in solution_str) / max(1, len(solution_str))
'''
SAVE_FREQ, TEST_FREQ = 2, 4
_TICK_S = 0.005
# A run that does not restart has survived a fault after this number of steps and _SURVIVAL_S seconds; after
# _UNDETECTED_S seconds if the fault should restart it, because Ray may detect a lost process late.
_SURVIVAL_STEPS = 3
_SURVIVAL_S, _UNDETECTED_S = 6.0, 45.0


@dataclass
class Outcome:
    """Result of a fault. `reaction`: restarted, continued or finished; `violations` is empty if all guarantees hold."""

    fault: Fault
    layout: str
    pid: int
    step: int
    phase: str
    saved: int
    seconds: float = 0.0
    reaction: str = ""
    reached: int = 0
    """The last step started before a restart: a run may continue for some time without the lost process."""
    resumed_at: int | None = None
    repeated_steps: int = 0
    message: str = ""
    violations: str = ""

    def row(self) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "fault"}
        return {"kind": self.fault.kind, "target": self.fault.target, "action": self.fault.action, **fields}


class Run:
    """The training command in `folder`. The benchmark restarts it only after a violation, which is counted."""

    def __init__(
        self, task: dict[str, str], folder: Path, layout: str, steps: int, limit: float, settings: Sequence[str] = ()
    ) -> None:
        self.layout, self.steps, self.limit = layout, steps, limit
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.shared_before = set(os.listdir("/dev/shm"))
        # A short path: Ray's socket names have a length limit.
        self.ray_folder = tempfile.mkdtemp(prefix="c", dir="/tmp")
        (folder / "tmp").mkdir()
        self.phase_log = PhaseLog(folder / "phases.jsonl")
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.command = [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            *_arguments(task, folder, layout, steps),
            *settings,
        ]
        self.newest_at_last_fault = 0
        self.forced_restarts = self.stalls = 0
        self.start()

    # ---------------------------------------------------------------- the process

    def start(self) -> None:
        self._began = time.monotonic()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "RAY_TMPDIR": self.ray_folder,
            "TMPDIR": str(self.folder / "tmp"),
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def force_restart(self) -> None:
        """Kill and restart the run; counted as a violation."""
        self.forced_restarts += 1
        kill_tree(self.process.pid)
        self.process.wait()
        self.start()

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self) -> int | None:
        """The exit status; None if the run does not end within `limit` seconds plus 10 s per step."""
        try:
            return self.process.wait(timeout=self.limit + 10.0 * self.steps)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.phase_log.read_new()

    def close(self) -> None:
        kill_tree(self.process.pid)
        self.process.wait()
        self.checkpoints.close()
        self.phase_log.read_new()

    # ---------------------------------------------------------------- injection

    def inject(self, fault: Fault, usual_seconds: dict[str, float], rng: random.Random) -> Outcome | None:
        """Inject the fault at its time and wait until the run has recovered; None if the run ended before."""
        if not self._wait_for_moment(fault, usual_seconds):
            return None
        pid = rng.choice(self._processes(fault.target))
        last = next(entry for entry in reversed(self.phase_log.all) if "phase" in entry)
        outcome = Outcome(fault, self.layout, pid, last["step"], last["phase"], self.checkpoints.newest())
        alive = {identity(member) for member in with_descendants(self.process.pid)[1:]} - {None}
        log_size, self.newest_at_last_fault = self.log.stat().st_size, outcome.saved
        moment = time.monotonic()
        if not send(pid, fault.signal):
            return self.inject(fault, usual_seconds, rng)
        self._wait_for_recovery(outcome, Position.of(last), moment, usual_seconds["step"])
        if outcome.reaction == "restarted":
            self._check_restart(outcome, alive)
        outcome.message = _fault_message(self.log, log_size)
        return outcome

    def _processes(self, kind: str) -> list[int]:
        """Pids of a kind; waits for them while the run starts."""
        for _ in range(round(self.limit / _TICK_S)):
            pids = by_kind(self.process.pid, self.phase_log.actor_ranks())
            if kind in pids:
                return pids[kind]
            self._tick()
        raise SystemExit(f"the run has no {kind}, but {pids}; see {self.log}")

    def _wait_for_moment(self, fault: Fault, usual_seconds: dict[str, float]) -> bool:
        """Wait for the time of the fault; False if the run has ended."""
        while self.checkpoints.newest(now=False) <= self.newest_at_last_fault:
            self.phase_log.read_new()
            if not self._tick_between_faults():
                return False
        if fault.kind == "starting":
            return self._wait_for_restart_phase(fault, usual_seconds)
        self.phase_log.read_new()
        first = self.phase_log.all[-1]["step"] + fault.steps
        for entry in self._new_entries():
            if fault.kind == "saver":
                if entry["step"] >= first and (folder := self.checkpoints.saving()) is not None:
                    time.sleep(fault.share * 0.1)
                    if folder.exists():
                        return True
            elif entry["step"] >= first and entry.get("phase") == fault.phase:
                time.sleep(max(0.0, entry["time"] + fault.share * usual_seconds[fault.phase] - time.monotonic()))
                return True
        return False

    def _wait_for_restart_phase(self, fault: Fault, usual_seconds: dict[str, float]) -> bool:
        """Kill the controller (not counted as a fault) and wait for a phase of the restart."""
        before = self.phase_log.controller
        for pid in by_kind(self.process.pid, []).get("controller", []):
            send(pid, fault.signal.SIGKILL)
        for entry in self._new_entries(restarted=True):
            if entry["pid"] != before and entry.get("phase") == fault.phase:
                time.sleep(fault.share * usual_seconds[fault.phase])
                return True
        return False

    def _new_entries(self, restarted: bool = False) -> Iterator[dict[str, Any]]:
        """Yield new log entries, or the last one again if there are none, until the run ends."""
        while True:
            yield from self.phase_log.read_new() or self.phase_log.all[-1:]
            if not self._tick_between_faults():
                if not restarted or self.process.returncode == 0:
                    return
                self.force_restart()

    def _tick_between_faults(self) -> bool:
        """Like `_tick`, and restart a run that makes no progress."""
        if (
            time.monotonic() - max(self._began, self.phase_log.all[-1]["time"] if self.phase_log.all else 0.0)
            > self.limit
        ):
            self.stalls += 1
            self._dump_state("no progress between faults")
            self.force_restart()
        return self._tick()

    def _tick(self) -> bool:
        """Sleep briefly; return whether the run still exists."""
        time.sleep(_TICK_S)
        return not self.has_ended

    # ---------------------------------------------------------------- recovery

    def _wait_for_recovery(self, outcome: Outcome, position: Position | None, moment: float, usual_step: float) -> None:
        """Wait until the run has passed the position of the fault or finished.

        If it exits or does not recover within `limit` seconds, record a violation and restart it.
        """
        before, deadline = self.phase_log.controller, moment + self.limit
        passed_at = survived_at = None
        while True:
            for entry in self.phase_log.read_new():
                current = Position.of(entry)
                if entry["pid"] != before:
                    if outcome.reaction != "restarted":
                        outcome.reaction, passed_at, survived_at = "restarted", None, None
                    outcome.resumed_at = entry.get("resumed_at", outcome.resumed_at)
                elif outcome.reaction != "restarted":
                    outcome.reached = max(outcome.reached, entry["step"])
                passed = current is not None and (position is None or current > position)
                if passed and passed_at is None and entry["time"] > moment:
                    passed_at = entry["time"]
                if survived_at is None and entry["step"] >= outcome.step + _SURVIVAL_STEPS:
                    survived_at = entry["time"]
            now = time.monotonic()
            if passed_at is not None:
                patience = _UNDETECTED_S if outcome.fault.restarts else _SURVIVAL_S
                if survived_at is not None and outcome.reaction != "restarted" and now > moment + patience:
                    # A loss may take effect later: count the additional time of these steps.
                    outcome.reaction, late = "continued", survived_at - moment - _SURVIVAL_STEPS * usual_step
                    outcome.seconds = max(passed_at - moment, late)
                    return
                if outcome.reaction == "restarted" or self._finished():
                    outcome.reaction, outcome.seconds = outcome.reaction or "continued", passed_at - moment
                    return
            if self._finished():
                outcome.reaction, outcome.seconds = "finished", now - moment
                return
            if not self._tick() and self.process.returncode != 0:
                outcome.violations += f"the run ended with {self.process.returncode}; "
                self.force_restart()
            elif now > deadline:
                outcome.violations += f"no recovery in {self.limit:.0f} s; "
                self._dump_state(outcome)
                self.force_restart()
                deadline = now + self.limit

    def _finished(self) -> bool:
        return self.has_ended and self.process.returncode == 0

    def _check_restart(self, outcome: Outcome, alive: set[Any]) -> None:
        left = [command_line(pid) for pid, began in alive if identity(pid) == (pid, began)]
        if left:
            outcome.violations += f"left running: {', '.join(' '.join(words)[:60] for words in left)}; "
        if outcome.resumed_at is None or outcome.resumed_at < outcome.saved:
            outcome.violations += f"resumed at {outcome.resumed_at}, though {outcome.saved} was saved; "
        starts = outcome.phase in STARTING
        outcome.repeated_steps = (
            0 if starts or outcome.resumed_at is None else max(outcome.step, outcome.reached) - outcome.resumed_at
        )

    def _dump_state(self, reason: object) -> None:
        """Write the processes and the end of the log to a file."""
        lines = [f"{reason}", ""]
        lines += [
            f"{pid} {state_of(pid)} {' '.join(command_line(pid))[:120]}" for pid in with_descendants(self.process.pid)
        ]
        (self.folder / f"hang-{self.forced_restarts}.txt").write_text(
            "\n".join(lines) + "\n" + self.log.read_text()[-5000:]
        )


_RAY_PREFIX = re.compile(r"^(\x1b\[\d+m)?\((\w+) pid=\d+\)(\x1b\[0m)? *")
# The message of the supervisor, otherwise one of the run.
_MESSAGES = (re.compile(r"restart \d+ of \d+ in .*"), re.compile(r".*(died|was killed|stopped|hangs|again).*"))


def _fault_message(log: Path, since: int) -> str:
    """The log line that reports a fault."""
    with log.open("rb") as file:
        file.seek(since)
        lines = file.read().decode(errors="replace").splitlines()
    other_lines = [_RAY_PREFIX.sub("", line) for line in lines if "(raylet)" not in line]
    return next((match[0] for pattern in _MESSAGES for line in other_lines if (match := pattern.search(line))), "")


def _arguments(task: dict[str, str], folder: Path, layout: str, steps: int) -> list[str]:
    sys.path.insert(0, str(ROOT))
    from tests.support.training_harness import overrides

    return overrides(
        task,
        folder,
        *LAYOUTS[layout],
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "reward_model.reward_kwargs={num_processes: 2}",
        f"trainer.cls_path={ROOT / 'benchmarks' / '_chaos_trainer.py'}:PhaseLoggingTrainer",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
        f"trainer.total_training_steps={steps}",
        "trainer.total_epochs=1000",
        f"trainer.save_freq={SAVE_FREQ}",
        f"trainer.test_freq={TEST_FREQ}",
        "trainer.max_actor_ckpt_to_keep=4",
        "trainer.logger=[console]",
    )
