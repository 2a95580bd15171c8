"""The recording of supervised training: rows of fine-tuning and pairs of reward models.

RowRecord records training batches, ValidationRecord the rows of one validation.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from verl.algos.preference import Pairs, pair_losses
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter, groups_within
from verl.trainer.common.dumps import ResponseText, Turn, decode
from verl.trainer.common.recorder import Recorder
from verl.trainer.ppo.recorded_rows import TEXT_BYTES, RowOptions, validation_columns

ID_BYTES, _VALUE_BYTES = 4, 4


class RowRecord:
    """Records batches of training, in the thread of the recorder's writer. The caller must not change the tensors."""

    def __init__(self, recorder: Recorder, tokenizer: Any) -> None:
        """`tokenizer`: used by the writer's thread only."""
        settings = recorder.settings
        self._recorder = recorder
        self.options = RowOptions(tokenizer, recorder.redaction, settings.texts, int(settings.max_mb_per_step * 1e6))

    def rows(self, batch: DataProto, log_probs: torch.Tensor, step: int) -> None:
        """Record the rows of a batch of `prompt_response_batch`. `log_probs` [rows, response]: before the update."""
        with self._recorder.timed():
            self._recorder.submit(partial(write_rows, copy.copy(batch), log_probs, step, self.options), step)

    def pairs(self, batch: DataProto, pairs: Pairs, scores: torch.Tensor, centering: float, step: int) -> None:
        """Record the pairs of a batch of `collate_comparisons`. `scores` [responses]: before the update."""
        with self._recorder.timed():
            job = partial(write_pairs, copy.copy(batch), pairs, scores, centering, step, self.options)
            self._recorder.submit(job, step)


# -------------------------------------------------------------------- fine-tuning


def write_rows(batch: DataProto, log_probs: torch.Tensor, step: int, options: RowOptions, writer: RecordWriter) -> None:
    """Write the stream `rows`: the metrics of all rows; tokens and texts of a sample that fits into the budget."""
    tensors = {name: column.cpu().numpy() for name, column in batch.tensors()}
    prompts, responses = row_tokens(batch)
    prompt_lengths, lengths = (np.array([len(ids) for ids in part], np.int64) for part in (prompts, responses))
    mask = tensors["response_mask"].astype(np.uint8)
    weights = tensors["loss_weights"] * mask if "loss_weights" in tensors else mask.astype(np.float64)
    values = log_probs.cpu().numpy()
    totals, counts = -(values.astype(np.float64) * weights).sum(1), weights.sum(1)

    per_token = ID_BYTES + TEXT_BYTES + _VALUE_BYTES * (2 if "loss_weights" in tensors else 1) + 1
    sizes = prompt_lengths * (ID_BYTES + TEXT_BYTES) + lengths * per_token
    chosen, sample = _sample("rows", sizes, step, options, writer)
    fields: dict[str, list[Any]] = {
        "mask": [mask[row, : lengths[row]] for row in chosen],
        "trainer_log_probs": [values[row, : lengths[row]] for row in chosen],
        "turns": [_segments(mask[row, : lengths[row]]) for row in chosen],
    }
    if "loss_weights" in tensors:
        fields["loss_weights"] = [tensors["loss_weights"][row, : lengths[row]] for row in chosen]
    if options.texts:
        fields |= _clean_texts([prompts[row] for row in chosen], "prompt", "prompt_ids", options)
        fields["token_ids"] = _add_turn_texts(fields["turns"], [responses[row] for row in chosen], options)
    columns = {
        "step": [step] * len(lengths),
        "uid": [digest(*ids) for ids in zip(prompts, responses, strict=True)],
        "tokens": (prompt_lengths + lengths).tolist(),
        "trained_tokens": mask.sum(1, dtype=np.int64).tolist(),
        "loss": [total / count if count else None for total, count in zip(totals, counts, strict=True)],
        **_of_all_rows(fields, chosen, len(lengths)),
    }
    writer.write_table("rows", step, columns, sample)


