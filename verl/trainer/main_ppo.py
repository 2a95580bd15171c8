"""Entry point of RL training: `python -m verl.trainer.main_ppo key=value …` -> configuration -> Ray -> TaskRunner.

Neither torch nor ray is imported before the configuration has been validated.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from omegaconf import DictConfig

from verl.config import PPOConfig, batch_plan, load_config
from verl.config.layout import active_roles, serves_reward_model, shares_devices
from verl.config.load import Config
from verl.trainer.common.command_line import command, console_mode, validated_config
from verl.trainer.common.nodes import ensure_head, is_worker_node, serve_as_node, start_head, stop_head
from verl.trainer.common.preflight import basic_preflight, check_code_runner, model_paths, ppo_preflight
from verl.trainer.common.ray_cluster import start_or_join_ray
from verl.trainer.common.run_status import RunStatus, StatusSnapshot
from verl.trainer.common.status_display import ControllerOutput, end_controller_output, show_status
from verl.trainer.ppo.utils import Role
from verl.trainer.recovery.exit_messages import attach_resume_hint, describe_resume, log_finished
from verl.trainer.recovery.ray_monitor import ControllerMonitor, RayProcesses, await_controller
from verl.trainer.recovery.signals import (
    FINISH_STEP,
    PREEMPTION_SIGNALS,
    RUN_ENDED,
    StopRequest,
    exit_on_signals,
    stop_on_signals,
)
from verl.trainer.recovery.supervised_process import before_first_step
from verl.trainer.recovery.supervisor import supervise, wants_supervision
from verl.utils.console import LINE, log_startup_phases, show_startup, startup_phase
from verl.utils.exceptions import annotate_error
from verl.utils.logging_setup import CurrentStderrHandler, messages_on_stderr, setup_logging, survive_lost_terminal
from verl.utils.resources import freeze_gc
from verl.utils.stacks import enable_stack_dumps

logger = logging.getLogger(__name__)

# The last lines of a controller that failed are awaited so long; one that died writes none.
_ERROR_OUTPUT_S = 1.0
# Modules of transformers that ranks import to load a model; together they take seconds.
_RANK_MODULES = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
)


def main() -> None:
    """Train a model by reinforcement learning; an invalid configuration lists every problem and exits with 2."""
    survive_lost_terminal()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[CurrentStderrHandler()])
    _main()


@command("ppo_trainer", sets_up_logging=False)
def _main(config: DictConfig) -> None:
    run_ppo(config, supervised=True)


@messages_on_stderr()
def run_ppo(config: Config, task_runner_class: Any = None, supervised: bool = False) -> None:
    """Check the configuration, start or join Ray, and wait for a TaskRunner (plain or Ray remote class) to finish.

    `supervised`: the run is executed by a child of this process, which restarts it when it dies (`trainer.max_restarts`
    times) and exits when it has ended. Code that follows the call in a script is executed by the child only.
    """
    runner_class = TaskRunner if task_runner_class is None else task_runner_class
    log_startup_phases(console_mode(config) == LINE)
    has_own_run = getattr(runner_class, "run", None) is not TaskRunner.run
    config = validated_config(config, PPOConfig, preflight=basic_preflight if has_own_run else ppo_preflight)
    logger.info(batch_plan(config).render())
    check_code_runner(config)

    if is_worker_node(config):
        return serve_as_node(config)
    with attach_resume_hint(config.trainer):
        if wants_supervision(config, supervised):
            attempt = supervise(config, lambda head: ensure_head(config, head), stop_head)
            stopped_by = _run_on_ray(attempt.config, runner_class, attempt.head, supervised)
        else:
            with before_first_step():
                head = start_head(config)  # sets environment variables that Ray reads when it is imported
            try:
                stopped_by = _run_on_ray(config, runner_class, head, supervised)
            finally:
                stop_head(head)
        if stopped_by is not None:
            logger.warning("stopped by %s; %s", stopped_by, describe_resume(config.trainer))
        elif not config.trainer.val_only:
            log_finished(config.trainer, "actor", merge_backend=_merge_backend(config))


def _run_on_ray(config: PPOConfig, runner_class: Any, head: Any, is_program: bool) -> str | None:
    """Run the TaskRunner as a Ray actor, show its progress and handle stop signals. Returns None if the run has
    finished; else the signal that stopped it, or a message if a step was given up because of it.

    `head`: the Ray head that this process started, or None. `is_program`: nothing follows the run in this process. A
    Ray cluster started here is then shut down, so that no actor output follows the last log line.
    """
    with before_first_step():
        import ray

        starts_ray = not ray.is_initialized()
        with show_startup(config.trainer.console == LINE), startup_phase("Ray"):
            processes = _start_ray(config, head)
        output = ControllerOutput(_class_name(runner_class)) if config.trainer.console == LINE else None
        try:
            runner = _create_runner(runner_class)
        except (KeyboardInterrupt, SystemExit):
            processes.kill()
            raise
    enable_stack_dumps()
    monitor = ControllerMonitor(runner, processes, config.trainer.hang_timeout)
    stopping: AbstractContextManager[StopRequest] = nullcontext(StopRequest())
    if hasattr(runner, "request_stop"):
        request, seconds = StopRequest(), config.trainer.save_within
        message = FINISH_STEP if seconds is None else f"stopping: saved first, if it can be in {seconds:g} s"
        is_starting = monitor.before_first_step if starts_ray else lambda: False
        stopping = stop_on_signals(
            lambda: _request_stop(runner, request.signal), processes.kill, message, request, is_starting
        )
    with stopping as request, show_status(partial(_status, monitor, output), config.trainer.console):
        try:
            given_up = await_controller(runner.run.remote(config), processes, request, monitor.poll)
            if output is not None:
                output.wait_for_end()
        except Exception as error:
            if output is not None:
                output.wait_for_end(_ERROR_OUTPUT_S)
            status = monitor.status
            if status is not None and status.phase:  # an error that already has a phase keeps it
                annotate_error(error, phase=status.phase, step=status.step + 1)
            raise
    if is_program:
        exit_on_signals(RUN_ENDED)
    if starts_ray and (is_program or request.signal is not None):
        ray.shutdown()  # output of the run arrives at any time until then
        sys.stdout.flush()
    # Logged by the driver: the last output of an actor may be lost with Ray.
    return given_up if request.signal is not None and isinstance(given_up, str) else request.signal


def _status(monitor: ControllerMonitor, output: ControllerOutput | None) -> StatusSnapshot | None:
    """Return the last status of the controller; None: it has not started. An empty status: it reports none."""
    has_started = output is not None and output.has_started
    return monitor.status or (StatusSnapshot(0, 0) if has_started else None)


def _start_ray(config: PPOConfig, head: Any) -> RayProcesses:
    trainer = config.trainer
    used = {config.role_mapping[role] for role in active_roles(config)}
    pools = [pool for name, pool in config.resource_pool_spec.items() if name in used]
    has_own_head = trainer.node_rank is not None
    return start_or_join_ray(
        trainer,
        pools,
        nodes=trainer.nnodes if has_own_head else 1,
        num_cpus=None if has_own_head else config.ray_init.num_cpus,
        start_timeout=config.ray_init.start_timeout,
        head_pid=None if head is None else head.pid,
    )


def _create_runner(runner_class: Any) -> Any:
    """Return an actor of this class, plain or remote."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not hasattr(runner_class, "remote"):
        # Three threads: `run`, `request_stop` and `run_status`. Preferably on this node, since other nodes may be lost.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        runner_class = ray.remote(num_cpus=1, max_concurrency=3, scheduling_strategy=here)(runner_class)
    return runner_class.remote()


