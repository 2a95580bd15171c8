"""What a run writes for people to look at: batches as tensors, answers as JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto
from verl.types.schema import selected_for
from verl.utils.atomic_file import replacing
from verl.utils.plain_store import save_tensors

# JSON leaves these as they are, but readers that split text into lines do not.
_LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}


def dump_batch(batch: DataProto, folder: str, step: int) -> Path:
    """`debug_step_N.pt`: a dict of the step's tensors, for `torch.load(…, weights_only=True)`; no object columns."""
    path = Path(folder) / f"debug_step_{step}.pt"
    save_tensors(dict(batch.tensors()), path)
    return path


def dump_rows(batch: DataProto, tokenizer: Any, folder: str, step: int) -> Path:
    """`N.jsonl`: prompt, answer, score and what the reward said, one line per sample."""
    answers, whole = answer_texts(batch, tokenizer), Trajectories.of(batch)
    scores = whole.sum(batch.batch["token_level_scores"].sum(-1)).tolist()
    ours = ("step", "input", "output", "score", "rows")
    extras = {
        f"data_{key}" if key in ours else key: batch.non_tensor_batch[key][whole.last_rows]
        for key in selected_for("dump", batch.non_tensor_batch)
    }
    rows = (
        {"step": step, **answer, "score": score, **{k: v[i] for k, v in extras.items()}}
        for i, (answer, score) in enumerate(zip(answers, scores, strict=True))
    )
    return write_jsonl(rows, Path(folder) / f"{step}.jsonl")


def answer_texts(batch: DataProto, tokenizer: Any) -> list[dict[str, Any]]:
    """Of every trajectory its first prompt as `input` and its last response as `output`; `rows` has all pairs of them
    where there are several."""
    texts = [decode(tokenizer, batch.batch[name].tolist()) for name in ("prompts", "responses")]
    whole = Trajectories.of(batch)
    rows: list[list[tuple[str, str]]] = [[] for _ in range(len(whole))]
    for number, pair in zip(whole.of_row, zip(*texts, strict=True), strict=True):
        rows[number].append(pair)
    return [
        {"input": pairs[0][0], "output": pairs[-1][1]} | ({"rows": pairs} if len(pairs) > 1 else {}) for pairs in rows
    ]


def write_jsonl(rows: Iterable[dict[str, Any]], path: Path) -> Path:
    """One JSON object per line; the file is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        for row in rows:
            line = json.dumps(row, ensure_ascii=False, default=_plain).translate(_LINE_BREAKS)
            stream.write(f"{line}\n".encode())
    return path


def decode(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Texts without special tokens."""
    return tokenizer.batch_decode(rows, skip_special_tokens=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else str(value)
