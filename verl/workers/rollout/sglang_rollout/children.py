"""The main functions of SGLang's processes, which end with the thread that started them."""

from __future__ import annotations

from typing import Any

from verl.utils.process_tree import die_with_parent

__all__ = ["run_detokenizer", "run_scheduler"]


def run_scheduler(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_scheduler_process_func(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    die_with_parent()
    return Engine.run_detokenizer_process_func(*args, **kwargs)
