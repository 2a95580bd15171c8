"""What a run writes for people to look at: batches as tensors, answers as JSONL."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto
from verl.types.schema import selected_for
from verl.utils.dataset.problems import ground_truth_of
from verl.utils.disk import atomic_write
from verl.utils.plain_store import save_tensors

_OURS = ("step", "input", "output", "gts", "score", "rows", "turns", "status")
# Columns that may have the right answer.
_TRUTHS = ("reward_model", "ground_truth")
# JSON leaves these as they are, but readers that split text into lines do not.
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def dump_batch(batch: DataProto, folder: str, step: int) -> Path:
    """`debug_step_N.pt`: a dict of the step's tensors, for `torch.load(…, weights_only=True)`; no object columns."""
    path = Path(folder) / f"debug_step_{step}.pt"
    save_tensors(dict(batch.tensors()), path)
    return path


def dump_rows(batch: DataProto, tokenizer: Any, folder: str, step: int) -> Path:
    """`N.jsonl`: prompt, answer, the right one (`gts`), score and what the reward said, one line per sample; of agents
    their turns as well."""
    answers, whole = answer_texts(batch, tokenizer), Trajectories.of(batch)
    scores, truths = whole.sum(batch.batch["token_level_scores"].sum(-1)).tolist(), ground_truths(batch)
    columns, names = batch.non_tensor_batch, selected_for("dump", batch.non_tensor_batch)
    extras = beside_ours({key: columns[key][whole.last_rows] for key in names})
    rows = (
        {"step": step, **answer, "gts": truth, "score": score, **{k: v[i] for k, v in extras.items()}}
        for i, (answer, truth, score) in enumerate(zip(answers, truths, scores, strict=True))
    )
    return write_jsonl(rows, Path(folder) / f"{step}.jsonl")


def beside_ours(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Further columns of a dump; those that are called as one of its own are `data_…`."""
    return {f"data_{name}" if name in _OURS else name: values for name, values in columns.items()}


def ground_truths(batch: DataProto) -> list[Any]:
    """The right answer of every trajectory, whoever scores it; None where the data has none."""
    columns = {name: batch.non_tensor_batch[name] for name in _TRUTHS if name in batch.non_tensor_batch}
    rows = Trajectories.of(batch).last_rows
    return [ground_truth_of({name: values[row] for name, values in columns.items()}) for row in rows]


def answer_texts(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Of every trajectory its first prompt as `input` and its last response as `output`; `rows` has all pairs of them
    where there are several. Of an agent's also its `status` and its `turns` in order: who spoke (`model`, or what the
    environment is called), what, and what the turn earned."""
    prompts, responses = (decode(tokenizer, batch.batch[name].tolist()) for name in ("prompts", "responses"))
    whole = Trajectories.of(batch)
    rows: list[list[int]] = [[] for _ in range(len(whole))]
    for row, number in enumerate(whole.of_row):
        rows[number].append(row)
    texts: list[dict[str, Any]] = []
    for members, last in zip(rows, whole.last_rows, strict=True):
        texts.append({"input": prompts[members[0]], "output": responses[last]})
        if len(members) > 1:
            texts[-1]["rows"] = [(prompts[row], responses[row]) for row in members]
    if "agent_turns" in batch.non_tensor_batch:
        for text, members in zip(texts, rows, strict=True):
            text["status"] = (batch.non_tensor_batch["agent_metrics"][members[0]] or {}).get("status", "finished")
            text["turns"] = [turn for row in members for turn in _turns(batch, tokenizer, row)]
    return texts


def _turns(batch: DataProto, tokenizer: Any, row: int) -> list[dict[str, Any]]:
    tokens, end, turns = batch.batch["responses"][row].tolist(), 0, []
    for source, count, name, reward in batch.non_tensor_batch["agent_turns"][row]:
        start, end = end, end + count
        turns.append({"by": name or source, "text": decode(tokenizer, [tokens[start:end]])[0]})
        if reward is not None:
            turns[-1]["reward"] = reward
    return turns


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> Path:
    """One JSON object per line, null for what is not finite; the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        for row in rows:
            line = json.dumps(_finite(row), ensure_ascii=False, default=_plain).translate(_LINE_BREAKS)
            stream.write(f"{line}\n".encode())
    return path


def decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Texts without special tokens."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def _finite(value: Any) -> Any:
    """With None in the place of NaN and infinity, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _finite(value.tolist())
    return _finite(value.item()) if isinstance(value, np.generic) else str(value)
