"""The rules that only `RMConfig` has: the model is a classifier with one label, whatever it begins as."""

from __future__ import annotations

from verl.config import supervised_rules
from verl.config.context_length import config_of_folder
from verl.config.problems import Report
from verl.config.rm import RMConfig

_LABELS = "num_labels"


def resolve(config: RMConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    supervised_rules.resolve(config, report)
    config.model.override_config.setdefault(_LABELS, 1)


def validate(config: RMConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    supervised_rules.validate(config, report)
    if config.data.truncation == "right":
        report.notice(
            "data.truncation=right cuts off the end of an answer, where its score is read, and what tells two answers"
            " apart may be gone. Set data.truncation=left, which shortens the prompt first."
        )


def check_environment(config: RMConfig, report: Report) -> None:
    """Report every path that does not exist here, every package that is missing, and a head that gives no score."""
    supervised_rules.check_environment(config, report)
    labels = config.model.override_config[_LABELS]
    if labels != 1:
        report.problem(f"model.override_config.{_LABELS}", labels, "a score is one number", "Leave it out")
    found = config_of_folder(config.model.path or "", {})
    architectures = (found or {}).get("architectures") or []
    given = len((found or {}).get("id2label") or (0, 0))  # two is what transformers does not write down
    if any("ForSequenceClassification" in name for name in architectures) and given != 1:
        why = f"it is a classifier of {given} labels; a score is one number"
        report.problem(
            "model.path", config.model.path, why, "Begin with a causal LM, or a classifier with num_labels=1"
        )
