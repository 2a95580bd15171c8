"""Checkpoints that are written while training goes on: the files are those of the moment at which the save began."""

import mmap
import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from tests.support.engine_cases import make_batch, make_engine, token_loss, whole_weights
from tests.support.memory import peak_process_memory
from tests.support.tiny import tiny_config, tiny_model
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.utils.disk import is_disk_full
from verl.workers.engine.common import offload, sharded_checkpoint
from verl.workers.engine.common.hf_export import HFExport
from verl.workers.engine.common.host_snapshot import HostSnapshot
from verl.workers.engine.common.offload import EngineMemory

ALL = ["model", "optimizer", "extra", "hf_model"]


def train(engine, seed=0):
    engine.forward_backward(make_batch(seed=seed), token_loss, ["log_probs"])
    return engine.optimizer_step()


def files_of(folder):
    return {path.relative_to(folder).as_posix(): content_of(path) for path in folder.rglob("*") if path.is_file()}


def content_of(path):
    if path.name != ".metadata":
        return path.read_bytes()
    metadata = FileSystemReader(path.parent).read_metadata()  # it names its folder, too
    return metadata.state_dict_metadata, metadata.storage_data


@contextmanager
def held_back(monkeypatch, owner, name):
    """Calls of `owner.name` wait until the block ends."""
    go, real = threading.Event(), getattr(owner, name)

    def waiting(*args, **kwargs):
        assert go.wait(60)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, waiting)
    try:
        yield
    finally:
        go.set()
        monkeypatch.setattr(owner, name, real)


def in_a_thread(work):
    done = threading.Event()
    thread = threading.Thread(target=lambda: (work(), done.set()))
    thread.start()
    return thread, done


def test_steps_taken_while_a_checkpoint_is_written_are_not_in_it(tmp_path, monkeypatch):
    engines = [make_engine(tiny_model(), background_save=background_save) for background_save in (True, False)]
    for engine in engines:
        train(engine)
        torch.manual_seed(7)
    behind, at_once = engines
    with held_back(monkeypatch, ChecksumRecorder, "open"):
        behind.begin_save(tmp_path / "behind", ALL)
        before = whole_weights(behind)
        torch.rand(5)
        train(behind, seed=1)
        train(behind, seed=2)
        assert not files_of(tmp_path)
    behind.finish_save()
    torch.manual_seed(7)
    at_once.save(tmp_path / "at once", ALL)
    found, wanted = files_of(tmp_path / "behind"), files_of(tmp_path / "at once")
    assert set(found) == set(wanted)
    assert [name for name in found if found[name] != wanted[name]] == []
    assert any(not torch.equal(value, before[name]) for name, value in whole_weights(behind).items())


def test_an_optimizer_step_waits_for_what_is_left_of_the_copy(tmp_path, monkeypatch):
    engine = make_engine(tiny_model())
    train(engine)
    wanted = whole_weights(engine)
    engine.forward_backward(make_batch(seed=1), token_loss, ["log_probs"])
    with held_back(monkeypatch, np, "copyto"):
        engine.begin_save(tmp_path, ["model"])
        thread, done = in_a_thread(engine.optimizer_step)
        assert not done.wait(0.3)
        assert all(torch.equal(value, wanted[name]) for name, value in whole_weights(engine).items())
    thread.join()
    engine.finish_save()
    again = make_engine(tiny_model(seed=3))
    again.load(tmp_path, ["model"])
    found = whole_weights(again)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(value, wanted[name]) for name, value in whole_weights(engine).items())


def test_a_second_save_waits_for_the_first_and_uses_its_memory(tmp_path, monkeypatch, several_files):
    engine = make_engine(tiny_model())
    train(engine)
    states = [whole_weights(engine)]
    with held_back(monkeypatch, ChecksumRecorder, "open"):
        engine.begin_save(tmp_path / "1", ["model", "optimizer"])
        train(engine)
        states.append(whole_weights(engine))
        thread, done = in_a_thread(lambda: engine.begin_save(tmp_path / "2", ["model", "optimizer"]))
        assert not done.wait(0.3)
    thread.join()
    engine.finish_save()
    assert len(list((tmp_path / "1" / "optimizer").glob("*.distcp"))) == 3
    again = make_engine(tiny_model(seed=3))
    for step, wanted in enumerate(states, start=1):
        again.load(tmp_path / str(step), ["model", "optimizer"])
        assert all(torch.equal(value, wanted[name]) for name, value in whole_weights(again).items())


def resident():
    """Bytes that this process has in memory, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def ended(name):
    """Wait for all threads of that name."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_for_the_first_checkpoint_is_made_beside_the_first_update(tmp_path, monkeypatch):
    engine = make_engine(tiny_model(vocab_size=15_000, hidden_size=256), save_contents=["model", "optimizer"])
    copy = 3 * sum(4 * value.numel() for value in engine.model.hf.parameters())
    before = resident()
    engine.infer(make_batch(), ["log_probs"])
    assert resident() - before < 0.6 * copy  # whoever learns nothing saves nothing
    train(engine)
    ended("snapshot memory")
    before = resident()
    with held_back(monkeypatch, ChecksumRecorder, "open"):
        engine.begin_save(tmp_path, ["model", "optimizer"])
        ended("snapshot")
        assert resident() - before < 0.6 * copy
    engine.finish_save()


def test_a_copy_begins_where_no_memory_is_being_made_any_more(monkeypatch):
    """It is made by writing to it: what was copied there already would be lost."""
    tensors = {"weight": torch.randn(100_000)}
    snapshot = HostSnapshot(torch.device("cpu"))
    taken = {}

    def take():
        taken.update(snapshot.take(tensors, {"weight": [tensors["weight"].view(torch.uint8)]}))
        snapshot.check()

    with held_back(monkeypatch, os, "setpriority"):
        snapshot.prepare([tensors["weight"].nbytes])
        thread, done = in_a_thread(take)
        assert not done.wait(0.3)
    thread.join()
    assert torch.equal(taken["weight"], tensors["weight"])


