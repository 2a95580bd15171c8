"""Generate n responses to every prompt of data files, and store them batch by batch, so that a run can resume.

A response depends on the seed, its prompt and its index among the n responses, not on other prompts: a resumed run
writes the same file as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from verl.config import GenerationConfig, ModelConfig, RolloutConfig, as_config
from verl.config.generation import check_context_length
from verl.protocol import DataProto
from verl.trainer.common.run_status import RunStatus
from verl.trainer.common.status_display import show_status
from verl.utils.console import LINE, format_duration, show_startup, startup_phase
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.problems import DataError, chat_rule, find_problems
from verl.utils.dataset.rows import ArrowFile, DataFile, Rows, find_files
from verl.utils.dataset.tokens import PromptTokens, encode_prompts, truncate
from verl.utils.disk import atomic_write
from verl.utils.exceptions import fields_as_keys
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect, tick
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.prompts import prompt_rows, response_end_tokens, trajectories_from_prompts

logger = logging.getLogger(__name__)

RESPONSES = "responses"
"""The column of the output file that contains the responses."""

# Name of the only job of the engine host.
_JOB = "generation"
# A `collect` call returns after this time at the latest.
_COLLECT_S = 2.0
# Key of the settings in the metadata of the output file.
_SETTINGS_KEY = b"verl.generation"
_RESPONSE_TYPE = pa.list_(pa.string())

# Keys of `rollout` that are stored with the responses and must be the same in a run that resumes. Keys for memory,
# speed and addresses may differ (`engine_kwargs`, `server_urls`).
_RESPONSE_KEYS = (
    "name",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "do_sample",
    "seed",
    "max_new_tokens",
    "max_model_len",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "dtype",
    "quantization",
)


def generate_responses(config: GenerationConfig) -> Path:
    """Generate responses to the prompts of `data.path`, except batches stored by an earlier run; return the output
    file."""
    one_line = config.trainer.console == LINE
    with show_startup(one_line), startup_phase("prompts"):
        prompts = _PromptBatches(config)
    output = Path(config.data.output_path).absolute()
    with ResponseStore(output, prompts.settings(), prompts.batch_count) as store:
        if store.finished:
            logger.info("%s exists already, with these settings", output)
            return output
        missing = store.missing()
        if missing:
            stored = prompts.batch_count - len(missing)
            if stored:
                logger.info("%d of %d batches are kept from an earlier run", stored, prompts.batch_count)
            with fields_as_keys("rollout", RolloutConfig):
                summary = _generate(config, prompts, store, missing)
            if one_line:
                logger.info("%s", summary)
        store.finish(prompts.table)
    logger.info("%s: %d rows with %d responses each", output, prompts.count, config.data.n_samples)
    if one_line:
        logger.info("  %-9s verl eval data.path=%s", "score:", shlex.quote(str(output)))
    return output


class _PromptBatches:
    """The rows of the data files with their tokenised prompts, divided into batches."""

    def __init__(self, config: GenerationConfig) -> None:
        self.config, data = config, config.data
        rows = Rows(find_files(data.path))
        problems = find_problems(rows, [chat_rule(data.prompt_key, "data.prompt_key")])
        if RESPONSES in rows.columns:
            problems.append(f"data.path: there is a column {RESPONSES!r} already. Rename it.")
        if problems:
            raise DataError(problems)
        self.count = len(rows) if data.max_samples < 0 else min(data.max_samples, len(rows))
        self.batch_count = -(-self.count // data.batch_size)
        self.table = _read_rows(rows, self.count)
        self.model_path = resolve_model_path(config.model.path)
        check_context_length(config, self.model_path)
        self.tokenizer = hf_tokenizer(self.model_path, trust_remote_code=config.model.trust_remote_code)
        encoder = PromptEncoder(self.tokenizer, data.apply_chat_template_kwargs, None, data.system_prompt)
        self._tokens = encode_prompts(rows, self.count, data.prompt_key, encoder)
        _check_lengths(rows, self._tokens, config)
        self.end_tokens = response_end_tokens(
            config.model, config.rollout, self.tokenizer, data.apply_chat_template_kwargs
        )

    def settings(self) -> dict[str, Any]:
        """Return all settings that determine the responses, by name."""
        data = self.config.data
        digest = hashlib.blake2b(digest_size=16)
        for row in range(self.count):
            digest.update(f"{self._tokens.uid(row)} {self._ids(row).tolist()}".encode())
        return {
            "prompts": f"{self.count} rows, {digest.hexdigest()}",
            "model.path": [self.model_path, _file_stats(self.model_path)],
            "model.override_config": self.config.model.override_config,
            "end tokens": self.end_tokens,
            "data.n_samples": data.n_samples,
            "data.batch_size": data.batch_size,
            **{f"rollout.{name}": self.config.rollout[name] for name in _RESPONSE_KEYS},
        }

    def size(self, batch: int) -> int:
        """Return the number of prompts of a batch."""
        return min(self.config.data.batch_size, self.count - batch * self.config.data.batch_size)

    def rows(self, batch: int) -> DataProto:
        """Return `n_samples` rows for every prompt of the batch, in order."""
        first = batch * self.config.data.batch_size
        numbers = range(first, first + self.size(batch))
        return prompt_rows([*map(self._ids, numbers)], [*map(self._tokens.uid, numbers)], self.config.data.n_samples)

    def _ids(self, row: int) -> np.ndarray:
        """Return the token ids of a prompt, truncated to the maximum length."""
        data = self.config.data
        return truncate(self._tokens.tokens[row], data.max_prompt_length, data.truncation)


def _generate(config: GenerationConfig, prompts: _PromptBatches, store: ResponseStore, missing: list[int]) -> str:
    """Generate and store the missing batches, and show the progress; return a summary."""
    n, console = config.data.n_samples, config.trainer.console
    status = RunStatus(prompts.batch_count, prompts.batch_count - len(missing))
    with show_startup(console == LINE), startup_phase("engine"):
        engine = _open_engine(config, prompts.model_path)
    lengths: list[int] = []
    with engine as rollout, show_status(status.snapshot, console), status.phase("rollout"):
        start, host = time.monotonic(), EngineHost(rollout)
        host.start(_JOB, {"eos_token_id": prompts.end_tokens}, temperature=config.rollout.temperature)
        batches = ((number, prompts.rows(number)) for number in missing)
        expect(n * sum(map(prompts.size, missing)))
        for number, responses in _completed_batches(host, batches, 2 * config.rollout.max_num_seqs):
            lengths += map(len, responses)
            texts = prompts.tokenizer.batch_decode(responses, skip_special_tokens=True)
            store.add(number, [texts[first : first + n] for first in range(0, len(texts), n)])
            status.step_done()
        seconds = time.monotonic() - start
    return describe_generation(lengths, config.rollout.max_new_tokens, seconds)


def describe_generation(lengths: Sequence[int], max_new_tokens: int, seconds: float) -> str:
    """Return one line for responses of these lengths in tokens, generated in `seconds`."""
    cut = sum(length >= max_new_tokens for length in lengths) / max(1, len(lengths))
    mean = sum(lengths) / max(1, len(lengths))
    return (
        f"Summary: {len(lengths)} responses in {format_duration(seconds)}: {len(lengths) / seconds:.1f} responses/s,"
        f" {sum(lengths) / seconds:.0f} tokens/s, length={mean:.4g} ({cut:.1%} cut)"
    )


def _completed_batches(
    host: EngineHost, batches: Iterator[tuple[int, DataProto]], capacity: int
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield (batch number, response tokens of its rows in order) as batches are completed.

    The next batch is submitted when fewer than `capacity` rows are in flight: the engine stays full, and only started
    batches are in memory.
    """
    in_flight: dict[str, tuple[int, int]] = {}  # name of a trajectory -> number of its batch, and its row there
    responses: dict[int, dict[int, list[int]]] = {}  # number of a batch -> row -> tokens
    sizes: dict[int, int] = {}  # number of a batch -> rows
    next_batch = next(batches, None)
    while next_batch is not None or in_flight:
        while next_batch is not None and len(in_flight) < capacity:
            number, rows = next_batch
            trajectories = trajectories_from_prompts(rows)
            in_flight |= {trajectory.name: (number, row) for row, trajectory in enumerate(trajectories)}
            responses[number], sizes[number] = {}, len(rows)
            host.submit(_JOB, rows)
            next_batch = next(batches, None)
        reply, _ = host.collect(host.id, _COLLECT_S, with_partials=False)
        host.raise_if_failed()
        if reply.headers is None:
            continue
        tick(len(reply.headers.names))
        for index, name in enumerate(reply.headers.names):
            number, row = in_flight.pop(name)
            responses[number][row] = reply.headers.last_tokens(index).tolist()
        for number in [number for number, size in sizes.items() if len(responses[number]) == size]:
            completed = responses.pop(number)
            yield number, [completed[row] for row in range(sizes.pop(number))]


