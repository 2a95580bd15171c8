"""ValidationRecord: records validation rows of fine-tuning and validation pairs of reward models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.algos.preference import Pairs
from verl.protocol import DataProto
from verl.recording.writer import RecordWriter
from verl.trainer.common.dumps import decode
from verl.trainer.common.recorder import Recorder
from verl.trainer.ppo.recorded_rows import TEXT_BYTES, RowOptions, validation_columns
from verl.trainer.supervised.row_record import ID_BYTES, digest, pair_tokens, row_tokens


class _Row(NamedTuple):
    """A row or pair of a validation, whose texts are not decoded yet."""

    uid: str
    sample_index: int
    score: float | None
    correct: bool | None
    rewards: dict[str, float]
    texts: dict[str, np.ndarray]
    """Token ids: `prompt`, `response`; of pairs also `rejected`."""

    @property
    def size(self) -> int:
        return (ID_BYTES + TEXT_BYTES) * sum(map(len, self.texts.values()))


class ValidationRecord:
    """Collects the rows of one validation, and records them in the stream `validation`.

    If they exceed the budget, a uniform sample is kept: the rows with the smallest ids, the same in every validation.
    """

    def __init__(self, options: RowOptions) -> None:
        self._options = options
        self._rows: list[_Row] = []
        self._bytes = self._count = 0
        self._seen: Counter[str] = Counter()
        self._limit = ""
        """Rows with this id or a larger one are left out; "" if all fit."""

    def add_rows(self, batch: DataProto, result: DataProto) -> None:
        """Add rows of `prompt_response_batch`. `result`: their columns `row_loss` and `row_tokens`."""
        prompts, responses = row_tokens(batch)
        losses, counts = (result.batch[name].tolist() for name in ("row_loss", "row_tokens"))
        for prompt, response, loss, count in zip(prompts, responses, losses, counts, strict=True):
            score = -loss / count if count else None
            self._add(digest(prompt, response), score, None, {}, {"prompt": prompt, "response": response})

    def add_pairs(self, batch: DataProto, pairs: Pairs, scores: torch.Tensor) -> None:
        """Add the pairs of a batch of `collate_comparisons` with the scores of its responses."""
        difference = (scores[pairs.chosen] - scores[pairs.rejected]).double()
        margins = (difference * (pairs.preference - 0.5).sign()).tolist()
        both = zip(scores[pairs.chosen].tolist(), scores[pairs.rejected].tolist(), strict=True)
        for tokens, margin, (chosen, rejected), preference in zip(
            pair_tokens(batch, pairs), margins, both, pairs.preference.tolist(), strict=True
        ):
            correct = None if preference == 0.5 or not margin else margin > 0
            texts = {"prompt": tokens.prompt, "response": tokens.chosen, "rejected": tokens.rejected}
            score = None if preference == 0.5 else margin
            self._add(digest(*tokens), score, correct, {"chosen": chosen, "rejected": rejected}, texts)

    def submit(self, recorder: Recorder, step: int) -> None:
        """Record the rows that were added."""
        if self._rows:
            recorder.submit(partial(_write, self._rows, self._count, step, self._options), step)

    def _add(
        self,
        uid: str,
        score: float | None,
        correct: bool | None,
        rewards: dict[str, float],
        texts: dict[str, np.ndarray],
    ) -> None:
        self._count += 1
        self._seen[uid] += 1
        if self._limit and uid >= self._limit:
            return
        row = _Row(uid, self._seen[uid] - 1, score, correct, rewards, {name: ids.copy() for name, ids in texts.items()})
        self._rows.append(row)
        self._bytes += row.size
        if self._bytes > self._options.max_bytes:
            self._keep_half()

    def _keep_half(self) -> None:
        """Leave out rows with the largest ids until half of the budget is used."""
        self._rows.sort(key=lambda row: row.uid)
        while self._rows and self._bytes > self._options.max_bytes // 2:
            self._limit = self._rows[-1].uid
            while self._rows and self._rows[-1].uid == self._limit:
                self._bytes -= self._rows.pop().size


def _write(rows: Sequence[_Row], count: int, step: int, options: RowOptions, writer: RecordWriter) -> None:
    sample = {"groups": count, "recorded": len(rows)}
    if len(rows) < count:
        writer.event("sampled", step, data=sample | {"stream": "validation"})
    samples: dict[str, list[Any]] = {
        "uid": [row.uid for row in rows],
        "sample_index": [row.sample_index for row in rows],
        "data_source": [None] * len(rows),
        "gts": [None] * len(rows),
        "reward": [row.score for row in rows],
        "correct": [row.correct for row in rows],
        "length": [len(row.texts["response"]) for row in rows],
        "finish_reason": [None] * len(rows),
        **{name: [row.rewards[name] for row in rows] for name in rows[0].rewards},
    }
    if options.texts:
        texts = {name: decode(options.tokenizer, [row.texts[name].tolist() for row in rows]) for name in rows[0].texts}
        samples |= {"prompt": texts["prompt"], "answer": texts["response"]}
        if "rejected" in texts:
            samples["more"] = [
                {"turns": [_turn("chosen", chosen), _turn("rejected", rejected)]}
                for chosen, rejected in zip(texts["response"], texts["rejected"], strict=True)
            ]
    writer.write_table("validation", step, validation_columns(samples, step, options), sample)


def _turn(name: str, text: str) -> Mapping[str, str]:
    return {"by": name, "text": text}