def test_a_copy_that_fails_fails_its_save_and_training_goes_on(tmp_path, monkeypatch):
    engine = make_engine(tiny_model())

    def failing(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(np, "copyto", failing)
        engine.begin_save(tmp_path / "1", ["model"])
        assert train(engine)["skipped"] == 0
        with pytest.raises(MemoryError, match="no room"):
            engine.finish_save()
    engine.save(tmp_path / "2", ["model"])


@pytest.mark.slow
def test_a_process_that_ends_while_something_is_written_ends_in_order():
    """A thread in the middle of torch's code would abort it: "terminate called without an active exception"."""
    code = """
import time, torch
from verl.utils.concurrency import run_in_thread

def work():
    end = time.monotonic() + 1
    while time.monotonic() < end:
        torch.ones(400, 400) @ torch.ones(400, 400)

run_in_thread("writing", work)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def several_files(monkeypatch):
    """As large states are written."""
    monkeypatch.setattr(sharded_checkpoint, "ONE_FILE_BYTES", 100_000)
    monkeypatch.setattr(sharded_checkpoint, "THREADS", 3)


@pytest.mark.parametrize("file", ["model/__0_2_0.distcp", "extra.pt", "huggingface/model.safetensors"])
def test_a_full_disk_is_told_to_whoever_finishes_and_the_next_save_goes_on(file, tmp_path, several_files):
    engine = make_engine(tiny_model())
    for full in (tmp_path / "1" / file, tmp_path / "2" / file):
        full.parent.mkdir(parents=True)
        full.symlink_to("/dev/full")
    engine.begin_save(tmp_path / "1", ALL)
    with pytest.raises(OSError, match="Errno 28") as caught:
        engine.finish_save()
    assert is_disk_full(caught.value)
    engine.begin_save(tmp_path / "2", ALL)
    with pytest.raises(OSError, match="Errno 28"):  # of the one before, which nobody finished
        engine.begin_save(tmp_path / "3", ALL)
    engine.save(tmp_path / "4", ALL)
    assert (tmp_path / "4" / file).stat().st_size > 0


def test_what_waits_in_host_memory_is_copied_from_there_and_not_overwritten_before(monkeypatch):
    """A device that is not the host's is played by plain tensors: they leave, come back and change as a GPU's do."""
    monkeypatch.setattr(offload, "PIECE_BYTES", 10_000)  # a weight waits in several pieces of host memory
    model = torch.nn.Linear(300, 300)
    model.register_buffer("table", torch.randn(10))
    moments = [torch.randn(1000), torch.zeros(0)]
    memory = EngineMemory(torch.device("meta"), model, lambda: moments, offload_gradients=False)
    snapshot = HostSnapshot(torch.device("cpu"))
    tensors = {"weight": model.weight.detach(), "table": model.table, "moment": moments[0], "nothing": moments[1]}
    for _ in range(2):
        wanted = {name: value.clone() for name, value in tensors.items()}
        memory.offload(True, True)
        with held_back(monkeypatch, np, "copyto"):
            taken = snapshot.take(tensors, memory.byte_views(tensors, snapshot.wait))
            for _ in range(2):  # passes change nothing: what comes back need not wait to leave again
                memory.reload(True, True)
                assert all(torch.equal(value, wanted[name]) for name, value in tensors.items())
                memory.offload(True, True)
            memory.reload(True, True)
            thread, done = in_a_thread(memory.prepare_update)
            assert not done.wait(0.3)
        thread.join()
        for value in tensors.values():
            value += 1
        memory.offload(True, True)
        assert all(torch.equal(value, wanted[name]) for name, value in taken.items())
        memory.reload(True, True)
        assert all(torch.equal(value, wanted[name] + 1) for name, value in tensors.items())


@pytest.mark.parametrize(("family", "changes"), [("qwen2", {}), ("mixtral", {"num_local_experts": 2})])
def test_an_export_holds_one_weight_at_a_time_and_shows_no_bar(family, changes, tmp_path, capfd):
    state = tiny_model(family, **changes).state_dict()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    alive = weakref.WeakSet()
    most = 0

    def whole(name):
        nonlocal most
        found = state[name].clone()
        alive.add(found)
        most = max(most, sum(value.nbytes for value in alive))
        return found

    HFExport(skeleton, torch.float32).write(whole, tmp_path, None)
    assert most <= 2 * max(value.nbytes for value in state.values())
    assert "shards" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from /proc")
def test_a_save_takes_the_copy_and_little_beside_it(tmp_path, monkeypatch):
    engine = make_engine(tiny_model(vocab_size=15_000, hidden_size=256))
    train(engine)
    weights = sum(4 * value.numel() for value in engine.model.hf.parameters())
    engine.save(tmp_path / "libraries", ["extra", "hf_model"])  # load their code
    copies, writes = [], []
    for step in range(4):
        with held_back(monkeypatch, ChecksumRecorder, "open"):
            with peak_process_memory() as copying:
                engine.begin_save(tmp_path / str(step), ALL)
                train(engine)  # once the copy is there
            with peak_process_memory() as training:
                train(engine)
        with peak_process_memory() as writing:
            engine.finish_save()
        copies.append(copying.bytes - training.bytes)
        writes.append(writing.bytes)
    assert copies[0] < 3.75 * weights
    # Later saves use the memory of the first. The least: threads of earlier tests may allocate memory, too.
    assert min(copies[1:]) < 0.75 * weights
    assert min(writes) < 0.1 * weights
