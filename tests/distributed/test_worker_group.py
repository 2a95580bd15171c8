"""Calling methods on a group: the same tests over the in-process group and over Ray actors."""

from __future__ import annotations

import sys

import pytest
import ray
import torch

from tests.support.workers import Counter
from verl.protocol import DataProto, DataProtoConfig
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, Worker
from verl.single_controller.base.decorator import Dispatch, register, register_dispatch_mode, update_dispatch_mode
from verl.single_controller.base.worker_group import create_colocated_worker_cls
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"name": [f"row {i}" for i in range(rows)]}, {"step": 1})


def test_every_rank_knows_its_place(counters):
    places = counters.whoami()
    assert [place[0] for place in places] == list(range(counters.world_size))
    assert {place[1] for place in places} == {counters.world_size}


def test_one_to_all_repeats_arguments_and_lists_results(counters):
    before = counters.add(0)
    assert counters.add(1, twice=True) == [value + 2 for value in before]


def test_all_to_all_gives_each_rank_its_entry(counters):
    assert counters.echo([f"for {i}" for i in range(counters.world_size)]) == [
        f"for {i}" for i in range(counters.world_size)
    ]
    with pytest.raises(ValueError, match=r"Counter.echo"):
        counters.echo(["x"] * 5)


def test_rank_zero_runs_on_rank_zero_only(counters):
    assert counters.only_zero("hello") == (0, "hello")
    assert counters.zero_by_execute() == [0]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8])
def test_a_batch_is_split_computed_and_joined_whether_or_not_it_divides(counters, rows):
    given = batch(rows)
    result = counters.square(given)
    assert result.batch["x"].tolist() == [i**2 for i in range(rows)]
    assert result.non_tensor_batch["name"].tolist() == [f"row {i}" for i in range(rows)]
    assert result.meta_info["step"] == 1
    ranks = result.batch["rank"].tolist()
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(min(rows, counters.world_size)))


def test_what_a_worker_writes_into_its_batch_does_not_reach_the_controllers(ray_counters):
    large = DataProto.from_dict({"x": torch.arange(100_000)})  # large enough to travel through the object store
    ray_counters.square(large)
    assert torch.equal(large.batch["x"], torch.arange(100_000))


def test_results_can_be_passed_on(counters):
    once = counters.square(batch(5))
    assert counters.square(once).batch["x"].tolist() == [i**4 for i in range(5)]
    assert counters.square(power=3, data=once).batch["x"].tolist() == [i**6 for i in range(5)]


def test_a_future_can_be_passed_on(counters):
    future = counters.square_later(batch(4))
    assert counters.square(future).batch["x"].tolist() == [0, 1, 16, 81]
    assert future.get().batch["x"].tolist() == [0, 1, 4, 9]


def test_fillers_are_dropped_also_when_a_method_returns_several_rows_per_row(counters):
    result = counters.repeat_rows(batch(5))
    assert result.batch["x"].tolist() == [i for i in range(5) for _ in range(3)]


def test_fillers_weigh_nothing(ray_counters):
    masked = DataProto.from_dict({"response_mask": torch.ones(5, 4, dtype=torch.long)})
    assert sum(ray_counters.masked_tokens(masked)) == 20


def test_filling_can_be_refused(ray_counters, monkeypatch):
    monkeypatch.setattr(DataProtoConfig, "auto_padding", False)
    with pytest.raises(ValueError, match=r"Counter.square"):
        ray_counters.square(batch(5))
    allowed = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert len(ray_counters.square(allowed)) == 5


def test_an_empty_batch_is_refused(counters):
    with pytest.raises(ValueError, match=r"^Counter\.square: .*batch"):
        counters.square(batch(2)[:0])


def test_batches_of_one_call_must_match(ray_counters):
    class TwoBatches(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def both(self, a, b):
            return a

    group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(TwoBatches))
    with pytest.raises(ValueError, match=r"'argument 0': 2.*'b': 3"):
        group.both(batch(2), b=batch(3))


