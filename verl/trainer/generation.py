"""Generation from a file: n answers to every prompt, kept batch by batch, so that a run that was killed goes on.

Which answer a prompt gets depends on the seed, its words and which of its n answers it is, not on what else is
generated with it: a run in two pieces writes what a whole one does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.config import GenerationConfig, ModelConfig, RolloutConfig, as_config
from verl.config.context_length import refuse_long_sequences
from verl.trainer.answer_store import RESPONSES, AnswerStore
from verl.trainer.common.answer_ends import answer_ends
from verl.trainer.common.status_line import StatusLine, progress_bar
from verl.types.request import Output, Request, SamplingParams
from verl.utils.counter_noise import sample_keys
from verl.utils.dataset.chat import PromptEncoder
from verl.utils.dataset.files import find_files
from verl.utils.dataset.problems import DataError, chat_rule, find_problems
from verl.utils.dataset.prompt_tokens import PromptTokens, encode_prompts
from verl.utils.dataset.rows import ArrowPart, Part, Rows
from verl.utils.dataset.tokens import truncated
from verl.utils.field_errors import keys_under
from verl.utils.fs import resolve_model_path
from verl.utils.progress import expect, tick
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.prompts import sampling_params

__all__ = ["generate_answers"]

logger = logging.getLogger(__name__)

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
            with keys_under("rollout", RolloutConfig):
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
        refuse_long_sequences(config, {config.model.path: self.model_path})
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
            digest.update(f"{self._tokens.uid(row)} {self._ids(row)}".encode())
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

    def requests(self, batch: int, params: SamplingParams) -> Iterator[Request]:
        """`n_samples` for every prompt of the batch, in order."""
        first = batch * self.config.data.batch_size
        for row in range(first, first + self.size(batch)):
            ids, uid = self._ids(row), self._tokens.uid(row)
            for index in range(self.config.data.n_samples):
                key = sample_keys(self.config.rollout.seed, 0, uid, index)
                yield Request(f"{row}/{index}", ids, replace(params, key=key), group=str(row))

    def _ids(self, row: int) -> list[int]:
        data = self.config.data
        return truncated(self._tokens.tokens[row], data.max_prompt_length, data.truncation).tolist()


def _answer(config: GenerationConfig, prompts: _Prompts, store: AnswerStore, missing: list[int]) -> None:
    """Generate and keep the missing batches, under a progress bar."""
    n = config.data.n_samples
    status = StatusLine(prompts.batches, prompts.batches - len(missing))
    with _engine(config, prompts.model_path) as rollout, progress_bar(status.standing), status.phase("rollout"):
        temperature = config.rollout.temperature
        params = sampling_params(rollout.config, {}, prompts.ends, temperature=temperature)
        batches = ((number, list(prompts.requests(number, params))) for number in missing)
        expect(n * sum(map(prompts.size, missing)))
        for number, outputs in _as_completed(rollout, batches, 2 * config.rollout.max_num_seqs):
            texts = prompts.tokenizer.batch_decode([output.token_ids for output in outputs], skip_special_tokens=True)
            store.keep(number, [texts[first : first + n] for first in range(0, len(texts), n)])
            status.step_done()


def _as_completed(
    rollout: BaseRollout, batches: Iterator[tuple[int, list[Request]]], enough: int
) -> Iterator[tuple[int, list[Output]]]:
    """Batches as they are whole. More are begun while fewer than `enough` requests are unfinished: no engine idles."""
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()
    under_way: dict[int, list[Future[Output]]] = {}
    left: dict[int, int] = {}
    waiting = True
    while waiting or left:
        while waiting and sum(left.values()) < enough:
            number, requests = next(batches, (-1, []))
            waiting = number >= 0
            if waiting:
                under_way[number], left[number] = rollout.submit(requests), len(requests)
                for future in under_way[number]:
                    future.add_done_callback(partial(_say, finished, number))
        if left:
            number = finished.get()
            tick()
            left[number] -= 1
            if not left[number]:
                del left[number]
                yield number, [future.result() for future in under_way.pop(number)]


def _say(finished: queue.SimpleQueue[int], number: int, _: Future[Output]) -> None:
    finished.put(number)


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