def _open_engine(config: GenerationConfig, model_path: str) -> BaseRollout:
    model = as_config(ModelConfig, config.model.to_dict(), at="actor_rollout_ref.model")
    # RolloutConfig does not allow temperature 0, which training never uses; it is passed to `EngineHost.start` instead.
    settings = {**config.rollout.to_dict(), "temperature": config.rollout.temperature or 1.0}
    return open_rollout(model_path, model, as_config(RolloutConfig, settings), config.trainer.device)


class ResponseStore:
    """Stores the responses of each batch on disk, until `finish` writes the file `output`. A context manager that locks
    `output`.

    Each batch is a file in a folder beside `output`. The folder and `output` also contain the settings that determine
    the responses: a later run with the same settings continues with the missing batches.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], batch_count: int) -> None:
        self.output = output
        self.folder = output.with_name(f"{output.name}.parts")
        # Normalised by JSON, for the comparison with stored settings.
        self._settings = json.loads(json.dumps(settings, sort_keys=True, default=str))
        self._batch_count = batch_count
        self._lock = FileLock(output.with_name(f".{output.name}.lock"))

    def __enter__(self) -> ResponseStore:
        """Lock the output. Raises ValueError if another run has locked it, or if the stored settings differ."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"data.output_path: another run is writing {self.output}. Wait, or choose another path."
            ) from error
        try:
            self._check_settings()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Deleted while it is locked: a run that starts after the release would otherwise lose the file that it locked.
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether the output file exists."""
        return self.output.exists()

    def missing(self) -> list[int]:
        """Return the numbers of the batches that are not stored yet."""
        return [number for number in range(self._batch_count) if not self._part(number).exists()]

    def add(self, number: int, responses: Sequence[Sequence[str]]) -> None:
        """Store the responses to each prompt of a batch; they are on disk when this returns."""
        _write_parquet(pa.table({RESPONSES: pa.array(responses, _RESPONSE_TYPE)}), self._part(number))

    def finish(self, rows: pa.Table) -> None:
        """Write `rows` with their responses atomically, and remove the folder."""
        parts = [pq.read_table(self._part(number)).column(RESPONSES) for number in range(self._batch_count)]
        responses = pa.chunked_array([chunk for part in parts for chunk in part.chunks], _RESPONSE_TYPE)
        table = rows.append_column(RESPONSES, responses)
        metadata = {**(table.schema.metadata or {}), _SETTINGS_KEY: json.dumps(self._settings).encode()}
        _write_parquet(table.replace_schema_metadata(metadata), self.output)
        shutil.rmtree(self.folder)

    def _check_settings(self) -> None:
        """Compare the settings with those stored in the output or the folder; store them if there are none."""
        if self.output.exists():
            try:
                stored = (pq.read_schema(self.output).metadata or {}).get(_SETTINGS_KEY)
            except pa.ArrowInvalid:
                stored = None
            self._compare_settings(self.output, None if stored is None else json.loads(stored))
            return
        self.folder.mkdir(exist_ok=True)
        file = self.folder / "settings.json"
        if file.exists():
            self._compare_settings(self.folder, json.loads(file.read_text()))
        else:
            with atomic_write(file) as stream:
                stream.write(json.dumps(self._settings, indent=1).encode())

    def _compare_settings(self, path: Path, settings: Any) -> None:
        """Raise ValueError if the settings stored at `path` differ from those of this run."""
        if settings is None:
            difference = "was not written by main_generation"
        else:
            names = sorted({*settings, *self._settings})
            different = [name for name in names if settings.get(name) != self._settings.get(name)]
            if not different:
                return
            difference = f"has responses of a run with another {', '.join(different)}"
        raise ValueError(f"data.output_path: {path} {difference}. Choose another path, or delete it.")

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:06d}.parquet"


def _write_parquet(table: pa.Table, file: Path) -> None:
    """Write a file atomically."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    with atomic_write(file) as stream:
        stream.write(sink.getvalue())


