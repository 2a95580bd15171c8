"""Weights between process groups: sharded trainers on one side, rollouts on the other, both called at once."""

from __future__ import annotations

import os
import signal
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.tiny import save_tiny_model, tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import Request, SamplingParams
from verl.types.weights import TensorSlice
from verl.utils.transfer_group import TransferAddress, TransferGroup, TransferHost
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.embedded_rollout import EmbeddedRollout
from verl.workers.sharding_manager import BroadcastReceiver, BroadcastSender

TRAINERS = 2


class ShardedModel:
    """A trainer whose ranks hold half of every tensor each and gather them bucket by bucket."""

    def __init__(self, model: torch.nn.Module, rank: int, world_size: int) -> None:
        self.whole = model.state_dict()
        self.shards = {name: tensor.flatten().chunk(world_size)[rank].clone() for name, tensor in self.whole.items()}
        self.world_size = world_size
        self.fail_after: int | None = None

    def manifest(self) -> dict[str, torch.Tensor]:
        return self.whole

    def buckets(self, dtype: torch.dtype, max_bytes: int, requested: Any = None) -> Any:
        names = list(self.shards)
        for start in range(0, len(names), 5):
            if self.fail_after is not None and start >= self.fail_after:
                raise FloatingPointError("the trainer broke")
            bucket = {}
            for name in names[start : start + 5]:
                parts = [torch.empty_like(self.shards[name]) for _ in range(self.world_size)]
                dist.all_gather(parts, self.shards[name])
                bucket[name] = torch.cat(parts).view(self.whole[name].shape).to(dtype)
            yield from in_pieces(bucket)


def in_pieces(bucket: dict[str, torch.Tensor]) -> Any:
    """The rows of one tensor of a bucket come apart, the last of them first."""
    name = next((name for name, tensor in bucket.items() if len(tensor) > 100), None)
    if name is not None:
        tensor = bucket.pop(name)
        yield {TensorSlice(name, 70, len(tensor)): tensor[70:]}
        yield {TensorSlice(name, 0, 70): tensor[:70]}
    yield bucket


def of_whole_tensors_only(engine: Any) -> None:
    """As an engine is that knows nothing of rows."""
    load = engine.load_bucket

    def load_whole(bucket: dict[Any, torch.Tensor]) -> None:
        assert all(isinstance(key, str) for key in bucket)
        load(bucket)

    engine.requested_rows, engine.load_bucket = (lambda: None), load_whole


def join_own_group(port: int, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)


def trainer(rank: int, port: int, rollouts: int, addresses: Any, results: Any, tied: bool) -> None:
    join_own_group(port, rank, TRAINERS)
    group = None
    if rank == 0:
        host = TransferHost("127.0.0.1")
        for _ in range(rollouts):
            addresses.put((host.address.host, host.address.port))
        group = TransferGroup(host, 0, 1 + rollouts, timeout_s=60)
    sender = BroadcastSender(group, torch.float32, bucket_bytes=1)
    said = []
    for version, seed in ((1, 11), (2, 12)):
        engine = ShardedModel(tiny_model(seed=seed, tie_word_embeddings=tied), rank, TRAINERS)
        said.append(sender.send(engine, version).tensors)
    # Another model: the rollouts refuse, and rank 0 hears of it.
    said.append(outcome(sender.send, ShardedModel(tiny_model(num_hidden_layers=1), rank, TRAINERS), 3))
    # A trainer that breaks in the middle: nobody is left waiting.
    broken = ShardedModel(tiny_model(seed=13, tie_word_embeddings=tied), rank, TRAINERS)
    broken.fail_after = 10
    said.append(outcome(sender.send, broken, 4))
    said.append(sender.send(ShardedModel(tiny_model(seed=12, tie_word_embeddings=tied), rank, TRAINERS), 5).tensors)
    results.put((f"trainer {rank}", said))
    dist.destroy_process_group()


def rollout(
    rank: int, port: int, rollouts: int, addresses: Any, results: Any, path: str, name: str, tied: bool
) -> None:
    join_own_group(port, rank, rollouts)
    group = TransferGroup(TransferAddress(*addresses.get(timeout=60)), 1 + rank, 1 + rollouts, timeout_s=60)
    model = as_config(ModelConfig, {"path": path}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": name, "load_format": "dummy"})
    engine: Any = get_rollout_class(name)(path, model, config)
    if rank == 1:
        of_whole_tensors_only(engine)
    receiver = BroadcastReceiver(group)
    said: list[Any] = []
    for seed in (11, 12):
        said.append(receiver.receive(engine).tensors)
        said.append(holds_weights_of(engine, tiny_model(seed=seed, tie_word_embeddings=tied)))
    said.append(outcome(receiver.receive, engine))
    output = engine.submit([Request("a", [5, 6, 7], SamplingParams(max_new_tokens=4))])[0].result()
    said.append(output.versions)
    engine.pause_generation("keep")
    waiting = engine.submit([Request("b", [5, 6, 7], SamplingParams(max_new_tokens=4))])[0]
    said.append(outcome(receiver.receive, engine))
    said.append(outcome(waiting.result, 30))
    engine.resume_generation()
    receiver.receive(engine)
    said.append(holds_weights_of(engine, tiny_model(seed=12, tie_word_embeddings=tied)))
    said.append(engine.version)
    engine.close()
    results.put((f"rollout {rank}", said))
    dist.destroy_process_group()


def bereaved_trainer(parent: Connection, rank: int, port: int) -> None:
    """Its receivers die in the middle of a send; it goes on with new ones."""
    join_own_group(port, rank, TRAINERS)
    said = []
    for version in (1, 2):
        group = None
        if rank == 0:
            host = TransferHost("127.0.0.1")
            parent.send(host.address)
            group = TransferGroup(host, 0, 3, timeout_s=60)
        sender = BroadcastSender(group, torch.float32, bucket_bytes=1)
        engine = ShardedModel(tiny_model(seed=11, tie_word_embeddings=True), rank, TRAINERS)
        said.append(outcome(sender.send, engine, version))
        if group is not None:
            group.abort()
    parent.send(said)
    dist.destroy_process_group()


def mortal_rollout(
    parent: Connection, rank: int, address: TransferAddress, path: str, dies: bool, timeout_s: float
) -> None:
    model = as_config(ModelConfig, {"path": path}, "actor_rollout_ref.model")
    engine: Any = get_rollout_class("native")(path, model, as_config(RolloutConfig, {"load_format": "dummy"}))
    group = TransferGroup(address, 1 + rank, 3, timeout_s=timeout_s)
    if dies:
        load, loaded = engine.load_bucket, []

        def load_and_die(bucket: Any) -> None:
            load(bucket)
            loaded.append(bucket)
            if len(loaded) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

        engine.load_bucket = load_and_die
    parent.send(outcome(BroadcastReceiver(group).receive, engine))
    engine.close()


def holds_weights_of(engine: EmbeddedRollout, model: torch.nn.Module) -> bool:
    ours = engine.weights
    return all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())


