"""Responses of a run as rows of the recording and as lines of JSONL files: RecordedStep converts a trained batch,
`record_validation` and `validation_lines` the responses to validation prompts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from verl.algos.groups import Trajectories
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.recording.writer import RecordWriter, groups_within
from verl.single_controller.ray.batch_ref import BatchRef
from verl.trainer.common.dumps import (
    FINISHED,
    ResponseText,
    RowTexts,
    Turn,
    ground_truths,
    json_line,
    plain_value,
    prompt_texts,
    response_texts,
    row_texts,
    turn_texts,
    turns_of_rows,
    unpadded,
)
from verl.types.schema import selected_for
from verl.utils.disk import to_json
from verl.workers.reward_manager.naive import FAILED_COLUMN

# Field of the recording → column of the batch, for values per response token.
_TOKEN_COLUMNS = {
    "mask": "response_mask",
    "rollout_log_probs": "rollout_log_probs",
    "trainer_log_probs": "old_log_probs",
    "ref_log_probs": "ref_log_prob",
    "teacher_log_probs": "teacher_log_prob",
    "entropy": "entropys",
    "values": "values",
    "advantages": "advantages",
    "weights": "rollout_is_weights",
    "versions": "rollout_versions",
    "token_scores": "token_level_scores",
}
# Columns that the stream `groups` needs for all rows.
_COLUMNS_OF_ALL_ROWS = {"response_mask", "token_level_scores", "rollout_versions"}
_ARROW_TYPES = {"mask": pa.uint8(), "versions": pa.int32()}
# Object columns with a field of their own; all other columns of a dump are in `extra`.
_OWN_COLUMNS = {
    *("uid", "sample_index", "trajectory", "finish_reason", "num_turns", "agent_metrics", "data_source"),
    *("reward_model", "ground_truth", "index"),
}
# Estimated bytes of text per token.
TEXT_BYTES = 4
_PREVIEW_CHARS = 200
# Columns of samples (`Validator`) that describe a response; the others are its reward and what the reward function
# returned.
DESCRIPTIONS = (
    *("response_text", "gts", "uid", "data_source", "answer_score"),
    *("sample_index", "length", "finish_reason"),
)


class RowOptions(NamedTuple):
    """How rows are recorded."""

    tokenizer: Any
    """Used only by the thread of the recording."""
    redaction: Redaction
    texts: bool
    max_bytes: int
    """Maximum size of the trajectories of a step, before compression."""


class RecordedStep:
    """The responses of a step. Texts are decoded, and columns that are not fetched yet are fetched, in the thread that
    calls `lines` or `write`."""

    def __init__(
        self, batch: DataProto, step: int, version: int, reward_names: Collection[str], options: RowOptions
    ) -> None:
        """`version`: version of the policy before the update on the batch. `reward_names`: columns that the reward
        function returned."""
        self._batch, self.step, self._version = copy.copy(batch), step, version
        self._reward_names, self._options = frozenset(reward_names), options
        self._all_tokens: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._all_texts: RowTexts | None = None

    def fetch_tokens(self) -> RecordedStep:
        """Fetch the columns that `lines` reads, in the calling thread: a worker that stores columns may die before
        `lines` runs."""
        _ = self._local  # a cached property: fetches its columns now
        tokens = self.fetch(["prompts", "responses"]).batch
        prompts, responses = (tokens[name].cpu().numpy() for name in ("prompts", "responses"))
        prompt_ids = unpadded(prompts, self._prompt_lengths, align_right=True)
        self._all_tokens = prompt_ids, unpadded(responses, self._lengths)
        return self

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the line of every response for a JSONL file; `max_bytes` does not apply. Call `fetch_tokens` before. A
        later `write` reuses the texts."""
        agent_turns = self._objects.get("agent_turns")
        self._all_texts = texts = row_texts(self._options.tokenizer, *self._all_tokens, agent_turns)
        trajectories, columns = self._trajectories_of_batch, self._objects
        scores = trajectories.sum(self._local.batch["token_level_scores"].sum(-1)).tolist()
        described = response_texts(texts, trajectories, columns)
        truths, names = ground_truths(self._local), selected_for("dump", columns)
        for number, row in enumerate(trajectories.last_rows):
            values = {name: columns[name][row] for name in names}
            yield json_line(self.step, described[number], truths[number], scores[number], values)

    def write(self, writer: RecordWriter) -> None:
        """Write groups and trajectories; record an event if only a sample of the groups fits into the budget."""
        chosen = groups_within(self._group_bytes(), self._options.max_bytes, seed=self.step)
        rows = np.flatnonzero(np.isin(self._group_of_row, chosen))
        sample = {"groups": len(self._uids), "recorded": len(chosen), "seed": self.step}
        if len(chosen) < len(self._uids):
            writer.event("sampled", self.step, data=sample)
        writer.write_table("groups", self.step, self._groups(set(chosen)))
        if len(rows):
            # Rows of a group are adjacent, so that readers find them in few row groups.
            rows = rows[np.argsort(self._group_of_row[rows], kind="stable")]
            writer.write_table("trajectories", self.step, self._trajectories(rows), sample)

    # ---------------------------------------------------------------- columns

    @cached_property
    def _local(self) -> DataProto:
        """The columns that are needed for all rows: object columns, masks, scores and versions. The other token columns
        are fetched for the recorded rows only."""
        present = set(self._batch.batch.keys())
        tensors = present & _COLUMNS_OF_ALL_ROWS
        if self._known_lengths is None or "response_mask" not in present:
            tensors |= {"attention_mask", "responses"}
        return self.fetch(tensors, list(self._batch.non_tensor_batch))

    @property
    def _objects(self) -> Any:
        return self._local.non_tensor_batch

    @cached_property
    def _trajectories_of_batch(self) -> Trajectories:
        return Trajectories.of(self._local)

    @property
    def _known_lengths(self) -> Any:
        """The lengths of the rows of a BatchRef, which are known without fetching a mask."""
        return getattr(self._batch, "lengths", None)

    @cached_property
    def _row_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the prompt and of the response of each row."""
        if (lengths := self._known_lengths) is not None:
            return np.array(lengths.prompt), np.array(lengths.response)
        columns = self._local.batch
        mask, width = columns["attention_mask"].cpu().numpy(), columns["responses"].shape[1]
        return mask[:, :-width].sum(-1), mask[:, -width:].sum(-1)

    @property
    def _prompt_lengths(self) -> np.ndarray:
        return self._row_lengths[0]

    @property
    def _lengths(self) -> np.ndarray:
        return self._row_lengths[1]

    @cached_property
    def _row_uids(self) -> list[str]:
        return [str(uid) for uid in self._objects.get("uid", range(len(self._local)))]

    @cached_property
    def _uids(self) -> list[str]:
        """The groups, in the order of their first rows."""
        return list(dict.fromkeys(self._row_uids))

    @cached_property
    def _group_of_row(self) -> np.ndarray:
        number = {uid: index for index, uid in enumerate(self._uids)}
        return np.array([number[uid] for uid in self._row_uids], dtype=np.int64)

    def fetch(self, tensors: Collection[str], objects: Sequence[str] = (), rows: np.ndarray | None = None) -> DataProto:
        """Return these columns in this process; `rows`: only these (None: all)."""
        batch, names = self._batch, sorted(tensors)
        if isinstance(batch, BatchRef):
            return batch.fetch(names, objects, rows)
        local = batch.select(names, list(objects))
        return local if rows is None else local.select_idxs(rows)

    def _group_bytes(self) -> list[int]:
        """Estimate the size of each group before compression."""
        present = set(self._batch.batch.keys())
        per_token = 4 * sum(column in present for column in _TOKEN_COLUMNS.values()) + 4 + TEXT_BYTES
        sizes = self._lengths * per_token + self._prompt_lengths * (4 + TEXT_BYTES)
        if self._options.texts:
            for column in self._objects.values():
                sizes = sizes + [_text_size(value) for value in column]
        return np.bincount(self._group_of_row, sizes, len(self._uids)).astype(np.int64).tolist()

    def _column(self, name: str, rows: np.ndarray, default: Any = None) -> list[Any]:
        """Values of an object column in these rows; `default` if the batch lacks it."""
        if name not in self._objects:
            return [default] * len(rows)
        return [plain_value(value) for value in self._objects[name][rows]]

    def _statuses(self, rows: np.ndarray) -> list[str]:
        return [(item or {}).get("status", FINISHED) for item in self._column("agent_metrics", rows)]

    def _scores(self) -> list[float | None]:
        """Score per trajectory; None if it could not be scored."""
        trajectories = self._trajectories_of_batch
        if "token_level_scores" not in self._local.batch.keys():
            return [None] * len(trajectories)
        scores = trajectories.sum(self._local.batch["token_level_scores"].sum(-1)).tolist()
        failed = self._column(FAILED_COLUMN, trajectories.last_rows, 0.0)
        return [None if flag else score for score, flag in zip(scores, failed, strict=True)]

    # ---------------------------------------------------------------- groups

    def _groups(self, recorded: set[int]) -> dict[str, list[Any]]:
        trajectories, options = self._trajectories_of_batch, self._options
        rows, scores = trajectories.last_rows, self._scores()
        group_of = self._group_of_row[rows]
        members: list[list[int]] = [[] for _ in self._uids]
        for number, group in enumerate(group_of):
            members[group].append(number)
        lengths = trajectories.sum(torch.from_numpy(np.asarray(self._lengths, dtype=np.int64))).tolist()
        per_response = {
            "samples": self._column("sample_index", rows),
            "scores": scores,
            "lengths": lengths,
            "turns": self._column("num_turns", rows, 1),
            "finish_reasons": self._column("finish_reason", rows),
            "statuses": self._statuses(rows),
        }
        first_rows = trajectories.first_rows[[group[0] for group in members]] if members else np.array([], int)
        known = [[score for i in group if (score := scores[i]) is not None] for group in members]
        columns: dict[str, list[Any]] = {
            "step": [self.step] * len(members),
            "uid": self._uids,
            "data_source": _as_texts(self._column("data_source", first_rows)),
            "prompt_tokens": self._prompt_lengths[first_rows].tolist(),
            **{name: [[values[i] for i in group] for group in members] for name, values in per_response.items()},
            "score_mean": [float(np.mean(values)) if values else None for values in known],
            "score_std": [float(np.std(values)) if values else None for values in known],
            "length_mean": [float(np.mean([lengths[i] for i in group])) for group in members],
            "staleness": self._staleness(),
            "recorded": [group in recorded for group in range(len(members))],
        }
        if options.texts:
            texts = self._prompt_texts(first_rows)
            columns["prompt"] = [options.redaction.text(text)[:_PREVIEW_CHARS] for text in texts]
        return columns

    def _staleness(self) -> list[int | None]:
        """Per group: version of the policy minus the oldest version that sampled a token; None if unknown."""
        if "rollout_versions" not in self._local.batch.keys():
            return [None] * len(self._uids)
        versions = self._local.batch["rollout_versions"]
        largest = torch.iinfo(versions.dtype).max
        oldest_of_row = torch.where(versions >= 0, versions, largest).amin(-1).cpu().numpy()
        oldest = np.full(len(self._uids), largest)
        np.minimum.at(oldest, self._group_of_row, oldest_of_row)
        return [None if version == largest else int(self._version - version) for version in oldest]

    # ---------------------------------------------------------------- trajectories

    def _trajectories(self, rows: np.ndarray) -> dict[str, Any]:
        trajectories, options = self._trajectories_of_batch, self._options
        number_of, last_rows = trajectories.of_row[rows], trajectories.last_rows
        # Values of a trajectory are those of its last row.
        ends, scores = last_rows[number_of], self._scores()
        columns: dict[str, Any] = {
            "step": [self.step] * len(rows),
            "uid": [self._uids[group] for group in self._group_of_row[rows]],
            "sample_index": self._column("sample_index", rows),
            "part": _parts(trajectories.of_row)[rows].tolist(),
            "data_source": _as_texts(self._column("data_source", rows)),
            "score": [scores[number] for number in number_of],
            "finish_reason": self._column("finish_reason", rows),
            "status": self._statuses(rows),
            "rewards": [self._rewards(row, _is_number) for row in ends],
        }
        recorded = {*_TOKEN_COLUMNS.values(), *(("prompts", "responses") if options.texts else ())}
        tensors = self.fetch(recorded & set(self._batch.batch.keys()), rows=rows).batch
        for name, column in _TOKEN_COLUMNS.items():
            if column in tensors.keys():
                values = tensors[column].cpu().numpy()
                columns[name] = ragged(values, self._lengths[rows], _ARROW_TYPES.get(name, pa.float32()))
        if options.texts:
            return columns | self._text_columns(rows, ends, tensors)
        return columns | {"turns": turns_of_rows(self._agent_turns(rows), self._lengths[rows])}

    def _prompt_texts(self, rows: np.ndarray, prompts: np.ndarray | None = None) -> list[str]:
        """Texts of the prompts of these rows. `prompts`: their token ids, if they are fetched."""
        if self._all_texts is not None:
            return [self._all_texts.prompts[row] for row in rows]
        if prompts is None:
            prompts = self.fetch(["prompts"], rows=rows).batch["prompts"].cpu().numpy()
        return prompt_texts(self._options.tokenizer, unpadded(prompts, self._prompt_lengths[rows], align_right=True))

    def _turn_texts(self, rows: np.ndarray, responses: np.ndarray) -> list[list[Turn]]:
        if self._all_texts is not None:
            return [self._all_texts.turns[row] for row in rows]
        ids = unpadded(responses, self._lengths[rows])
        return turn_texts(self._options.tokenizer, ids, self._agent_turns(rows))

    def _agent_turns(self, rows: np.ndarray) -> np.ndarray | None:
        turns = self._objects.get("agent_turns")
        return None if turns is None else turns[rows]

    def _text_columns(self, rows: np.ndarray, ends: np.ndarray, tokens: Any) -> dict[str, Any]:
        """Columns with texts and token ids. `tokens`: the columns `prompts` and `responses` of the rows."""
        redact = self._options.redaction
        prompts, responses = (tokens[name].cpu().numpy().copy() for name in ("prompts", "responses"))
        texts, turn_rows = self._prompt_texts(rows, prompts), self._turn_texts(rows, responses)
        clean = [redact.text(text) for text in texts]
        # Token ids would reveal the redacted parts of texts.
        prompts[[old != new for old, new in zip(texts, clean, strict=True)]] = -1
        turns = [_clean_turns(row, redact) for row in turn_rows]
        responses[[old != new for old, new in zip(turn_rows, turns, strict=True)]] = -1
        truths = ground_truths(self._local)
        numbers = self._trajectories_of_batch.of_row[rows]
        extra = [
            name
            for name in selected_for("dump", self._objects)
            if name not in _OWN_COLUMNS and name not in self._reward_names
        ]
        columns: dict[str, Any] = {
            "prompt": clean,
            "turns": turns,
            "prompt_ids": ragged(prompts, self._prompt_lengths[rows], pa.int32(), align_right=True),
            "token_ids": ragged(responses, self._lengths[rows], pa.int32()),
            "ground_truth": [_text_or_json(truths[number], redact) for number in numbers],
            "reward_info": [self._json(self._rewards(row, lambda value: not _is_number(value))) for row in ends],
            "messages": [self._json(self._messages(row)) for row in rows],
            "agent": [self._json(item) for item in self._column("agent_metrics", rows)],
            "extra": [self._json({name: self._objects[name][row] for name in extra}) for row in ends],
        }
        return columns

    def _rewards(self, row: int, is_kept: Callable[[Any], bool]) -> dict[str, Any]:
        """Values of the reward function by name."""
        names = [name for name in self._objects if name in self._reward_names and name != FAILED_COLUMN]
        values = {name: plain_value(self._objects[name][row]) for name in names}
        return {name: value for name, value in values.items() if value is not None and is_kept(value)}

    def _messages(self, row: int) -> Any:
        """The conversation, if known: with the turns of an agent, or the prompt only."""
        for name in ("agent_messages", "raw_prompt"):
            if name in self._objects and self._objects[name][row] is not None:
                return self._objects[name][row]
        return None

    def _json(self, value: Any) -> str | None:
        return _json_text(value, self._options.redaction)


# ---------------------------------------------------------------- validation


def record_validation(
    samples: Mapping[str, Sequence[Any]], step: int, options: RowOptions, writer: RecordWriter
) -> None:
    """Write the scored responses to the validation prompts; a sample of the prompts if they exceed the budget."""
    numbers: dict[str, list[int]] = {}
    for index, uid in enumerate(samples["uid"]):
        numbers.setdefault(str(uid), []).append(index)
    sizes = [len(text.prompt) + len(text.response) for text in samples["response_text"]]
    groups = list(numbers.values())
    # The same seed in all steps: the same prompts are recorded over time.
    chosen = groups_within([sum(sizes[i] for i in group) for group in groups], options.max_bytes, seed=0)
    rows = [i for number in chosen for i in groups[number]]
    sample = {"groups": len(groups), "recorded": len(chosen), "seed": 0}
    if len(chosen) < len(groups):
        writer.event("sampled", step, data=sample | {"stream": "validation"})
    if rows:
        selected = {name: [values[i] for i in rows] for name, values in samples.items()}
        writer.write_table("validation", step, validation_columns(selected, step, options), sample)


def validation_columns(samples: Mapping[str, Sequence[Any]], step: int, options: RowOptions) -> dict[str, list[Any]]:
    """Columns of the stream `validation`. `samples`: see `Validator`, with the column `correct`; columns that it lacks
    are null."""
    count, redact = len(samples["uid"]), options.redaction
    names = [name for name in _reward_outputs(samples) if name not in (FAILED_COLUMN, "correct")]
    values = [{name: plain_value(samples[name][i]) for name in names} for i in range(count)]
    columns: dict[str, list[Any]] = {
        "step": [step] * count,
        "uid": [str(uid) for uid in samples["uid"]],
        "data_source": _as_texts(samples["data_source"]),
        "score": [plain_value(value) for value in samples["reward"]],
        "rewards": [{name: value for name, value in row.items() if _is_number(value)} for row in values],
    }
    for name in ("correct", "length", "finish_reason", "sample_index"):
        if name in samples:
            columns[name] = [plain_value(value) for value in samples[name]]
    texts: Sequence[ResponseText] = samples["response_text"]
    columns["status"] = [text.status or FINISHED for text in texts]
    if options.texts:
        columns |= {
            "prompt": [redact.text(text.prompt) for text in texts],
            "response": [redact.text(text.response) for text in texts],
            "turns": [text.turns and _clean_turns(text.turns, redact) for text in texts],
            "ground_truth": [_text_or_json(truth, redact) for truth in samples["gts"]],
            "reward_info": [
                _json_text({k: v for k, v in row.items() if v is not None and not _is_number(v)}, redact)
                for row in values
            ],
        }
    return columns


def validation_lines(samples: Mapping[str, Sequence[Any]], step: int) -> Iterator[dict[str, Any]]:
    """Yield the line of every response for a JSONL file. `samples`: see `Validator`."""
    names = ("data_source", "uid", *_reward_outputs(samples))
    for row, text in enumerate(samples["response_text"]):
        values = {name: samples[name][row] for name in names}
        yield json_line(step, text, samples["gts"][row], samples["reward"][row], values)


def _reward_outputs(samples: Mapping[str, Sequence[Any]]) -> list[str]:
    return [name for name in samples if name not in DESCRIPTIONS and name != "reward"]


def _clean_turns(turns: Sequence[Turn], redact: Redaction) -> list[Turn]:
    return [turn | {"text": redact.text(turn["text"])} for turn in turns]


# ---------------------------------------------------------------- values


def ragged(values: np.ndarray, lengths: np.ndarray, kind: pa.DataType, align_right: bool = False) -> pa.Array:
    """Return a list array of the first (`align_right`: the last) `lengths` values of each row [rows, width]."""
    position = np.arange(values.shape[1])
    limits = np.asarray(lengths).reshape(-1, 1)
    kept = position >= values.shape[1] - limits if align_right else position < limits
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.ascontiguousarray(values[kept], dtype=kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat, kind), pa.list_(kind))


def _text_size(value: Any) -> int:
    """Estimate the bytes of a value as JSON."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_text_size(key) + _text_size(item) for key, item in value.items())
    if isinstance(value, list | tuple | set):
        return sum(map(_text_size, value))
    return value.nbytes if isinstance(value, np.ndarray) and value.dtype != object else 8


def _json_text(value: Any, redaction: Redaction) -> str | None:
    """Return the value as JSON; None for None and for empty dicts."""
    value = plain_value(value)
    return None if value is None or value == {} else to_json(redaction.value(value, keys=True), default=_as_text)


def _text_or_json(value: Any, redaction: Redaction) -> str | None:
    """Return a text as it is, and other values as JSON."""
    return redaction.text(value) if isinstance(value, str) else _json_text(value, redaction)


def _as_text(value: Any) -> Any:
    return plain_value(value) if isinstance(value, np.ndarray | np.generic) else str(value)


def _is_number(value: Any) -> bool:
    """Whether a value of a reward is recorded as a number."""
    return isinstance(value, bool | int | float)


def _as_texts(values: Sequence[Any]) -> list[str | None]:
    """Values as texts; None stays None."""
    return [None if value is None else str(value) for value in values]


def _parts(of_row: np.ndarray) -> np.ndarray:
    """Return the index of each row within its trajectory, from 0."""
    seen: dict[int, int] = {}
    parts = np.zeros(len(of_row), dtype=np.int64)
    for row, number in enumerate(of_row.tolist()):
        parts[row] = seen.get(number, 0)
        seen[number] = parts[row] + 1
    return parts
