"""The path of a GRPO prompt from its data file to the gradient and back to a metric: the files and lines it passes.

    python benchmarks/path_of_a_prompt.py               # -v lists the files

The second training step of a tiny run in one process, from taking its prompts until its metrics are logged. Counts the
files of all functions of `verl` that are called, except those in scorer processes. Fewer is better: this is the code to
read in order to understand what happens to a prompt.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from _report import report  # noqa: E402

from tests.support.training_harness import close, make_task, make_trainer, overrides  # noqa: E402

_KEYS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.use_kl_loss=True")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="list the files")
    verbose = parser.parse_args().verbose
    with tempfile.TemporaryDirectory() as folder:
        functions = called_functions(Path(folder))
    lines = {file: len(Path(file).read_text().splitlines()) for file in functions}
    function_lines = sum(_line_count(code) for codes in functions.values() for code in codes)
    rows: list[dict[str, Any]] = [
        {"quantity": "files", "count": len(functions)},
        {"quantity": "lines of these files", "count": sum(lines.values())},
        {"quantity": "lines of called functions", "count": function_lines},
    ]
    if verbose:
        rows += [{"quantity": os.path.relpath(file, ROOT), "count": lines[file]} for file in sorted(functions)]
    report("path of a GRPO prompt", rows)


def called_functions(folder: Path) -> dict[str, set[CodeType]]:
    """The functions that one training step calls, by file of the package."""
    functions: dict[str, set[CodeType]] = {}
    recording = False

    def record_call(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            recording
            and event == "call"
            and code.co_filename.startswith(f"{ROOT}/verl/")
            and code.co_name != "<module>"
        ):
            functions.setdefault(code.co_filename, set()).add(code)

    threading.setprofile(record_call)
    sys.setprofile(record_call)
    trainer = make_trainer(overrides(make_task(folder), folder, *_KEYS, "trainer.total_training_steps=3"))
    trainer.init_workers()
    take, log, steps = trainer.state.prompts.take, trainer._log_metrics, iter(range(3))

    def start_recording(count: int) -> Any:
        nonlocal recording
        recording = next(steps) == 1
        return take(count)

    def stop_recording(metrics: dict[str, float], step: int) -> None:
        nonlocal recording
        log(metrics, step)  # the harness replaces `_log_metrics` by a method that does not call the tracker
        trainer.tracking.log(metrics, step)
        recording = False

    trainer.state.prompts.take, trainer._log_metrics = start_recording, stop_recording
    try:
        trainer.fit()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        close(trainer)
    return functions


def _line_count(code: CodeType) -> int:
    return max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno + 1


if __name__ == "__main__":
    main()
