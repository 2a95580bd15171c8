"""Shared by the scripts of this folder: arguments, raw rows from local files or the hub, writing parquet files."""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.dataset.rows import Rows

Row = dict[str, Any]
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".jsonl.gz")


def argument_parser(doc: str | None, name: str, hub_name: str, layout: str) -> argparse.ArgumentParser:
    """The arguments of every script; `layout` describes the files of a local folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_save_dir(parser, name)
    parser.add_argument("--local_dataset_path", help=f"{layout}; default: the hub")
    parser.add_argument("--hub_name", default=hub_name, help="dataset to download if no local path is given")
    return parser


def add_save_dir(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument("--local_save_dir", default=f"~/data/{name}", help="folder for the parquet files")


def expanded(path: str) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def local_files(path: str, names: Sequence[str]) -> list[Path]:
    """The data files of a folder whose names begin with one of `names`; a path to a file is that file."""
    target = expanded(path)
    if target.is_file():
        return [target]
    return sorted(
        file for file in target.glob("*") if file.name.startswith(tuple(names)) and file.name.endswith(SUFFIXES)
    )


def from_folder(path: str, names: Sequence[str], origin: str) -> Iterator[Row]:
    """The rows of `local_files(path, names)`; `origin` says where to get missing files."""
    files = local_files(path, names)
    if not files:
        patterns = " or ".join(f"{name}*.jsonl" for name in names)
        raise SystemExit(
            f"--local_dataset_path: there is no {expanded(path) / patterns} (or .json, .parquet). Get it from {origin}."
        )
    for file in files:
        if file.suffix == ".gz":
            with gzip.open(file, "rt", encoding="utf-8") as lines:
                yield from (json.loads(line) for line in lines if line.strip())
            continue
        rows = Rows([str(file)])
        for _, batch in rows.batches(rows.columns):
            yield from batch


def from_hub(name: str, split: str, part: str | None = None) -> Iterator[Row]:
    """The rows of a split; `part`: the configuration of a dataset with several."""
    import datasets
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    sources = [name]
    with contextlib.suppress(LocalEntryNotFoundError):
        # Offline, `load_dataset` does not find by name what `hf download` has downloaded.
        sources.insert(0, snapshot_download(name, repo_type="dataset", local_files_only=True))
    for source in sources:
        try:
            dataset = datasets.load_dataset(source, part, split=split)
        except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
            reason = error
        else:
            yield from dataset
            return
    raise SystemExit(
        f"{name}: cannot be loaded from the hub ({reason}). On a machine with access run: "
        f"hf download --repo-type dataset {name}; or give --local_dataset_path."
    )


def training_row(
    source: str, prompt: str | list[Row], ability: str, ground_truth: Any, extra_info: Row, style: str = "rule"
) -> Row:
    """One row in the schema of RL data; a `prompt` of type str becomes a user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {
        "data_source": source,
        "prompt": messages,
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


def field(item: Row, name: str, location: str) -> Any:
    """A required field of a raw row; `location` names the row in the error."""
    if item.get(name) is None:
        raise SystemExit(f"{location}: no {name!r} (found: {', '.join(item)}). Use data in the format of this script.")
    return item[name]


def save(rows: Iterable[Row], folder: str, split: str, note: str = "") -> None:
    """Write `split`.parquet and print its path and number of rows."""
    target = expanded(folder)
    target.mkdir(parents=True, exist_ok=True)
    table = list(rows)
    if not table:
        raise SystemExit(f"{split}: no usable row. Check the raw data.")
    file = target / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(table), file)
    print(f"{file}: {len(table)} rows{note}")
