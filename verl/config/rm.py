"""`RMConfig`: keys and rules of reward model training (`verl.trainer.main_rm`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config import supervised
from verl.config.context_length import read_model_config
from verl.config.problems import Report
from verl.config.schema import key
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig

_NUM_LABELS = "num_labels"


@dataclass(kw_only=True, slots=True)
class RMDataConfig(SupervisedDataConfig):
    train_batch_size: int = key("Prompts per training step over all ranks, each with all of its pairs.", min=1)
    micro_batch_size_per_gpu: int = key("Responses per forward pass on a rank.", null="4", min=1)
    val_batch_size: int = key("Prompts per validation batch.", follows="data.train_batch_size", min=1)
    train_max_samples: int = key("Use only the first pairs of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first pairs of the validation set; -1: all.", min=-1)
    prompt_key: str = key("Column of the prompt (text or messages); dots select nested fields: extra_info.question.")
    chosen_key: str = key("Column of the chosen response: text, messages, or a whole conversation.")
    rejected_key: str = key("Column of the rejected response, in the forms of chosen_key.")
    preference_key: str = key("Optional column: probability that the chosen response is preferred (default 1).")
    tie_key: str = key("Optional column: true for ties (probability 0.5).")
    margin_key: str = key("Optional column: margin between the scores (default 0).")
    weight_key: str = key("Optional column: weight of the pair in the loss (default 1).")


@dataclass(kw_only=True, slots=True)
class RMConfig(SupervisedConfig):
    data: RMDataConfig = key("Pairs and batches.")
    centering_coef: float = key(
        "Coefficient of the mean squared sum of both scores in the loss, which centers scores around 0.", min=0
    )

    @property
    def model_kind(self) -> Literal["causal_lm", "sequence_classification"]:
        return "sequence_classification"

    @property
    def rows_per_step(self) -> int:
        return 2 * self.data.train_batch_size

    @property
    def max_rows_per_rank(self) -> int | None:
        """None: prompts have a varying number of responses, and ranks are balanced by tokens."""
        return None


def resolve(config: RMConfig, report: Report) -> None:
    """Replace every null by the value that it stands for."""
    supervised.resolve(config, report)
    config.model.override_config.setdefault(_NUM_LABELS, 1)


def validate(config: RMConfig, report: Report) -> None:
    """Report all problems of a resolved configuration."""
    supervised.validate(config, report)
    if config.data.truncation == "right":
        report.notice(
            "data.truncation=right cuts off the end of a response, where the score is computed. Set"
            " data.truncation=left, which shortens the prompt first."
        )


def check_environment(config: RMConfig, report: Report) -> None:
    """Report missing files and packages, and a model or override with several labels."""
    supervised.check_environment(config, report)
    num_labels = config.model.override_config[_NUM_LABELS]
    if num_labels != 1:
        report.problem(f"model.override_config.{_NUM_LABELS}", num_labels, "a score is one number", "Leave it out")
    model = read_model_config(config.model.path or "", {}) or {}
    architectures = model.get("architectures") or []
    label_count = len(model.get("id2label") or (0, 0))  # transformers omits the default of two labels
    if any("ForSequenceClassification" in name for name in architectures) and label_count != 1:
        why = f"the classifier has {label_count} labels; a score is one number"
        report.problem("model.path", config.model.path, why, "Set a causal LM, or a classifier with num_labels=1")
