"""Dumps for inspection: batches as tensors, responses as JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.algos.groups import Trajectories
from verl.protocol import DataProto
from verl.recording.redaction import Redaction
from verl.types.schema import selected_for
from verl.utils.dataset.rows import ground_truth_of
from verl.utils.disk import atomic_write
from verl.utils.nested import save_tensors

_OWN_FIELDS = ("step", "input", "output", "gts", "score", "rows", "turns", "status")
# Columns that may contain the ground truth.
_GROUND_TRUTH_COLUMNS = ("reward_model", "ground_truth")
# Line breaks that JSON does not escape, but readers that split text into lines recognise.
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def dump_batch(batch: DataProto, folder: str, step: int) -> Path:
    """Write `debug_step_N.pt`: a dict of the step's tensors, for `torch.load(…, weights_only=True)`."""
    path = Path(folder) / f"debug_step_{step}.pt"
    save_tensors(dict(batch.tensors()), path)
    return path


def dump_rows(batch: DataProto, tokenizer: Any, folder: str, step: int, redaction: Redaction | None = None) -> Path:
    """Write `N.jsonl` with a line per trajectory: prompt, response, ground truth (`gts`), score, outputs of the reward
    function, and the turns of agents."""
    texts, trajectories = response_texts(batch, tokenizer), Trajectories.of(batch)
    scores, truths = trajectories.sum(batch.batch["token_level_scores"].sum(-1)).tolist(), ground_truths(batch)
    columns, names = batch.non_tensor_batch, selected_for("dump", batch.non_tensor_batch)
    extras = extra_fields({key: columns[key][trajectories.last_rows] for key in names})
    rows = (
        {"step": step, **text, "gts": truth, "score": score, **{k: v[i] for k, v in extras.items()}}
        for i, (text, truth, score) in enumerate(zip(texts, truths, scores, strict=True))
    )
    return write_jsonl(rows, Path(folder) / f"{step}.jsonl", redaction)


def extra_fields(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return further columns of a dump. A column with the name of a standard field gets the prefix `data_`."""
    return {f"data_{name}" if name in _OWN_FIELDS else name: values for name, values in columns.items()}


def ground_truths(batch: DataProto) -> list[Any]:
    """Return the ground truth of every trajectory; None if the data has none."""
    columns = {name: batch.non_tensor_batch[name] for name in _GROUND_TRUTH_COLUMNS if name in batch.non_tensor_batch}
    rows = Trajectories.of(batch).last_rows
    return [ground_truth_of({name: values[row] for name, values in columns.items()}) for row in rows]


def response_texts(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Return per trajectory its first prompt (`input`) and last response (`output`); with several rows, all prompts and
    responses (`rows`); for agents also the `status` and the `turns`: source (`by`), text and reward."""
    prompts, responses = (decode(tokenizer, batch.batch[name].tolist()) for name in ("prompts", "responses"))
    trajectories = Trajectories.of(batch)
    rows: list[list[int]] = [[] for _ in range(len(trajectories))]
    for row, number in enumerate(trajectories.of_row):
        rows[number].append(row)
    texts: list[dict[str, Any]] = []
    for members, last in zip(rows, trajectories.last_rows, strict=True):
        texts.append({"input": prompts[members[0]], "output": responses[last]})
        if len(members) > 1:
            texts[-1]["rows"] = [(prompts[row], responses[row]) for row in members]
    if "agent_turns" in batch.non_tensor_batch:
        for text, members in zip(texts, rows, strict=True):
            text["status"] = (batch.non_tensor_batch["agent_metrics"][members[0]] or {}).get("status", "finished")
            text["turns"] = [turn for row in members for turn in _turns(batch, tokenizer, row)]
    return texts


def _turns(batch: DataProto, tokenizer: Any, row: int) -> list[dict[str, Any]]:
    described = [
        {"by": name or source, "tokens": count, "reward": reward}
        for source, count, name, reward in batch.non_tensor_batch["agent_turns"][row]
    ]
    tokens = batch.batch["responses"][row : row + 1].numpy()
    texts = response_turns(tokenizer, tokens, [tokens.shape[1]], [described])[0]
    return [
        {"by": turn["by"], "text": text} | ({} if turn["reward"] is None else {"reward": turn["reward"]})
        for turn, text in zip(described, texts, strict=True)
    ]


def response_turns(
    tokenizer: Any, responses: np.ndarray, lengths: Sequence[int], turns: Sequence[Sequence[Mapping[str, Any]]]
) -> list[list[str]]:
    """Return the text of every turn. `responses` [rows, width]; `turns`: the turns of each row, whose `tokens` is the
    number of their tokens. A turn may end after `lengths`, the number of tokens of each row: it is truncated."""
    pieces = []
    for row, length, parts in zip(responses, lengths, turns, strict=True):
        ids, end = row[:length].tolist(), 0
        for turn in parts:
            start, end = end, end + turn["tokens"]
            pieces.append(ids[start:end])
    texts = iter(decode(tokenizer, pieces))
    return [[next(texts) for _ in parts] for parts in turns]


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path, redaction: Redaction | None = None) -> Path:
    """Write one JSON object per line atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        for row in rows:
            value = plain_value(row) if redaction is None else redaction.value(plain_value(row), keys=True)
            line = json.dumps(value, ensure_ascii=False, default=str).translate(_LINE_BREAKS)
            stream.write(f"{line}\n".encode())
    return path


def decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Return the texts without special tokens."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def plain_value(value: Any) -> Any:
    """Return nested values of numpy as Python values; NaN and infinity, which JSON does not have, as None."""
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain_value(value.tolist())
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
