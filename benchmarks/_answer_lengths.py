"""Lengths of recorded responses: read from a file, or counted in texts with a model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Fields of the responses in files of `verl.trainer.main_generation` and `trainer.rollout_data_dir`.
FIELDS = ("responses", "output")


def read_lengths(path: Path, tokenizer: str | None, fields: tuple[str, ...] = FIELDS) -> list[list[int]]:
    """Tokens of every response, grouped by prompt.

    `path`: {"answers": [[tokens, …], …]}; JSON lines, each the tokens of an answer or of all answers to a prompt; or
    texts, which need a `tokenizer`: Parquet or JSON lines with answers in `fields`, or a folder of the latter. Rows of
    a file with the same "input" answer one prompt.
    """
    if path.suffix == ".json":
        return json.loads(path.read_text())["answers"]
    rows = [list(_rows(file)) for file in _files(path)]
    if rows and rows[0] and not isinstance(rows[0][0], dict):
        return [row if isinstance(row, list) else [row] for row in rows[0]]
    if tokenizer is None:
        raise SystemExit(f"{path} contains texts: set --tokenizer to the model that counts their tokens.")
    texts = [answers for of_file in rows for answers in _by_prompt(of_file, path, fields)]
    return _count_tokens(texts, tokenizer)


def in_groups(lengths: list[list[int]], answers: int) -> list[list[int]]:
    """Groups of `answers` lengths. Prompts with fewer responses are merged with the next ones; such groups vary more,
    and wait more often for a long response, than real groups."""
    groups: list[list[int]] = [[]]
    for of_prompt in lengths:
        if len(groups[-1]) >= answers:
            groups.append([])
        groups[-1] += of_prompt
    if len(groups) > 1 and len(groups[-1]) < answers:
        groups.pop()
    return [group[:answers] for group in groups]


def _files(path: Path) -> list[Path]:
    """Sorted by step number, if the files are named by step."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("*.jsonl"), key=lambda file: (len(file.stem), file.stem))


def _rows(file: Path) -> Iterator[Any]:
    if file.suffix == ".parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(file).to_pylist()
    else:
        yield from (json.loads(line) for line in file.read_text().split("\n") if line.strip())


def _by_prompt(rows: list[dict[str, Any]], path: Path, fields: tuple[str, ...]) -> list[list[str]]:
    prompts: dict[Any, list[str]] = {}
    for number, row in enumerate(rows):
        values = [row[field] for field in fields if field in row]
        if not values:
            raise SystemExit(f"{path}: a row has no {' or '.join(fields)} (found: {', '.join(row)}). Set --fields.")
        texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
        prompts.setdefault(row.get("input", number), []).extend(texts)
    return list(prompts.values())


def _count_tokens(texts: list[list[str]], tokenizer: str) -> list[list[int]]:
    """Including the end token of each response."""
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    return [[len(ids) + 1 for ids in encode(group, add_special_tokens=False)["input_ids"]] for group in texts]
