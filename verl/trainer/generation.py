"""Generation from a file: n answers to every prompt, kept batch by batch, so that a run that was killed goes on.

Which answer a prompt gets depends on the seed, its words and which of its n answers it is, not on what else is
generated with it: a run in two pieces writes what a whole one does.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.config import GenerationConfig, ModelConfig, RolloutConfig, as_config
from verl.config.generation import check_context_length
from verl.protocol import DataProto
from verl.trainer.answer_store import RESPONSES, AnswerStore
from verl.trainer.common.answer_ends import answer_ends
from verl.trainer.common.status_line import StatusLine, progress_bar
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import DataError, chat_rule, find_problems
from verl.utils.dataset.rows import ArrowPart, Part, Rows
from verl.utils.dataset.tokens import PromptTokens, encode_prompts, truncate
from verl.utils.exceptions import fields_as_keys
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect, tick
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.prompts import prompt_rows, trajectories_from_prompts

__all__ = ["generate_answers"]

logger = logging.getLogger(__name__)

_JOB = "generation"
# A call for finished rows blocks this long.
_COLLECT_S = 2.0

# Keys of `rollout` that decide answers; the others decide how fast they come.
_DECISIVE = (
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
)


def generate_answers(config: GenerationConfig) -> Path:
    """Answer the prompts of `data.path`; returns the file that was written. What an earlier run kept is not redone."""
    prompts = _Prompts(config)
    output = Path(config.data.output_path).absolute()
    with AnswerStore(output, prompts.settings(), prompts.batches) as store:
        if store.finished:
            logger.info("%s is there already, with these settings", output)
            return output
        missing = store.missing()
        if missing:
            kept = prompts.batches - len(missing)
            if kept:
                logger.info("%d of %d batches are kept from an earlier run", kept, prompts.batches)
            with fields_as_keys("rollout", RolloutConfig):
                _answer(config, prompts, store, missing)
        store.finish(prompts.table)
    logger.info("%s: %d rows with %d answers each", output, prompts.count, config.data.n_samples)
    return output


class _Prompts:
    """The rows of the files, their prompts in tokens, and the batches they are answered in."""

    def __init__(self, config: GenerationConfig) -> None:
        self.config, data = config, config.data
        rows = Rows(find_files(data.path))
        problems = find_problems(rows, [chat_rule(data.prompt_key, "data.prompt_key")])
        if RESPONSES in rows.columns:
            problems.append(f"data.path: there is a column {RESPONSES!r} already. Rename it.")
        if problems:
            raise DataError(problems)
        self.count = len(rows) if data.max_samples < 0 else min(data.max_samples, len(rows))
        self.batches = -(-self.count // data.batch_size)
        self.table = _table(rows, self.count)
        self.model_path = resolve_model_path(config.model.path)
        check_context_length(config, self.model_path)
        self.tokenizer = hf_tokenizer(self.model_path, trust_remote_code=config.model.trust_remote_code)
        encoder = PromptEncoder(self.tokenizer, data.apply_chat_template_kwargs, None, data.system_prompt)
        self._tokens = encode_prompts(rows, self.count, data.prompt_key, encoder)
        _refuse_overlong(rows, self._tokens, config)
        self.ends = answer_ends(config.model, config.rollout, self.tokenizer, data.apply_chat_template_kwargs)

    def settings(self) -> dict[str, Any]:
        """Everything that decides the answers."""
        data = self.config.data
        digest = hashlib.blake2b(digest_size=16)
        for row in range(self.count):
            digest.update(f"{self._tokens.uid(row)} {self._ids(row).tolist()}".encode())
        return {
            "prompts": f"{self.count} rows, {digest.hexdigest()}",
            "model.path": [self.model_path, _files_of(self.model_path)],
            "model.override_config": self.config.model.override_config,
            "end tokens": self.ends,
            "data.n_samples": data.n_samples,
            "data.batch_size": data.batch_size,
            **{f"rollout.{name}": self.config.rollout[name] for name in _DECISIVE},
        }

    def size(self, batch: int) -> int:
        """Prompts of a batch."""
        return min(self.config.data.batch_size, self.count - batch * self.config.data.batch_size)

    def rows(self, batch: int) -> DataProto:
        """`n_samples` rows for every prompt of the batch, in order."""
        first = batch * self.config.data.batch_size
        numbers = range(first, first + self.size(batch))
        return prompt_rows([*map(self._ids, numbers)], [*map(self._tokens.uid, numbers)], self.config.data.n_samples)

    def _ids(self, row: int) -> np.ndarray:
        data = self.config.data
        return truncate(self._tokens.tokens[row], data.max_prompt_length, data.truncation)


def _answer(config: GenerationConfig, prompts: _Prompts, store: AnswerStore, missing: list[int]) -> None:
    """Generate and keep the missing batches, under a progress bar."""
    n = config.data.n_samples
    status = StatusLine(prompts.batches, prompts.batches - len(missing))
    with _engine(config, prompts.model_path) as rollout, progress_bar(status.standing), status.phase("rollout"):
        host = EngineHost(rollout)
        host.start(_JOB, {"eos_token_id": prompts.ends}, temperature=config.rollout.temperature)
        batches = ((number, prompts.rows(number)) for number in missing)
        expect(n * sum(map(prompts.size, missing)))
        for number, responses in _completed_batches(host, batches, 2 * config.rollout.max_num_seqs):
            texts = prompts.tokenizer.batch_decode(responses, skip_special_tokens=True)
            store.keep(number, [texts[first : first + n] for first in range(0, len(texts), n)])
            status.step_done()


def _completed_batches(
    host: EngineHost, batches: Iterator[tuple[int, DataProto]], capacity: int
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield (batch number, response tokens of its rows in order) as batches are completed.

    The next batch is submitted when fewer than `capacity` rows are in flight: the engine stays full, and only started
    batches are in memory.
    """
    in_flight: dict[str, tuple[int, int]] = {}  # by trajectory: its batch and row
    responses: dict[int, dict[int, list[int]]] = {}
    sizes: dict[int, int] = {}
    waiting = next(batches, None)
    while waiting is not None or in_flight:
        while waiting is not None and len(in_flight) < capacity:
            number, rows = waiting
            in_flight |= {one.name: (number, row) for row, one in enumerate(trajectories_from_prompts(rows))}
            responses[number], sizes[number] = {}, len(rows)
            host.submit(_JOB, rows)
            waiting = next(batches, None)
        reply, _ = host.collect(host.id, _COLLECT_S, with_partials=False)
        host.require_sound()
        if reply.headers is None:
            continue
        tick(len(reply.headers.names))
        for index, name in enumerate(reply.headers.names):
            number, row = in_flight.pop(name)
            responses[number][row] = reply.headers.last_tokens(index).tolist()
        for number in [number for number, size in sizes.items() if len(responses[number]) == size]:
            done = responses.pop(number)
            yield number, [done[row] for row in range(sizes.pop(number))]


