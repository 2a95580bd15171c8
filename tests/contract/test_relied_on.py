"""What code written for public releases relies on: further names, and how they behave."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import MutableMapping
from importlib.util import find_spec
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import object_array
from verl.single_controller.base.decorator import (
    DISPATCH_MODE_FN_REGISTRY,
    Dispatch,
    get_predefined_dispatch_fn,
    method_specs,
    register,
)
from verl.trainer.main_ppo import TaskRunner, create_rl_sampler
from verl.trainer.ppo import core_algos
from verl.utils import fs, model, py_functional, torch_functional
from verl.utils.import_utils import load_extern_object

# ---------------------------------------------------------------- batches


def batch(**meta) -> DataProto:
    return DataProto({"x": torch.arange(4).view(2, 2)}, {"name": object_array(["a", "b"])}, meta)


def test_a_batch_is_made_of_a_tensordict_or_a_plain_dict():
    tensors = {"x": torch.ones(3, 2), "y": torch.zeros(3)}
    for given in (tensors, TensorDict(tensors, batch_size=[3])):
        data = DataProto(batch=given)
        assert len(data) == 3
        assert data.batch.batch_size == torch.Size([3])
    data.batch = {"x": torch.ones(3, 1)}
    assert list(data.batch.keys()) == ["x"]
    with pytest.raises(ValueError, match=r"^DataProto: 'y' .*\(2,\), 'x' .*\(3,\)"):
        DataProto(batch={"x": torch.ones(3), "y": torch.ones(2)})
    with pytest.raises(ValueError, match=r"^DataProto: batch .*list.*TensorDict.*dict"):
        DataProto(batch=[torch.ones(3)])


def test_a_name_gives_a_column():
    data = batch()
    assert data["x"] is data.batch["x"]
    assert data["name"].tolist() == ["a", "b"]
    with pytest.raises(KeyError, match=r"'z'.*'name', 'x'"):
        data["z"]


def test_to_tensordict_is_the_way_back_from_from_tensordict():
    data = batch()
    found = data.to_tensordict()
    assert found.batch_size == torch.Size([2])
    again = DataProto.from_tensordict(found)
    assert torch.equal(again["x"], data["x"])
    assert again["name"].tolist() == ["a", "b"]


def test_column_chunks_unfold_into_rows():
    data = DataProto.from_dict({"x": torch.arange(8).view(2, 4), "y": torch.tensor([1, 2])}, {"n": ["a", "b"]})
    found = data.unfold_column_chunks(2, split_keys=["x"])
    assert found["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found["y"].tolist() == [1, 1, 2, 2]
    assert found["n"].tolist() == ["a", "a", "b", "b"]
    assert data.unfold_column_chunks(2)["x"].tolist() == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    with pytest.raises(ValueError, match=r"'x'.*\(2, 4\).* 3\b"):
        data.unfold_column_chunks(3, split_keys=["x"])


def test_concat_gathers_metrics_and_wants_everything_else_to_agree():
    parts = [
        batch(metrics={"loss": 1.0, "lr": [0.1]}, temperature=0.7),
        batch(metrics=[{"loss": 2.0}, {"loss": 3.0, "norm": 9.0}], temperature=0.7),
        batch(),
    ]
    joined = DataProto.concat(parts)
    assert joined.meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "lr": [0.1], "norm": [9.0]}, "temperature": 0.7}
    assert "metrics" not in DataProto.concat([batch(), batch()]).meta_info
    assert parts[0].meta_info["metrics"]["lr"] == [0.1], "the parts are as they were"
    with pytest.raises(ValueError, match="'temperature'"):
        DataProto.concat([batch(temperature=0.7), batch(temperature=0.8)])


# ---------------------------------------------------------------- controller


def test_dispatch_modes_are_looked_up_by_mode():
    found = get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO)
    assert found is DISPATCH_MODE_FN_REGISTRY[Dispatch.DP_COMPUTE_PROTO]
    assert set(found) == {"dispatch_fn", "collect_fn"}
    with pytest.raises(ValueError, match=r"'NONE'.*'ALL_TO_ALL'"):
        get_predefined_dispatch_fn("NONE")


def test_async_methods_are_accepted_and_run_on_the_control_lane():
    from verl.single_controller.base import ClassWithInitArgs, Worker
    from verl.single_controller.local import LocalWorkerGroup

    class Plain(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def answer(self, value):
            return value

    class Waits(Plain):
        async def answer(self, value):
            return 2 * value

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        async def fails(self):
            raise KeyError("in the loop")

    assert method_specs(Plain)["answer"].lane == "compute"
    assert {method_specs(Waits)[name].lane for name in ("answer", "fails")} == {"control"}
    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Waits))
    assert group.answer(3) == [6]
    with pytest.raises(RuntimeError, match="in the loop"):
        group.fails()


def test_names_of_the_ray_controller():
    import ray

    from verl.single_controller.base import Worker
    from verl.single_controller.ray import base

    assert base.create_colocated_worker_raw_cls is base.create_colocated_worker_cls
    assert base.RayClassWithInitArgs(ray.remote(Worker)).cls is Worker
    assert "worker_env" in inspect.signature(base.RayWorkerGroup).parameters
    manager = base.ResourcePoolManager({"pool": [2]}, {"actor": "pool"}, use_gpu=False)
    manager.create_resource_pool()
    assert manager.get_resource_pool("actor").store == [2]


def test_one_pool_for_all_roles_is_given_by_its_processes():
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

    for mapping, name in (({}, "global_pool"), ({Role.ActorRollout: "mine", Role.Critic: "mine"}, "mine")):
        manager = ResourcePoolManager(process_on_nodes=[2, 2], mapping=mapping, use_gpu=False)
        manager.create_resource_pool()
        pools = {manager.get_resource_pool(role) for role in (Role.ActorRollout, Role.Critic)}
        assert [pool.store for pool in pools] == [[2, 2]]
        assert list(manager.resource_pool_dict) == [name]
        assert manager.get_n_gpus() == 4
    for wrong, why in (
        ({}, r"\bresource_pool_spec .*\bprocess_on_nodes .*all roles"),
        (
            {"resource_pool_spec": {"a": [1]}, "process_on_nodes": [1]},
            r"\bresource_pool_spec .*\bprocess_on_nodes .*all roles",
        ),
        ({"process_on_nodes": [1], "mapping": {1: "a", 2: "b"}}, r"process_on_nodes .*\bmapping .*\['a', 'b'\]"),
        ({"resource_pool_spec": {"a": [1], "b": [1]}}, r": mapping .*\['a', 'b'\]"),
        ({"resource_pool_spec": {"a": [1]}, "mapping": {1: "b"}}, r": mapping .*'b'.* resource_pool_spec .*\['a'\]"),
    ):
        with pytest.raises(ValueError, match=why):
            ResourcePoolManager(**wrong)


def test_workers_register_their_place_in_the_constructor():
    from verl.single_controller.base import ClassWithInitArgs, Worker
    from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn
    from verl.single_controller.local import LocalWorkerGroup

    class Mine(Worker):
        def __init__(self):
            super().__init__()
            self._register_dispatch_collect_info("mine", dp_rank=self.rank, is_collect=True)
            self._register_dispatch_collect_info(mesh_name="silent", dp_rank=0, is_collect=False)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="mine"))
        def double(self, data):
            return DataProto({"x": 2 * data.batch["x"]})

    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Mine))
    assert group.double(batch()).batch["x"].tolist() == [[0, 2], [4, 6]]
    assert [place.collect for name in ("mine", "silent") for place in group.mesh_places(name)] == [True, False]


# ---------------------------------------------------------------- registries


@pytest.mark.parametrize("registry", [core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY])
def test_registries_are_mappings_and_a_taken_name_is_refused(registry):
    known, function = next(iter(registry.items()))
    assert registry[known] is registry.get(known) is function
    assert known in registry
    assert len(registry) == len(registry.keys())
    assert registry.get("nobody") is None
    registry[known] = function
    with pytest.raises(ValueError, match=rf": {known!r} .*verl\.algos\."):
        registry[known] = lambda: None


def _registries():
    from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY

    return {
        "estimators": core_algos.ADV_ESTIMATOR_REGISTRY,
        "losses": core_algos.POLICY_LOSS_REGISTRY,
        "managers": REWARD_MANAGER_REGISTRY,
        "dispatch": DISPATCH_MODE_FN_REGISTRY,
    }


@pytest.mark.parametrize("name", _registries())
def test_registries_behave_like_dictionaries(name):
    registry = _registries()[name]
    saved = registry.copy()
    assert isinstance(registry, MutableMapping)
    assert type(saved) is dict
    key, value = next(iter(saved.items()))
    try:
        assert list(registry) == list(registry.keys()) == list(saved)
        assert registry == saved
        assert key in registry
        assert "absent" not in registry
        assert registry.get("absent", 3) == 3
        del registry[key]
        assert key not in registry
        assert len(registry) == len(saved) - 1
        with pytest.raises(KeyError):
            registry[key]
        with pytest.raises(KeyError):
            del registry[key]
        assert registry.pop(key, None) is None
        assert registry.setdefault(key, value) is value
        assert registry.pop(key) is value
        registry.popitem()
        registry.clear()
        assert not registry
        assert list(registry) == []
        registry.update({key: value})
        assert dict(registry) == {key: value}
        assert bool(registry)
    finally:
        registry.clear()
        registry.update(saved)
    assert registry == saved


def test_an_estimator_can_be_registered_again_after_its_name_was_deleted():
    registry = core_algos.ADV_ESTIMATOR_REGISTRY

    def first():
        return 1

    def second():
        return 2

    core_algos.register_adv_est("contract_own")(first)
    with pytest.raises(ValueError, match=r"'contract_own' .*\.first\b"):
        core_algos.register_adv_est("contract_own")(second)
    del registry["contract_own"]
    core_algos.register_adv_est("contract_own")(second)
    assert core_algos.get_adv_estimator_fn("contract_own") is registry.pop("contract_own") is second


def test_reward_managers_are_a_mapping():
    from verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY
    from verl.workers.reward_manager.registry import register as register_manager

    naive = REWARD_MANAGER_REGISTRY["naive"]
    assert register_manager("naive")(naive) is naive
    with pytest.raises(ValueError, match=r"reward_manager: 'naive' .*NaiveRewardManager"):
        register_manager("naive")(type("Other", (), {}))


def test_vectorized_estimators_are_the_estimators():
    assert core_algos.compute_grpo_vectorized_outcome_advantage is core_algos.compute_grpo_outcome_advantage
    assert core_algos.compute_rloo_vectorized_outcome_advantage is core_algos.compute_rloo_outcome_advantage


# ---------------------------------------------------------------- trainer


def test_a_trainer_of_ones_own_is_named_by_the_runner_or_by_the_configuration(tmp_path):
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    def chosen(runner, cls_path=None):
        return runner._trainer_class(SimpleNamespace(trainer=SimpleNamespace(cls_path=cls_path, mode="sync")))

    class Mine(RayPPOTrainer):
        pass

    class Runner(TaskRunner):
        trainer_cls = Mine

    (tmp_path / "mine.py").write_text(
        "from verl.trainer.ppo.ray_trainer import RayPPOTrainer as Base\nclass T(Base):\n    pass\nclass U:\n    pass\n"
    )
    assert chosen(TaskRunner()) is RayPPOTrainer
    assert chosen(Runner()) is Mine
    assert chosen(Runner(), f"{tmp_path}/mine.py:T").__name__ == "T"
    assert chosen(TaskRunner(), "verl.trainer.ppo.ray_trainer.RayPPOTrainer") is RayPPOTrainer
    assert chosen(TaskRunner(), "pkg://verl.trainer.ppo.ray_trainer:RayPPOTrainer") is RayPPOTrainer
    for wrong, why in (
        ("mine", "'mine' .*file.py:Class"),
        (f"{tmp_path}/mine.py:U", r"U in .*mine\.py .*RayPPOTrainer"),
    ):
        with pytest.raises(ValueError, match=f"^trainer.cls_path: .*{why}"):
            chosen(TaskRunner(), wrong)


def test_a_sampler_that_is_none_is_refused(tmp_path):
    (tmp_path / "order.py").write_text(
        "class Order:\n    def __init__(self, data_source, data_config):\n        pass\n"
    )
    with pytest.raises(ValueError, match=r"^data\.sampler\.name: Order in .*order\.py .*AbstractSampler"):
        create_rl_sampler({"sampler": {"path": str(tmp_path / "order.py"), "name": "Order"}}, [1, 2])


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_the_engine_that_is_not_installed_says_so():
    from verl.workers.rollout.vllm_rollout import vLLMRollout

    with pytest.raises(ImportError, match=r"^vLLMRollout: .*make setup-vllm"):
        vLLMRollout("model", None, None)


def test_weights_of_a_rollout_come_as_an_iterator():
    from verl.workers.rollout.base import BaseRollout

    received: dict[str, torch.Tensor] = {}
    rollout = SimpleNamespace(
        version=0,
        weight_dtype=torch.float32,
        begin_update=lambda version, manifest: None,
        load_bucket=received.update,
        finish_update=lambda fingerprints: None,
    )
    BaseRollout.update_weights(rollout, iterator=iter([("lm_head.weight", torch.ones(2))]))
    assert list(received) == ["lm_head.weight"]


# ---------------------------------------------------------------- utilities


def test_an_environment_variable_for_a_while(monkeypatch):
    monkeypatch.setenv("VERL_THERE", "before")
    monkeypatch.delenv("VERL_NOT_THERE", raising=False)
    with pytest.raises(KeyError), py_functional.temp_env_var("VERL_THERE", "inside"):  # noqa: PT012
        with py_functional.temp_env_var("VERL_NOT_THERE", "inside"):
            assert (os.environ["VERL_THERE"], os.environ["VERL_NOT_THERE"]) == ("inside", "inside")
        raise KeyError
    assert os.environ["VERL_THERE"] == "before"
    assert "VERL_NOT_THERE" not in os.environ


@pytest.mark.parametrize("use_signals", [False, True])
def test_a_call_that_takes_too_long_is_a_timeout(use_signals):
    @py_functional.timeout_limit(0.2, use_signals=use_signals)
    def wait(seconds, value="done"):
        time.sleep(seconds)
        return int(value) if value == "no number" else value

    assert wait.__name__ == "wait"
    assert wait(0.0, value="in time") == "in time"
    with pytest.raises(ValueError, match="no number"):
        wait(0.0, "no number")
    with pytest.raises(TimeoutError, match=r"^wait .*\b0\.2 s"):
        wait(600.0)


def test_two_dicts_become_one_where_they_agree():
    same = np.arange(3)
    assert py_functional.union_two_dict({"a": same, "b": 1}, {"a": same.copy(), "c": 2}).keys() == {"a", "b", "c"}
    with pytest.raises(ValueError, match=r"^union_two_dict: 'b' .*: 1, 2\."):
        py_functional.union_two_dict({"b": 1}, {"b": 2})


def test_random_masks_are_runs_within_their_ratios():
    torch.manual_seed(0)
    mask = model.create_random_mask(torch.zeros(200, 20), 0.7, 0.2, min_ratio_of_valid_token=0.3)
    assert set(mask.sum(1).tolist()) == set(range(6, 15))
    assert set(mask.argmax(1).tolist()) == set(range(5))
    assert ((mask[:, 1:] - mask[:, :-1]) == 1).sum(1).max() <= 1, "one run of ones"
    assert (model.create_random_mask(torch.zeros(50, 4), 1.0, 1.0).sum(1) >= 1).all()
    with pytest.raises(ValueError, match=r"^create_random_mask: \w+=0\.8, \w+=0\.5, \w+=0\.2\b"):
        model.create_random_mask(torch.zeros(2, 4), 0.5, 0.2, min_ratio_of_valid_token=0.8)


def test_model_configurations_are_changed_deeply():
    config = SimpleNamespace(hidden=8, text=SimpleNamespace(layers=2, heads=4), rope={"theta": 1.0, "kind": "plain"})
    model.update_model_config(config, {"hidden": 16, "text": {"layers": 3}, "rope": {"theta": 2.0}, "new": [1]})
    assert (config.hidden, config.text.layers, config.text.heads, config.new) == (16, 3, 4, [1])
    assert config.rope == {"theta": 2.0, "kind": "plain"}


def test_the_size_of_a_model_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        model.print_model_size(torch.nn.Linear(1000, 1000), name="head")
    assert "head: 1.001M parameters" in caplog.text


def test_statistics_of_one_process_are_those_of_its_tensor():
    values, mask = torch.tensor([1.0, 2.0, 6.0, 7.0]), torch.tensor([1, 1, 0, 0])
    assert [float(part) for part in torch_functional.distributed_mean_max_min_std(values)] == pytest.approx(
        [4.0, 7.0, 1.0, float(values.std())]
    )
    assert torch_functional.distributed_mean_max_min_std(values, False, False, False)[1:] == (None, None, None)
    assert float(torch_functional.distributed_masked_mean(values, mask)) == 1.5
    assert float(torch_functional.distributed_masked_mean(values, 0 * mask)) == 0


def test_a_remote_file_lands_under_the_md5_of_its_address(tmp_path):
    url = f"memory://{tmp_path.name}/train.parquet"
    with fsspec.open(url, "wb") as file:
        file.write(b"rows")
    assert fs.is_non_local(url)
    assert not any(fs.is_non_local(path) for path in (tmp_path, "a/b", f"file://{tmp_path}"))
    local = fs.copy_to_local(url, tmp_path)
    assert local == str(tmp_path / fs.md5_encode(url) / "train.parquet")
    before = os.stat(local).st_ino
    fs.copy_to_local(url, tmp_path)
    assert os.stat(local).st_ino == before
    assert fs.copy_to_local(url, tmp_path, always_recopy=True) == local
    assert os.stat(local).st_ino != before


def test_external_objects_and_what_is_wrong_with_them(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("value = 3\n")
    assert load_extern_object(None, "value") is None
    assert load_extern_object(str(file), "value") == 3
    with pytest.raises(FileNotFoundError, match=r"nothing\.py: .*mine\.py"):
        load_extern_object(str(tmp_path / "nothing.py"), "value")
    with pytest.raises(AttributeError, match=r"mine\.py: .*'other'.*: value\."):
        load_extern_object(str(file), "other")
    file.write_text("1 / 0\n")
    with pytest.raises(RuntimeError, match=r"mine\.py: .*ZeroDivisionError"):
        load_extern_object(str(file), "value")
