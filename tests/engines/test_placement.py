"""Weights reach the engine wherever it runs: in the trainer's process, in one beside it, in a pool of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.engines import MODELS, EngineRow
from tests.support.tiny import tiny_model
from tests.support.unsharded_model import UnshardedModel
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import EngineDiedError, Request, SamplingParams
from verl.utils.process_tree import children
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.workers.rollout.placement import open_rollout
from verl.workers.sharding_manager import BroadcastReceiver, BroadcastSender, InProcessTransfer

PROMPT = list(range(20, 60))
LONG = SamplingParams(max_new_tokens=400, key=5, temperature=0.7)


@pytest.fixture
def place(
    engine_name: str, row: EngineRow, model_folder: Callable[[str], Path], running_engine: Any
) -> Iterator[Callable[..., Any]]:
    """The engine as a worker of a run has it; keywords are configuration keys."""
    running_engine.close()
    placed: list[Any] = []

    def start(kind: str, **keys: Any) -> Any:
        path = str(model_folder(kind))
        model = as_config(ModelConfig, {"path": path}, "actor_rollout_ref.model")
        usual = {"name": engine_name, "max_model_len": 512, "load_format": "dummy", "free_weights": False}
        placed.append(open_rollout(path, model, as_config(RolloutConfig, {**usual, **row.keys, **keys}), "cpu"))
        return placed[-1]

    yield start
    for engine in placed:
        engine.close()


def through_a_group(trainer: UnshardedModel, engine: Any, version: int) -> None:
    """As between two pools: the sender and the receiver are called at once."""
    host = TransferHost("127.0.0.1")
    groups: dict[int, TransferGroup] = {}
    joining = threading.Thread(target=lambda: groups.update({1: TransferGroup(host.address, 1, 2, timeout_s=60)}))
    joining.start()
    groups[0] = TransferGroup(host, 0, 2, timeout_s=60)
    joining.join()
    receiving = threading.Thread(target=BroadcastReceiver(groups[1]).receive, args=(engine,))
    receiving.start()
    BroadcastSender(groups[0], engine.weight_dtype, bucket_bytes=20_000).send(trainer, version)
    receiving.join()


def in_one_go(trainer: UnshardedModel, engine: Any, version: int) -> None:
    InProcessTransfer(trainer, engine, bucket_bytes=20_000).sync(version)


@pytest.mark.parametrize(
    ("keys", "hand_over", "kind"),
    [({"in_process": True}, in_one_go, "tied"), ({}, in_one_go, "experts"), ({}, through_a_group, "tied")],
    ids=["in process", "own process", "pool"],
)
def test_every_placement_takes_weights_before_and_in_the_middle(
    place: Callable[..., Any], keys: dict[str, Any], hand_over: Callable[..., None], kind: str
) -> None:
    engine = place(kind, **keys)
    models = {version: tiny_model(seed=version, **MODELS[kind]) for version in (1, 2)}
    hand_over(UnshardedModel(models[1]), engine, 1)
    future = engine.submit([Request("a", PROMPT, LONG)])[0]
    engine.submit([Request("clock", PROMPT, SamplingParams(max_new_tokens=8))])[0].result()
    engine.pause_generation("keep")
    hand_over(UnshardedModel(models[2]), engine, 2)
    engine.resume_generation()
    output = future.result()
    assert len(output.token_ids) == 400
    for version in set(output.versions):
        with torch.no_grad():
            logits = models[version](torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.7
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))[:, 0]
        of = torch.tensor(output.versions) == version
        torch.testing.assert_close(torch.tensor(output.log_probs)[of], expected[of], atol=1e-4, rtol=0)
    assert output.versions[-1] == 2


def python_segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


@pytest.mark.needs("tensor parallel")
def test_a_rank_of_the_engine_that_is_killed_ends_it_and_another_one_takes_its_place(place: Callable[..., Any]) -> None:
    segments = python_segments()
    engine, trainer = place("wide", tensor_model_parallel_size=2), UnshardedModel(tiny_model(seed=1, **MODELS["wide"]))
    in_one_go(trainer, engine, 1)
    (future,) = engine.submit([Request("a", PROMPT, LONG)])
    workers = [
        pid for pid in children(engine.pid) if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(workers[-1], signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=rf"process {workers[-1]} \(.*\) .*SIGKILL"):
        future.result()
    assert engine.restart_if_dead()
    in_one_go(trainer, engine, 1)
    (future,) = engine.submit([Request("a", PROMPT, SamplingParams(max_new_tokens=20))])
    assert future.result().versions == [1] * 20
    engine.close()
    assert python_segments() <= segments
