"""Experts of answers whose weights were updated under way: each token keeps those of the version that sampled it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.agents import ROLLOUT, AgentSetup, DyingHandle, SlowEngines, make_agent_setup, prompts_of
from tests.support.moe_runs import moe_task
from tests.support.router_cases import EXPERTS, LAYERS, UNKNOWN
from verl.models.routing import record_routes, routers
from verl.protocol import DataProto
from verl.trainer.asynchronous.group_state import GroupState, from_plain, to_plain
from verl.types.request import Output
from verl.types.trajectory import Trajectory
from verl.utils.nested import load_plain, save_plain
from verl.workers.rollout.training_rows import rows_from_trajectories

DENSE = 1
"""The layer of the task's model that has no experts."""
TOKENS = 24


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return moe_task(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def models(task: dict[str, str]) -> list[Any]:
    """By version: the task's model, and the same with other routers. `.seen` is what its last pass chose."""
    made = [AutoModelForCausalLM.from_pretrained(task["model"]).float() for _ in range(2)]
    torch.manual_seed(11)
    for router in routers(made[1]).values():
        torch.nn.init.normal_(router.weight, std=0.5)
    for model in made:
        model.seen = {}
        record_routes(model, model.seen.__setitem__)
    return made


@pytest.fixture
def two(task: dict[str, str], models: list[Any], tmp_path: Path) -> Iterator[AgentSetup]:
    more = (f"data.max_response_length={TOKENS}", f"{ROLLOUT}.return_routed_experts=True")
    made = make_agent_setup(task, tmp_path, *more, replicas=2)
    with made.open_engines():
        yield made
        made.agents.close_host()


def update(two: AgentSetup, models: list[Any], number: int) -> None:
    two.engine(number).update_weights(models[1].state_dict().items())


def assert_experts(models: list[Any], made: list[Trajectory]) -> int:
    """Every token's experts are those of the version that sampled the next one; returns of how many trajectories the
    tokens are of several versions."""
    rows = rows_from_trajectories(made, pad_token_id=0)
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
def test_answers_go_on_through_an_update(
    two: AgentSetup, task: dict[str, str], models: list[Any], monkeypatch, loop: str
):
    """Also outputs that were read while they were generated, and later turns of a conversation."""
    slow = SlowEngines(monkeypatch, steps=8)
    asked = prompts(task, loop)
    two.start(asked)
    assert slow.reached.wait(30)
    two.host.partials("job")
    for number in range(2):
        update(two, models, number)
    slow.resume.set()
    assert assert_experts(models, two.collect(len(asked))) > 0


def test_partial_outputs_of_a_checkpoint_keep_their_experts(
    two: AgentSetup, task: dict[str, str], models: list[Any], tmp_path: Path, monkeypatch
):
    """They are saved, loaded, and resumed by engines that have newer weights."""
    slow = SlowEngines(monkeypatch, steps=8)
    asked = prompts(task, "single_turn_agent")
    two.start(asked)
    assert slow.reached.wait(30)
    partials = two.host.partials("job")
    slow.resume.set()
    two.agents.close_host()
    assert partials
    group = GroupState("group", asked[:1], 3, partials=partials)
    save_plain(to_plain(group, {}), tmp_path / "answers.pt")
    saved: dict[str, Output] = from_plain(load_plain(tmp_path / "answers.pt")).partials
    for number in range(2):
        update(two, models, number)
    two.start(asked, partials=saved)
    assert assert_experts(models, two.collect(len(asked))) == len(partials)


def test_answers_of_a_lost_replica_keep_the_experts_of_what_it_had_reported(
    two: AgentSetup, task: dict[str, str], models: list[Any], monkeypatch
):
    """The other one, which resumes them, has newer weights."""
    monkeypatch.setattr("verl.workers.rollout.engine_client.PARTIALS_S", 0.0)
    monkeypatch.setattr("verl.workers.rollout.engine_client.COLLECT_S", 0.005)
    slow = SlowEngines(monkeypatch, steps=16)
    update(two, models, 1)
    asked = prompts(task, "single_turn_agent")
    first, second = (replica.handle(0) for replica in two.replicas)
    two.start(asked, [DyingHandle(first), second])
    while two.host.collect(two.host.id, 30.0, False)[0].lost_replica is None:
        pass
    slow.resume.set()
    assert assert_experts(models, two.collect(len(asked))) > 0
