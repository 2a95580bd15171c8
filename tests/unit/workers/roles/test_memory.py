"""Out of memory in a worker's phase: the error that the controller sees says which phase, how much, and what helps."""

import pickle
from pathlib import Path

import pytest
import ray
import torch

from verl.config import CriticConfig, PPOConfig, RMConfig, SFTConfig, as_config, devices, load_config
from verl.config.devices import MemoryState, memory_state, oom_kills
from verl.config.schema import get_path, walk
from verl.planning.remedies import PHASES, applicable_remedies, remedies
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import WorkerCallError, WorkerDiedError
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayClassWithInitArgs, create_colocated_worker_cls
from verl.single_controller.ray.rank_monitor import RecentMemory, explain_death
from verl.trainer.common.run_status import RunStatus
from verl.trainer.common.training_health import add_memory_advice
from verl.workers.roles.supervised import RewardTrainingWorker, SFTWorker
from verl.workers.roles.training import explain_out_of_memory

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.32 GiB of which 1 GiB is free."
)


class FullDevice:
    """An engine whose device has no room."""

    def __init__(self, error: str) -> None:
        self.error = error

    def infer(self, *_: object) -> None:
        raise torch.OutOfMemoryError(self.error)


class Critic(Worker):
    def __init__(self, config, error):
        self.config, self.engine = config, FullDevice(error)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("update_critic", config_root="critic")
    def update_critic(self):
        """Runs out of memory."""
        self.engine.infer()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("values", config_root="critic")
    def compute_values(self):
        """Does not."""
        return 7


def start(error=MESSAGE, **changes):
    config = as_config(CriticConfig, {"ppo_micro_batch_size_per_gpu": 8, "use_dynamic_bsz": False, **changes})
    return LocalWorkerGroup(ray_cls_with_init=RayClassWithInitArgs(Critic, config=config, error=error))


def test_the_error_names_phase_size_and_keys_in_the_order_of_cost():
    with pytest.raises(WorkerCallError) as caught:
        start(model={"enable_gradient_checkpointing": False}).update_critic()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    text = str(caught.value)
    assert "update_critic: out of device memory" in text
    assert "2.50 GiB more were requested" in text
    keys = ["ppo_micro_batch_size_per_gpu (now 8)", "enable_gradient_checkpointing=True", "ulysses", "grad_offload"]
    places = [text.index(key) for key in keys]
    assert places == sorted(places)
    assert "ppo_max_token_len_per_gpu" not in text, "micro-batches are counted in samples here"


def test_what_is_done_already_is_not_advised():
    with pytest.raises(WorkerCallError) as caught:
        start(ppo_micro_batch_size_per_gpu=1, model={"enable_gradient_checkpointing": True}).update_critic()
    assert "ppo_micro_batch_size_per_gpu" not in str(caught.value)
    assert "gradient_checkpointing" not in str(caught.value)


def test_keys_of_another_engine_are_not_advised():
    with pytest.raises(WorkerCallError) as caught:
        start(strategy="megatron").update_critic()
    assert "ppo_micro_batch_size_per_gpu" in str(caught.value)
    assert "critic.fsdp_config" not in str(caught.value)


@pytest.mark.parametrize(
    ("worker_class", "root", "phase"), [(SFTWorker, SFTConfig, "sft"), (RewardTrainingWorker, RMConfig, "rm")]
)
def test_an_evaluation_of_a_supervised_run_names_its_program_and_keys(worker_class, root, phase):
    keys = ["model.path=org/model", "data.train_files=x", "trainer.device=cpu", "data.micro_batch_size_per_gpu=8"]
    worker = worker_class(load_config(None, keys, check_files=False, root=root))
    worker.engine = FullDevice(MESSAGE)
    with pytest.raises(torch.OutOfMemoryError, match=rf"^{phase}: out of device memory") as caught:
        worker.evaluate(DataProto())
    assert "1. data.micro_batch_size_per_gpu (now 8)" in str(caught.value)


class Actor(Worker):
    def __init__(self, config):
        self.config, self.engine = config, FullDevice(MESSAGE)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @explain_out_of_memory("update_actor", config_root="actor_rollout_ref")
    def update_actor(self):
        """Runs out of memory."""
        self.engine.infer()


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_only_roles_that_share_the_device_are_advised_on(estimator):
    config = run_of(estimator=estimator)
    roles = {"actor_rollout": RayClassWithInitArgs(Actor, config=config.actor_rollout_ref)}
    if estimator == "gae":
        roles["critic"] = RayClassWithInitArgs(Critic, config=config.critic, error=MESSAGE)
    group = LocalWorkerGroup(ray_cls_with_init=create_colocated_worker_cls(roles)).spawn(roles)["actor_rollout"]
    with pytest.raises(WorkerCallError) as caught:
        group.update_actor()
    text = str(caught.value)
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in text
    assert ("critic.fsdp_config.optimizer_offload" in text) == (estimator == "gae")
    for other in ("actor_rollout_ref.ref.", "reward_model.", "distillation."):
        assert other not in text


