"""The probe of an engine of other make, with ours in its place: right, and wrong in ways that no fingerprint sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.support.lora_cases import perturb_lora_b
from tests.support.training_harness import make_task, overrides, policy_worker
from verl.config import load_config
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.main_ppo import TaskRunner
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.weight_sync import EngineMismatchError, EngineProbe, WeightSync
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.utils import hf_tokenizer

ROLLOUT = "actor_rollout_ref.rollout"
# Training samples from a part of the distribution: the probe must not.
SAMPLING = (f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_p=0.5", f"{ROLLOUT}.n=2", "algorithm=grpo")


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> Iterator[tuple[WorkerGroups, EngineProbe]]:
    with started(tmp_path_factory.mktemp("probe"), enabled=True) as result:
        yield result


@contextmanager
def started(folder, *more: str, enabled: bool | None = None) -> Iterator[tuple[WorkerGroups, EngineProbe]]:
    config, runner = load_config(None, overrides(make_task(folder), folder, *SAMPLING, *more)), TaskRunner()
    runner.add_actor_rollout_worker(config)
    pools = runner.init_resource_pool_mgr(config)
    groups = WorkerGroups(config, runner.role_worker_mapping, pools, LocalWorkerGroup, "cpu")
    groups.start()
    tokenizer, rollouts = hf_tokenizer(config.actor_rollout_ref.model.path), RolloutManager(config, groups)
    yield groups, EngineProbe(config, tokenizer, groups, rollouts, enabled)
    pools.release()


def test_an_engine_is_proved_once_and_again_when_it_was_started_anew(groups, monkeypatch):
    groups, probe = groups
    asked = []
    measure = probe.measure
    monkeypatch.setattr(probe, "measure", lambda: asked.append(measure()) or asked[-1])
    sync = WeightSync(groups, probe)
    for version in (0, 1):
        sync.sync(version)
    assert len(asked) == 1
    assert 0 < asked[0].difference < 1e-5, "two ways to compute the same log-probs, to rounding"
    groups.engine_starts += 1
    sync.sync(2)
    assert len(asked) == 2


def test_adapters_are_checked_until_their_effect_is_measurable(tmp_path, monkeypatch):
    with started(tmp_path, "actor_rollout_ref.model.lora_rank=4") as (groups, probe):
        worker, results, measure = policy_worker(groups.actor), {}, probe.measure
        sync, version = WeightSync(groups, probe), 0
        infer, passes = worker.engine.infer, []
        monkeypatch.setattr(
            worker.engine, "infer", lambda data, *args: passes.append(data.meta_info["eager"]) or infer(data, *args)
        )
        monkeypatch.setattr(probe, "measure", lambda: results.setdefault(version, measure()))
        for version in range(12):
            if version in (6, 9):
                perturb_lora_b(worker.engine)
            sync.sync(version)
            sync.sync(version)
        assert list(results) == [0, 1, 3, 7], "the first, second, fourth and eighth version"
        assert all(result.difference < 1e-5 for result in results.values())
        assert [result.adapter_share for result in results.values()][:3] == [None] * 3
        assert results[7].adapter_share == pytest.approx(1, abs=0.01)
        assert passes == [True] * 8, "two passes of each check, for which nothing is compiled"

        groups.engine_starts += 1
        version = 12
        sync.sync(version)
        assert results[12].adapter_share == pytest.approx(1, abs=0.01), "again after a start"


@pytest.mark.parametrize("size", [0.003, 1.0])
def test_an_engine_that_ignores_its_adapters_ends_the_run_however_small_their_effect(tmp_path, monkeypatch, size):
    """The smaller effect on log-probs is below the limit for rounding."""
    with started(tmp_path, "actor_rollout_ref.model.lora_rank=4", f"{ROLLOUT}.temperature=1") as (groups, probe):
        worker, results, measure = policy_worker(groups.actor), [], probe.measure
        monkeypatch.setattr(probe, "measure", lambda: results.append(measure()) or results[-1])
        finish = worker.rollout.finish_update

        def ignore_adapters(fingerprint):
            finish(fingerprint)
            worker.rollout.model.adapters.clear()

        monkeypatch.setattr(worker.rollout, "finish_update", ignore_adapters)
        perturb_lora_b(worker.engine)
        for name, value in worker.engine.model.hf.named_parameters():
            if "lora_B" in name:
                value.data.mul_(size)
        with pytest.raises(EngineMismatchError, match=r"rollout\.name = native: .*\b0% .*LoRA.*merge_lora=true"):
            WeightSync(groups, probe).sync(0)
        assert (results[0].difference < probe.limit) == (size < 1)


def at_another_temperature(rollout, monkeypatch) -> None:
    submit = rollout.submit

    def wrongly(requests):
        return submit([replace(each, params=replace(each.params, temperature=1.0)) for each in requests])

    monkeypatch.setattr(rollout, "submit", wrongly)


def with_a_weight_that_the_sync_missed(rollout, monkeypatch) -> None:
    finish = rollout.finish_update

    def forgetting(fingerprint):
        finish(fingerprint)
        rollout.weights["model.layers.1.mlp.down_proj.weight"].mul_(1.5)

    monkeypatch.setattr(rollout, "finish_update", forgetting)


@pytest.mark.parametrize("wrong", [at_another_temperature, with_a_weight_that_the_sync_missed])
def test_an_engine_that_is_not_the_policy_ends_the_run(groups, monkeypatch, wrong):
    groups, probe = groups
    groups.engine_starts += 1
    wrong(policy_worker(groups.actor).rollout, monkeypatch)
    with pytest.raises(EngineMismatchError, match=r"rollout\.name = native: .* 0\.\d+ .* 0\.00143 "):
        WeightSync(groups, probe).sync(groups.engine_starts + 10)


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ((), 1e-3 / 0.7),
        ((f"{ROLLOUT}.dtype=bfloat16",), 0.1 / 0.7),
        (("actor_rollout_ref.actor.fsdp_config.mixed_precision=bf16", f"{ROLLOUT}.temperature=1"), 0.1),
        ((f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.quantization=fp8", f"{ROLLOUT}.temperature=2"), 0.3),
    ],
)
def test_the_coarser_precision_says_what_rounding_explains(tmp_path, more, limit):
    task = {"train": "a/b", "val": "a/b", "model": "a/b", "reward": "a.py"}
    config = load_config(None, overrides(task, tmp_path, *SAMPLING, *more), check_files=False)
    assert EngineProbe(config, None, None, None).limit == pytest.approx(limit)