def test_metrics_of_all_ranks_come_back_as_lists(counters):
    metrics = counters.with_metrics(batch(4)).meta_info["metrics"]
    assert sum(metrics["rows"]) == 4
    assert metrics["ranks"] == list(range(counters.world_size))


def test_compute_calls_run_in_the_order_they_were_made(ray_counters):
    for i in range(60):
        ray_counters.execute_all_async("append", i)
    assert ray_counters.get_log() == [list(range(60))] * 2


def test_execute_by_name(ray_counters):
    assert ray_counters.execute_all_sync("unregistered", 5) == [5, 6]
    assert ray_counters.execute_all_sync("unregistered", [10, 20]) == [10, 21]
    assert ray.get(ray_counters.execute_all_async("unregistered", 5)) == [5, 6]
    assert ray.get(ray_counters.execute_all("unregistered", 5)) == [5, 6]
    assert ray_counters.execute_rank_zero_sync("unregistered", 3) == 3
    assert ray.get(ray_counters.execute_rank_zero("unregistered", 3)) == 3
    whole = ray.get(ray_counters.execute_rank_zero_async("square", batch(3)))
    assert whole.batch["x"].tolist() == [0, 1, 4]
    with pytest.raises(KeyError, match="no such key on rank 0"):
        ray.get(ray_counters.execute_rank_zero_async("fail"))


def test_a_mistyped_method_names_its_neighbour(counters):
    with pytest.raises(AttributeError, match=r"WorkerGroup of 'Counter' .*'sqare'.*'square'"):
        counters.sqare(batch(2))


def test_custom_dispatch_modes(counters):
    def each_rank_twice(group, value):
        return [[value * rank for rank in range(group.world_size)]], {}

    mode = register_dispatch_mode("TIMES_RANK", each_rank_twice, lambda group, outputs: sum(outputs))
    assert Dispatch.TIMES_RANK is mode
    try:

        class Custom(Worker):
            @register(dispatch_mode=Dispatch.TIMES_RANK)
            def same(self, value):
                return value + 1

        group = LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Custom))
        assert group.same(7) == 1
        update_dispatch_mode(mode, lambda group, value: ([[value]], {}), lambda group, outputs: outputs[0])
        assert group.same(7) == 8
    finally:
        from verl.single_controller.base import decorator

        del decorator.DISPATCH_MODE_FN_REGISTRY[Dispatch.TIMES_RANK], Dispatch.TIMES_RANK


def test_workers_see_their_place_and_the_variables_given_to_the_group(ray_counters, cpu_pool):
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_RANK", "RAY_LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
    seen = ray_counters.environment([*names, "MASTER_ADDR", "MASTER_PORT", "VERL_TEST_WORKER_ENV"])
    for rank, values in enumerate(seen):
        assert values[:6] == [str(rank), "2", str(rank), "2", str(rank), "2"]
        assert values[6:] == [ray_counters.master_address, str(ray_counters.master_port), "given"]
    with pytest.raises(ValueError, match=r"(?s)worker_env.*MASTER_PORT"):
        RayWorkerGroup(cpu_pool, RayClassWithInitArgs(Counter, 5), worker_env={"RANK": "0", "MASTER_PORT": "1"})


def test_an_override_keeps_its_registration():
    class Louder(Counter):
        def add(self, amount, twice=False):
            return super().add(10 * amount, twice)

    assert LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Louder)).add(1) == [10]


def test_bad_registrations_are_refused():
    with pytest.raises(ValueError, match=r"^register: lane 'gpu'.*'compute', 'control'"):
        register(lane="gpu")
    with pytest.raises(ValueError, match=r"^register: dispatch_mode .*dispatch_fn .*collect_fn"):
        register(dispatch_mode={"dispatch_fn": print})

    class Hides(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def shutdown(self):
            pass

    with pytest.raises(ValueError, match=r"^Hides: .*'shutdown' .*WorkerGroup\.shutdown"):
        LocalWorkerGroup(ray_cls_with_init=ClassWithInitArgs(Hides))


def test_the_local_group_has_one_rank():
    with pytest.raises(ValueError, match=r"^LocalWorkerGroup: .*\b2 ranks.*RayWorkerGroup"):
        LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Counter))


