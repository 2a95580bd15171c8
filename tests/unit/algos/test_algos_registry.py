"""Registries: what configuration knows is what is registered, everything has a hand-computed case, users may add."""

from __future__ import annotations

import ast
import inspect
import math
from enum import Enum
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from verl.algos import AdvantageEstimator, estimate_advantages
from verl.algos.registry import ADV_ESTIMATORS, POLICY_LOSSES
from verl.config import names
from verl.trainer.ppo import core_algos
from verl.utils.registry import Registry

HERE = Path(__file__).parent


def test_registered_names_are_those_the_configuration_knows():
    assert set(ADV_ESTIMATORS) == set(names.ADV_ESTIMATORS) == {member.value for member in AdvantageEstimator}
    assert set(POLICY_LOSSES) == set(names.POLICY_LOSSES)


def without_a_case(kind: str, registry: Registry) -> list[str]:
    """Members without a `test_<name>…_by_hand` in `test_<kind>_<name>.py` that calls their function and asserts.

    (KL estimates and aggregations have tables by hand in `test_kl.py` and `test_aggregate.py`, compared there.)
    """
    missing = []
    for name in registry:
        function = registry[name].__name__
        tests = HERE / f"test_{kind}_{name}.py"
        body = ast.parse(tests.read_text()).body if tests.exists() else []
        cases = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith(f"test_{name}_")
            and node.name.endswith("by_hand")
            and any(isinstance(part, ast.Assert) for part in ast.walk(node))
            and any(isinstance(part, ast.Name) and part.id == function for part in ast.walk(node))
        ]
        if not cases:
            missing.append(name)
    return missing


@pytest.mark.parametrize(("kind", "registry"), [("advantage", ADV_ESTIMATORS), ("policy_loss", POLICY_LOSSES)])
def test_every_registered_member_has_a_hand_computed_case(kind, registry):
    assert without_a_case(kind, registry) == [], f"write test_{kind}_<name>.py with test_<name>_by_hand"


def test_a_member_without_a_hand_computed_case_would_be_noticed():
    registry: Registry = Registry("algorithm.adv_estimator")
    registry.register("grpo")(ADV_ESTIMATORS["grpo"])
    registry.register("rloo")(ADV_ESTIMATORS["grpo"])  # a case there is, but of another function
    registry.register("nobody_wrote_one")(ADV_ESTIMATORS["grpo"])
    assert without_a_case("advantage", registry) == ["rloo", "nobody_wrote_one"]


def test_every_member_is_explained_in_the_docs():
    text = (HERE.parents[2] / "docs/guides/algorithms.md").read_text()
    members = [*ADV_ESTIMATORS, *POLICY_LOSSES, *names.LOSS_AGG_MODES, *names.KL_PENALTIES]
    assert [name for name in members if f"`{name}`" not in text] == []


def test_what_an_estimator_or_loss_takes_is_what_users_pass():
    first = ["token_level_rewards", "response_mask", "index", "epsilon"]
    for name in ("grpo", "grpo_passk", "rloo", "opo", "reinforce_plus_plus_baseline", "gpg", "gdpo"):
        parameters = list(inspect.signature(getattr(core_algos, f"compute_{name}_outcome_advantage")).parameters)
        assert parameters[:4] == first
        assert "config" in parameters
    for name in POLICY_LOSSES:
        parameters = list(inspect.signature(getattr(core_algos, f"compute_policy_loss_{name}")).parameters)
        assert parameters[:7] == [
            "old_log_prob",
            "log_prob",
            "advantages",
            "response_mask",
            "loss_agg_mode",
            "config",
            "rollout_is_weights",
        ]