def row_tokens(batch: DataProto) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the token ids of the prompt and of the response of every row of `prompt_response_batch`."""
    names = ("prompts", "responses", "attention_mask")
    prompts, responses, attended = (batch.batch[name].cpu().numpy() for name in names)
    width = prompts.shape[1]
    starts, ends = width - attended[:, :width].sum(1), attended[:, width:].sum(1)
    return (
        [row[start:] for row, start in zip(prompts, starts, strict=True)],
        [row[:end] for row, end in zip(responses, ends, strict=True)],
    )


def _segments(mask: np.ndarray) -> list[dict[str, Any]]:
    """Return the turns of a row: its segments of consecutive tokens that are trained on (`model`), or not."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(mask)) + 1, [len(mask)]]) if len(mask) else np.array([0])
    return [
        {"source": "model" if mask[start] else "environment", "tokens": int(end - start)}
        for start, end in itertools.pairwise(starts)
    ]


def _add_turn_texts(
    turns: Sequence[list[dict[str, Any]]], responses: Sequence[np.ndarray], options: RowOptions
) -> list[np.ndarray]:
    """Add the texts of the turns; return the token ids of the rows, which are -1 if a text was redacted."""
    pieces = []
    for row, ids in zip(turns, responses, strict=True):
        pieces += [part.tolist() for part in np.split(ids, np.cumsum([turn["tokens"] for turn in row])[:-1]) if row]
    texts, kept = iter(decode(options.tokenizer, pieces)), []
    for row, ids in zip(turns, responses, strict=True):
        is_redacted = False
        for turn in row:
            text = next(texts)
            turn["text"] = options.redaction.text(text)
            is_redacted |= turn["text"] != text
        kept.append(_ids(ids, is_redacted))
    return kept


# -------------------------------------------------------------------- reward models