def _check_lengths(rows: Rows, prompts: PromptTokens, config: GenerationConfig) -> None:
    """Raise DataError for prompts that are too long, unless they are to be truncated."""
    limit, lengths = config.data.max_prompt_length, prompts.tokens.lengths
    too_long = np.flatnonzero(lengths > limit)
    if len(too_long) and config.data.truncation == "error":
        first, others = int(too_long[0]), len(too_long) - 1
        more = f" (and {others} more)" if others else ""
        raise DataError(
            [
                f"{rows.where(first)}{more}: the prompt has {lengths[first]} tokens, more than data.max_prompt_length ="
                f" {limit} (the longest has {lengths.max()}). Raise it, or set data.truncation=left, right or middle."
            ]
        )


def _read_rows(rows: Rows, count: int) -> pa.Table:
    """Return the first `count` rows of all files with all of their columns."""
    tables: list[pa.Table] = []
    for data_file in rows.data_files:
        size = min(len(data_file), count - sum(table.num_rows for table in tables))
        try:
            tables.append(_first_rows(data_file, size))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                [f"{data_file.file}: its rows cannot be converted to a table ({error}). Give each field one type."]
            ) from error
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        files = ", ".join(data_file.file for data_file in rows.data_files)
        raise DataError([f"{files}: a column has several types ({error}). Generate each file separately."]) from error


def _first_rows(data_file: DataFile, size: int) -> pa.Table:
    if isinstance(data_file, ArrowFile):
        return data_file.table.slice(0, size)
    return pa.Table.from_pylist(data_file.rows(0, size))


def _file_stats(folder: str) -> list[list[Any]]:
    """Return name, size and modification time of each file of a model, which identify its state."""
    stats = [(path.name, os.stat(path)) for path in sorted(Path(folder).glob("*")) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
