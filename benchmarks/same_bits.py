"""Compare the numbers of this working tree with those of another commit, bit for bit, on this machine.

    python benchmarks/same_bits.py COMMIT [--cases NAME …] [--out build/same_bits]

Every case of `_same_bits_cases.py` (PPO, GRPO with each aggregation, DAPO, rollout correction, agents, async training,
SFT, reward models, distillation, two ranks …) trains a tiny model for four steps with the code of COMMIT and with the
working tree. The table shows, per case, how many metrics, batch columns (tokens, masks, log-probs, advantages, all
without the padding of prompts) and weight tensors are bit-identical. Then the working tree resumes each run from the
checkpoint that COMMIT wrote at step 2 and must reach the same steps 3 and 4. The results of COMMIT are kept under --out
and reused; bits differ between machines, so they are never compared across machines. Shared prefixes are disabled: they
sum in another order.

Intended differences are listed with their reasons in `EXPECTED`, values that differ between two runs of one commit in
`TIMING_DEPENDENT`. The exit code is 1 for any other difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _report import report
from _same_bits_cases import AGENT_FILE, GATEWAY_FILE, INTERACTION_FILE, REWARD_FILE, SAVED_STEP, cases

ROOT = Path(__file__).resolve().parents[1]

# Intended differences to earlier commits: pattern of "case kind name" -> reason. Kinds: metrics, columns, weights,
# resumed metrics, resumed weights. A refactoring adds none.
EXPECTED: dict[str, str] = {
    r" columns position_ids$": "padding only: in-process batches are stored without padding, like those on Ray",
    r" metrics (val/)?reward/errors": "written in every step and in validation, also if there is no error",
}
# Differences between two runs of one commit. Agents send requests one by one, so the composition of decode batches, and
# with it the last bits of the rollout's log-probs, depends on timing; so do the counts of requests in flight.
TIMING_DEPENDENT = (
    r"^(agent_|tool_agent|gateway_agent)\w* (columns|resumed metrics|metrics) rollout(_log_probs$|/|_corr/)",
    r"^(async_|one_step_off)\w* (resumed )?metrics async/(in_flight|queue_depth)",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--cases", nargs="*", default=[], help="names of cases; default: all")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "same_bits")
    options = parser.parse_args()
    revision = git("rev-parse", "--short=12", options.commit)
    task = make_task(options.out / "task")
    names = select_cases([case.name for case in cases(task)], options.cases)
    old, new = options.out / revision, options.out / "working_tree"
    shutil.rmtree(new, ignore_errors=True)
    old_tree = old / "tree"
    if not old_tree.exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", str(old_tree), revision)
    run_tree(old_tree, options.out / "task", old, names)
    run_tree(ROOT, options.out / "task", new, names)
    run_tree(ROOT, options.out / "task", new, names, resume_from=old)
    rows, unexpected = compare(names, old, new)
    report(f"Bit-identical results: working tree against {revision}", rows)
    for line in unexpected:
        print(line)
    return 1 if unexpected else 0


def select_cases(known: list[str], requested: list[str]) -> list[str]:
    """The requested cases, or all if none is requested, in the order of `known`."""
    if unknown := sorted(set(requested) - set(known)):
        raise SystemExit(f"--cases: unknown case {', '.join(unknown)}. Known cases: {', '.join(known)}.")
    return [name for name in known if not requested or name in requested]


def compare(names: list[str], old: Path, new: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """One row per case and a line per difference that is not expected."""
    rows, unexpected = [], []
    for name in names:
        before, after = load(old / name / "run.json"), load(new / name / "run.json")
        resumed = load(new / name / "resumed.json")
        row: dict[str, Any] = {"case": name}
        pairs = {
            "metrics": (flat(before.get("metrics")), flat(after.get("metrics"))),
            "columns": (flat(before.get("columns")), flat(after.get("columns"))),
            "weights": (before.get("weights", {}), after.get("weights", {})),
        }
        if resumed:
            late = {step: metrics for step, metrics in before.get("metrics", {}).items() if int(step) > SAVED_STEP}
            late_resumed = {
                step: metrics for step, metrics in resumed.get("metrics", {}).items() if int(step) > SAVED_STEP
            }
            pairs["resumed metrics"] = (flat(late), flat(late_resumed))
            pairs["resumed weights"] = (before.get("weights", {}), resumed.get("weights", {}))
        for kind, (left, right) in pairs.items():
            keys = [key for key in sorted(left.keys() | right.keys()) if not matches(TIMING_DEPENDENT, name, kind, key)]
            different = [key for key in keys if left.get(key) != right.get(key)]
            row[kind] = f"{len(keys) - len(different)}/{len(keys)}"
            remaining = [key for key in different if not matches(EXPECTED, name, kind, key)]
            lines = [f"{name}: {kind}: {key}: {left.get(key)} -> {right.get(key)}" for key in remaining]
            unexpected += lines[:5] + ([f"{name}: {kind}: … and {len(lines) - 5} more"] if len(lines) > 5 else [])
        errors = [
            f"{name}: {result['error'].strip().splitlines()[-1]}"
            for result in (before, after, resumed)
            if "error" in result
        ]
        row["error"] = "yes" if errors else ""
        unexpected += errors
        rows.append(row)
    return rows, unexpected


def matches(patterns: Iterable[str], case: str, kind: str, key: str) -> bool:
    """Whether a pattern matches "case kind name"; `key` is a name, or a step and a name."""
    return any(re.search(pattern, f"{case} {kind} {key.split(' ', 1)[-1]}") for pattern in patterns)


def flat(by_step: dict[str, dict[str, str]] | None) -> dict[str, str]:
    return {f"{step} {name}": value for step, values in (by_step or {}).items() for name, value in values.items()}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def run_tree(tree: Path, task: Path, out: Path, names: list[str], resume_from: Path | None = None) -> None:
    """Run the cases with the code of `tree`, with one thread per process, so that sums have a fixed order."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("_same_bits_run.py")),
        "--task",
        str(task),
        "--out",
        str(out),
    ]
    command += ["--cases", *names]
    command += ["--resume-from", str(resume_from)] if resume_from else []
    paths = os.pathsep.join([str(tree), str(Path(__file__).parent)])
    settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("a") as log:
        subprocess.run(command, env=os.environ | settings, stdout=log, stderr=subprocess.STDOUT, check=True)


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def make_task(folder: Path) -> dict[str, str]:
    """Models, data, rewards and agents, written once and read by both trees; returns paths by name."""
    task_file = folder / "task.json"
    if task_file.exists():
        return json.loads(task_file.read_text())
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny import save_tiny_model, tiny_config, tiny_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "teacher", seed=7, hidden_size=96, num_hidden_layers=3, initializer_range=0.1)
    save_reward_model(folder / "judge", tiny_config(num_labels=1), tiny_tokenizer())
    rows = [rl_row(number) for number in range(40)]
    interaction_rows = [
        {**row, "extra_info": {**row["extra_info"], "interaction_kwargs": {"name": "repeat"}}} for row in rows
    ]
    files = {
        "train.jsonl": rows,
        "val.jsonl": rows[:6],
        "interaction_rows.jsonl": interaction_rows,
        "sft.jsonl": [{"prompt": f"add {n} and 2", "response": f"{n}+2={n + 2}"} for n in range(24)],
        "rm.jsonl": [{"prompt": f"add {n}", "chosen": "two " * (n % 3 + 1), "rejected": "no"} for n in range(24)],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
    sources = {
        "reward": REWARD_FILE,
        "agents": AGENT_FILE,
        "gateway_agent": GATEWAY_FILE,
        "interaction": INTERACTION_FILE,
    }
    for name, text in sources.items():
        (folder / f"{name}.py").write_text(text)
    agent_loops = [
        {
            "name": "gateway",
            "_target_": "verl.agent.gateway.GatewayAgentLoop",
            "run_agent": f"{folder / 'gateway_agent.py'}:run_agent",
        }
    ]
    interactions = {
        "interaction": [{"name": "repeat", "class_name": f"{folder / 'interaction.py'}:Repeat", "config": {}}]
    }
    (folder / "gateway.yaml").write_text(json.dumps(agent_loops))  # JSON is YAML
    (folder / "interactions.yaml").write_text(json.dumps(interactions))
    names = {
        **{name: name for name in ("model", "teacher", "judge")},
        **{name.removesuffix(".jsonl"): name for name in files},
        **{name: f"{name}.py" for name in sources},
        "gateway": "gateway.yaml",
        "interactions": "interactions.yaml",
    }
    task = {name: str(folder / file) for name, file in names.items()}
    task_file.write_text(json.dumps(task))
    return task


def rl_row(number: int) -> dict[str, Any]:
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": f"Say {number} {'very ' * (number % 4)}well"}],
        "ability": "toy",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": number, "split": "train"},
    }


def save_reward_model(folder: Path, config: Any, tokenizer: Any) -> None:
    """A reward model with random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
