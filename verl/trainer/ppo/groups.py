"""WorkerGroups: who runs where, and calls on them: rows evened out over the ranks, results in the batch's order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from verl.agent.loop import LoopSpec, imported_class, listed_loops
from verl.agent.tool_files import read_tool_files
from verl.agent.worker import AgentLoopWorker
from verl.config import PPOConfig, names
from verl.config.layout import BLOCK_OF_ROLE, ROLLOUT, layout_of
from verl.planning.engines import beside
from verl.protocol import DataProto
from verl.single_controller.base.errors import WorkerError
from verl.single_controller.base.handle import RankHandle
from verl.single_controller.base.worker import collective_timeout
from verl.single_controller.ray import RayClassWithInitArgs, ResourcePoolManager, create_colocated_worker_cls
from verl.trainer.ppo.arrange import arrange, evenness, mini_batches_by_prompt, row_costs
from verl.trainer.ppo.utils import Role
from verl.types.schema import Call, columns_read_by, selected_for
from verl.utils.balancing import SequenceCost
from verl.utils.fs import resolve_model_path
from verl.utils.metric import reduce_metrics
from verl.workers.rollout.replica_states import ReplicaEvent, Replicas

logger = logging.getLogger(__name__)

# The policy last: its rollout engine takes what memory the others leave.
_LOAD_ORDER = (
    Role.Critic,
    Role.RefPolicy,
    Role.RewardModel,
    Role.Teacher,
    Role.Actor,
    Role.Rollout,
    Role.ActorRollout,
    Role.ActorRolloutRef,
)
# Beyond the time that tools have to release things.
_CLOSE_S = 10.0
# What they hold comes from files, or from the actor.
_STATELESS = frozenset({Role.Rollout, Role.RefPolicy, Role.RewardModel, Role.Teacher})
# Passes that read more, or other columns, than one of any model does.
_CALLS_OF_PASS: dict[str, tuple[Call, ...]] = {"actor": ("infer", "old_log_prob"), "reward_model": ("reward_model",)}
# What users know the parts of the hybrid roles as.
_NAMES = {Role.ActorRollout: ("Actor", "Rollout"), Role.ActorRolloutRef: ("Actor", "Rollout", "RefPolicy")}


class WorkerGroups:
    """One group per role, roles of one pool in the same processes: one process per device. `start` makes them."""

    actor: Any
    rollout: Any
    """The actor's own group where they share processes."""
    reference: Any
    """The actor's group where the actor without its adapter is the reference."""
    critic: Any = None
    reward_model: Any = None
    teacher: Any = None
    agents: Any = None
    """Processes that run agents' loops, with `rollout.mode=async`."""
    replicas: Replicas
    """Of a rollout with processes of its own: which of them may get requests."""
    generation_open = False
    """Between `open_generation` and `close_generation`."""
    engine_starts = 0
    """How often rollout engines were started: another number than last time, and other engines answer."""

    def __init__(
        self, config: PPOConfig, workers: Mapping[Role, type], pools: ResourcePoolManager, cls: Any, device: str
    ) -> None:
        """`cls` is the class of the groups: on Ray, or in this process."""
        self._config, self._workers, self._pools, self._cls, self._device = config, workers, pools, cls, device
        self.roles = frozenset(workers)
        self._started: dict[str, Any] = {}
        self._agent_class: type[AgentLoopWorker] = AgentLoopWorker
        self._listed_loops: Mapping[str, LoopSpec] = {}
        self.dp_sizes = {name: layout_of(config, name).dp_size for name in BLOCK_OF_ROLE}

    def start(self, create: Mapping[Role, Callable[[], Any]] = MappingProxyType({})) -> None:
        """Reserve the devices, start the groups of all roles, load the models.

        `create`: functions that return the worker group of a role, used instead of `self.create`.
        """
        agents_wanted = self._prepared_agents()
        model = self._config.actor_rollout_ref.model
        self._cost = SequenceCost.from_folder(resolve_model_path(model.path), model.override_config)
        self._pools.create_resource_pool()
        # All pools first: more than the cluster has is one error, before anything is loaded.
        self._cls.reserve(list(self._pools.resource_pool_dict.values()))
        with ThreadPoolExecutor(1) as beside:
            agents = beside.submit(self._start_agents, agents_wanted)
            self._groups = groups = {role: self._created(role, create.get(role)) for role in self._workers}
            self.agents = agents.result()  # what is wrong with tools and loops is said before models load
        self._load(frozenset(groups))
        self.actor = groups.get(Role.Actor) or groups.get(Role.ActorRollout) or groups[Role.ActorRolloutRef]
        self.rollout = groups.get(Role.Rollout, self.actor)
        self.reference = groups.get(Role.RefPolicy, self.actor)
        self.critic, self.reward_model = groups.get(Role.Critic), groups.get(Role.RewardModel)
        self.teacher = groups.get(Role.Teacher)
        self._ranks_per_replica = self._config.actor_rollout_ref.rollout.tensor_model_parallel_size
        self.replicas = Replicas(max(1, self.rollout.world_size // self._ranks_per_replica))
        self.replicas.apply(ReplicaEvent.STARTED)
        self.engine_starts += 1

    def end(self) -> None:
        """Have agents' tools let go of what they hold outside of the processes, which end with the run."""
        if self.agents is not None:
            self.agents.ask("close", self._config.actor_rollout_ref.rollout.multi_turn.tool_timeout + _CLOSE_S)

    @property
    def frees_weights(self) -> bool:
        """Whether the engines are without weights while training: those of the trainer's own processes may be."""
        rollout = self._config.actor_rollout_ref.rollout
        return self.rollout is self.actor and rollout.free_weights and not rollout.server_urls

    @property
    def answering(self) -> tuple[Any, ...]:
        """The worker groups that take part in generation."""
        return (self.rollout,) if self.agents is None else (self.rollout, self.agents)

    def open_generation(self) -> list[tuple[RankHandle, str]]:
        """Open generation until `close_generation`, also during weight syncs and training; return handle and host id of
        the first rank of each replica. Called again, it also opens replicas that were restarted."""
        ids = self.rollout.begin_generation()
        self.generation_open = True
        places = self.rollout.mesh_places("rollout")
        return [(self.rollout.handle(rank), ids[rank]) for rank, place in enumerate(places) if place.collect]

    def close_generation(self) -> None:
        """Close generation; raise the error of a failed engine, if there is one."""
        self.generation_open = False
        self.rollout.end_generation()

    @property
    def takes_turns(self) -> bool:
        """Whether an open generation stands still while others work on the engine's devices."""
        return self.must_take_turns or (self._works_in_their_processes and not self._config.trainer.overlap)

    @property
    def must_take_turns(self) -> bool:
        """Where an engine's ranks, and those of others, work together in the same processes, two groups of ranks
        would wait for each other."""
        return self._config.actor_rollout_ref.rollout.tensor_model_parallel_size > 1 and self._works_in_their_processes

    @property
    def _works_in_their_processes(self) -> bool:
        """Engines share processes, and devices, with others who compute."""
        rollout = self._config.actor_rollout_ref.rollout
        alone = self.rollout is not self.actor and len(self._roles_in(self._pools.mapping[Role.Rollout])) == 1
        return not alone and not beside(rollout) and not rollout.server_urls

    @property
    def uses_ray(self) -> bool:
        """Whether ranks run in Ray actors; otherwise in this process."""
        return hasattr(self.rollout, "processes")

    @property
    def may_lose_hosts(self) -> bool:
        """Whether a rollout rank, or its engine, can be lost without the trainer's state."""
        rollout = self._config.actor_rollout_ref.rollout
        return self.rollout is not self.actor or beside(rollout) or bool(rollout.server_urls)

    def is_single_turn(self, agent_name: str) -> bool:
        """Whether rows of this agent loop are one model call each, which needs no loop worker."""
        if self.agents is None:
            return True
        ours = self._agent_class is AgentLoopWorker and agent_name not in self._listed_loops
        return ours and agent_name == names.SINGLE_TURN

    @cached_property
    def overrides_generate_sequences(self) -> bool:
        """Whether a class of the user has its own `generate_sequences`, which then generates each batch."""
        if self.agents is not None:
            return self._agent_class.generate_sequences is not AgentLoopWorker.generate_sequences
        ours = hasattr(self.rollout, "overrides_generate_sequences")
        return not ours or any(self.rollout.overrides_generate_sequences())

    def require_engines(self) -> None:
        """Raise the WorkerError of a rank, or of an engine's own process, that an open generation has lost."""
        self.rollout.require_engine()

    def cancel_generation(self) -> None:
        """From any thread."""
        for group in self.answering if hasattr(self, "rollout") else ():
            group.cancel()

    def restartable_with(self, role: str) -> frozenset[Role]:
        """The roles whose processes are started anew together with this one's; none, where training state is there."""
        if role == str(Role.Agents):
            return frozenset({Role.Agents})
        pool = next((self._pools.mapping[each] for each in self._workers if str(each) == role), None)
        return self._roles_in(pool) if self._is_stateless(pool) else frozenset()

    def restart(self, roles: frozenset[Role]) -> None:
        """Start the processes of these roles, which are all of one pool, anew in their places, and load their models.

        Whoever holds one of the groups need not know. A rollout has no weights of the trainer's then.
        """
        if Role.Agents in roles:
            self.agents.restart()
            return
        if Role.Rollout in roles:
            self.replicas.apply(ReplicaEvent.DIED)
            self.replicas.apply(ReplicaEvent.RESTART)
        # Replicas of one rank each know nothing of each other: those that live go on with what they were asked.
        alone = roles == {Role.Rollout} and self._ranks_per_replica == 1
        self._started[self._pools.mapping[next(iter(roles))]].restart(alone)
        if alone:
            self.rollout.cancel()  # a whole batch is asked again
        self._load(roles)
        if Role.Rollout in roles:
            self.replicas.apply(ReplicaEvent.STARTED)
            self.engine_starts += 1

    def revive_engines(self) -> None:
        """Start engines anew whose own processes are gone, beside ranks that are not. None has the weights then."""
        self.rollout.cancel()  # of the others nobody waits for an answer any more
        self.rollout.revive_engine()
        for event in (ReplicaEvent.DIED, ReplicaEvent.RESTART, ReplicaEvent.STARTED):
            self.replicas.apply(event)
        self.engine_starts += 1

    @property
    def devices(self) -> int:
        """Of all pools together."""
        return self._pools.get_n_gpus()

    def infer(self, method: Callable[..., Any], batch: DataProto, role: str) -> DataProto:
        """A pass without an update: its columns for every row."""
        costs, rows = row_costs(batch, self._cost), [np.arange(len(batch))]
        arranged = arrange(costs, rows, self.dp_sizes[role], self._config.trainer.balance_batch)
        sent = select_read_by(batch, *_CALLS_OF_PASS.get(role, ("infer",))).select_idxs(arranged.order)
        sent.meta_info = {"temperature": self._config.actor_rollout_ref.rollout.temperature}
        if role == "critic":
            sent.meta_info["last_value"] = self._config.algorithm.truncated_responses == "bootstrap"
        with self._engines_at_rest(role):
            return _without_meta(arranged.results(method(sent)))

    @contextmanager
    def _engines_at_rest(self, role: str) -> Iterator[None]:
        """Around a pass of a reward model: an open generation that must take turns with it stands still. All other
        passes of a step come after `WeightSync` has seen to that."""
        pools, lost = self._config.role_mapping, False
        must = role == "reward_model" and self.must_take_turns and pools[role] == pools["rollout"]
        if not must or not self.generation_open:
            yield
            return
        self.rollout.pause_rollout()
        try:
            yield
        except WorkerError:
            lost = True  # the ranks start anew, or the run ends
            raise
        finally:
            if not lost:
                self.rollout.resume_rollout()

    def update(self, method: Callable[..., Any], batch: DataProto, role: str, step: int) -> dict[str, float]:
        """Mini-batches are whole prompts in the batch's order, however many rows each has; every rank gets its part.

        Returns metrics; columns that the update gives are added to `batch`.
        """
        block = self._config.critic if role == "critic" else self._config.actor_rollout_ref.actor
        minis = mini_batches_by_prompt(_prompts(batch, self._config), block.ppo_mini_batch_size)
        costs, ranks = row_costs(batch, self._cost), self.dp_sizes[role]
        arranged = arrange(costs, minis, ranks, self._config.trainer.balance_batch)
        # Objects stay here: ground truths may be large. Tensors of the user's own go along.
        read = selected_for("update_critic" if role == "critic" else "update_actor", batch.batch.keys())
        sent = arranged.take(batch, read)
        sent.meta_info = {
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            "mini_batches": arranged.sizes,
            "global_steps": step,
        }
        if role == "actor" and self._config.distillation.enabled:
            sent.meta_info["distillation"] = self._config.distillation.loss
        if role == "actor" and self._config.algorithm.rollout_correction.weighs_in_the_loss:
            sent.meta_info["correction"] = self._config.algorithm.rollout_correction
        result = method(sent)
        metrics = reduce_metrics(result.meta_info["metrics"])
        if role == "actor" and ranks > 1:
            metrics |= evenness(costs, minis, arranged, ranks)
        if len(result):
            batch.union(_without_meta(arranged.results(result)))
        return metrics

    def _load(self, roles: frozenset[Role]) -> None:
        for role in _LOAD_ORDER:
            if role in roles:
                self._groups[role].init_model()

    def _roles_in(self, pool: str | None) -> frozenset[Role]:
        return frozenset(role for role in self._workers if self._pools.mapping[role] == pool)

    def _is_stateless(self, pool: str | None) -> bool:
        return self._roles_in(pool) <= _STATELESS

    def create(self, role: Role) -> Any:
        """Return the worker group of a role. The first call for a pool starts the processes that its roles share."""
        pool = self._pools.mapping[role]
        if pool not in self._started:
            self._start_pool(pool)
        return self._started[pool].spawn([str(role)])[str(role)]

    def _created(self, role: Role, create: Callable[[], Any] | None) -> Any:
        group = self.create(role) if create is None else create()
        if group is None:
            name = getattr(create, "__qualname__", create)
            raise ValueError(f"{name} returned None. Return the worker group of {role}, a {self._cls.__name__}.")
        return group

    def _start_pool(self, pool: str) -> None:
        roles = self._roles_in(pool)
        classes = {role: self._prepared(role, cls) for role, cls in self._workers.items() if role in roles}
        for name in [name for role in classes for name in _NAMES.get(role, (role.name,))]:
            logger.info("Creating %s worker pool...", name)
        self._started[pool] = self._cls(
            resource_pool=self._pools.resource_pool_dict[pool],
            ray_cls_with_init=create_colocated_worker_cls({str(role): cls for role, cls in classes.items()}),
            device_name=self._device,
            collective_timeout=collective_timeout(self._config.trainer.hang_timeout),
            expendable=self._is_stateless(pool),
        )

    def _prepared_agents(self) -> RayClassWithInitArgs | None:
        """What loop workers are made of; what is wrong with files of tools and loops is said at once."""
        rollout = self._config.actor_rollout_ref.rollout
        if rollout.mode != "async":
            return None
        agent = rollout.agent
        worker = self._agent_class
        if agent.agent_loop_manager_class is not None:
            key = f"{ROLLOUT}.agent.agent_loop_manager_class"
            worker = self._agent_class = imported_class(key, agent.agent_loop_manager_class, AgentLoopWorker)
            if (
                self._config.trainer.mode != "sync"
                and worker.generate_sequences is not AgentLoopWorker.generate_sequences
            ):
                raise ValueError(
                    f"{key} = {agent.agent_loop_manager_class}: it has a generate_sequences of its own, which"
                    f" trainer.mode={self._config.trainer.mode} does not call: rows are submitted one by one"
                    " (`host`). Put what it does into an agent loop, or set trainer.mode=sync."
                )
        tools = read_tool_files(rollout.multi_turn)
        self._listed_loops = listed_loops(agent)
        prepared = RayClassWithInitArgs(worker, self._config, self._listed_loops, tools)
        prepared.imports = list(self._config.external_libs)
        return prepared

    def _start_agents(self, prepared: RayClassWithInitArgs | None) -> Any:
        if prepared is None:
            return None
        agent, nodes = self._config.actor_rollout_ref.rollout.agent, self._config.trainer.nnodes
        shares = [len(range(node, agent.num_workers, nodes)) for node in range(min(nodes, agent.num_workers))]
        pool = self._cls.cpu_pool(shares, str(Role.Agents))
        if pool is not None:  # given back with the others
            self._pools.resource_pool_dict[str(Role.Agents)] = pool
        started = self._cls(
            resource_pool=pool,
            ray_cls_with_init=create_colocated_worker_cls({str(Role.Agents): prepared}),
            device_name="cpu",
            expendable=True,
        )
        return started.spawn([str(Role.Agents)])[str(Role.Agents)]

    def _prepared(self, role: Role, cls: type) -> RayClassWithInitArgs:
        config = self._config
        if role is Role.Critic:
            prepared = RayClassWithInitArgs(cls, config=config.critic)
        elif role is Role.RewardModel:
            reward = copy.deepcopy(config.reward_model)
            if reward.model.input_tokenizer is None:
                reward.model.input_tokenizer = config.actor_rollout_ref.model.path
            prepared = RayClassWithInitArgs(cls, config=reward)
        elif role is Role.Teacher:
            prepared = RayClassWithInitArgs(cls, config=config.distillation, student=config.actor_rollout_ref.model)
        else:
            prepared = RayClassWithInitArgs(cls, config=config.actor_rollout_ref, role=str(role))
        prepared.imports, prepared.run_config = list(config.external_libs), config
        return prepared


def select_read_by(batch: DataProto, *calls: Call) -> DataProto:
    """The columns that these calls read, without metadata."""
    names = columns_read_by(*calls)
    tensors, objects = batch.batch.keys(), batch.non_tensor_batch
    return batch.select([n for n in names if n in tensors], [n for n in names if n in objects], [])


def local_columns(batch: DataProto, names: Iterable[str], objects: Iterable[str] | None = None) -> DataProto:
    """Those of the named columns that there are (all objects, if none are named), on the controller."""
    arrays = batch.non_tensor_batch
    tensors = {name: batch.batch[name] for name in names if name in batch.batch.keys()}
    kept = {name: arrays[name] for name in (arrays if objects is None else objects) if name in arrays}
    return DataProto.from_dict(tensors, kept, batch.meta_info)


def _prompts(batch: DataProto, config: PPOConfig) -> np.ndarray:
    """[rows]: which prompt each answers; in a batch without names every `rollout.n` rows are one's."""
    named = "uid" in batch.non_tensor_batch
    return batch.non_tensor_batch["uid"] if named else np.arange(len(batch)) // config.actor_rollout_ref.rollout.n


def _without_meta(result: DataProto) -> DataProto:
    result.meta_info = {}
    return result
