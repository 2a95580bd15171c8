"""WorkerGroups: the worker groups of all roles: placement, restarts, and calls with rows balanced over ranks."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from verl.agent.loop import LoopSpec, imported_class, listed_loops
from verl.agent.toolbox import read_tool_files
from verl.agent.worker import AgentLoopWorker
from verl.config import PPOConfig, names
from verl.config.layout import BLOCK_OF_ROLE, ROLLOUT, frees_partial_kv, layout_of, runs_in_own_process
from verl.config.schema import get_path
from verl.protocol import DataProto
from verl.single_controller.base.worker import collective_timeout
from verl.single_controller.base.worker_group import RankHandle, WorkerError
from verl.single_controller.ray import RayClassWithInitArgs, ResourcePoolManager, create_colocated_worker_cls
from verl.trainer.ppo.row_balancing import (
    SharedCosts,
    balance_metrics,
    balance_rows,
    mini_batches_by_prompt,
    row_costs,
    select_columns_for,
    shared_costs,
)
from verl.trainer.ppo.utils import POLICY_ROLES, Role
from verl.types.schema import Call, selected_for
from verl.utils.balancing import COST_PER_TOKEN, SequenceCost
from verl.utils.console import startup_phase
from verl.utils.fs import resolve_model_path
from verl.utils.metric import reduce_metrics

logger = logging.getLogger(__name__)

# The policy is last: its rollout engine uses the remaining memory.
_LOAD_ORDER = (
    Role.Critic,
    Role.RefPolicy,
    Role.RewardModel,
    Role.Teacher,
    *POLICY_ROLES,
    Role.Rollout,
)
# Timeout for closing loop workers, in addition to the timeout of their tools.
_CLOSE_S = 10.0
# Roles without training state: their weights are read from files or received from the actor.
_STATELESS = frozenset({Role.Rollout, Role.RefPolicy, Role.RewardModel, Role.Teacher})
# Roles whose forward passes read more or other columns than those of the call "infer".
_INFER_CALLS: dict[str, tuple[Call, ...]] = {"actor": ("infer", "old_log_prob"), "reward_model": ("reward_model",)}
# Names of the parts of hybrid roles, for the log.
_LOG_NAMES = {Role.ActorRollout: ("Actor", "Rollout"), Role.ActorRolloutRef: ("Actor", "Rollout", "RefPolicy")}


class WorkerGroups:
    """One worker group per role. Roles of one resource pool share their processes, one per device."""

    actor: Any
    rollout: Any
    """The actor's group if they share processes."""
    reference: Any
    """The actor's group if the reference is the actor without its adapter."""
    critic: Any = None
    reward_model: Any = None
    teacher: Any = None
    agents: Any = None
    """Loop workers, which run agent loops, if `rollout.mode` is async."""
    replica_count: int
    """Number of rollout replicas."""
    generation_open = False
    """True between `open_generation` and `close_generation`."""
    engine_starts = 0
    """Number of starts of rollout engines so far; a change means that engines are new."""

    def __init__(
        self, config: PPOConfig, workers: Mapping[Role, type], pools: ResourcePoolManager, cls: Any, device: str
    ) -> None:
        """`workers`: worker class of each role. `cls`: class of the worker groups (on Ray, or in this process)."""
        self._config, self._workers, self._pools, self._cls, self._device = config, workers, pools, cls, device
        self.device_flops: float | None = None
        """Peak rate of a device; None if it is unknown."""
        self.roles = frozenset(workers)
        self._pool_groups: dict[str, Any] = {}
        """By name of the pool: the worker group of the processes that all roles of the pool share."""
        self._loop_worker_cls: type[AgentLoopWorker] = AgentLoopWorker
        self._loop_specs: Mapping[str, LoopSpec] = {}
        self.dp_sizes = {name: layout_of(config, name).dp_size for name in BLOCK_OF_ROLE}

    def start(self, create: Mapping[Role, Callable[[], Any]] = MappingProxyType({})) -> None:
        """Reserve the devices, start the groups of all roles, load the models.

        `create`: functions that return the worker group of a role, used instead of `self.create`.
        """
        loop_workers = self._loop_worker_args()
        model = self._config.actor_rollout_ref.model
        self._cost = SequenceCost.from_folder(resolve_model_path(model.path), model.override_config)
        with startup_phase("worker processes"):
            self._start_processes(loop_workers, create)
        self._load_models(frozenset(self._groups))
        groups = self._groups
        self.actor = next(groups[role] for role in POLICY_ROLES if role in groups)
        self.rollout = groups.get(Role.Rollout, self.actor)
        self.reference = groups.get(Role.RefPolicy, self.actor)
        self.critic, self.reward_model = groups.get(Role.Critic), groups.get(Role.RewardModel)
        self.teacher = groups.get(Role.Teacher)
        self._ranks_per_replica = self._config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self.replica_count = max(1, self.rollout.world_size // self._ranks_per_replica)
        self.engine_starts += 1

    def _start_processes(
        self, loop_workers: RayClassWithInitArgs | None, create: Mapping[Role, Callable[[], Any]]
    ) -> None:
        """Reserve the devices and start the groups of all roles, without their models."""
        self._pools.create_resource_pool()
        # All pools at once: if the cluster is too small, there is one error before anything is loaded.
        self._cls.reserve(list(self._pools.resource_pool_dict.values()))
        with ThreadPoolExecutor(1) as thread:
            agents = thread.submit(self._start_loop_workers, loop_workers)
            self._groups = {role: self._create(role, create.get(role)) for role in self._workers}
            self.agents = agents.result()  # before models are loaded: raises errors of tools and agent loops

    def end(self) -> None:
        """Close the agents' tools, which release external resources. The worker processes end with the run."""
        if self.agents is not None:
            self.agents.query_ranks("close", self._config.actor_rollout_ref.rollout.multi_turn.tool_timeout + _CLOSE_S)

    def by_role(self) -> dict[str, Any]:
        """Return the running groups by the name of their role; {} before `start`. Thread-safe."""
        groups = {str(role): group for role, group in dict(getattr(self, "_groups", {})).items()}
        return groups | ({} if self.agents is None else {str(Role.Agents): self.agents})

    @property
    def frees_weights(self) -> bool:
        """Whether engines free their weights during training; only engines in the trainer's processes do."""
        rollout = self._config.actor_rollout_ref.rollout
        return self.rollout is self.actor and rollout.free_weights and not rollout.server_urls

    @property
    def frees_partial_kv(self) -> bool:
        """Whether a generation that is paused for training frees its KV cache."""
        return self.rollout is self.actor and frees_partial_kv(self._config)

    @property
    def generation_groups(self) -> tuple[Any, ...]:
        """The worker groups that take part in generation."""
        return (self.rollout,) if self.agents is None else (self.rollout, self.agents)

    def open_generation(self) -> list[tuple[RankHandle, str]]:
        """Open generation until `close_generation`, also during weight syncs and training; return handle and host id of
        the first rank of each replica. A further call also opens replicas that were restarted."""
        ids = self.rollout.begin_generation()
        self.generation_open = True
        places = self.rollout.mesh_places("rollout")
        return [(self.rollout.handle(rank), ids[rank]) for rank, place in enumerate(places) if place.collect]

    def close_generation(self) -> None:
        """Close generation; raise the error of a failed engine, if there is one."""
        self.generation_open = False
        self.rollout.end_generation()

    @property
    def pauses_for_training(self) -> bool:
        """Whether an open generation is paused while training uses the engines' devices."""
        return self._must_alternate or (self._engines_share_processes and not self._config.trainer.overlap)

    @property
    def _must_alternate(self) -> bool:
        """Whether engines and other models must not run concurrently: both run collectives over several ranks in the
        same processes, which would deadlock."""
        return self._config.actor_rollout_ref.rollout.tensor_model_parallel_size > 1 and self._engines_share_processes

    @cached_property
    def _engines_share_processes(self) -> bool:
        """Whether engines share processes, and devices, with other models."""
        rollout = self._config.actor_rollout_ref.rollout
        has_own_pool = self.rollout is not self.actor and len(self._roles_in(self._pools.mapping[Role.Rollout])) == 1
        return not has_own_pool and not runs_in_own_process(rollout) and not rollout.server_urls

    @property
    def uses_ray(self) -> bool:
        """Whether ranks run in Ray actors; otherwise in this process."""
        return hasattr(self.rollout, "processes")

    @property
    def may_lose_hosts(self) -> bool:
        """Whether a rollout rank, or its engine, can be lost without losing training state."""
        rollout = self._config.actor_rollout_ref.rollout
        return self.rollout is not self.actor or runs_in_own_process(rollout) or bool(rollout.server_urls)

    def is_single_turn(self, agent_name: str) -> bool:
        """Return whether this agent loop is a single model call, which needs no loop worker."""
        if self.agents is None:
            return True
        is_default = self._loop_worker_cls is AgentLoopWorker and agent_name not in self._loop_specs
        return is_default and agent_name == names.SINGLE_TURN

    @cached_property
    def overrides_generate_sequences(self) -> bool:
        """Whether a user's class overrides `generate_sequences`. It is then called once per batch."""
        if self.agents is not None:
            return self._loop_worker_cls.generate_sequences is not AgentLoopWorker.generate_sequences
        has_method = hasattr(self.rollout, "overrides_generate_sequences")
        return not has_method or any(self.rollout.overrides_generate_sequences())

    def require_engines(self) -> None:
        """Raise the WorkerError of a rank or an engine process that was lost while generation is open."""
        self.rollout.raise_engine_error()

    def cancel_generation(self) -> None:
        """Cancel all running generation calls. Thread-safe."""
        for group in self.generation_groups if hasattr(self, "rollout") else ():
            group.cancel()

    def restartable_with(self, role: str) -> frozenset[Role]:
        """Return the roles that share processes with this role and are restarted together; empty if one of them has
        training state, so that no restart in place is possible."""
        if role == str(Role.Agents):
            return frozenset({Role.Agents})
        pool = next((self._pools.mapping[known] for known in self._workers if str(known) == role), None)
        roles = self._roles_in(pool)
        return roles if roles <= _STATELESS else frozenset()

    def restart(self, roles: frozenset[Role]) -> None:
        """Restart the processes of these roles (all roles of one pool) in place, and load their models.

        The worker groups stay valid. Rollout engines need a weight sync afterwards.
        """
        if Role.Agents in roles:
            self.agents.restart()
            return
        # Replicas with a single rank are independent: only dead ranks are restarted, others continue their requests.
        only_dead = roles == {Role.Rollout} and self._ranks_per_replica == 1
        self._pool_groups[self._pools.mapping[next(iter(roles))]].restart(only_dead)
        if only_dead:
            self.rollout.cancel()  # the caller repeats the whole call
        self._load_models(roles)
        if Role.Rollout in roles:
            self.engine_starts += 1

    def restart_engines(self) -> None:
        """Restart engine processes that died, although their ranks live. All engines need a weight sync afterwards."""
        self.rollout.cancel()  # nothing collects the results of the other engines
        self.rollout.restart_engine()
        self.engine_starts += 1

    @property
    def devices(self) -> int:
        """Number of devices of all pools."""
        return self._pools.get_n_gpus()

    def mfu(self, batch: DataProto, seconds: Mapping[str, float], saving: float = 0.0) -> dict[str, float]:
        """Return FLOPs of the actor update (forward and backward, without recomputation) relative to the peak rate of
        its devices; {} if the device or the shape of the model is unknown.

        `perf/mfu/actor` counts every row in full; `perf/mfu/actor_computed` subtracts `saving`, the share of FLOPs that
        shared prefixes saved. `seconds`: by phase.
        """
        duration = seconds.get("update_actor", 0.0)
        if self.device_flops is None or self._cost is COST_PER_TOKEN or not duration:
            return {}
        flops = 3 * self._config.actor_rollout_ref.actor.ppo_epochs * float(row_costs(batch, self._cost).sum())
        required = flops / (duration * self.actor.world_size * self.device_flops)
        return {"perf/mfu/actor": required, "perf/mfu/actor_computed": (1 - saving) * required}

    def infer(self, method: Callable[..., Any], batch: DataProto, role: str, eager: bool = False) -> DataProto:
        """Run a forward pass without update over the batch; return its result columns in the row order of `batch`.

        `method`: method of a worker group. `role`: key of `dp_sizes`. `eager`: compile nothing for this pass.
        """
        costs, rows = row_costs(batch, self._cost), [np.arange(len(batch))]
        shared = self._shared_costs(batch, costs, role)
        balanced = balance_rows(costs, rows, self.dp_sizes[role], self._config.trainer.balance_batch, shared)
        sent = select_columns_for(batch, *_INFER_CALLS.get(role, ("infer",))).select_idxs(balanced.order)
        sent.meta_info = {"temperature": self._config.actor_rollout_ref.rollout.temperature}
        if eager:
            sent.meta_info["eager"] = True
        if role == "critic":
            sent.meta_info["last_value"] = self._config.algorithm.truncated_responses == "bootstrap"
        with self._generation_paused_for(role):
            result = balanced.restore_order(method(sent))
        result.meta_info = {}
        return result

    @contextmanager
    def _generation_paused_for(self, role: str) -> Iterator[None]:
        """Context of a forward pass of this role: pause an open generation that must not run concurrently with a reward
        model. For other roles, `WeightSync.release_weights` has already paused it."""
        pools, lost = self._config.role_mapping, False
        must_pause = role == "reward_model" and self._must_alternate and pools[role] == pools["rollout"]
        if not must_pause or not self.generation_open:
            yield
            return
        self.rollout.pause_rollout()
        try:
            yield
        except WorkerError:
            lost = True  # the ranks will be restarted, or the run ends: there is nothing to resume
            raise
        finally:
            if not lost:
                self.rollout.resume_rollout()

    def update(self, method: Callable[..., Any], batch: DataProto, role: str, step: int) -> dict[str, float]:
        """Update a model on the batch and return the metrics. Columns computed by the update are added to `batch`.

        A mini-batch consists of all rows of `ppo_mini_batch_size` consecutive prompts; every rank gets an equal number
        of its rows.
        """
        block = self._config.critic if role == "critic" else self._config.actor_rollout_ref.actor
        minis = mini_batches_by_prompt(_prompt_ids(batch, self._config), block.ppo_mini_batch_size)
        costs, ranks = row_costs(batch, self._cost), self.dp_sizes[role]
        shared = self._shared_costs(batch, costs, role)
        balanced = balance_rows(costs, minis, ranks, self._config.trainer.balance_batch, shared)
        # Tensor columns of the user are sent; object columns are not, because ground truths may be large.
        read = selected_for("update_critic" if role == "critic" else "update_actor", batch.batch.keys())
        sent = balanced.take(batch, read)
        sent.meta_info = {
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            "mini_batches": balanced.sizes,
            "global_steps": step,
        }
        if role == "actor" and self._config.distillation.enabled:
            sent.meta_info["distillation"] = self._config.distillation.loss
        correction = self._config.algorithm.rollout_correction
        if role == "actor" and (correction.computes_weights_in_loss or "denominator_log_probs" in batch.batch.keys()):
            sent.meta_info["correction"] = correction
        result = method(sent)
        metrics = reduce_metrics(result.meta_info["metrics"])
        if role == "actor" and ranks > 1:
            metrics |= balance_metrics(costs, minis, balanced, ranks, shared)
        if len(result):
            columns = balanced.restore_order(result)
            columns.meta_info = {}
            batch.union(columns)
        return metrics

    def _shared_costs(self, batch: DataProto, costs: np.ndarray, role: str) -> SharedCosts | None:
        """Return the `shared_costs` of the batch; None if this role does not compute common prefixes once or has one
        rank."""
        block = get_path(self._config, BLOCK_OF_ROLE[role])
        if block.use_prefix_grouper == "false" or self.dp_sizes[role] == 1:
            return None
        return shared_costs(batch, costs, self._cost, _prompt_ids(batch, self._config))

    def _load_models(self, roles: frozenset[Role]) -> None:
        for role in _LOAD_ORDER:
            if role in roles:
                with startup_phase(f"weights of {role.name}"):
                    self._groups[role].init_model()

    def _roles_in(self, pool: str | None) -> frozenset[Role]:
        return frozenset(role for role in self._workers if self._pools.mapping[role] == pool)

    def create(self, role: Role) -> Any:
        """Return the worker group of a role. The first call for a pool starts the processes that its roles share."""
        pool = self._pools.mapping[role]
        if pool not in self._pool_groups:
            self._start_pool(pool)
        return self._pool_groups[pool].spawn([str(role)])[str(role)]

    def _create(self, role: Role, create: Callable[[], Any] | None) -> Any:
        group = self.create(role) if create is None else create()
        if group is None:
            name = getattr(create, "__qualname__", create)
            raise ValueError(f"{name} returned None. Return the worker group of {role}, a {self._cls.__name__}.")
        return group

    def _start_pool(self, pool: str) -> None:
        roles = self._roles_in(pool)
        classes = {role: self._worker_args(role, cls) for role, cls in self._workers.items() if role in roles}
        for name in [name for role in classes for name in _LOG_NAMES.get(role, (role.name,))]:
            logger.info("Creating %s worker pool...", name)
        self._pool_groups[pool] = self._cls(
            resource_pool=self._pools.resource_pool_dict[pool],
            ray_cls_with_init=create_colocated_worker_cls({str(role): cls for role, cls in classes.items()}),
            device_name=self._device,
            collective_timeout=collective_timeout(self._config.trainer.hang_timeout),
            expendable=roles <= _STATELESS,
        )

    def _loop_worker_args(self) -> RayClassWithInitArgs | None:
        """Return class and arguments of the loop workers; None if the run has none. Raises errors in the files of tools
        and agent loops."""
        rollout = self._config.actor_rollout_ref.rollout
        if rollout.mode != "async":
            return None
        if rollout.agent.agent_loop_manager_class is not None:
            self._loop_worker_cls = self._custom_loop_worker(rollout.agent.agent_loop_manager_class)
        tools = read_tool_files(rollout.multi_turn)
        self._loop_specs = listed_loops(rollout.agent)
        args = RayClassWithInitArgs(self._loop_worker_cls, self._config, self._loop_specs, tools)
        args.imports = list(self._config.external_libs)
        return args

    def _custom_loop_worker(self, path: str) -> type[AgentLoopWorker]:
        key, mode = f"{ROLLOUT}.agent.agent_loop_manager_class", self._config.trainer.mode
        cls = imported_class(key, path, AgentLoopWorker)
        if mode != "sync" and cls.generate_sequences is not AgentLoopWorker.generate_sequences:
            raise ValueError(
                f"{key} = {path}: it overrides generate_sequences, which trainer.mode={mode} does not call, because it"
                " submits rows one by one. Move the code into an agent loop, or set trainer.mode=sync."
            )
        return cls

    def _start_loop_workers(self, args: RayClassWithInitArgs | None) -> Any:
        if args is None:
            return None
        agent, nodes = self._config.actor_rollout_ref.rollout.agent, self._config.trainer.nnodes
        workers_per_node = [len(range(node, agent.num_workers, nodes)) for node in range(min(nodes, agent.num_workers))]
        pool = self._cls.cpu_pool(workers_per_node, str(Role.Agents))
        if pool is not None:  # released together with the other pools
            self._pools.resource_pool_dict[str(Role.Agents)] = pool
        group = self._cls(
            resource_pool=pool,
            ray_cls_with_init=create_colocated_worker_cls({str(Role.Agents): args}),
            device_name="cpu",
            expendable=True,
        )
        return group.spawn([str(Role.Agents)])[str(Role.Agents)]

    def _worker_args(self, role: Role, cls: type) -> RayClassWithInitArgs:
        config = self._config
        if role is Role.Critic:
            args = RayClassWithInitArgs(cls, config=config.critic)
        elif role is Role.RewardModel:
            reward = copy.deepcopy(config.reward_model)
            if reward.model.input_tokenizer is None:
                reward.model.input_tokenizer = config.actor_rollout_ref.model.path
            args = RayClassWithInitArgs(cls, config=reward)
        elif role is Role.Teacher:
            args = RayClassWithInitArgs(cls, config=config.distillation, student=config.actor_rollout_ref.model)
        else:
            args = RayClassWithInitArgs(cls, config=config.actor_rollout_ref, role=str(role))
        args.imports, args.run_config = list(config.external_libs), config
        return args


def _prompt_ids(batch: DataProto, config: PPOConfig) -> np.ndarray:
    """Return the prompt id of each row [rows]; without a column `uid`, `rollout.n` consecutive rows share a prompt."""
    if "uid" in batch.non_tensor_batch:
        return batch.non_tensor_batch["uid"]
    return np.arange(len(batch)) // config.actor_rollout_ref.rollout.n