JUDGED = ("reward_model.enable=True", "reward_model.path=org/judge")
SERVED = (*JUDGED, "reward_model.judge.enable=True")


def said_beside_a_reward_model(*keys: str) -> str:
    """What the actor says in a run with these keys, in which a reward model shares its device."""
    config = run_of("grpo", *keys)
    actor = RayClassWithInitArgs(Actor, config=config.actor_rollout_ref)
    actor.run_config = config
    roles = {"actor_rollout": actor, "rm": RayClassWithInitArgs(Worker)}
    group = LocalWorkerGroup(ray_cls_with_init=create_colocated_worker_cls(roles)).spawn(roles)["actor_rollout"]
    with pytest.raises(WorkerCallError) as caught:
        group.update_actor()
    return str(caught.value)


def test_a_judge_that_is_served_has_nothing_to_offload():
    assert "reward_model.fsdp_config.param_offload=True" in said_beside_a_reward_model(*JUDGED)
    served = said_beside_a_reward_model(*SERVED)
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu" in served
    assert "reward_model." not in served


def test_what_would_do_nothing_in_asynchronous_training_is_not_advised():
    """Answers under way keep their KV: there may be less of it."""
    said = said_beside_a_reward_model(*JUDGED, "trainer.mode=async")
    assert "actor_rollout_ref.rollout.gpu_memory_utilization (now 0.4): lower it" in said
    for name in ("free_cache_engine", "free_weights"):
        assert name not in said


@pytest.mark.parametrize("served", [False, True])
def test_a_rank_that_was_killed_is_not_told_to_move_a_served_judge_back(served):
    key = "reward_model.fsdp_config.param_offload"
    config = run_of("grpo", *(SERVED if served else JUDGED), f"{key}=True")
    with pytest.raises(WorkerDiedError) as caught, add_memory_advice(config), RunStatus(5).phase("save_checkpoint"):
        raise by_monitor()
    assert (f"{key}=False" in caught.value.summary) == (not served)


def test_an_error_without_a_size_keeps_its_own_words():
    with pytest.raises(WorkerCallError, match="the region could not be mapped"):
        start("the region could not be mapped").update_critic()


def test_a_phase_that_fits_gives_its_result():
    assert start().compute_values() == [7]


@pytest.mark.parametrize("phase", PHASES)
def test_every_remedy_is_a_key_that_exists_and_can_move(phase):
    known = dict(walk(RMConfig if phase == "rm" else SFTConfig if phase.startswith("sft") else PPOConfig))
    for remedy in remedies(phase):
        assert remedy.key in known
        assert remedy.only_if is None or remedy.only_if[0] in known


def test_remedies_are_those_of_the_values_that_are_set():
    config = load_config(
        None, ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.device=cpu"], check_files=False
    )
    keys = [remedy.key for remedy, _ in applicable_remedies("update_actor", lambda key: get_path(config, key))]
    assert keys[0] == "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    assert "actor_rollout_ref.model.enable_gradient_checkpointing" not in keys, "it is on by default"
    assert list(next(r for r in remedies("gen") if r.action == "lower").values(0.2)) == [0.15, 0.1]


def test_out_of_host_memory_names_the_phase_and_keys_that_do_not_move_more_there():
    """The allocator's real refusal: no machine has that much."""

    class Update:
        config = as_config(CriticConfig, {"ppo_micro_batch_size_per_gpu": 8, "use_dynamic_bsz": False})
        device = torch.device("cpu")

        @explain_out_of_memory("update_critic", config_root="critic")
        def run(self) -> torch.Tensor:
            return torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(MemoryError, match=r"update_critic") as caught:
        Update().run()
    assert "1. critic.ppo_micro_batch_size_per_gpu (now 8): lower it" in str(caught.value)
    assert "offload" not in str(caught.value)


def killed(error: Exception) -> WorkerDiedError:
    """What a group makes of what Ray raises."""
    what, advice = explain_death(error)
    died = WorkerDiedError(what, "actor", 1, "host", "update_actor", str(error))
    died.advice = advice
    return died


def by_monitor() -> WorkerDiedError:
    said = "1 worker(s) were killed. Memory on the node (IP: 10.0.0.1) was 22.31GB used / 23.50GB limit (0.949)\nmore"
    return killed(ray.exceptions.OutOfMemoryError(said))


def run_of(estimator="gae", *keys: str, **actor) -> PPOConfig:
    names = [f"actor_rollout_ref.actor.{name}={value}" for name, value in actor.items()]
    names.append(f"algorithm.adv_estimator={estimator}")
    paths = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=org/model", "trainer.n_gpus_per_node=1"]
    return load_config(None, [*paths, *names, *keys], check_files=False)


