"""An engine in a process of its own answers as it does in this one, bit for bit, and its end is known at once."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.breaking_engine import FAILING_REQUEST
from tests.support.tiny import tiny_model
from tests.support.unsharded_model import UnshardedModel
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import EngineDiedError, Output, Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.utils.process_tree import children, why_not_running
from verl.utils.progress import pulse_count, stopped_helper
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.process.process_rollout import EngineProcess
from verl.workers.rollout.process.transport import EngineSpec
from verl.workers.sharding_manager import InProcessTransfer

# Orphans are the system's to bury.
_OVER = {"gone", "ended"}


def requests(count: int, tokens: int = 24, **params: Any) -> list[Request]:
    settings = {"temperature": 0.8, "max_new_tokens": tokens, "ignore_eos": True, **params}
    return [Request(f"r{i}", [5 + i, 9, 17 + i % 3], SamplingParams(key=1000 + i, **settings)) for i in range(count)]


def answers(rollout: Any, asked: list[Request]) -> list[Output]:
    return [future.result() for future in rollout.submit(asked)]


@pytest.fixture(scope="module")
def inside(model_path):
    model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
    with NativeRollout(str(model_path), model, as_config(RolloutConfig, {"max_new_tokens": 24})) as rollout:
        yield rollout


def test_both_answer_the_same_before_and_after_a_weight_change(hosted, inside):
    assert answers(hosted, requests(12)) == answers(inside, requests(12))
    trainer, asked = UnshardedModel(tiny_model(seed=5)), requests(6, top_p=0.9, top_log_probs=2)
    for rollout in (hosted, inside):
        stats = InProcessTransfer(trainer, rollout, bucket_bytes=20_000).sync(version=7)
        assert (stats.tensors, rollout.version) == (len(trainer.weights), 7)
    changed = answers(hosted, asked)
    assert changed == answers(inside, asked)
    assert {version for output in changed for version in output.versions} == {7}


def test_batches_and_streams_are_the_same(hosted, inside, make_prompts):
    ours = hosted.generate_sequences(make_prompts())
    theirs = inside.generate_sequences(make_prompts())
    for name in theirs.batch.keys():
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    assert sorted(row for row, _ in hosted.stream(make_prompts())) == list(range(8))


def test_what_was_paused_goes_on_with_the_new_weights(hosted, inside):
    outputs = []
    for rollout in (hosted, inside):
        InProcessTransfer(UnshardedModel(tiny_model(seed=1)), rollout).sync(version=1)
        futures = rollout.submit(requests(4, tokens=400))
        while not rollout_has_tokens(rollout):
            time.sleep(0.01)
        rollout.pause_generation("keep")
        InProcessTransfer(UnshardedModel(tiny_model(seed=2)), rollout).sync(version=2)
        assert not any(future.done() for future in futures)
        rollout.resume_generation()
        outputs.append([future.result() for future in futures])
    for output in outputs[0] + outputs[1]:
        assert sorted(set(output.versions)) == [1, 2]
        assert len(output.token_ids) == 400


def rollout_has_tokens(rollout: Any) -> bool:
    """Steps have been made: what is paused now is under way."""
    before = pulse_count()
    time.sleep(0.6)
    return pulse_count() > before


def test_errors_keep_their_type_and_the_engine_goes_on(hosted):
    with pytest.raises(ValueError, match=r"^request 'r': prompt_ids"):
        hosted.submit([Request("r", [], SamplingParams())])
    with pytest.raises(ValueError, match=r"^pause_generation: mode 'later' .*'finish', 'keep', 'abort'"):
        hosted.pause_generation("later")
    good, broken = UnshardedModel(tiny_model(seed=3)), UnshardedModel(tiny_model(seed=3))
    broken.weights = {**broken.weights, "model.norm.weight": torch.ones(3)}
    with pytest.raises(WeightMismatchError, match=r"'model\.norm\.weight' .*\[3\].*\[64\]"):
        InProcessTransfer(broken, hosted).sync(version=3)
    InProcessTransfer(good, hosted).sync(version=4)
    assert len(answers(hosted, requests(1))[0].token_ids) == 24


def test_cancelled_and_aborted_requests_end(hosted):
    cancelled, aborted, kept = hosted.submit(requests(3, tokens=450))
    cancelled.cancel()
    hosted.abort(["r1"])
    assert aborted.result().finish_reason == "abort"
    assert kept.result().finish_reason == "length"
    hosted.wait_idle()
    assert len(answers(hosted, requests(3))) == 3  # their names are free again


def test_a_callback_may_ask_the_engine_again(hosted):
    first, second = requests(2)
    answered = threading.Event()
    found: list[Output] = []

    def ask_again(_: Any) -> None:
        found.extend(answers(hosted, [second]))
        answered.set()

    # Nested: the thread that answers waits for an answer itself, which another one must receive.
    hosted.submit([first])[0].add_done_callback(lambda done: threading.Thread(target=ask_again, args=[done]).start())
    hosted.submit([Request("quick", [7], SamplingParams(max_new_tokens=1))])[0].add_done_callback(
        lambda _: hosted.submit([Request("again", [8], SamplingParams(max_new_tokens=1))])
    )
    assert answered.wait(60)
    assert len(found) == 1


def test_one_bit_that_flips_on_the_way_is_refused(hosted, monkeypatch):
    """In the shared memory itself, after the trainer has written it."""
    from verl.workers.rollout.process.transport import SharedBuffer

    put = SharedBuffer.put

    def put_and_flip(self, bucket, start=0):
        handle = put(self, bucket, start)
        piece = next(piece for piece in handle.pieces if piece.name.endswith("down_proj.weight"))
        self.flat[piece.start + piece.size // 2] ^= 1
        return handle

    with monkeypatch.context() as patch:
        patch.setattr(SharedBuffer, "put", put_and_flip)
        with pytest.raises(WeightMismatchError, match=r"down_proj.weight"):
            InProcessTransfer(UnshardedModel(tiny_model(seed=6)), hosted).sync(version=9)
    with pytest.raises(RuntimeError, match=r"version 9 .*down_proj\.weight"):
        hosted.submit(requests(1))
    InProcessTransfer(UnshardedModel(tiny_model(seed=6)), hosted).sync(version=9)
    assert answers(hosted, requests(1))[0].versions[-1] == 9


def workers(rollout: Any) -> list[int]:
    """Of the engine's own."""
    found = children(rollout.pid)
    return [pid for pid in found if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def fail_with(cause: str, futures: list[Any]) -> str:
    """Returns where the log is."""
    for future in futures:
        with pytest.raises(EngineDiedError, match=rf"(?s){cause}") as told:
            future.result()
    return log_of(str(told.value))


def log_of(told: str) -> str:
    (found,) = re.findall(r"Its log is (\S+)\.", told)
    return found


@pytest.mark.slow
def test_an_engine_that_stands_or_loses_a_process_or_its_device_is_known_and_starts_anew(hosted, inside):
    hosted.pause_generation("keep")  # nothing is finished before what follows
    futures = hosted.submit(requests(2))
    os.kill(hosted.pid, signal.SIGSTOP)
    while stopped_helper() is None:
        time.sleep(0.01)
    assert stopped_helper() == (hosted.pid, "stopped")
    os.kill(hosted.pid, signal.SIGCONT)
    worker, first = workers(hosted)[0], hosted.pid
    assert os.path.exists(f"/dev/shm/verl-{first}")
    os.kill(worker, signal.SIGKILL)
    log = fail_with(rf"process {first} ended with .*process {worker} \(Worker_TP1\) was killed by SIGKILL", futures)
    assert not os.path.exists(f"/dev/shm/verl-{first}")
    with pytest.raises(EngineDiedError):
        hosted.submit(requests(1))
    assert hosted.restart_if_dead()
    assert hosted.pid != first
    for each in (hosted, inside):
        InProcessTransfer(UnshardedModel(tiny_model(seed=8)), each).sync(version=11)
    assert answers(hosted, requests(2)) == answers(inside, requests(2))
    futures = hosted.submit([*requests(1, tokens=450), Request(FAILING_REQUEST, [5], SamplingParams())])
    fail_with("AcceleratorError: CUDA error: an illegal memory access", futures)
    assert hosted.restart_if_dead()
    members = [hosted.pid, *children(hosted.pid)]
    hosted.close()
    assert "was killed by SIGKILL" in Path(log).read_text(), "what was named stays"
    os.unlink(log)
    assert {why_not_running(pid) for pid in members} <= _OVER
    assert not os.path.exists(f"/dev/shm/verl-{members[0]}")


@pytest.mark.slow
def test_one_that_does_not_answer_is_killed_and_leaves_nothing(start_hosted, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("verl.workers.rollout.process.process_rollout.EXIT_TIMEOUT_S", 3.0)
    rollout = start_hosted()
    pid, (worker,) = rollout.pid, workers(rollout)
    assert len(list(tmp_path.glob("verl-engine-*.log"))) == 1
    os.kill(pid, signal.SIGSTOP)
    rollout.close()
    deadline = time.monotonic() + 60  # a machine without a moment to spare takes as long to bury it
    while not {why_not_running(pid), why_not_running(worker)} <= _OVER or list(tmp_path.glob("verl-engine-*.log")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not os.path.exists(f"/dev/shm/verl-{pid}")


@pytest.mark.slow
def test_an_engine_that_cannot_be_made_says_why_and_leaves_no_process(start_hosted):
    before = children(os.getpid())
    with pytest.raises(ValueError, match=r"engine_kwargs\.native\.no_such_key") as told:
        start_hosted(engine_kwargs={"native": {"no_such_key": 1}})
    assert "output of the engine process" in str(told.value.__cause__)
    os.unlink(log_of(str(told.value.__cause__)))
    assert children(os.getpid()) == before


def test_a_process_that_cannot_be_started_leaves_no_log(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = EngineSpec(
        "module:Class", "model", as_config(ModelConfig, {}), as_config(RolloutConfig, {}), "cpu", threads=1
    )
    with pytest.raises(ValueError, match="null byte"):
        EngineProcess(spec, {"NAME": "\0"})
    assert list(tmp_path.iterdir()) == []
