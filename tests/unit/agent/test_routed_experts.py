"""Experts of answers whose weights were updated under way: each token keeps those of the version that sampled it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.agent.answering import trained_rows
from verl.trainer.asynchronous.asked import Asked, from_plain, to_plain

from tests.support.agents import ROLLOUT, House, house, prompts_of
from tests.support.mixture_runs import mixture_task
from tests.support.router_cases import EXPERTS, LAYERS, UNKNOWN
from verl.inference.model_runner import ModelRunner
from verl.models.routing import note_routes, routers
from verl.protocol import DataProto
from verl.single_controller.base.errors import WorkerDiedError
from verl.single_controller.base.handle import RankHandle
from verl.types.request import Output, SamplingParams
from verl.types.trajectory import Trajectory
from verl.utils.plain_store import load_plain, save_plain

DENSE = 1
"""The layer of the task's model that has no experts."""
TOKENS = 24


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return mixture_task(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def models(task: dict[str, str]) -> list[Any]:
    """By version: the task's model, and the same with other routers. `.seen` is what its last pass chose."""
    made = [AutoModelForCausalLM.from_pretrained(task["model"]).float() for _ in range(2)]
    torch.manual_seed(11)
    for router in routers(made[1]).values():
        torch.nn.init.normal_(router.weight, std=0.5)
    for model in made:
        model.seen = {}
        note_routes(model, model.seen.__setitem__)
    return made


@pytest.fixture
def two(task: dict[str, str], models: list[Any], tmp_path: Path) -> Iterator[House]:
    more = (f"data.max_response_length={TOKENS}", f"{ROLLOUT}.return_routed_experts=True")
    made = house(task, tmp_path, *more, replicas=2)
    with made.open_engines():
        yield made
        made.agents.end_stream()


class Slow:
    """Engines that take their time, and stand still after so many steps until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.steps, self.reached, self.go_on = steps, threading.Event(), threading.Event()
        launch = ModelRunner.launch

        def slowly(runner: ModelRunner, plan: Any) -> Any:
            self.steps -= 1
            time.sleep(0.005)
            if self.steps <= 0 and not self.go_on.is_set():
                self.reached.set()
                self.go_on.wait(0.2)
            return launch(runner, plan)

        monkeypatch.setattr(ModelRunner, "launch", slowly)


def update(two: House, models: list[Any], number: int) -> None:
    two.engine(number).update_weights(models[1].state_dict().items())


def collected(two: House, count: int) -> list[Trajectory]:
    made: list[Trajectory] = []
    while len(made) < count:
        (told,) = two.agents.collect_trajectories(30.0)
        made += told.trajectories
    return made


def assert_experts(models: list[Any], made: list[Trajectory]) -> int:
    """Every token's experts are those of the version that sampled the next one; returns of how many trajectories the
    tokens are of several versions."""
    rows = trained_rows(made, 1, SamplingParams(max_new_tokens=TOKENS), {}, 0, None)
    width = rows.batch["responses"].shape[1]
    versions_of = torch.cat([torch.full_like(rows.batch["prompts"], -1), rows.batch["rollout_versions"]], dim=1)
    mixed = 0
    for ids, mask, versions, experts in zip(
        rows.batch["input_ids"],
        rows.batch["attention_mask"].bool(),
        versions_of,
        rows.batch["routed_experts"],
        strict=True,
    ):
        tokens, of_token, found = ids[mask], versions[mask].tolist(), experts[mask].long()
        chosen = []
        for model in models:
            with torch.no_grad():
                model(tokens[None])
            chosen.append([model.seen[layer] for layer in sorted(model.seen)])
        sampled = [at for at, version in enumerate(of_token) if version >= 0]
        for at in range(sampled[-1]):
            version = of_token[next(later for later in sampled if later > at)]
            assert found[at][[layer for layer in range(LAYERS) if layer != DENSE]].tolist() == [
                layer[at].tolist() for layer in chosen[version]
            ], f"token {at} of {len(tokens)}, before one of version {version}"
        assert (experts[~mask] == UNKNOWN).all()
        assert (found[:, DENSE] == UNKNOWN).all()
        assert (found[sampled[-1], 0] >= EXPERTS).all(), "the last token is not read"
        mixed += len({of_token[at] for at in sampled}) > 1
    assert width <= TOKENS
    return mixed


def prompts(task: dict[str, str], name: str) -> DataProto:
    asked = prompts_of(task, 3, name)
    asked.meta_info["ignore_eos"] = True
    return asked


@pytest.mark.parametrize("loop", ["single_turn_agent", "tests.support.agents.TwoTurns"])
def test_answers_go_on_through_an_update(two: House, task: dict[str, str], models: list[Any], monkeypatch, loop: str):
    """Also those of which partial answers were noted, which ends and resumes them; and turns of one conversation."""
    slow = Slow(monkeypatch, steps=8)
    asked = prompts(task, loop)
    two.agents.begin_stream(two.handles, asked.meta_info)
    two.agents.add_rows(asked, {})
    assert slow.reached.wait(30)
    two.agents.partial_answers()
    for number in range(2):
        update(two, models, number)
    slow.go_on.set()
    assert assert_experts(models, collected(two, len(asked))) > 0


def test_partial_answers_of_a_checkpoint_keep_their_experts(
    two: House, task: dict[str, str], models: list[Any], tmp_path: Path, monkeypatch
):
    """They are saved, loaded, and taken up by engines that have newer weights."""
    slow = Slow(monkeypatch, steps=8)
    asked = prompts(task, "single_turn_agent")
    two.agents.begin_stream(two.handles, asked.meta_info)
    two.agents.add_rows(asked, {})
    assert slow.reached.wait(30)
    slow.go_on.set()
    (partials,) = two.agents.partial_answers()
    two.agents.end_stream()
    assert partials
    group = Asked("group", asked[:1], 3, partials=partials)
    save_plain(to_plain(group), tmp_path / "answers.pt")
    saved: dict[str, Output] = from_plain(load_plain(tmp_path / "answers.pt")).partials
    for number in range(2):
        update(two, models, number)
    two.agents.begin_stream(two.handles, asked.meta_info)
    two.agents.add_rows(asked, saved)
    made = collected(two, len(asked))
    assert assert_experts(models, made) == len(partials)


class Mortal(RankHandle):
    """A replica that dies when it has reported some tokens of unfinished answers."""

    def __init__(self, inner: RankHandle) -> None:
        self.inner, self.told, self.dead, self.role, self.rank = inner, 0, False, inner.role, inner.rank

    def tell(self, method: str, *args: Any) -> None:
        if not self.dead:
            self.inner.tell(method, *args)

    def ask(self, method: str, *args: Any) -> Any:
        if self.dead:
            raise WorkerDiedError("worker process died", "rollout", 0, "here", method)
        collected = self.inner.ask(method, *args)
        self.told += sum(len(piece.token_ids) for piece in collected.pieces.values())
        self.dead |= self.told > 10
        return collected


def test_answers_of_a_lost_replica_keep_the_experts_of_what_it_had_reported(
    two: House, task: dict[str, str], models: list[Any], monkeypatch
):
    """The other one, which goes on with them, has newer weights."""
    monkeypatch.setattr("verl.agent.replicas._PIECES_S", 0.0)
    monkeypatch.setattr("verl.agent.replicas._STANDING_S", 0.005)
    Slow(monkeypatch, steps=10**6)
    update(two, models, 1)
    asked = prompts(task, "single_turn_agent")
    first, second = (replica.handle(0) for replica in two.replicas)
    two.agents.begin_stream([Mortal(first), second], asked.meta_info)
    two.agents.add_rows(asked, {})
    assert assert_experts(models, collected(two, len(asked))) > 0