def _merge_backend(config: PPOConfig) -> str | None:
    """Return the `--backend` of the model merger for the actor's checkpoints; None without next commands."""
    strategy = config.actor_rollout_ref.actor.strategy
    return ("megatron" if strategy == "megatron" else "fsdp") if config.trainer.console == LINE else None


def _class_name(runner_class: Any) -> str:
    """Return the name that Ray gives to actors of this class, plain or remote."""
    metadata = getattr(runner_class, "__ray_metadata__", None)
    return str(runner_class.__name__ if metadata is None else metadata.class_name)


def _request_stop(runner: Any, signal: str | None) -> None:
    if signal in PREEMPTION_SIGNALS and hasattr(runner, "preempt"):
        runner.preempt.remote(signal)
    else:
        runner.request_stop.remote()


class TaskRunner:
    """The controller: a Ray actor that sets up and runs the trainer. Subclasses may override its public methods."""

    trainer_cls: Any = None
    """A subclass of RayPPOTrainer to use; `trainer.cls_path` of the configuration has precedence."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, type] = {}
        self.mapping: dict[Any, str] = {}
        self._trainer: Any = None
        self._memory_plan: Any = None
        self._startup_status = RunStatus(0)
        self._startup_status.starting = True  # also while Ray unpickles the arguments of `run`
        self._stop_requested = False

    def run(self, config: PPOConfig) -> str | None:
        """Register the roles, load tokenizer, rewards and data, start the workers, train.

        Returns a message if a step was given up because of a preemption signal; else None.
        """
        one_line = console_mode(config) == LINE
        # Log lines and step lines in one stream keep their order.
        setup_logging(stream=sys.stdout if one_line else None, console=console_mode(config))
        try:
            return self._run(load_config(config))
        finally:
            if one_line:
                end_controller_output()

    def _run(self, config: PPOConfig) -> str | None:
        with startup_phase("controller"):  # imports of torch, models and users' code
            for module in config.external_libs:
                importlib.import_module(module)
            trainer_cls = self._trainer_class(config)
            self.add_actor_rollout_worker(config)
            self.add_critic_worker(config)
            self.add_reward_model_worker(config)
            self.add_ref_policy_worker(config)
            self.add_teacher_worker(config)
            resource_pool_manager = self.init_resource_pool_mgr(config)
        try:
            with startup_phase("reserved devices"):
                self._start_ranks(config, resource_pool_manager)
            return self._train(config, trainer_cls, resource_pool_manager)
        finally:
            resource_pool_manager.release()

    def _start_ranks(self, config: PPOConfig, resource_pool_manager: Any) -> None:
        """Reserve the devices and start the processes of the ranks: they import what they need while this process
        checks models, data and rewards."""
        import ray

        from verl.single_controller.ray.rank_start import start_early

        if not ray.is_initialized():  # worker groups in this process
            return
        names = {worker.__module__ for worker in self.role_worker_mapping.values()}
        modules = [name for name in sorted(names) if name.startswith("verl.")]  # users' classes are sent by content
        resource_pool_manager.create_resource_pool()
        pools = list(resource_pool_manager.resource_pool_dict.values())
        start_early(pools, [*modules, *_RANK_MODULES])

    def _train(self, config: PPOConfig, trainer_cls: Any, resource_pool_manager: Any) -> str | None:
        """Check models, data and rewards, then create the trainer, start the workers and train."""
        from verl.trainer.ppo.state import check_run_start
        from verl.utils import hf_processor, hf_tokenizer

        model = config.actor_rollout_ref.model
        folders = self._check_models(config)
        start = check_run_start(config, self.role_worker_mapping)
        with startup_phase("data"):
            tokenizer = hf_tokenizer(folders[model.path], trust_remote_code=model.trust_remote_code)
            processor = hf_processor(folders[model.path], trust_remote_code=model.trust_remote_code)
            train_dataset, val_dataset = self._create_datasets(config, tokenizer, processor)
        if config.distillation.enabled:
            from verl.trainer.ppo.teachers import check_teachers

            check_teachers(config, folders, tokenizer, train_dataset)
        with startup_phase("rewards"):
            reward_fn, val_reward_fn = self._load_rewards(config, tokenizer, train_dataset)
        self._trainer = trainer_cls(
            config=config,
            tokenizer=tokenizer,
            processor=processor,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=resource_pool_manager,
            reward_fn=reward_fn,
            val_reward_fn=val_reward_fn,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            train_sampler=create_rl_sampler(config.data, train_dataset),
            device_name=config.trainer.device,
        )
        self._trainer.state.run_start = start
        self._trainer.set_memory_plan(self._memory_plan)
        if self._stop_requested:
            return None
        try:
            self._trainer.init_workers()
            freeze_gc()
            self._trainer.fit()
            return self._trainer.preemption.given_up
        finally:
            for manager in (reward_fn, val_reward_fn):
                getattr(manager, "close", lambda: None)()
            start.close()

    def request_stop(self) -> None:
        """Finish the current step, save, and end the run."""
        self._stop_requested = True
        if self._trainer is not None:
            self._trainer.stop_requested.set()

    def preempt(self, signal: str) -> None:
        """Request a stop because of a preemption signal, which leaves `trainer.save_within` seconds."""
        self._stop_requested = True
        if self._trainer is not None:
            self._trainer.preempt(signal)

    def run_status(self) -> StatusSnapshot:
        """Return step and phase of the run for the driver's terminal; 0 of 0 steps until the trainer exists."""
        return getattr(self._trainer, "status", self._startup_status).snapshot()

    def add_actor_rollout_worker(self, config: PPOConfig) -> None:
        """Add the policy: one hybrid role, or separate roles for training and generation if their pools differ."""
        workers = self._workers(config.actor_rollout_ref.actor.strategy)
        if shares_devices(config):
            self._add(config, Role.ActorRollout, workers.ActorRolloutRefWorker, "actor")
        else:
            self._add(config, Role.Actor, workers.ActorRolloutRefWorker, "actor")
            self._add(config, Role.Rollout, workers.ActorRolloutRefWorker, "rollout")

    def add_critic_worker(self, config: PPOConfig) -> None:
        """Add the critic, if the estimator needs one."""
        if config.critic.enable:
            self._add(config, Role.Critic, self._workers(config.critic.strategy).CriticWorker, "critic")

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        """Add the reward model, if enabled."""
        if not config.reward_model.enable:
            return
        if serves_reward_model(config):
            from verl.workers.roles.served_reward_model import ServedRewardModelWorker  # imports the web server

            self._add(config, Role.RewardModel, ServedRewardModelWorker, "reward_model")
        else:
            workers = self._workers(config.reward_model.strategy)
            self._add(config, Role.RewardModel, workers.RewardModelWorker, "reward_model")

    def add_ref_policy_worker(self, config: PPOConfig) -> None:
        """Add the reference policy, if a KL term needs it."""
        if "ref" in active_roles(config):
            workers = self._workers(config.actor_rollout_ref.ref.strategy)
            self._add(config, Role.RefPolicy, workers.ActorRolloutRefWorker, "ref")

    def add_teacher_worker(self, config: PPOConfig) -> None:
        """Add the local teachers of a distillation."""
        from verl.workers.roles.teacher import TeacherWorker

        if "teacher" in active_roles(config):
            self._add(config, Role.Teacher, TeacherWorker, "teacher")

    def init_resource_pool_mgr(self, config: PPOConfig) -> Any:
        """Return the resource pools of the configuration and the roles on them."""
        from verl.single_controller.ray import ResourcePoolManager

        return ResourcePoolManager(config.resource_pool_spec, self.mapping, use_gpu=config.trainer.device == "cuda")

    def _check_models(self, config: PPOConfig) -> dict[str, str]:
        """Return the local folders of the models by their paths, after checks that need only their config files."""
        from verl.config.context_length import check_context_length
        from verl.config.megatron import check_model_layouts
        from verl.planning.check import check_memory
        from verl.search.client import check_retriever
        from verl.utils.fs import resolve_model_path

        with startup_phase("model files"):
            folders = {path: resolve_model_path(path, key) for key, path in model_paths(config).items()}
        with startup_phase("memory plan"):
            check_context_length(config, folders)
            check_model_layouts(config, folders)
            self._memory_plan = check_memory(config, folders)
        if config.do_search:
            check_retriever(config.retriever)
        return folders

    def _create_datasets(self, config: PPOConfig, tokenizer: Any, processor: Any) -> tuple[Any, Any]:
        """Return the datasets for training and validation (None without `data.val_files`). Raises ValueError for rows
        that cannot be scored."""
        from verl.trainer.ppo.reward import check_rewards

        data = config.data
        train_dataset = create_rl_dataset(
            data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
        )
        val_dataset = None
        if data.val_files:
            val_dataset = create_rl_dataset(
                data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
            )
        check_rewards(train_dataset, config, config.distillation.scores_responses)
        if val_dataset is not None:
            check_rewards(val_dataset, config)
        return train_dataset, val_dataset

    def _load_rewards(self, config: PPOConfig, tokenizer: Any, train_dataset: Any) -> tuple[Any, Any]:
        """Return the reward managers for training and validation. The first one is tried on a few rows."""
        from verl.trainer.data_check import check_reward_at_start
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.trainer.recovery.hang_detector import HangDetector
        from verl.utils.reward_score.served import require_server

        with HangDetector(self._startup_status, config.trainer.hang_timeout):
            reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
            val_reward_fn = load_reward_manager(config, tokenizer, num_examine=0)  # validation logs its own samples
            if config.reward_model.url is not None:
                require_server(config.reward_model.url)
            elif config.distillation.scores_responses and not config.reward_model.enable:
                loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
                check_reward_at_start(reward_fn, train_dataset, config.data.reward_fn_key, loop)
        return reward_fn, val_reward_fn

    def _trainer_class(self, config: PPOConfig) -> Any:
        from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.utils.import_utils import load_user_object

        key, cls_path = "trainer.cls_path", config.trainer.cls_path
        if cls_path is None:
            default = RayPPOTrainer if config.trainer.mode == "sync" else AsyncPPOTrainer
            return default if self.trainer_cls is None else self.trainer_cls
        path, _, name = cls_path.rpartition(":" if ":" in cls_path.removeprefix("pkg://") else ".")
        if not path or not name:
            raise ValueError(f"{key}: {cls_path!r} names no class. Write file.py:Class or package.module.Class.")
        user_class: Any = load_user_object(path, name, key=key)
        if not isinstance(user_class, type) or not issubclass(user_class, RayPPOTrainer):
            module = RayPPOTrainer.__module__
            raise ValueError(f"{key}: {name} in {path} is no RayPPOTrainer. Derive it from {module}.RayPPOTrainer.")
        return user_class

    def _add(self, config: PPOConfig, role: Role, cls: type, name: str) -> None:
        self.role_worker_mapping[role] = cls
        self.mapping[role] = config.role_mapping[name]

    def _workers(self, strategy: str) -> Any:
        return importlib.import_module(f"verl.workers.{'megatron' if strategy == 'megatron' else 'fsdp'}_workers")


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any, is_train: bool = True, max_samples: int = -1
) -> Any:
    """Return a dataset of the class `data.custom_cls`, or an RLHFDataset."""
    from verl.config import DataConfig, as_config
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.utils.import_utils import load_user_object

    config = as_config(DataConfig, data_config)
    custom = config.custom_cls
    if custom.path is not None and custom.name is not None:
        takes = ("data_files", "tokenizer", "config", "processor", "max_samples")
        cls = load_user_object(custom.path, custom.name, key="data.custom_cls.path", required_params=takes)
        return cls(
            data_files=data_paths, tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples
        )
    split = "train" if is_train else "validation"
    return RLHFDataset(data_paths, tokenizer, config, processor=processor, max_samples=max_samples, split=split)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """Return the sampler of `data.sampler`; by default an EpochSampler, which shuffles if `data.shuffle` is set."""
    from verl.config import DataConfig, as_config
    from verl.trainer.ppo.prompts import make_sampler
    from verl.utils.dataset.sampler import AbstractSampler
    from verl.utils.import_utils import load_user_object

    config = as_config(DataConfig, data_config)
    custom = config.sampler
    if custom.path is not None and custom.name is not None:
        takes = ("data_source", "data_config")
        cls = load_user_object(custom.path, custom.name, key="data.sampler.path", required_params=takes)
        if not (isinstance(cls, type) and issubclass(cls, AbstractSampler)):
            raise ValueError(
                f"data.sampler.name: {custom.name} in {custom.path} is no AbstractSampler. Derive it from"
                " AbstractSampler, or AbstractCurriculumSampler, of verl.experimental.dataset.sampler."
            )
        return cls(data_source=dataset, data_config=config)
    return make_sampler(config, dataset)


def __getattr__(name: str) -> Any:
    """Load `RewardManager` and `_select_rm_score_fn`, which older scripts import from here, on access."""
    if name == "RewardManager":
        from verl.workers.reward_manager import NaiveRewardManager

        return NaiveRewardManager
    if name == "_select_rm_score_fn":
        from verl.utils.reward_score import _select_rm_score_fn

        return _select_rm_score_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
