"""Helpers for tests of rollout hosts: rows of named trajectories, and replies collected from a real engine's host."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from verl.protocol import DataProto, object_array
from verl.types.request import Output, join_outputs
from verl.types.trajectory import HostReply
from verl.workers.rollout.engine_host import EngineHost
from verl.workers.rollout.loop_host import LoopHost

MANY_TOKENS = 120


def named_rows(make_prompts: Callable[..., DataProto], rows: int = 4, **keys: Any) -> DataProto:
    """Prompts with `uid` and `sample_index`, as a RolloutManager submits them."""
    prompts = make_prompts(rows=rows, **keys)
    prompts.non_tensor_batch["sample_index"] = object_array([0] * rows)
    return prompts


def names_of(rows: DataProto) -> list[str]:
    columns = rows.non_tensor_batch
    return [f"{uid}/{number}" for uid, number in zip(columns["uid"], columns["sample_index"], strict=True)]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_finished(host: LoopHost, *jobs: str) -> None:
    """Wait until generation of all rows of these jobs has ended."""
    wait_until(lambda: not any(host.jobs[job].unfinished for job in jobs))


def wait_tokens(engine: Any, count: int) -> None:
    """Wait until every request of the engine has `count` tokens."""

    def all_have() -> bool:
        outputs = [sequence.output for sequence in engine.loop.all_unfinished()]
        return bool(outputs) and all(len(output.token_ids) >= count for output in outputs)

    wait_until(all_have)


def pause_with_tokens(engine: Any, count: int) -> None:
    """Stop the engine when every request has at least `count` tokens."""
    wait_tokens(engine, count)
    engine.pause_generation("keep")


def collect_all(host: LoopHost, count: int) -> list[tuple[HostReply, DataProto]]:
    """Collect until `count` trajectories have been reported; every non-empty reply with its rows."""
    replies: list[tuple[HostReply, DataProto]] = []
    while sum(len(reply.headers.names) for reply, _ in replies if reply.headers) < count:
        reply, rows = host.collect(host.id, 60, False)
        assert reply.failure is None
        assert not reply.closed
        if rows is not None:
            replies.append((reply, rows))
    return replies


def tokens_by_name(replies: list[tuple[HostReply, DataProto]]) -> dict[str, list[int]]:
    """Response tokens of single-row trajectories, read from the headers and checked against the rows."""
    tokens: dict[str, list[int]] = {}
    for reply, rows in replies:
        headers = reply.headers
        assert headers is not None
        for number, name in enumerate(headers.names):
            tokens_of_row = headers.tokens[headers.token_offsets[number] : headers.token_offsets[number + 1]].tolist()
            assert rows.batch["responses"][number, : len(tokens_of_row)].tolist() == tokens_of_row
            assert name not in tokens, "reported once"
            tokens[name] = tokens_of_row
    return tokens


def one_reply(host: LoopHost, job: str) -> tuple[HostReply, DataProto]:
    """Wait until the job has finished and collect it with one call."""
    wait_finished(host, job)
    reply, rows = host.collect(host.id, 60, False)
    assert rows is not None
    return reply, rows


def assert_same_tensors(rows: DataProto, expected: DataProto) -> None:
    assert set(rows.batch.keys()) == set(expected.batch.keys())
    for name in expected.batch.keys():
        assert torch.equal(rows.batch[name].nan_to_num(7.0), expected.batch[name].nan_to_num(7.0)), name


def add_partials(known: dict[str, Output], pieces: Mapping[str, Output], rows: DataProto) -> None:
    """Join reported pieces, as the RolloutManager does."""
    lengths = dict(zip(names_of(rows), rows.batch["attention_mask"].sum(-1).tolist(), strict=True))
    for name, piece in pieces.items():
        known[name] = join_outputs([known[name], piece] if name in known else [piece], lengths[name])


def open_host(engine: Any, job: str, rows: DataProto, partials: Any = None, **meta: Any) -> EngineHost:
    """A host of this engine with one job whose rows are submitted."""
    host = EngineHost(engine)
    host.start(job, rows.meta_info | meta)
    host.submit(job, rows, partials)
    return host
