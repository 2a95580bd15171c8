"""`verl summary FOLDER`: what improved in a run, where its time went, and next commands, from its metrics file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl.trainer.common.run_summary import CONFIG_FILE, METRICS_FILE, RunSummary, read_summary
from verl.utils.checkpoint.folders import RECORD_FOLDER

# Keys of `trainer` that `describe_next_commands` reads.
_TRAINER_KEYS = ("default_local_dir", "logger", "tracking_dir", "project_name", "experiment_name")


def main(arguments: Sequence[str]) -> int:
    """Print the summary; return 0, or 2 if there are no metrics."""
    parser = argparse.ArgumentParser(prog="verl summary", description=__doc__)
    parser.add_argument("folder", type=Path, help="trainer.default_local_dir, trainer.tracking_dir or a metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    file = _metrics_file(options.folder)
    if not file.is_file():
        sys.stderr.write(
            f"verl summary: there is no file {file}. Name the folder of a run: trainer.default_local_dir (default:"
            " ./checkpoints/<project_name>/<experiment_name>), or trainer.tracking_dir if trainer.logger contains"
            ' "file".\n'
        )
        return 2
    summary = read_summary(file)
    if not summary.step_seconds and not summary.curves:
        sys.stderr.write(f"verl summary: {file} contains no training steps.\n")
        return 2
    config_file = file.with_name(CONFIG_FILE)
    stored = json.loads(config_file.read_text()) if config_file.is_file() else {}
    if options.json:
        sys.stdout.write(json.dumps(as_dict(summary, stored), indent=2) + "\n")
    else:
        sys.stdout.write("\n".join([summary.render(stored), *_next_commands(stored)]) + "\n")
    return 0


def _metrics_file(folder: Path) -> Path:
    """Return the metrics file of a folder. In a checkpoint folder, it is part of the recording, which every run has."""
    if not folder.is_dir():
        return folder
    recorded = folder / RECORD_FOLDER / METRICS_FILE
    tracked = folder / METRICS_FILE
    return recorded if recorded.is_file() and not tracked.is_file() else tracked


def as_dict(summary: RunSummary, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary as JSON data; `config`: the stored configuration, empty if unknown."""
    curves = {
        name: {"first": curve.first, "last": curve.last, "best": curve.best, "best_step": curve.best_step}
        for name, curve in summary.curves.items()
    }
    return {
        "steps": len(summary.step_seconds),
        "metrics": curves,
        "seconds": summary.by_duration(),
        "tokens": summary.tokens,
        "bottleneck": summary.bottleneck(config=config),
        "other_mode": summary.other_mode(config),
    }


def _next_commands(stored: Mapping[str, Any]) -> list[str]:
    """Return the next commands after a run with this stored configuration; [] if it was not a training run."""
    from verl.trainer.recovery.exit_messages import describe_next_commands

    trainer = stored.get("trainer", {})
    if any(key not in trainer for key in _TRAINER_KEYS):
        return []
    actor = stored.get("actor_rollout_ref", {}).get("actor", {})
    backend = "megatron" if actor.get("strategy") == "megatron" else "fsdp"
    return describe_next_commands(SimpleNamespace(**trainer), "actor" if actor else ".", backend)