class _PairTokens(NamedTuple):
    """Token ids of a pair."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


def write_pairs(
    batch: DataProto,
    pairs: Pairs,
    scores: torch.Tensor,
    centering: float,
    step: int,
    options: RowOptions,
    writer: RecordWriter,
) -> None:
    """Write the stream `pairs`: the metrics of all pairs; tokens and texts of a sample that fits into the budget."""
    tokens = pair_tokens(batch, pairs)
    lengths = {name: np.array([len(getattr(pair, name)) for pair in tokens]) for name in _PairTokens._fields}
    sizes = np.sum(list(lengths.values()), axis=0) * (ID_BYTES + TEXT_BYTES)
    sampled, sample = _sample("pairs", sizes, step, options, writer)
    fields: dict[str, list[Any]] = {}
    for name in _PairTokens._fields if options.texts else ():
        fields |= _clean_texts([getattr(tokens[pair], name) for pair in sampled], name, f"{name}_ids", options)
    scores = scores.double()
    chosen_scores, rejected_scores = scores[pairs.chosen], scores[pairs.rejected]
    # 1: `chosen` is the better answer; -1: `rejected`; 0: a tie.
    sign = (pairs.preference.double() - 0.5).sign()
    margins = ((chosen_scores - rejected_scores) * sign).tolist()
    ties = (sign == 0).tolist()
    columns = {
        "step": [step] * len(tokens),
        "uid": [digest(*pair) for pair in tokens],
        "chosen_score": chosen_scores.tolist(),
        "rejected_score": rejected_scores.tolist(),
        "margin": [None if tie else margin for margin, tie in zip(margins, ties, strict=True)],
        "correct": [None if tie or not margin else margin > 0 for margin, tie in zip(margins, ties, strict=True)],
        "loss": pair_losses(scores, pairs, centering).tolist(),
        "preference": pairs.preference.tolist(),
        "required_margin": pairs.margin.tolist(),
        "weight": pairs.weight.tolist(),
        **{f"{name}_tokens": counts.tolist() for name, counts in lengths.items()},
        **_of_all_rows(fields, sampled, len(tokens)),
    }
    writer.write_table("pairs", step, columns, sample)


def pair_tokens(batch: DataProto, pairs: Pairs) -> list[_PairTokens]:
    ids, lengths = batch.batch["input_ids"].cpu().numpy(), batch.batch["attention_mask"].sum(1).tolist()
    prompts = [length - count for length, count in zip(lengths, batch.batch["answer_tokens"].tolist(), strict=True)]
    return [
        _PairTokens(ids[c, : prompts[c]], ids[c, prompts[c] : lengths[c]], ids[r, prompts[r] : lengths[r]])
        for c, r in zip(pairs.chosen.tolist(), pairs.rejected.tolist(), strict=True)
    ]


# -------------------------------------------------------------------- shared


def _sample(
    stream: str, sizes: np.ndarray, step: int, options: RowOptions, writer: RecordWriter
) -> tuple[list[int], dict[str, int]]:
    """Return the rows that are recorded with tokens and texts, and the description of the sample; record an event if
    rows are left out."""
    chosen = groups_within(sizes.tolist(), options.max_bytes, seed=step)
    sample = {stream: len(sizes), "recorded": len(chosen), "seed": step}
    if len(chosen) < len(sizes):
        writer.event("sampled", step, data=sample)
    return chosen, sample


def _of_all_rows(fields: Mapping[str, Sequence[Any]], chosen: Sequence[int], count: int) -> dict[str, list[Any]]:
    """Return the fields of the chosen rows as columns of `count` rows, null in the others, and `recorded`."""
    place = {row: number for number, row in enumerate(chosen)}
    columns = {
        name: [values[place[row]] if row in place else None for row in range(count)] for name, values in fields.items()
    }
    return {"recorded": [row in place for row in range(count)], **columns}


def _clean_texts(
    tokens: Sequence[np.ndarray], text_field: str, ids_field: str, options: RowOptions
) -> dict[str, list[Any]]:
    """Return redacted texts, and the token ids, which are -1 if the text was redacted."""
    texts = decode(options.tokenizer, [ids.tolist() for ids in tokens])
    redaction: Redaction = options.redaction
    clean = [redaction.text(text) for text in texts]
    ids = [_ids(row, old != new) for row, old, new in zip(tokens, texts, clean, strict=True)]
    return {text_field: clean, ids_field: ids}


def _ids(ids: np.ndarray, is_redacted: bool) -> np.ndarray:
    return np.full(len(ids), -1, np.int32) if is_redacted else ids.astype(np.int32)


def digest(*tokens: np.ndarray) -> str:
    """Return 32 hexadecimal digits that depend only on these token ids."""
    digest = hashlib.sha256()
    for ids in tokens:
        digest.update(len(ids).to_bytes(8, "little") + ids.astype("<i8").tobytes())
    return digest.hexdigest()[:32]


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
    samples["response_text"] = _texts(rows, options) if options.texts else [ResponseText("", "")] * len(rows)
    writer.write_table("validation", step, validation_columns(samples, step, options), sample)


def _texts(rows: Sequence[_Row], options: RowOptions) -> list[ResponseText]:
    """Return the texts of rows or pairs; both responses of a pair are turns."""
    names = list(rows[0].texts)
    decoded = [decode(options.tokenizer, [row.texts[name].tolist() for row in rows]) for name in names]
    texts = []
    for values in zip(*decoded, strict=True):
        text = dict(zip(names, values, strict=True))
        turns = None
        if "rejected" in text:
            turns = [_turn("chosen", text["response"]), _turn("rejected", text["rejected"])]
        texts.append(ResponseText(text["prompt"], text["response"], turns=turns))
    return texts


def _turn(name: str, text: str) -> Turn:
    return {"source": "environment", "name": name, "text": text}