def _engine(config: GenerationConfig, model_path: str) -> BaseRollout:
    model = as_config(ModelConfig, config.model.to_dict(), at="actor_rollout_ref.model")
    # Training never samples at temperature 0; requests say it themselves.
    settings = {**config.rollout.to_dict(), "temperature": config.rollout.temperature or 1.0}
    return open_rollout(model_path, model, as_config(RolloutConfig, settings), config.trainer.device)


def _refuse_overlong(rows: Rows, prompts: PromptTokens, config: GenerationConfig) -> None:
    limit, lengths = config.data.max_prompt_length, prompts.tokens.lengths
    long = np.flatnonzero(lengths > limit)
    if len(long) and config.data.truncation == "error":
        raise DataError(
            [
                f"{rows.where(int(long[0]))} (and {len(long) - 1} more): the prompt has {lengths[long[0]]} tokens, more"
                f" than data.max_prompt_length = {limit} (the longest has {lengths.max()}). Raise it, or set"
                " data.truncation=left, right or middle."
            ]
        )


def _table(rows: Rows, count: int) -> pa.Table:
    """The first `count` rows of all files with all of their columns."""
    tables: list[pa.Table] = []
    for part in rows.parts:
        size = min(len(part), count - sum(table.num_rows for table in tables))
        try:
            tables.append(_part_table(part, size))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError([f"{part.file}: its rows make no table ({error}). Give each field one type."]) from error
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        files = ", ".join(part.file for part in rows.parts)
        raise DataError([f"{files}: a column has several types ({error}). Answer each file by itself."]) from error


def _part_table(part: Part, size: int) -> pa.Table:
    if isinstance(part, ArrowPart):
        return part.table.slice(0, size)
    return pa.Table.from_pylist(part.rows(0, size))


def _files_of(folder: str) -> list[list[Any]]:
    """Which state of a model: name, size and time of each of its files."""
    stats = [(path.name, os.stat(path)) for path in sorted(Path(folder).glob("*")) if path.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
