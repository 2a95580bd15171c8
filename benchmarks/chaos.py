"""Kill and stop random processes of a training run, which must recover by itself with bit-identical weights.

    python benchmarks/chaos.py [--faults 100] [--seed 0] [--out results/] [--limit 120]

The real command (`python -m verl.trainer.main_ppo`, a tiny model on a CPU, checkpoints every second step) is hit by
SIGKILL and SIGSTOP: ranks, rollout replicas, scorers and their fork server, the controller, the driver, Ray's
processes, processes that write a checkpoint, start or resume. A fault occurs at a random time of a random phase, after
the run has saved a new step. Seconds are measured from the fault until the run has passed the position of the fault.
A reference run without faults is done once per layout. Guarantees, whose violations are counted:

- the run recovers from every fault within the limit, without intervention;
- a restart resumes from the newest step that was complete at the fault, and no process of the old attempt is left;
- every `global_step_N` that appears is complete, file by file;
- every step, also when repeated, has the prompts, responses and scores of the reference run;
- all saved weights and optimizer states are bit-identical to those of the reference run;
- at the end no process, shared memory or temporary file is left.

Results accumulate: with the same `--out`, the tables cover all faults in it. Exits with 1 after a violation.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _chaos_run import KINDS, LAYOUTS, REWARD, ROOT, SAVE_FREQ, SIGNALS, Run, plan_faults
from _chaos_watch import ReferenceRun, leftover_processes
from _report import report

from verl.utils.process_tree import adopt_orphans

_STEPS_PER_FAULT = 6
_EXIT_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=20, help="faults per run; runs alternate between layouts")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--signals", nargs="+", default=list(SIGNALS), choices=list(SIGNALS))
    parser.add_argument(
        "--kinds", nargs="+", default=(), choices=sorted({kind for kinds in KINDS.values() for kind in kinds})
    )
    parser.add_argument("--limit", type=float, default=120, help="maximum seconds of a recovery")
    parser.add_argument("--hang-timeout", type=float, default=20, help="trainer.hang_timeout of the runs with faults")
    parser.add_argument("--out", default=None, help="folder to which the results are added")
    parser.add_argument("--json", default=None, help="append the JSON lines of the tables to this file")
    args = parser.parse_args()
    adopt_orphans()
    out = Path(args.out or tempfile.mkdtemp(prefix="chaos-")).absolute()
    work = out / f"runs-{args.seed}-{os.getpid()}"
    work.mkdir(parents=True)
    violated = inject_faults(args, work, out)
    show(out, args.json)
    if not violated:
        shutil.rmtree(work)
    if any(json.loads(line)["violations"] for line in (out / "runs.jsonl").read_text().splitlines()):
        sys.exit(f"guarantees were violated; logs are in {out}")


def inject_faults(args: argparse.Namespace, work: Path, out: Path) -> bool:
    """Inject all faults, in as many runs as needed; return whether a guarantee was violated."""
    sys.path.insert(0, str(ROOT))
    from tests.support.training_harness import make_task

    (out / "task").mkdir(exist_ok=True)
    task = make_task(out / "task")
    Path(task["reward"]).write_text(REWARD)
    rng, remaining, number, violated = random.Random(args.seed), args.faults, 0, False
    plans = {layout: plan_faults(layout, rng, args.kinds, args.signals) for layout in args.layouts}
    steps = min(args.per_run, args.faults) * _STEPS_PER_FAULT // SAVE_FREQ * SAVE_FREQ
    while remaining > 0:
        layout = args.layouts[number % len(args.layouts)]
        reference = reference_run(task, out / f"reference-{layout}-{steps}.json", work, layout, steps, args.limit)
        settings = [f"trainer.hang_timeout={args.hang_timeout}"]
        run = Run(task, work / f"{layout}-{number}", layout, steps, args.limit, settings)
        try:
            count = inject_into_run(run, reference, plans[layout], min(remaining, args.per_run), rng, out)
            violated |= not check_end(run, reference, out)
        finally:
            run.close()
        remaining, number = remaining - count, number + 1
        if count == 0:
            raise SystemExit(f"the run ended before its first fault: see {run.log}")
    return violated


def reference_run(task: dict[str, str], known: Path, work: Path, layout: str, steps: int, limit: float) -> ReferenceRun:
    """The reference run, done once per output folder."""
    if known.exists():
        return ReferenceRun(**json.loads(known.read_text()))
    began = time.monotonic()
    run = Run(task, work / layout, layout, steps, limit)
    try:
        code = run.wait()
    finally:
        run.close()
    if code != 0:
        raise SystemExit(f"the reference run ended with {code}: see {run.log}")
    log(f"{layout}: {steps} steps without faults in {time.monotonic() - began:.0f} s")
    reference = ReferenceRun.of(run.phase_log, run.checkpoints)
    known.write_text(json.dumps(asdict(reference)))
    return reference


def inject_into_run(run: Run, reference: ReferenceRun, plan: Any, count: int, rng: random.Random, out: Path) -> int:
    """Inject up to `count` faults; return the number injected before the run ended."""
    for injected in range(count):
        fault = next(plan)
        outcome = run.inject(fault, reference.usual_seconds, rng)
        if outcome is None:
            return injected
        append(out / "faults.jsonl", outcome.row())
        log(
            f"{run.layout} step {outcome.step} {outcome.phase}: {fault.kind} ({fault.target}) {fault.action}: "
            f"{outcome.reaction} after {outcome.seconds:.1f} s, {outcome.repeated_steps} steps repeated"
            + (f"  VIOLATION: {outcome.violations}" if outcome.violations else "")
            + f"\n    {outcome.message}"
        )
    return count


# ---------------------------------------------------------------- checks


def check_end(run: Run, reference: ReferenceRun, out: Path) -> bool:
    """Wait for the end of the run and record its violations; return whether there are none."""
    code = run.wait()
    run.close()
    deadline = time.monotonic() + _EXIT_S
    while leftover_processes([run.process.pid]) and time.monotonic() < deadline:
        time.sleep(0.2)
    problems = [] if code == 0 else [f"the run ended with {code}"]
    problems += [f"restarted by the benchmark {run.forced_restarts} times"] if run.forced_restarts else []
    problems += [f"no recovery: no progress between faults, {run.stalls} times"] if run.stalls else []
    problems += [f"incomplete checkpoint: {text}" for text in sorted(run.checkpoints.incomplete)]
    problems += differing_rollouts(run, reference) + differing_weights(run, reference)
    problems += [f"left running: {text}" for text in leftover_processes([run.process.pid])]
    problems += leftover_files(run)
    checked = {"checkpoints": run.checkpoints.verified, "steps": run.steps}
    append(out / "runs.jsonl", {"layout": run.layout, **checked, "violations": problems})
    for problem in problems:
        log(f"{run.layout} VIOLATION: {problem}")
    return not problems


def differing_rollouts(run: Run, reference: ReferenceRun) -> list[str]:
    """Steps with other prompts, responses or scores than in the reference run."""
    digests = run.phase_log.rollout_digests()
    return [
        f"prompts, responses or scores differ at {step}"
        for step, expected in reference.rollout_digests.items()
        if digests.get(step) != expected
    ]


def differing_weights(run: Run, reference: ReferenceRun) -> list[str]:
    """Saved steps whose weights or optimizer differ from the reference run."""
    problems = []
    for step, expected in reference.tensors.items():
        saved = run.checkpoints.saved.get(int(step))
        if saved is None:
            problems.append(f"step {step} was never saved")
        elif differing := [name for name in expected if saved.tensors.get(name) != expected[name]]:
            problems.append(f"step {step}: {', '.join(differing)} differ")
    return problems


def leftover_files(run: Run) -> list[str]:
    """Leftover shared memory and temporary files; Ray's logs are expected."""
    held = "\n".join(_maps())
    shared = [name for name in os.listdir("/dev/shm") if name not in run.shared_before and name not in held]
    temporary = [str(path.relative_to(run.folder)) for path in (run.folder / "tmp").rglob("*") if path.is_file()]
    unfinished = [path.name for path in run.checkpoints.root.glob(".*") if path.name not in (".lock", ".owner")]
    shutil.rmtree(run.ray_folder, ignore_errors=True)
    return [f"left behind: {name}" for name in (*shared, *temporary, *unfinished)]


