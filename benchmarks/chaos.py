"""Random kills and stops of every process of a training run, which must come through by itself, with the same weights.

    python benchmarks/chaos.py [--faults 100] [--seed 0] [--out results/] [--limit 120]

The real command (`python -m verl.trainer.main_ppo`, a tiny model on a CPU, checkpoints every second step) is hit by
SIGKILL and SIGSTOP: ranks, rollout replicas, scorers and their fork server, the controller, the driver, Ray's own
processes, whoever writes a checkpoint, whoever starts or resumes. A fault comes at a random point of a random phase,
after the run has saved something new. Seconds are those from the fault until the run stands beyond the place where it
was hit. Beside it the same run goes undisturbed, once per layout. Promised, and counted where broken:

- every fault is over within the limit, without a hand touching the run;
- a restart resumes from the newest step that was whole when the fault came, and nothing of the old attempt is left;
- every `global_step_N` that ever appears is whole, file by file;
- every step, each time it is done, has the prompts, answers and scores of the undisturbed run;
- all saved weights and optimizer states, the last ones included, are those of the undisturbed run, bit for bit;
- at the end no process, shared memory or temporary file is left.

Parts add up: with the same `--out`, the tables are those of all faults in it. Exits with 1 where a promise was broken.
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

from _chaos_faults import KINDS, LAYOUTS, SIGNALS, planned
from _chaos_processes import left_of
from _chaos_run import REWARD, ROOT, SAVE_FREQ, Run
from _chaos_watch import Undisturbed
from _report import report

from verl.utils.process_tree import adopt_orphans

_STEPS_PER_FAULT = 6
_GOING_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=20, help="faults of one run; runs take turns in their layout")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--signals", nargs="+", default=list(SIGNALS), choices=list(SIGNALS))
    parser.add_argument(
        "--kinds", nargs="+", default=(), choices=sorted({kind for all_of in KINDS.values() for kind in all_of})
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds in which a fault must be over")
    parser.add_argument("--hang-timeout", type=float, default=20, help="trainer.hang_timeout of the disturbed runs")
    parser.add_argument("--out", default=None, help="folder whose results these are added to")
    parser.add_argument("--json", default=None, help="append the JSON lines of the tables to this file")
    args = parser.parse_args()
    adopt_orphans()
    out = Path(args.out or tempfile.mkdtemp(prefix="chaos-")).absolute()
    work = out / f"runs-{args.seed}-{os.getpid()}"
    work.mkdir(parents=True)
    broken = injected(args, work, out)
    show(out, args.json)
    if not broken:
        shutil.rmtree(work)
    if any(json.loads(line)["broken"] for line in (out / "runs.jsonl").read_text().splitlines()):
        sys.exit(f"promises were broken; logs are in {out}")


def injected(args: argparse.Namespace, work: Path, out: Path) -> bool:
    """All faults, in as many runs as they need; whether one of them broke a promise."""
    sys.path.insert(0, str(ROOT))
    from tests.support.training_harness import make_task

    (out / "task").mkdir(exist_ok=True)
    task = make_task(out / "task")
    Path(task["reward"]).write_text(REWARD)
    rng, left, number, broken = random.Random(args.seed), args.faults, 0, False
    plans = {layout: planned(layout, rng, args.kinds, args.signals) for layout in args.layouts}
    steps = min(args.per_run, args.faults) * _STEPS_PER_FAULT // SAVE_FREQ * SAVE_FREQ
    while left > 0:
        layout = args.layouts[number % len(args.layouts)]
        reference = without_faults(task, out / f"undisturbed-{layout}-{steps}.json", work, layout, steps, args.limit)
        settings = [f"trainer.hang_timeout={args.hang_timeout}"]
        run = Run(task, work / f"{layout}-{number}", layout, steps, args.limit, settings)
        try:
            count = disturbed(run, reference, plans[layout], min(left, args.per_run), rng, out)
            broken |= not finished(run, reference, out)
        finally:
            run.close()
        left, number = left - count, number + 1
        if count == 0:
            raise SystemExit(f"no fault reached the run: see {run.log}")
    return broken


def without_faults(task: dict[str, str], known: Path, work: Path, layout: str, steps: int, limit: float) -> Undisturbed:
    """Done once for all parts that share a folder."""
    if known.exists():
        return Undisturbed(**json.loads(known.read_text()))
    began = time.monotonic()
    run = Run(task, work / layout, layout, steps, limit)
    try:
        code = run.wait()
    finally:
        run.close()
    if code != 0:
        raise SystemExit(f"the undisturbed run ended with {code}: see {run.log}")
    say(f"{layout}: {steps} steps undisturbed in {time.monotonic() - began:.0f} s")
    found = Undisturbed.of(run.notes, run.checkpoints)
    known.write_text(json.dumps(asdict(found)))
    return found


def disturbed(run: Run, reference: Undisturbed, plan: Any, count: int, rng: random.Random, out: Path) -> int:
    """How many faults the run took before it came to its end."""
    for taken in range(count):
        fault = next(plan)
        outcome = run.hit(fault, reference.usual_seconds, rng)
        if outcome is None:
            return taken
        append(out / "faults.jsonl", outcome.row())
        say(
            f"{run.layout} step {outcome.step} {outcome.phase}: {fault.kind} ({fault.target}) {fault.done}: "
            f"{outcome.how} after {outcome.seconds:.1f} s, {outcome.redone} steps again"
            + (f"  BROKEN: {outcome.broken}" if outcome.broken else "")
            + f"\n    {outcome.said}"
        )
    return count


# ---------------------------------------------------------------- what a run must have kept


def finished(run: Run, reference: Undisturbed, out: Path) -> bool:
    """Wait for its end and note what it broke."""
    code = run.wait()
    run.close()
    gone_by = time.monotonic() + _GOING_S
    while left_of([run.process.pid]) and time.monotonic() < gone_by:
        time.sleep(0.2)
    problems = [] if code == 0 else [f"the run ended with {code}"]
    problems += [f"by hand: started again {run.hands} times"] if run.hands else []
    problems += [f"no recovery: it stood still {run.stood_still} times between faults"] if run.stood_still else []
    problems += [f"half a checkpoint: {text}" for text in sorted(run.checkpoints.broken)]
    problems += differing_answers(run, reference) + differing_weights(run, reference)
    problems += [f"left running: {text}" for text in left_of([run.process.pid])]
    problems += left_behind(run)
    checked = {"checkpoints": run.checkpoints.verified, "steps": run.steps}
    append(out / "runs.jsonl", {"layout": run.layout, **checked, "broken": problems})
    for problem in problems:
        say(f"{run.layout} BROKEN: {problem}")
    return not problems


def differing_answers(run: Run, reference: Undisturbed) -> list[str]:
    """Steps that were trained on other prompts, answers or scores than those of the undisturbed run."""
    found = run.notes.answers()
    return [
        f"prompts, answers or scores differ at {step}"
        for step, it in reference.answers.items()
        if found.get(step) != it
    ]


def differing_weights(run: Run, reference: Undisturbed) -> list[str]:
    """Saved steps whose weights or optimizer are not those of the undisturbed run."""
    problems = []
    for step, expected in reference.tensors.items():
        found = run.checkpoints.saved.get(int(step))
        if found is None:
            problems.append(f"step {step} was never saved")
        elif differing := [name for name in expected if found.tensors.get(name) != expected[name]]:
            problems.append(f"step {step}: {', '.join(differing)} differ")
    return problems


def left_behind(run: Run) -> list[str]:
    """Shared memory and temporary files; Ray keeps its logs, which is its way."""
    held = "\n".join(_maps())
    shared = [name for name in os.listdir("/dev/shm") if name not in run.shared_before and name not in held]
    temporary = [str(path.relative_to(run.folder)) for path in (run.folder / "tmp").rglob("*") if path.is_file()]
    unfinished = [path.name for path in run.checkpoints.root.glob(".*") if path.name not in (".lock", ".owner")]
    shutil.rmtree(run.ray_folder, ignore_errors=True)
    return [f"left behind: {name}" for name in (*shared, *temporary, *unfinished)]


def _maps() -> list[str]:
    """What processes have mapped, as far as we may see it."""
    found = []
    for process in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.append(process.read_text())
        except OSError:
            continue
    return found


# ---------------------------------------------------------------- showing it


def show(out: Path, json_path: str | None) -> None:
    """The tables of all that is in the folder."""
    faults, runs = (
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()] for name in ("faults", "runs")
    )
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for fault in faults:
        groups[fault["kind"], fault["done"]].append(fault)
    rows = [{"fault": " ".join(name), **_figures(members)} for name, members in sorted(groups.items())]
    rows.append({"fault": "all", **_figures(faults)})
    report(f"{len(faults)} faults in {len(runs)} runs", rows, json_path)
    print("\nwhat the run said")
    for (kind, done), members in sorted(groups.items()):
        print(f"  {kind} {done}: {next((fault['said'] for fault in members if fault['said']), '(nothing)')}")
    report("promises", [*_promises(faults, runs)], json_path)


def _figures(faults: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [fault["seconds"] for fault in faults]
    return {
        "faults": len(faults),
        "restarts": sum(fault["how"] == "restarted" for fault in faults),
        "steps again": sum(fault["redone"] for fault in faults),
        "median s": round(statistics.median(seconds), 1),
        "worst s": round(max(seconds), 1),
        "broken": sum(bool(fault["broken"]) for fault in faults),
    }


def _promises(faults: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was promised, of how many, and how often it was not so."""
    hit = [fault["broken"] for fault in faults]
    problems = [problem for run in runs for problem in run["broken"]]

    def row(promise: str, of: int, word: str, said: list[str]) -> dict[str, Any]:
        return {"promise": promise, "of": of, "broken": sum(word in text for text in said)}

    steps = sum(run["steps"] for run in runs)
    return [
        row("no hang", len(faults), "no recovery", [*hit, *problems]),
        row("no run that ends", len(faults), "ended with", hit),
        row("no saved step lost", len(faults), "though", hit),
        row("nothing left running at a restart", len(faults), "left running", hit),
        row("no half checkpoint", sum(run["checkpoints"] for run in runs), "half a checkpoint", problems),
        row("the same prompts, answers and scores", steps, "prompts, answers", problems),
        row("the same weights and optimizer", steps // SAVE_FREQ, "step ", problems),
        row("nothing left at the end", len(runs), "left ", problems),
    ]


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(row) + "\n")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
