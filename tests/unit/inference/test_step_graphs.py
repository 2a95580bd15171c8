"""StepGraphs without a device: which graphs are captured when, what they compute, and their sizes."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config import RolloutConfig, as_config
from verl.inference.block_manager import BlockManager
from verl.inference.graphs import StepGraphs, StepInputs, always_permitted
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import Sequence
from verl.protocol import DataProto
from verl.single_controller.base.worker import RankHost
from verl.types.request import Request, SamplingParams
from verl.utils.buffer_sizes import DECODE_SIZES, MIXED_SIZES, device_kv_bytes, graph_bytes, graph_sizes
from verl.utils.device import CaptureGate, capture_gate
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout

SLOTS, TOKENS, WIDTH = 24, 200, 3


class Recorder:
    """Replays by calling the function again; may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.recorded, self.replayed = error, 0, 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self.error is not None:
            raise self.error
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay


class Graphs:
    """StepGraphs of a model whose hidden states are row, position and token."""

    def __init__(self, recorder: Recorder, may_capture: Any = always_permitted, **options: Any) -> None:
        self.last_tokens = torch.arange(100, 100 + SLOTS + 1)
        self.sizes: list[tuple[str, int]] = []
        self.graphs = StepGraphs(
            self._decode, self._mixed, self.last_tokens, SLOTS, TOKENS, recorder, may_capture, **options
        )

    def _decode(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.sizes.append(("decode", len(rows)))
        return torch.stack([rows, positions, self.last_tokens[rows]], dim=1).float()

    def _mixed(self, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, *rest: Any) -> torch.Tensor:
        starts, sequence_rows, lengths, size = rest
        assert len(sequence_rows) == len(lengths) == len(starts) - 1 == min(size, SLOTS)
        self.sizes.append(("mixed", size))
        return torch.stack([rows, positions, ids], dim=1).float()

    def run(self, slots: list[int], prefill: int = 0) -> torch.Tensor | None:
        """A step that decodes `slots`, after a prefill of this many tokens in slot 0; checks its hidden states."""
        rows = torch.tensor([0] * prefill + slots)
        positions = torch.arange(len(rows)) + 7
        ids = torch.arange(500, 500 + prefill)
        empty = torch.empty(0, dtype=torch.int64)
        sequences = [0] * bool(prefill) + slots
        starts = torch.tensor([*([0] if prefill else []), *range(prefill, len(rows) + 1)])
        inputs = StepInputs(
            rows, positions, ids, starts, torch.tensor(sequences), torch.tensor(sequences) + 1, *[empty] * 7
        )
        hidden = self.graphs.run(inputs, bool(prefill))
        if hidden is not None:
            tokens = torch.cat([ids, self.last_tokens[torch.tensor(slots, dtype=torch.int64)]])
            expected = torch.stack([rows, positions, tokens], dim=1).float()
            assert torch.equal(hidden[: len(rows)], expected)
            assert (hidden[len(rows) :, 0] == SLOTS).all(), "padding refers to the padding slot"
        return hidden


def test_a_graph_is_captured_when_a_step_of_its_size_first_runs():
    recorder = Recorder()
    steps = Graphs(recorder)
    assert steps.graphs.captured == 0
    for count, captured in ((5, 1), (8, 1), (6, 1), (3, 2), (5, 2), (17, 3), (24, 3), (1, 4)):
        steps.run(list(range(count)))
        assert steps.graphs.captured == recorder.recorded == captured
    assert recorder.replayed == 4
    steps.run([3, 4], prefill=70)
    steps.run([5], prefill=100)
    assert (steps.graphs.captured, recorder.replayed) == (5, 5)
    assert set(steps.sizes) == {("decode", 8), ("decode", 4), ("decode", 32), ("decode", 1), ("mixed", 128)}


def test_every_step_runs_once_at_its_padded_size():
    steps, dice = Graphs(Recorder()), random.Random(1)
    for number in range(200):
        prefill = dice.randrange(1, TOKENS - SLOTS) if dice.random() < 0.5 else 0
        slots = dice.sample(range(1, SLOTS), dice.randint(0 if prefill else 1, SLOTS - 1))
        assert steps.run(slots, prefill) is not None
        assert len(steps.sizes) == number + 1
    assert steps.graphs.captured == len(set(steps.sizes))


def test_while_the_device_is_in_use_steps_run_without_graphs_at_the_same_size():
    recorder, gate = Recorder(), CaptureGate()
    steps = Graphs(recorder, gate.capture)
    with gate.work():
        busy = steps.run([1, 2, 3])
        assert busy is not None
        assert len(busy) == 4
        assert steps.graphs.captured == 0
        with gate.waiting():
            steps.run([1, 2, 3])
        assert steps.graphs.captured == 1
        steps.run([4, 5, 6])
    assert recorder.replayed == 1


def test_a_graph_that_does_not_fit_into_memory_is_left_out():
    recorder = Recorder(torch.OutOfMemoryError("CUDA out of memory"))
    steps = Graphs(recorder)
    assert steps.run([1, 2]) is not None
    recorder.error = None
    assert steps.run([1, 2]) is not None
    assert steps.graphs.captured == 0, "not tried again: every attempt would empty the allocator's cache"
    steps.run([1])
    assert steps.graphs.captured == 1
    with pytest.raises(torch.OutOfMemoryError):
        Graphs(Recorder(torch.OutOfMemoryError("CUDA out of memory")), skips_out_of_memory=False).run([1])


def test_a_model_that_cannot_be_captured_runs_without_padding():
    steps = Graphs(Recorder(RuntimeError("operation not permitted when stream is capturing")))
    assert steps.run([1, 2, 3]) is not None, "the step itself has run"
    assert steps.run([1, 2, 3]) is None


def test_a_capture_that_fails_later_leaves_out_its_own_graph_only():
    """The model can be captured, so another thread has disturbed this capture."""
    recorder = Recorder()
    steps = Graphs(recorder)
    steps.run([1])
    recorder.error = RuntimeError("operation failed due to a previous error during capture")
    assert steps.run([1, 2, 3]) is not None, "the step itself has run"
    recorder.error = None
    assert steps.run([4, 5, 6]) is not None, "at its padded size, without a graph"
    assert (steps.graphs.captured, recorder.replayed) == (1, 0)
    steps.run([2])
    steps.run([1, 2, 3, 4, 5])
    assert (steps.graphs.captured, recorder.replayed) == (2, 1)


def test_the_largest_graphs_are_captured_first():
    steps = Graphs(Recorder())
    steps.graphs.capture_largest()
    assert steps.sizes == [("mixed", 256), ("decode", 32)]
    steps.run([1, 2], prefill=190)
    assert steps.graphs.captured == 2


def test_all_graphs_are_captured_at_once():
    recorder = Recorder()
    steps = Graphs(recorder)
    steps.graphs.capture_all()
    decode, mixed = graph_sizes(SLOTS, TOKENS)
    assert steps.graphs.captured == len(decode) + len(mixed)
    sizes = [size for _, size in steps.sizes]
    assert sizes == sorted(sizes, reverse=True), "the others reuse the memory of the largest"


def test_steps_of_more_tokens_than_the_largest_graph_have_none():
    graphs = StepGraphs(
        lambda *_: torch.empty(0), lambda *_: torch.empty(0), torch.zeros(4), 3, 8192, Recorder(), always_permitted
    )
    rows = torch.zeros(MIXED_SIZES[-1] + 1, dtype=torch.int64)
    empty = torch.empty(0, dtype=torch.int64)
    assert graphs.run(StepInputs(rows, rows, rows, *[empty] * 10), True) is None


def test_sizes_cover_what_steps_can_need_and_no_more():
    for sequences in (1, 3, 8, 17, 256, 300, 1024, 5000):
        for tokens in (1, 32, 64, 100, 2048, 8192):
            decode, mixed = graph_sizes(sequences, tokens)
            assert decode[-1] >= min(sequences, tokens, DECODE_SIZES[-1])
            assert mixed[-1] >= min(tokens, MIXED_SIZES[-1])
            assert len(decode) == 1 or decode[-2] < min(sequences, tokens)
            assert len(mixed) == 1 or mixed[-2] < tokens
            assert (list(decode), list(mixed)) == (sorted(set(decode)), sorted(set(mixed)))
    for sizes in (DECODE_SIZES[3:], MIXED_SIZES[1:]):
        assert all(after <= 2 * before for before, after in pairwise(sizes))


def test_memory_for_the_kv_cache_excludes_that_of_graphs():
    graphs = graph_bytes(hidden=1536, intermediate=8960, itemsize=2, max_sequences=256, max_tokens=8192)
    assert graphs == 4096 * 2 * (1536 + 2 * 1536 + 3 * 8960)
    without = device_kv_bytes(100 << 30, 50 << 30, 0.9, 3 << 30, 1 << 20, 0)
    assert without - device_kv_bytes(100 << 30, 50 << 30, 0.9, 3 << 30, 1 << 20, graphs) == graphs


def lengths(mean: int, longest: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return [max(1, min(longest, round(mean * dice.lognormvariate(-0.5, 1.0)))) for _ in range(256)]


def captures_of(responses: list[int], slots: int) -> tuple[int, float]:
    """(captures, padding as a share of all decoded rows) of 32 prompts with 8 responses of these lengths."""
    scheduler = Scheduler(BlockManager(50_000, 16), slots, 8192, 8192)
    sequences = []
    for number, length in enumerate(responses):
        prompt, group = [5 + number // 8] * 128, str(number // 8)
        params = SamplingParams(max_new_tokens=length, ignore_eos=True)
        sequences.append(Sequence(Request(str(number), prompt, params, group=group), number))
    scheduler.add(sequences)
    pending: deque[Any] = deque()
    sizes, rows, padded = set(), 0, 0
    while scheduler.has_work or pending:
        plan = scheduler.schedule()
        if plan is not None:
            count = len(plan.decode_slots) + sum(len(prefill.token_ids) for prefill in plan.prefills)
            possible = MIXED_SIZES if plan.prefills else DECODE_SIZES
            size = next(size for size in possible if size >= count)
            sizes.add((bool(plan.prefills), size))
            if not plan.prefills:
                rows, padded = rows + count, padded + size - count
            pending.append(plan)
        while len(pending) > (plan is not None):
            done = pending.popleft()
            count = len(done.sample_slots)
            scheduler.postprocess(done, [9] * count, [0.0] * count, [0.0] * count, [0.0] * count, 0)
    return len(sizes), padded / rows


@pytest.mark.parametrize(
    ("responses", "slots", "captures"),
    [
        ([256] * 256, 256, 2),
        (lengths(256, 2048, 1), 256, 15),  # one prefill, and all sizes of decodes up to 256
        (lengths(256, 2048, 1), 64, 12),
    ],
    ids=["equal", "ragged", "refilled"],
)
def test_few_graphs_are_captured_while_a_batch_shrinks(responses, slots, captures):
    captured, padding = captures_of(responses, slots)
    assert captured <= captures
    assert padding < 0.17


# ---------------------------------------------------------------- the gate


def test_work_waits_for_a_capture_and_prevents_others():
    gate, order = CaptureGate(), []

    def work() -> None:
        with gate.work():
            order.append("work")

    thread = threading.Thread(target=work)
    with gate.capture() as permitted:
        assert permitted
        with gate.capture() as second:
            assert not second, "one capture at a time"
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        order.append("captured")
    thread.join(10)
    assert order == ["captured", "work"]


@pytest.mark.parametrize("outer", [True, False])
def test_work_may_be_nested_and_wait(outer):
    gate = CaptureGate()
    with gate.work() if outer else nullcontext():
        with gate.work(), gate.capture() as permitted:
            assert not permitted
        with gate.waiting(), gate.capture() as permitted:
            assert permitted
        with gate.capture() as permitted:
            assert permitted is not outer
    with pytest.raises(KeyError), gate.work():
        raise KeyError
    with gate.capture() as permitted:
        assert permitted


class Host(RankHost):
    """The host of one worker that is not a `Worker`."""

    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.workers["actor"] = worker

    def send(self, output: Any, shard: Any) -> Any:
        return output


class Device:
    """A worker that reports whether another thread could capture a graph now."""

    def can_capture(self, *_: Any) -> bool:
        with ThreadPoolExecutor() as pool:
            return pool.submit(self._can_capture).result()

    def _can_capture(self) -> bool:
        with capture_gate.capture() as permitted:
            return permitted

    def generate(self) -> tuple[bool, bool]:
        return BaseRollout.generate_sequences(self, DataProto()), self.can_capture()  # type: ignore[arg-type,return-value]

    is_leader, config = True, as_config(RolloutConfig, {"tensor_model_parallel_size": 1})


def test_calls_on_the_compute_lane_prevent_captures_unless_they_wait_for_the_engine(monkeypatch):
    monkeypatch.setattr(rollout_base, "EngineHost", lambda rollout: SimpleNamespace(generate_batch=rollout.can_capture))
    host = Host(Device())
    assert host.call("actor", "can_capture", [], {}, "compute") is False
    assert host.call("actor", "can_capture", [], {}, "control") is True
    assert host.call("actor", "generate", [], {}, "compute") == (True, False)