def test_classes_wrapped_with_ray_remote_are_accepted():
    assert RayClassWithInitArgs(ray.remote(Counter), 5).cls is Counter
    assert RayClassWithInitArgs(ray.remote(num_cpus=0)(Counter), 5).cls is Counter


def test_user_modules_are_imported_before_a_worker_is_constructed(tmp_path, monkeypatch):
    (tmp_path / "users_library.py").write_text("LOADED = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepared = ClassWithInitArgs(Counter, 1)
    prepared.imports = ["users_library"]
    LocalWorkerGroup(ray_cls_with_init=prepared)
    assert sys.modules.pop("users_library").LOADED
    prepared.imports = ["no_such_library"]
    with pytest.raises(RuntimeError, match=r"'no_such_library'"):
        LocalWorkerGroup(ray_cls_with_init=prepared)


@pytest.mark.slow
def test_colocated_roles_share_a_process_and_keep_their_own_methods(cpu_pool):
    both = create_colocated_worker_cls(
        {"first": RayClassWithInitArgs(Counter, 1), "second": RayClassWithInitArgs(Counter, 100)}
    )
    with RayWorkerGroup(cpu_pool, both) as group:
        roles = group.spawn({"first", "second"})
        assert roles["first"].add(1) == [2, 2]
        assert roles["second"].add(1) == [101, 101]
        assert [p[3] for p in roles["first"].whoami()] == [p[3] for p in roles["second"].whoami()]
        assert roles["first"].square(batch(3)).batch["x"].tolist() == [0, 1, 4]
        with pytest.raises(ValueError, match=r"^spawn: .*\['third'\].*\['first', 'second'\]"):
            group.spawn(["third"])
        with pytest.raises(RuntimeError, match=r"role 'second', rank 0.*method 'fail'"):
            roles["second"].fail()
    local = LocalWorkerGroup(ray_cls_with_init=both).spawn(["first", "second"])
    assert (local["first"].add(1), local["second"].add(1)) == ([2], [101])


@pytest.mark.slow
def test_attaching_to_a_running_group_by_name(cpu_pool):
    with RayWorkerGroup(cpu_pool, RayClassWithInitArgs(Counter, 7), name_prefix="test-attach", detached=True) as group:
        by_prefix = RayWorkerGroup.from_detached(name_prefix="test-attach")
        by_names = RayWorkerGroup.from_detached(worker_names=group.worker_names)
        with pytest.raises(ValueError, match=r"^Counter: .*RayWorkerGroup\.from_detached"):  # and the ranks stay alive
            by_prefix.restart()
        assert by_prefix.add(1) == [8, 8]
        assert by_names.add(1) == [9, 9]
        assert (by_names.master_address, by_names.master_port) == (group.master_address, group.master_port)
        with pytest.raises(ValueError, match=r"^RayWorkerGroup\.from_detached: 1 .*\b2 ranks"):
            RayWorkerGroup.from_detached(worker_names=group.worker_names[:1])
    with pytest.raises(ValueError, match=r"'nobody:0'.*detached=True"):
        RayWorkerGroup.from_detached(name_prefix="nobody")


@pytest.mark.slow
def test_ranks_task_runner_and_helpers_all_fit_on_two_cpus(cpu_pool, ray_counters):
    """Beside a 2-rank group, a task runner (1 CPU) and a second pool start at once on a node of 2 CPUs."""

    @ray.remote(num_cpus=1)
    class Runner:
        def go(self):
            pool = RayResourcePool([2], use_gpu=False)
            with RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 1)) as group:
                scorer = ray.remote(num_cpus=0)(lambda: "scored")
                answers = group.add(1), ray.get([scorer.remote() for _ in range(4)])
            pool.release()
            return answers

    runner = Runner.remote()
    assert ray.get(runner.go.remote()) == ([2, 2], ["scored"] * 4)
    assert ray.cluster_resources()["CPU"] == 2
    ray.kill(runner)
