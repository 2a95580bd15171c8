"""What LoRA keys mean and which of them cannot work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec

from verl.config.model import CriticModelConfig, ModelConfig
from verl.config.problems import Report

ALL_LINEAR = "all-linear"

_PLAIN_NAME = re.compile(r"[\w.-]+")
_LOW_RATE = 1e-5


def module_matcher(names: Sequence[str] | None) -> list[str] | str | None:
    """Names as peft takes them: a list of endings, or as a string ALL_LINEAR or one expression of the whole name."""
    if not names:
        return None
    if len(names) == 1 and (names[0] == ALL_LINEAR or not _PLAIN_NAME.fullmatch(names[0])):
        re.compile(names[0])
        return names[0]
    odd = [name for name in names if name == ALL_LINEAR or not _PLAIN_NAME.fullmatch(name)]
    if odd:
        raise ValueError(f"{odd[0]!r} stands among several entries, and these can only be names")
    return list(names)


def lora_rules(path: str, model: ModelConfig | CriticModelConfig, lr: float, report: Report) -> None:
    """Report what cannot work in the model block at `path`, which trains with `lr`."""
    if model.lora_rank == 0:
        return
    rank = (f"{path}.lora_rank",)
    if find_spec("peft") is None:
        why = "needs the package peft, which is not installed"
        report.problem(rank[0], model.lora_rank, why, "Run `pip install -e .[lora]`, or set it to 0")
    if not model.target_modules:
        why = f"is empty, and {path}.lora_rank = {model.lora_rank} adapts something"
        report.problem(f"{path}.target_modules", [], why, f"Set [{ALL_LINEAR}], or lora_rank=0", rank)
    for key in ("target_modules", "exclude_modules"):
        names = getattr(model, key)
        try:
            module_matcher(names)
        except (ValueError, re.error) as error:
            fix = "Give ends of names only, or one regular expression of the whole name"
            report.problem(f"{path}.{key}", names, f"cannot be read: {error}", fix, rank)
    if lr < _LOW_RATE:
        report.notice(
            f"{path}.lora_rank = {model.lora_rank} with a learning rate of {lr:g}: adapters usually need ten times the "
            "rate of full training, e.g. 1e-5 to 1e-4."
        )
