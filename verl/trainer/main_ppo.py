"""The main entry: `python -m verl.trainer.main_ppo key=value …` -> configuration -> Ray -> TaskRunner.

Neither torch nor ray is imported until the configuration is known to be right.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from omegaconf import DictConfig

from verl.config import PPOConfig, batch_plan, load_config
from verl.config.layout import active_roles, serves_reward_model, shares_devices
from verl.config.load import Config
from verl.trainer.common import preemption
from verl.trainer.common.cluster import start_ray, wait_for_nodes
from verl.trainer.common.code_check import check_code_runner
from verl.trainer.common.command_line import checked, command
from verl.trainer.common.completion import log_finished
from verl.trainer.common.controller_poll import ControllerPoll
from verl.trainer.common.ending import tells_of_restart, what_the_same_command_does
from verl.trainer.common.nodes import joins_a_head, running_head, serve_as_node, start_head, stop_head
from verl.trainer.common.own_ray import OwnRay, result_of
from verl.trainer.common.preflight import basic_preflight, ppo_preflight
from verl.trainer.common.signals import FINISHES, RUN_ENDED, Asked, before_first_step, exit_on_signals, stop_on_signals
from verl.trainer.common.status_line import StatusLine, progress_bar
from verl.trainer.supervision.report import earlier_attempts
from verl.trainer.supervision.supervisor import supervise, wants_supervision
from verl.utils.exceptions import annotate_error
from verl.utils.logging_setup import messages_on_stderr
from verl.utils.lost_terminal import outlive_terminal
from verl.utils.process_tree import with_descendants
from verl.utils.resources import freeze_gc
from verl.utils.stacks import answer_stack_requests

logger = logging.getLogger(__name__)


def main() -> None:
    """Train a model by reinforcement learning; a wrong configuration lists every problem and exits with 2."""
    outlive_terminal()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _main()


@command("ppo_trainer", sets_up_logging=False)
def _main(config: DictConfig) -> None:
    run_ppo(config, supervised=True)


@messages_on_stderr()
def run_ppo(config: Config, task_runner_class: Any = None, supervised: bool = False) -> None:
    """Check the configuration, start or join Ray, and wait for a TaskRunner (plain or Ray remote class) to finish.

    `supervised`: the run is a child of this process, which starts it again when it dies (`trainer.max_restarts` times)
    and exits when it is over: what follows in a script is done by the child alone.
    """
    runner_class = TaskRunner if task_runner_class is None else task_runner_class
    has_own_run = getattr(runner_class, "run", None) is not TaskRunner.run
    config = checked(config, PPOConfig, preflight=basic_preflight if has_own_run else ppo_preflight)
    logger.info(batch_plan(config).render())
    check_code_runner(config)

    if joins_a_head(config):
        return serve_as_node(config)
    with tells_of_restart(config.trainer):
        if wants_supervision(config, supervised):
            attempt = supervise(config, lambda head: running_head(config, head), stop_head)
            by = _run_on_ray(attempt.config, runner_class, attempt.head, supervised)
        else:
            with before_first_step():
                head = start_head(config)  # before Ray is imported: it reads its settings then
            try:
                by = _run_on_ray(config, runner_class, head, supervised)
            finally:
                stop_head(head)
        if by is not None:
            logger.warning("stopped by %s; %s", by, what_the_same_command_does(config.trainer))
        elif not config.trainer.val_only:
            log_finished(config.trainer, "actor")


def _run_on_ray(config: PPOConfig, runner_class: Any, head: Any, is_program: bool) -> str | None:
    """The signal that ended the run, if one did, and what was given up for it.

    `is_program`: nothing follows the run in this process. A Ray cluster started here is then shut down, so that no
    actor output follows the last log line.
    """
    import ray

    ours = not ray.is_initialized()
    with before_first_step():
        own, runner = _start_runner(config, runner_class, head)
    answer_stack_requests()
    poll = ControllerPoll(runner, own, config.trainer.hang_timeout)
    stopping: AbstractContextManager[Asked] = nullcontext(Asked())
    if hasattr(runner, "request_stop"):
        by, within = Asked(), config.trainer.save_within
        first = FINISHES if within is None else f"stopping: saved first, if it can be in {within:g} s"
        starting = poll.before_first_step if ours else lambda: False
        stopping = stop_on_signals(lambda: _ask_to_stop(runner, by.by), own.kill, first, by, starting)
    with stopping as asked, progress_bar(lambda: poll.standing):
        try:
            given_up = result_of(runner.run.remote(config), own, asked, poll.look)
        except Exception as error:
            now = poll.standing
            if now is not None and now.phase:  # what an error knows itself stays
                annotate_error(error, phase=now.phase, step=now.step + 1)
            raise
    if is_program:
        exit_on_signals(RUN_ENDED)
    if ours and (is_program or asked.by is not None):
        ray.shutdown()  # what the run printed arrives at any time until then
        sys.stdout.flush()
    # Said here: the last that an actor prints may be lost with Ray.
    return given_up if asked.by is not None and isinstance(given_up, str) else asked.by


def _start_runner(config: PPOConfig, runner_class: Any, head: Any) -> tuple[OwnRay, Any]:
    """Start or join Ray, wait for the nodes and create the actor of `runner_class`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = OwnRay()
    if not ray.is_initialized():
        again = earlier_attempts() > 0
        num_cpus = config.ray_init.num_cpus if config.trainer.node_rank is None else None
        own = start_ray(num_cpus, config.trainer.nodes_within if again else 0, config.ray_init.start_timeout)
        if not own:
            used = {config.role_mapping[role] for role in active_roles(config)}
            pools = [pool for name, pool in config.resource_pool_spec.items() if name in used]
            nodes = 1 if config.trainer.node_rank is None else config.trainer.nnodes
            wait_for_nodes(config.trainer, pools, again, nodes)
    own = own or OwnRay(() if head is None else with_descendants(head.pid), ray.get_runtime_context().gcs_address)
    if not hasattr(runner_class, "remote"):
        # Three threads: one runs, the others take the request to stop and say where the run stands. On this node, if
        # it has room: others may go and come.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        runner_class = ray.remote(num_cpus=1, max_concurrency=3, scheduling_strategy=here)(runner_class)
    return own, runner_class.remote()


