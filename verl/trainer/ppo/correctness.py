"""How many answers were right, per data source: counted where a score says right or wrong, and said on the console."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto
from verl.workers.reward_manager.naive import FAILED

logger = logging.getLogger(__name__)

Right = dict[str, list[bool]]


def right_answers(
    sources: Sequence[str], scores: Sequence[float | None], said: Sequence[Any] | None, judged: bool
) -> Right:
    """Whether each answer is right, by source: `acc` where the reward says it as a number, else a score of 1.

    The scores of a reward model (`judged`) are degrees, not verdicts: without `acc` such an answer does not count. Nor
    does one that could not be scored (None).
    """
    right: Right = defaultdict(list)
    for source, score, acc in zip(sources, scores, said or [None] * len(scores), strict=True):
        if isinstance(acc, bool | int | float | np.number | np.bool_):
            right[source].append(bool(acc >= 1.0))
        elif not judged and score is not None:
            right[source].append(score >= 1.0)
    return dict(right)


def say_right(right: Right, when: str = "") -> None:
    """One line per source, as users know it."""
    for source, answers in right.items():
        total, correct = len(answers), sum(answers)
        logger.info("%s%s Correct: %d/%d, Accuracy: %.2f", when, source, correct, total, correct / total)


def say_right_of_step(batch: DataProto, extra: Mapping[str, Any], source_key: str, judged: bool, step: int) -> None:
    """The same for a scored training batch; `extra` names the columns that the reward added."""
    columns, whole = batch.non_tensor_batch, Trajectories.of(batch)
    answers = whole.last_rows
    sources = columns[source_key][answers].tolist() if source_key in columns else ["unknown"] * len(whole)
    said = columns["acc"][answers].tolist() if "acc" in extra else None
    scores: list[float | None] = whole.sum(batch.batch["token_level_scores"].sum(-1)).tolist()
    if any(columns.get(FAILED, ())):
        # Where those that could not be scored are masked, they are neither right nor wrong; else they count 0.
        counted = whole.mask.any(-1).tolist()
        scores = [score if counts else None for score, counts in zip(scores, counted, strict=True)]
    say_right(right_answers(sources, scores, said, judged), when=f"step {step}: ")
