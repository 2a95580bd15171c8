"""The path of a GRPO prompt from its data file to the gradient and back to a metric: the files and lines it passes.

    python benchmarks/path_of_a_prompt.py               # -v lists the files

The second training step of a tiny run in one process: from the moment its prompts are taken until its metrics are
logged, every function of `verl` that runs counts its file (scorer processes are not seen). Fewer is better: it is what
somebody reads who wants to know what happens to a prompt.
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
        passed = files_passed(Path(folder))
    lines = {file: len(Path(file).read_text().splitlines()) for file in passed}
    own = sum(_lines(code) for codes in passed.values() for code in codes)
    rows: list[dict[str, Any]] = [{"what": "files", "count": len(passed)}]
    rows += [{"what": "lines in them", "count": sum(lines.values())}, {"what": "lines of what runs", "count": own}]
    if verbose:
        rows += [{"what": os.path.relpath(file, ROOT), "count": lines[file]} for file in sorted(passed)]
    report("path of a GRPO prompt", rows)


def files_passed(folder: Path) -> dict[str, set[CodeType]]:
    """What runs of every file of the package during one training step."""
    passed: dict[str, set[CodeType]] = {}
    watching = False

    def watch(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if watching and event == "call" and code.co_filename.startswith(f"{ROOT}/verl/") and code.co_name != "<module>":
            passed.setdefault(code.co_filename, set()).add(code)

    threading.setprofile(watch)
    sys.setprofile(watch)
    trainer = make_trainer(overrides(make_task(folder), folder, *_KEYS, "trainer.total_training_steps=3"))
    trainer.init_workers()
    take, log, steps = trainer.state.prompts.take, trainer._log_metrics, iter(range(3))

    def take_and_watch(count: int) -> Any:
        nonlocal watching
        watching = next(steps) == 1
        return take(count)

    def log_and_rest(metrics: dict[str, float], step: int) -> None:
        nonlocal watching
        log(metrics, step)
        trainer.tracking.log(metrics, step)
        watching = False

    trainer.state.prompts.take, trainer._log_metrics = take_and_watch, log_and_rest
    try:
        trainer.fit()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        close(trainer)
    return passed


def _lines(code: CodeType) -> int:
    return max(line or 0 for _, _, line in code.co_lines()) - code.co_firstlineno + 1


if __name__ == "__main__":
    main()