def _ask_to_stop(runner: Any, by: str | None) -> None:
    if by in preemption.SIGNALS and hasattr(runner, "preempt"):
        runner.preempt.remote(by)
    else:
        runner.request_stop.remote()


class TaskRunner:
    """Runs everything, as a Ray actor beside the driver; subclass it to change a part."""

    trainer_cls: Any = None
    """Your subclass of RayPPOTrainer; `trainer.cls_path` of the configuration wins over it."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, type] = {}
        self.mapping: dict[Any, str] = {}
        self._trainer: Any = None
        self._starting = StatusLine(0)
        self._stop_requested = False

    def run(self, config: PPOConfig) -> str | None:
        """Register the roles, load tokenizer, rewards and data, start the workers, train.

        What was given up at the end, if the run was asked to stop and there was no time for it.
        """
        from verl.config.context_length import check_context_length
        from verl.config.megatron import refuse_model_layouts
        from verl.planning.check import check_memory
        from verl.search.searcher import check_retriever
        from verl.trainer.common.watch import HangWatch
        from verl.trainer.ppo.reward import check_rewards, load_reward_manager
        from verl.trainer.ppo.reward_check import check_at_start
        from verl.trainer.ppo.state import check_run_start
        from verl.trainer.ppo.teachers import check_teachers
        from verl.utils import hf_processor, hf_tokenizer
        from verl.utils.fs import resolve_model_path
        from verl.utils.logging_setup import setup_logging
        from verl.utils.reward_score.served import require_server

        setup_logging()
        self._starting.starting = True
        config = load_config(config)
        for module in config.external_libs:
            importlib.import_module(module)
        trainer_cls = self._trainer_class(config)
        self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config)
        self.add_teacher_worker(config)
        resource_pool_manager = self.init_resource_pool_mgr(config)
        model = config.actor_rollout_ref.model
        folders = {path: resolve_model_path(path, key) for key, path in self._model_paths(config).items()}
        local_path = folders[model.path]
        check_context_length(config, folders)
        refuse_model_layouts(config, folders)
        check_memory(config, folders)
        if config.do_search:
            check_retriever(config.retriever)
        start = check_run_start(config, self.role_worker_mapping)
        tokenizer = hf_tokenizer(local_path, trust_remote_code=model.trust_remote_code)
        processor = hf_processor(local_path, trust_remote_code=model.trust_remote_code)
        data = config.data
        train_dataset = create_rl_dataset(
            data.train_files, data, tokenizer, processor, is_train=True, max_samples=data.train_max_samples
        )
        val_dataset = None
        if data.val_files:
            val_dataset = create_rl_dataset(
                data.val_files, data, tokenizer, processor, is_train=False, max_samples=data.val_max_samples
            )
        check_rewards(train_dataset, config, config.distillation.scores_answers)
        if val_dataset is not None:
            check_rewards(val_dataset, config)
        if config.distillation.enabled:
            check_teachers(config, folders, tokenizer, train_dataset)
        with HangWatch(self._starting, config.trainer.hang_timeout):
            reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
            val_reward_fn = load_reward_manager(config, tokenizer, num_examine=0)  # validation shows its own samples
            if config.reward_model.url is not None:
                require_server(config.reward_model.url)
            elif config.distillation.scores_answers and not config.reward_model.enable:
                loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
                check_at_start(reward_fn, train_dataset, data.reward_fn_key, loop)
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
            train_sampler=create_rl_sampler(data, train_dataset),
            device_name=config.trainer.device,
        )
        self._trainer.state.run_start = start
        if self._stop_requested:
            return None
        try:
            self._trainer.init_workers()
            freeze_gc()
            self._trainer.fit()
            return self._trainer.given_up
        finally:
            for manager in (reward_fn, val_reward_fn):
                getattr(manager, "close", lambda: None)()
            resource_pool_manager.release()
            start.close()

    def request_stop(self) -> None:
        """Finish the step that runs, save, and end."""
        self._stop_requested = True
        if self._trainer is not None:
            self._trainer.stop_requested.set()

    def preempt(self, by: str) -> None:
        """As `request_stop`, by a signal that leaves `trainer.save_within` seconds."""
        self._stop_requested = True
        if self._trainer is not None:
            self._trainer.preempt(by)

    def standing(self) -> Any:
        """Step and phase of the run, for whoever has a terminal; 0 of 0 steps before there is a trainer."""
        return getattr(self._trainer, "status", self._starting).standing()

    def add_actor_rollout_worker(self, config: PPOConfig) -> None:
        """The policy: one hybrid role, or training and generation apart where their pools differ."""
        from verl.trainer.ppo.utils import Role

        workers = self._workers(config.actor_rollout_ref.actor.strategy)
        if shares_devices(config):
            self._add(config, Role.ActorRollout, workers.ActorRolloutRefWorker, "actor")
        else:
            self._add(config, Role.Actor, workers.ActorRolloutRefWorker, "actor")
            self._add(config, Role.Rollout, workers.ActorRolloutRefWorker, "rollout")

    def add_critic_worker(self, config: PPOConfig) -> None:
        """The critic, where the estimator needs one."""
        from verl.trainer.ppo.utils import Role

        if config.critic.enable:
            self._add(config, Role.Critic, self._workers(config.critic.strategy).CriticWorker, "critic")

    def add_reward_model_worker(self, config: PPOConfig) -> None:
        """The reward model, where one is enabled."""
        from verl.trainer.ppo.utils import Role

        if not config.reward_model.enable:
            return
        if serves_reward_model(config):
            from verl.workers.roles.served_reward_model import ServedRewardModelWorker  # imports the web server

            self._add(config, Role.RewardModel, ServedRewardModelWorker, "reward_model")
        else:
            workers = self._workers(config.reward_model.strategy)
            self._add(config, Role.RewardModel, workers.RewardModelWorker, "reward_model")

    def add_ref_policy_worker(self, config: PPOConfig) -> None:
        """The frozen reference, where a KL needs it."""
        from verl.trainer.ppo.utils import Role

        if "ref" in active_roles(config):
            workers = self._workers(config.actor_rollout_ref.ref.strategy)
            self._add(config, Role.RefPolicy, workers.ActorRolloutRefWorker, "ref")

    def add_teacher_worker(self, config: PPOConfig) -> None:
        """The teachers that run here, where one is distilled."""
        from verl.trainer.ppo.utils import Role
        from verl.workers.roles.teacher import TeacherWorker

        if "teacher" in active_roles(config):
            self._add(config, Role.Teacher, TeacherWorker, "teacher")

    def init_resource_pool_mgr(self, config: PPOConfig) -> Any:
        """The pools of the configuration, and which role runs on which."""
        from verl.single_controller.ray import ResourcePoolManager

        return ResourcePoolManager(config.resource_pool_spec, self.mapping, use_gpu=config.trainer.device == "cuda")

    def _trainer_class(self, config: PPOConfig) -> Any:
        from verl.trainer.asynchronous.trainer import AsyncPPOTrainer
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        from verl.utils.import_utils import load_user_object

        key, cls_path = "trainer.cls_path", config.trainer.cls_path
        if cls_path is None:
            ours = RayPPOTrainer if config.trainer.mode == "sync" else AsyncPPOTrainer
            return ours if self.trainer_cls is None else self.trainer_cls
        path, _, name = cls_path.rpartition(":" if ":" in cls_path.removeprefix("pkg://") else ".")
        if not path or not name:
            raise ValueError(f"{key}: {cls_path!r} names no class. Write file.py:Class or package.module.Class.")
        found: Any = load_user_object(path, name, key=key)
        if not isinstance(found, type) or not issubclass(found, RayPPOTrainer):
            module = RayPPOTrainer.__module__
            raise ValueError(f"{key}: {name} in {path} is no RayPPOTrainer. Derive it from {module}.RayPPOTrainer.")
        return found

    def _model_paths(self, config: PPOConfig) -> dict[str, str]:
        """The models of the run by the keys that name them."""
        paths: dict[str, str | None] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
        if config.critic.enable:
            paths["critic.model.path"] = config.critic.model.path
        if config.reward_model.enable:
            paths["reward_model.path"] = config.reward_model.path
        for name, teacher in config.distillation.local_teachers.items():
            paths[f"distillation.teacher_models.{name}.model_path"] = teacher.model_path
        return {key: path for key, path in paths.items() if path is not None}

    def _add(self, config: PPOConfig, role: Any, cls: type, name: str) -> None:
        self.role_worker_mapping[role] = cls
        self.mapping[role] = config.role_mapping[name]

    def _workers(self, strategy: str) -> Any:
        return importlib.import_module(f"verl.workers.{'megatron' if strategy == 'megatron' else 'fsdp'}_workers")


def create_rl_dataset(
    data_paths: Any, data_config: Any, tokenizer: Any, processor: Any, is_train: bool = True, max_samples: int = -1
) -> Any:
    """The dataset of `data.custom_cls`, or RLHFDataset."""
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
    """The sampler of `data.sampler`, or a seeded shuffle, or the order of the rows."""
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
    """`RewardManager` and `_select_rm_score_fn`, which older scripts import from here; loaded when asked for."""
    if name == "RewardManager":
        from verl.workers.reward_manager import NaiveRewardManager

        return NaiveRewardManager
    if name == "_select_rm_score_fn":
        from verl.utils.reward_score import _select_rm_score_fn

        return _select_rm_score_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