def outcome(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "succeeded"


def preloaded() -> Any:
    """One process imports torch and transformers, the ranks are its forks: seconds instead of half a minute."""
    context = mp.get_context("forkserver")
    engines = ["verl.workers.rollout.hf_rollout", "verl.workers.rollout.native_rollout"]
    context.set_forkserver_preload([*engines, "verl.workers.sharding_manager"])
    return context


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Child:
    """A process that answers through a pipe of its own: one that is killed takes no lock of the others with it."""

    def __init__(self, context: Any, target: Any, *args: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the pipe

    def answer(self) -> Any:
        assert self._pipe.poll(90), "no answer"
        return self._pipe.recv()


@pytest.mark.slow
def test_a_trainer_whose_receiver_dies_in_the_middle_goes_on_with_new_ones(tmp_path: Path):
    path, context = str(save_tiny_model(tmp_path, tie_word_embeddings=True)), preloaded()
    port, children = free_port(), []

    def start(target: Any, *args: Any) -> Child:
        children.append(Child(context, target, *args))
        return children[-1]

    try:
        trainers = [start(bereaved_trainer, rank, port) for rank in range(TRAINERS)]
        address = trainers[0].answer()
        survivor, victim = (start(mortal_rollout, rank, address, path, rank == 1, 8) for rank in range(2))
        with pytest.raises(EOFError):
            victim.answer()
        assert survivor.answer().startswith("TransferLostError"), "nobody waits for ever"
        survivor.process.kill()  # as the controller does with the rest of a group
        address = trainers[0].answer()
        second = [start(mortal_rollout, rank, address, path, False, 60) for rank in range(2)]
        (lost, sent), others = trainers[0].answer(), trainers[1].answer()
        assert lost.startswith("TransferLostError: weights: ")
        assert sent == "succeeded"
        assert others == ["succeeded"] * 2, "the other training ranks walk on to the end"
        assert [rollout.answer() for rollout in second] == ["succeeded"] * 2
        for child in [*trainers, *second]:
            child.process.join(timeout=120)
        assert [child.process.exitcode for child in [*trainers, *second]] == [0] * 4
    finally:
        for child in children:
            child.process.kill()


@pytest.mark.parametrize(
    ("name", "rollouts", "tied"),
    [
        ("native", 2, False),
        pytest.param("native", 1, True, marks=pytest.mark.slow),
        pytest.param("hf", 1, True, marks=pytest.mark.slow),
    ],
)
def test_sharded_trainers_and_rollouts_exchange_versions_in_their_own_group(
    tmp_path: Path, name: str, rollouts: int, tied: bool
):
    path = str(save_tiny_model(tmp_path, tie_word_embeddings=tied))
    context = preloaded()
    addresses, results = context.Queue(), context.Queue()
    ports = free_port(), free_port()
    processes = [
        context.Process(target=trainer, args=(rank, ports[0], rollouts, addresses, results, tied), daemon=True)
        for rank in range(TRAINERS)
    ] + [
        context.Process(
            target=rollout, args=(rank, ports[1], rollouts, addresses, results, path, name, tied), daemon=True
        )
        for rank in range(rollouts)
    ]
    for process in processes:
        process.start()
    try:
        said = dict(results.get(timeout=120) for _ in processes)
    except Empty:
        pytest.fail(f"no answer; exit codes {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.join(timeout=120)
            process.kill()

    tensors = len(tiny_model(tie_word_embeddings=tied).state_dict())
    refused = "WeightsRefusedError: weights: version 3 was refused by rollout rank"
    sent, sent_again, refusal, broke, finally_sent = said["trainer 0"]
    assert (sent, sent_again, finally_sent) == (tensors,) * 3
    assert refusal.startswith(f"{refused}(s) {list(range(rollouts))}")
    assert broke == "FloatingPointError: the trainer broke"
    for rank in range(rollouts):
        first, exact, second, exact_again, refusal, versions, *after = said[f"rollout {rank}"]
        broke, waited, exact_finally, version = after
        assert (first, second) == (tensors, tensors)
        assert exact
        assert exact_again
        assert "WeightMismatchError: weights: 'model.layers.1." in refusal
        assert "is not in the trainer's manifest" in refusal
        assert versions == [2] * 4, "a refused version changes nothing"
        assert "the trainer failed while sending: FloatingPointError: the trainer broke" in broke
        assert waited == broke, "who waits for an answer hears of it too"
        assert exact_finally
        assert version == 5