@pytest.mark.parametrize("config", [None, {}, OmegaConf.create({"policy_loss": {"tau_pos": 2.0}})])
def test_a_loss_called_without_numbers_takes_its_papers(config):
    """Its aggregation by its argument, its clip by its configuration: the ratio is held at 1 + its own distance."""
    for name, own in names.POLICY_LOSSES.items():
        loss = getattr(core_algos, f"compute_policy_loss_{name}")
        assert inspect.signature(loss).parameters["loss_agg_mode"].default == own.loss_agg_mode
        if own.clip is None:
            continue
        shares = []
        for distance in (0.9, 1.1):
            reached = own.clip[1] * distance
            ratio = reached if name == "geo_mean" else math.log1p(reached)  # geo_mean's distances are of the log-ratio
            _, metrics = loss(
                torch.zeros(1, 1), torch.full((1, 1), ratio), torch.ones(1, 1), torch.ones(1, 1), config=config
            )
            shares.append(float(metrics["clipfrac"]))
        assert shares == [0.0, 1.0], name


def test_core_algos_exports_what_it_binds():
    assert all(hasattr(core_algos, name) for name in core_algos.__all__)
    same = core_algos.compute_reinforce_plus_plus_outcome_advantage
    assert core_algos.compute_reinforce_plus_plus_advantage is same
    assert core_algos.get_adv_estimator_fn("reinforce_plus_plus") is same


def test_the_enum_is_a_string_and_finds_its_function():
    assert AdvantageEstimator.GRPO == "grpo"
    assert f"{AdvantageEstimator.GRPO}" == str(AdvantageEstimator.GRPO) == "grpo"
    assert core_algos.get_adv_estimator_fn(AdvantageEstimator.GAE) is core_algos.compute_gae_advantage_return


def test_a_user_adds_a_member_by_decorator_and_finds_it_under_its_name():
    registry: Registry = Registry("algorithm.adv_estimator")

    class Mine(str, Enum):
        BEST = "best"

    @registry.register(Mine.BEST)
    def best():
        return 1

    assert registry["best"] is registry[Mine.BEST] is registry.lookup("best") is best
    assert list(registry) == ["best"]


def test_a_name_cannot_be_taken_by_another_function_but_a_reloaded_file_may_define_its_own_again():
    registry: Registry = Registry("algorithm.adv_estimator")

    def mine():
        return 1

    def other():
        return 2

    registry.register("mine")(mine)
    again = type(mine)(mine.__code__, mine.__globals__, mine.__name__)
    again.__qualname__ = mine.__qualname__
    assert registry.register("mine")(again) is registry["mine"] is again
    with pytest.raises(ValueError, match=r"^algorithm\.adv_estimator: 'mine'.*\.mine\b"):
        registry.register("mine")(other)


def test_an_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"(?s)adv_estimator.*'grppo'.*'grpo'.*external_libs"):
        core_algos.get_adv_estimator_fn("grppo")
    with pytest.raises(ValueError, match=r"(?s)loss_mode.*'xyz'"):
        core_algos.get_policy_loss_fn("xyz")


def test_an_estimator_gets_what_it_names_and_says_what_it_lacks():
    rewards, mask = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1)
    advantages, _ = estimate_advantages(
        "rloo", token_level_rewards=rewards, response_mask=mask, index=["a", "a"], values=3
    )
    assert advantages.tolist() == [[1.0], [-1.0]]
    with pytest.raises(ValueError, match=r"(?s)token_level_rewards.*response_mask"):
        estimate_advantages(AdvantageEstimator.GAE, token_level_rewards=rewards, response_mask=mask, values=None)


def test_an_estimator_with_kwargs_gets_everything_that_is_there():
    @core_algos.register_adv_est("keeps_all")
    def keeps_all(response_mask, **rest):
        return response_mask, rest

    assert estimate_advantages("keeps_all", response_mask=1, values=2, index=None) == (1, {"values": 2})
    del ADV_ESTIMATORS["keeps_all"]
    assert "keeps_all" not in ADV_ESTIMATORS


def test_ours_are_imported_when_asked_for_and_keep_their_names():
    registry: Registry = Registry("algorithm.adv_estimator", {"gae": names.EstimatorTraits("no_such_module:function")})
    assert list(registry) == ["gae"]
    assert "gae" in registry
    with pytest.raises(ValueError, match=r"(?s)'gae'.*no_such_module\.function"):
        registry.register("gae")(lambda: None)
    with pytest.raises(ModuleNotFoundError):
        registry.lookup("gae")
