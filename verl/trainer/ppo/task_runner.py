"""The controller of RL training: a Ray actor that sets up models, data, rewards and workers, and runs the trainer.

Neither torch nor ray is imported at import time: the driver imports this module too.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from verl.config import PPOConfig, load_config
from verl.config.layout import active_roles, serves_reward_model, shares_devices
from verl.trainer.common.command_line import console_mode
from verl.trainer.common.preflight import model_paths
from verl.trainer.common.run_status import RunStatus, StatusSnapshot
from verl.trainer.common.status_display import end_controller_output
from verl.trainer.ppo.utils import Role
from verl.utils.console import LINE, startup_phase
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import freeze_gc

__all__ = ["TaskRunner", "create_rl_dataset", "create_rl_sampler"]

# Modules of transformers that ranks import to load a model; together they take seconds.
_RANK_MODULES = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.generation.utils",
)


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

        from verl.single_controller.ray.actors import start_early

        if not ray.is_initialized():  # worker groups in this process
            return
        names = {worker.__module__ for worker in self.role_worker_mapping.values()}
        modules = [name for name in sorted(names) if name.startswith("verl.")]  # users' classes are sent by content
        resource_pool_manager.create_resource_pool()
        pools = list(resource_pool_manager.resource_pool_dict.values())
        compiles = config.trainer.device == "cuda" and config.actor_rollout_ref.actor.use_torch_compile
        start_early(pools, [*modules, *_RANK_MODULES], compiles)

    def _train(self, config: PPOConfig, trainer_cls: Any, resource_pool_manager: Any) -> str | None:
        """Check models, data and rewards, then create the trainer, start the workers and train."""
        from verl.trainer.ppo.state import check_run_start

        folders = self._check_models(config)
        with contextlib.ExitStack() as resources:
            start = resources.enter_context(contextlib.closing(check_run_start(config, self.role_worker_mapping)))
            self._trainer = self._create_trainer(config, trainer_cls, resource_pool_manager, folders, resources)
            self._trainer.state.run_start = start
            self._trainer.set_memory_plan(self._memory_plan)
            if self._stop_requested:
                return None
            self._trainer.init_workers()
            freeze_gc()
            self._trainer.fit()
            return self._trainer.preemption.given_up

    def _create_trainer(
        self,
        config: PPOConfig,
        trainer_cls: Any,
        resource_pool_manager: Any,
        folders: dict[str, str],
        resources: contextlib.ExitStack,
    ) -> Any:
        """Return the trainer, with datasets and reward managers that are checked. `resources` closes the managers."""
        from verl.utils import hf_processor, hf_tokenizer

        model = config.actor_rollout_ref.model
        with startup_phase("data"):
            tokenizer = hf_tokenizer(folders[model.path], trust_remote_code=model.trust_remote_code)
            processor = hf_processor(folders[model.path], trust_remote_code=model.trust_remote_code)
            train_dataset, val_dataset = self._create_datasets(config, tokenizer, processor)
        if config.distillation.enabled:
            from verl.trainer.ppo.teachers import check_teachers

            check_teachers(config, folders, tokenizer, train_dataset)
        with startup_phase("rewards"):
            reward_fn, val_reward_fn = self._load_rewards(config, tokenizer, train_dataset, resources)
        return trainer_cls(
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

    def _load_rewards(
        self, config: PPOConfig, tokenizer: Any, train_dataset: Any, resources: contextlib.ExitStack
    ) -> tuple[Any, Any]:
        """Return the reward managers for training and validation, which `resources` closes. If reward functions score
        the responses, the first manager is checked on a few rows."""
        from verl.trainer.data_check import check_reward_at_start
        from verl.trainer.ppo.reward import load_reward_manager
        from verl.trainer.recovery.hang_detector import HangDetector
        from verl.utils.reward_score.served import require_server

        with HangDetector(self._startup_status, config.trainer.hang_timeout):
            managers = []
            for _ in ("training", "validation"):
                managers.append(load_reward_manager(config, tokenizer, num_examine=0))  # validation logs its samples
                resources.callback(getattr(managers[-1], "close", lambda: None))
            reward_fn, val_reward_fn = managers
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
            raise ValueError(
                f"{key}: {cls_path!r} is not the path of a class. Write file.py:Class or package.module.Class."
            )
        user_class: Any = load_user_object(path, name, key=key)
        if not isinstance(user_class, type) or not issubclass(user_class, RayPPOTrainer):
            module = RayPPOTrainer.__module__
            raise ValueError(f"{key}: {name} in {path} is not a RayPPOTrainer. Derive it from {module}.RayPPOTrainer.")
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
    from verl.utils.dataset.rl_dataset import AbstractSampler
    from verl.utils.import_utils import load_user_object

    config = as_config(DataConfig, data_config)
    custom = config.sampler
    if custom.path is not None and custom.name is not None:
        takes = ("data_source", "data_config")
        cls = load_user_object(custom.path, custom.name, key="data.sampler.path", required_params=takes)
        if not (isinstance(cls, type) and issubclass(cls, AbstractSampler)):
            raise ValueError(
                f"data.sampler.name: {custom.name} in {custom.path} is not an AbstractSampler. Derive it from"
                " AbstractSampler, or AbstractCurriculumSampler, of verl.experimental.dataset.sampler."
            )
        return cls(data_source=dataset, data_config=config)
    return make_sampler(config, dataset)
