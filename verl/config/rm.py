"""`RMConfig`: the whole configuration of reward-model training (`verl.trainer.main_rm`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl.config import supervised
from verl.config.context_length import config_of_folder
from verl.config.problems import Report
from verl.config.schema import key
from verl.config.supervised import SupervisedConfig, SupervisedDataConfig


@dataclass(kw_only=True, slots=True)
class RMDataConfig(SupervisedDataConfig):
    train_batch_size: int = key("Prompts per training step, over all ranks, each with all of its pairs.", min=1)
    micro_batch_size_per_gpu: int = key("Answers per forward pass on a rank.", null="4", min=1)
    val_batch_size: int = key("Prompts per validation batch.", null="", follows="data.train_batch_size", min=1)
    train_max_samples: int = key("Use only the first pairs of the training set; -1: all.", min=-1)
    val_max_samples: int = key("Use only the first pairs of the validation set; -1: all.", min=-1)
    prompt_key: str = key("Column of the prompt, a text or messages; dots look inside: extra_info.question.")
    chosen_key: str = key("Column of the better answer: a text, messages, or a whole conversation.")
    rejected_key: str = key("Column of the other answer, likewise.")
    preference_key: str = key("Column, if there is one, of the probability that the better answer is better (else 1).")
    tie_key: str = key("Column, if there is one, that is true where neither is better: a preference of 0.5.")
    margin_key: str = key("Column, if there is one, of the distance that the better score should keep (else 0).")
    weight_key: str = key("Column, if there is one, of the pair's weight in the loss (else 1).")


@dataclass(kw_only=True, slots=True)
class RMConfig(SupervisedConfig):
    data: RMDataConfig = key("Pairs and batches.")
    centering_coef: float = key(
        "Weight of the mean of (score of chosen + score of rejected)² in the loss, which keeps scores around 0.", min=0
    )

    @property
    def model_kind(self) -> Literal["causal_lm", "sequence_classification"]:
        return "sequence_classification"

    @property
    def rows_per_step(self) -> int:
        return 2 * self.data.train_batch_size

    @property
    def most_rows_per_rank(self) -> int | None:
        """None: a prompt has as many answers as were compared, and ranks are dealt tokens, not rows."""
        return None


_LABELS = "num_labels"


def resolve(config: RMConfig, report: Report) -> None:
    """Fill in every null that stands for something."""
    supervised.resolve(config, report)
    config.model.override_config.setdefault(_LABELS, 1)


def validate(config: RMConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
    supervised.validate(config, report)
    if config.data.truncation == "right":
        report.notice(
            "data.truncation=right cuts off the end of an answer, where its score is read, and what tells two answers"
            " apart may be gone. Set data.truncation=left, which shortens the prompt first."
        )


def check_environment(config: RMConfig, report: Report) -> None:
    """Report every path that does not exist here, every package that is missing, and a head that gives no score."""
    supervised.check_environment(config, report)
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