def _maps() -> list[str]:
    """Memory maps of all readable processes."""
    maps = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        try:
            maps.append(process.read_text())
        except OSError:
            continue
    return maps


# ---------------------------------------------------------------- tables


def show(out: Path, json_path: str | None) -> None:
    """Print the tables of all results in the folder."""
    faults, runs = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()] for name in ("faults", "runs")
    )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for fault in faults:
        groups[fault["kind"], fault["action"]].append(fault)
    rows = [{"fault": " ".join(name), **_figures(members)} for name, members in sorted(groups.items())]
    rows.append({"fault": "all", **_figures(faults)})
    report(f"{len(faults)} faults in {len(runs)} runs", rows, json_path)
    print("\nmessages of the run")
    for (kind, action), members in sorted(groups.items()):
        print(f"  {kind} {action}: {next((fault['message'] for fault in members if fault['message']), '(none)')}")
    report("guarantees", [*_guarantees(faults, runs)], json_path)


def _figures(faults: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [fault["seconds"] for fault in faults]
    return {
        "faults": len(faults),
        "restarts": sum(fault["reaction"] == "restarted" for fault in faults),
        "repeated steps": sum(fault["repeated_steps"] for fault in faults),
        "median s": round(statistics.median(seconds), 1),
        "worst s": round(max(seconds), 1),
        "violations": sum(bool(fault["violations"]) for fault in faults),
    }


def _guarantees(faults: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number of checks and violations per guarantee."""
    of_faults = [fault["violations"] for fault in faults]
    of_runs = [problem for run in runs for problem in run["violations"]]

    def row(guarantee: str, checks: int, pattern: str, messages: list[str]) -> dict[str, Any]:
        return {"guarantee": guarantee, "checks": checks, "violations": sum(pattern in text for text in messages)}

    steps = sum(run["steps"] for run in runs)
    return [
        row("no hang", len(faults), "no recovery", [*of_faults, *of_runs]),
        row("no run that ends with an error", len(faults), "ended with", of_faults),
        row("no saved step lost", len(faults), "though", of_faults),
        row("no process left at a restart", len(faults), "left running", of_faults),
        row("no incomplete checkpoint", sum(run["checkpoints"] for run in runs), "incomplete checkpoint", of_runs),
        row("the same prompts, responses and scores", steps, "prompts, responses", of_runs),
        row("the same weights and optimizer", steps // SAVE_FREQ, "step ", of_runs),
        row("no process or file left at the end", len(runs), "left ", of_runs),
    ]


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