def test_a_rank_that_was_killed_leaves_with_the_keys_of_its_phase():
    config = run_of(ppo_micro_batch_size_per_gpu=8, **{"fsdp_config.grad_offload": True})
    with pytest.raises(WorkerDiedError) as caught, add_memory_advice(config), RunStatus(5).phase("update_actor"):
        raise by_monitor()
    died = pickle.loads(pickle.dumps(caught.value))
    assert died.summary.startswith(
        "worker process died: Ray's memory monitor killed it, out of host memory (22.31GB used / 23.50GB). What helps,"
        " cheapest first:\n  1. actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu (now 8): lower it"
    )
    assert "actor_rollout_ref.actor.fsdp_config.grad_offload=False" in died.summary
    assert "offload=True" not in died.summary
    assert died.summary in str(died)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_a_rank_that_was_killed_leaves_with_keys_of_roles_that_the_run_has(estimator):
    config, phase = run_of(estimator), RunStatus(5).phase("save_checkpoint")
    with pytest.raises(WorkerDiedError) as caught, add_memory_advice(config), phase:
        raise by_monitor()
    assert "actor_rollout_ref.actor.optim.state_dtype=bf16" in caught.value.summary
    assert ("critic.optim.state_dtype=bf16" in caught.value.summary) == (estimator == "gae")


def test_where_the_phase_tells_nothing_the_general_advice_stays():
    for error in (by_monitor(), killed(ray.exceptions.RayActorError())):
        said = error.summary
        with pytest.raises(WorkerDiedError), add_memory_advice(run_of()), RunStatus(5).phase("testing"):
            raise error
        assert error.summary == said
    assert said == "worker process died", "no sign of memory"


GB = 2**30


def memory(available: float, oom_kills: int | None, host_oom_kills: int | None = None) -> MemoryState:
    return MemoryState(int(available * GB), 24 * GB, oom_kills, host_oom_kills)


@pytest.mark.parametrize(
    ("before", "now", "lowest", "cause", "is_memory"),
    [
        # The OOM killer did not run: whatever is free, something else killed it.
        (memory(20, 3), memory(20, 3), memory(20, 3), "killed by signal 9 from another process", False),
        (memory(20, 3), memory(20, 3), memory(0.5, 3), "the kernel's OOM killer did not run", False),
        # It ran.
        (memory(20, 3), memory(20, 4), memory(0.5, 3), "the kernel's OOM killer ran (0.5 of 24.0 GB were", True),
        # Only the counter of the machine grows: Ray, or another program, runs in another cgroup.
        (memory(20, 0, 3), memory(20, 0, 4), memory(20, 0, 3), "probably out of host memory: the kernel's OOM", True),
        (memory(20, 0, 3), memory(20, 0, 4), memory(20, 0, 3), "on this machine, in another cgroup (20.0", True),
        (memory(20, 0, 3), memory(20, 0, 3), memory(0.5, 0, 3), "the kernel's OOM killer did not run", False),
        # Of which cgroup it is, is unknown.
        (memory(20, None, 3), memory(20, None, 4), memory(20, None, 3), "probably out of host memory: the", True),
        (memory(20, None, 3), memory(20, None, 4), memory(20, None, 3), "ran on this machine (20.0", True),
        # The kernel does not count: memory before the death decides.
        (memory(20, None), memory(20, None), memory(20, None), "20.0 of 24.0 GB were available", False),
        (memory(20, None), memory(20, None), memory(0.5, None), "probably out of host memory", True),
        # Another node, of which only its state after the death is known.
        (None, memory(20, 4), None, "not out of memory (20.0 of 24.0 GB were available)", False),
        # Nothing is known.
        (None, None, None, "worker process died: killed (signal 9) or crashed.", False),
    ],
)
def test_a_death_is_attributed_to_memory_only_with_evidence(before, now, lowest, cause, is_memory):
    error = ray.exceptions.RayActorError(None, "Worker unexpectedly exits with a connection error code 2")
    said, advice = explain_death(error, before, now, lowest)
    assert cause in said
    assert ("out of host memory" in said, bool(advice)) == (is_memory, is_memory)


def test_both_counters_of_the_kernel_are_read(monkeypatch, tmp_path):
    (tmp_path / "memory.events").write_text("oom 5\noom_kill 2\n")
    monkeypatch.setattr(devices, "cgroup_counters", lambda: [tmp_path / "absent", tmp_path / "memory.events"])
    state = memory_state()
    assert state.oom_kills == 2
    assert state.host_oom_kills == oom_kills([Path("/proc/vmstat")])


def test_the_state_of_this_machine_is_read_and_its_lowest_kept(monkeypatch):
    state = memory_state()
    assert 0 < state.available <= state.total
    states = iter([memory(9, 0), memory(2, 0), memory(8, 1)])
    monkeypatch.setattr("verl.single_controller.ray.rank_monitor.memory_state", lambda: next(states))
    monkeypatch.setattr("verl.single_controller.ray.rank_monitor.SAMPLE_INTERVAL_S", 0.0)
    recent = RecentMemory()
    assert (recent.first, recent.lowest) == (None, None)
    for _ in range(3):
        recent.sample()
    assert (recent.first, recent.lowest) == (memory(9, 0), memory(2, 0))
