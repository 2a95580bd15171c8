"""RayPPOTrainer: the training loop. `_train_step` is one training step: one call per phase, in order."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from verl.algos import AdvantageEstimator
from verl.config import PPOConfig, load_config
from verl.config.layout import (
    actor_is_reference,
    needs_reference,
    old_log_probs_from_update,
    reward_server_shares_devices,
    serves_reward_model,
)
from verl.planning.catalog import peak_flops
from verl.planning.phases import MemoryPlan
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup, ResourcePoolManager
from verl.trainer.common.loader import BatchLoader
from verl.trainer.common.run_status import Phases, RunStatus, memory_gb
from verl.trainer.common.training_health import UpdateCheck, WeightCheck, add_memory_advice, update_remedies
from verl.trainer.ppo.advantage import (
    RolloutMismatch,
    add_advantage_columns,
    apply_kl_penalty,
    check_bootstrap,
    compute_advantage,
    compute_response_mask,
)
from verl.trainer.ppo.dynamic_sampling import DynamicSampling, PromptSource
from verl.trainer.ppo.generator import Generator
from verl.trainer.ppo.metric_utils import phase_metrics, without_nan
from verl.trainer.ppo.prompts import create_dataloaders, schedule_steps
from verl.trainer.ppo.reward import RewardModelServer
from verl.trainer.ppo.rollout_manager import RolloutManager
from verl.trainer.ppo.run_record import RunRecord
from verl.trainer.ppo.state import TrainerAttributes, TrainerState
from verl.trainer.ppo.teachers import Teachers
from verl.trainer.ppo.utils import POLICY_ROLES, Role, need_reference_policy, require_mode
from verl.trainer.ppo.validator import Validator
from verl.trainer.ppo.weight_sync import EngineProbe, WeightSync
from verl.trainer.ppo.worker_groups import WorkerGroups
from verl.trainer.ppo.worker_recovery import WorkerRecovery
from verl.trainer.recovery.hang_detector import HangDetector
from verl.trainer.recovery.step_end import VALIDATION, NonFatalFailures, Preemption, StepEnd, is_due
from verl.utils.console import LINE, startup_phase
from verl.utils.tracking import Tracking

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]

logger = logging.getLogger(__name__)


class RayPPOTrainer(TrainerAttributes):
    """The controller of a run. Subclasses may override its phases, which are methods.

    It composes collaborators (`groups`, `rollouts`, `generator`, `dynamic_sampling`, `validator`, `teachers`,
    `mismatch`, `weight_sync`, `recovery`, `state`, `record`) and never passes itself to them. A collaborator that needs
    a phase receives the bound method, so an overridden version is used.
    """

    modes: tuple[str, ...] = ("sync",)
    """Values of `trainer.mode` that this class supports."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: Any = RayWorkerGroup,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        self.config: PPOConfig = load_config(config)
        require_mode(self.config, self.modes, type(self).__name__)
        check_bootstrap(self.config.algorithm)
        self.tokenizer, self.processor = tokenizer, processor
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.device_name = device_name or self.config.trainer.device
        self.use_critic = Role.Critic in role_worker_mapping
        self.use_reference_policy = need_reference_policy(role_worker_mapping) or (
            needs_reference(self.config) and actor_is_reference(self.config)
        )
        self.use_rm = Role.RewardModel in role_worker_mapping
        self.stop_requested = threading.Event()
        self.status = RunStatus(total_steps=0)
        self.status.starting = True
        self._compose(reward_fn, val_reward_fn)
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self.state.set_dataloader(self.train_dataloader)
        self.status.total = self.total_training_steps
        self.hang_detector = HangDetector(self.status, self.config.trainer.hang_timeout)
        self.phases = self._new_phases()  # for calls outside of `fit`

    # ---------------------------------------------------------------- setup

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        loaders = create_dataloaders(self.config, train_dataset, val_dataset, collate_fn, train_sampler)
        self.train_dataloader = loaders[0]
        self.val_dataloader: Any = loaders[1]
        self.total_training_steps = schedule_steps(self.config, len(self.train_dataloader))

    def _compose(self, reward_fn: Any, val_reward_fn: Any) -> None:
        """Create the collaborators."""
        config, tokenizer = self.config, self.tokenizer
        self.failures = NonFatalFailures()
        self.mismatch = RolloutMismatch(config.algorithm.rollout_correction)
        self.record = RunRecord(config, tokenizer, self.failures, self.status)
        self.state = TrainerState(config, self.role_worker_mapping, tokenizer)
        self.groups = groups = WorkerGroups(
            config, self.role_worker_mapping, self.resource_pool_manager, self.ray_worker_group_cls, self.device_name
        )
        self.rollouts = RolloutManager(config, groups)
        probe = EngineProbe(config, tokenizer, groups, self.rollouts)
        self.weight_sync = WeightSync(groups, probe, "keep" if config.trainer.partial_kv == "keep" else "recompute")
        self.recovery = WorkerRecovery(groups, self.weight_sync, self.state, self.status)
        recorder = self.record.recorder
        self.recovery.on_restart, self.state.saver.on_end = partial(recorder.event, "recovery"), recorder.saved
        self.generator = Generator(config, tokenizer, groups, self.rollouts, reward_fn, self._infer)
        add_rm_scores, record = self.generator.add_rm_scores, self.record.validation
        self.validator = Validator(config, tokenizer, groups, add_rm_scores, record)
        self.val_reward_fn = val_reward_fn
        self.teachers = Teachers(config, groups)
        self.dynamic_sampling = DynamicSampling(config, tokenizer.pad_token_id)
        self._update_check = UpdateCheck(config.trainer.max_nonfinite_steps, update_remedies(config))
        self._weight_check = WeightCheck(config, self._update_check, self.state.resume_from)
        self.preemption = Preemption(config.trainer.save_within)
        self._step_end = StepEnd(self.stop_requested, self.failures, self.state.saver, self.preemption)

    def init_workers(self) -> None:
        """Reserve devices, start one worker group per pool with its roles colocated, and load the models."""
        with startup_phase("reward and teacher services"):
            self.generator.start()
            self.teachers.check_servers(self.tokenizer)
            self.state.check_start()
        with self.hang_detector:
            policy = dict.fromkeys(POLICY_ROLES, self._create_actor_rollout_worker_group)
            self.groups.start({**policy, Role.Critic: self._create_critic_worker_group})
            with startup_phase("weight sync"):
                self.weight_sync.connect()
            if serves_reward_model(self.config):
                with startup_phase("reward model server"):
                    server = RewardModelServer(self.groups, reward_server_shares_devices(self.config))
                    self.reward_fn, self.val_reward_fn = server.start(self.reward_fn, self.val_reward_fn)

    def _create_actor_rollout_worker_group(self) -> Any:
        """Return the worker group of the policy; without the rollout if that has its own devices. An override may
        return another group, or change the group that `super()` returns."""
        return self.groups.create(next(role for role in POLICY_ROLES if role in self.role_worker_mapping))

    def _create_critic_worker_group(self) -> Any:
        """Return the worker group of the critic. Only called if the run has a critic."""
        return self.groups.create(Role.Critic)

    # ---------------------------------------------------------------- training loop

    def fit(self) -> None:
        """Train for `total_training_steps`; on a stop request, finish the current step, save and return."""
        with self.hang_detector:
            self._fit()

    @cached_property
    def tracking(self) -> Tracking:
        """The trackers of the run, opened on first use: by `fit`, or by a script that calls `_validate`."""
        trainer, first_step = self.config.trainer, self.state.first_step
        names = trainer.project_name, trainer.experiment_name
        return Tracking(
            *names,
            trainer.logger,
            self.config.to_dict(),
            first_step,
            trainer.tracking_dir,
            trainer.console,
            self.total_training_steps,
        )

    def _fit(self) -> None:
        trainer = self.config.trainer
        tracking = self.tracking
        try:
            self.record.open(self.state.check_start(), self.groups.by_role)
            with add_memory_advice(self.config):
                with startup_phase("checkpoint"):
                    self._load_checkpoint()
                self.status.step = self.global_steps
                if self.val_dataloader is not None and (trainer.val_before_train or trainer.val_only):
                    with self.status.phase("testing"), self._weight_check.explain_errors(self.global_steps):
                        validate = partial(self.preemption.unless_given_up, self._validate)
                        metrics = self.failures.attempt(VALIDATION, self.global_steps, validate, trainer.val_only)
                        self._report_metrics(metrics or self.failures.metrics(), self.global_steps)
                if not trainer.val_only:
                    self._train()
                    self._log_summary()
        finally:
            self.record.close(self.global_steps, sys.exc_info()[1])
            tracking.close()
            if isinstance(self.val_dataloader, BatchLoader):
                self.val_dataloader.close()
            self.state.end(sys.exc_info()[1])
        self.groups.end()

    def _train(self) -> None:
        logger.info("Starting training...")
        self.status.starting = False
        self._snapshot_state()
        while self.global_steps < self.total_training_steps:
            batch = self._next_prompts()
            self.global_steps += 1
            with self._weight_check.explain_errors(self.global_steps), self.state.saver.wait_on_error():
                if self._step(batch):
                    return

    def _step(self, batch: DataProto) -> bool:
        """Run one training step, then save and validate if due, and log.

        Returns True if the run stops here; its state is then saved.
        """
        trainer, step, last = self.config.trainer, self.global_steps, self.total_training_steps
        self.phases = self._new_phases()
        self.preemption.begin_step(step, self.phases)
        try:
            with self.phases("step"):
                metrics = self._train_step(batch)
        except Exception:
            if self.preemption.finish() is None:
                raise
            self.state.restore_snapshot()
            self._step_end.finish_preempted(self.global_steps, self._save_checkpoint, self.phases)
            return True
        self._weight_check.check(metrics, step, self._report_metrics, self.state.saver.wait)
        end_metrics, stopping = self._step_end(
            step,
            self._save_checkpoint,
            self._validate,
            self.phases,
            save_due=is_due(step, trainer.save_freq, last),
            test_due=self.val_dataloader is not None and is_due(step, trainer.test_freq, last),
            is_last=step >= last,
        )
        metrics |= end_metrics | {"training/global_step": step, "training/epoch": self.state.prompts.epoch}
        metrics |= self.recovery.metrics() | phase_metrics(self.last_batch, self.phases, self.groups.devices)
        saving = metrics.get("actor/prefix_saving_flops", 0.0)
        metrics |= self.groups.mfu(self.last_batch, self.phases.seconds, saving) | self._utilization_metrics()
        metrics |= self.hang_detector.step_done(self.phases.seconds["step"])
        metrics |= self.record.end_step(step)
        self._report_metrics(metrics, step)
        self.status.step_done()
        self._snapshot_state()
        self._update_check.check(metrics, getattr(self.reward_fn, "last_failure", None))
        if step >= last or stopping:
            self.failures.raise_if_unsaved(step)
        return stopping

    def set_memory_plan(self, plan: MemoryPlan | None) -> None:
        """Record the planned memory, and report the utilization of devices whose peak rate is known."""
        self.record.recorder.memory_plan = plan
        self.groups.device_flops = None if plan is None or plan.device is None else peak_flops(plan.device)

    def _new_phases(self) -> Phases:
        return Phases(self.status, memory_gb if self.device_name == "cuda" else None, self.preemption.enter_phase)

    def _utilization_metrics(self) -> dict[str, float]:
        """Return the idle times of generation and training, if they run concurrently."""
        return {}

    def _snapshot_state(self) -> None:
        """Between steps: take the snapshot that is saved if a preemption signal ends the next step."""
        self.preemption.end_step(self.global_steps)
        if self.config.trainer.save_within is not None:
            self.state.take_snapshot()

    def preempt(self, signal: str) -> None:
        """Request a stop because of this preemption signal, which leaves `trainer.save_within` seconds. Thread-safe."""
        self.stop_requested.set()
        if self.preemption.decide(signal, self.state.saver.last_save_seconds):
            self.preemption.keep_cancelling(self._cancel)

    def _cancel(self) -> None:
        """Cancel the running generation or scoring. Thread-safe."""
        self.rollouts.cancel_waiting()
        self.groups.cancel_generation()
        if "reward" in self.status.current_phase.key:
            for manager in (self.reward_fn, self.val_reward_fn):
                if hasattr(manager, "close"):
                    manager.close()

    def _train_step(self, batch: DataProto) -> dict[str, float]:
        """Run one training step on a batch of prompts; return its metrics.

        `_collect_rollouts` generates and scores the responses; from then on `batch` has one row per response.
        """
        metrics: dict[str, float] = {}
        self._version_before_update = self.policy_version
        with self.phases("update_weights", self.actor_wg):
            self._sync_weights()
        batch = self._collect_rollouts(batch, metrics)
        self._free_generation_devices()
        self._skips_old_log_prob_pass = self._update_computes_old_log_probs(batch)
        if not self._skips_old_log_prob_pass:
            with self.phases("old_log_prob", self.actor_wg):
                batch = self._compute_old_log_prob(batch, metrics)
        if self.use_reference_policy:
            with self.phases("ref", self.ref_policy_wg):
                batch = batch.union(self._infer(self.ref_policy_wg.compute_ref_log_prob, batch, "ref"))
        if self.config.distillation.enabled:
            with self.phases("teacher", self.groups.teacher):
                batch = batch.union(self.teachers.columns(batch, self._infer))
        if self.use_critic:
            with self.phases("values", self.critic_wg):
                batch = batch.union(self._infer(self.critic_wg.compute_values, batch, "critic"))
        with self.phases("adv"):
            batch = self._compute_advantage(batch, metrics)
        if self.use_critic:
            with self.phases("update_critic", self.critic_wg):
                metrics |= self._update(self.critic_wg.update_critic, batch, "critic")
            self._update_check.record_update(metrics, "critic")
        if self._updates_actor:
            with self.phases("update_actor", self.actor_wg):
                metrics |= self._update(self.actor_wg.update_actor, batch, "actor")
            if self._update_check.record_update(metrics, "actor"):  # False if the update was skipped
                self.policy_version += 1
        self._record_step(batch, metrics)
        return metrics

    # ---------------------------------------------------------------- phases

    @property
    def _updates_actor(self) -> bool:
        # `global_steps` is 0 if a script calls `_train_step` without `fit`.
        return max(1, self.global_steps) > self.config.trainer.critic_warmup

    def _update_computes_old_log_probs(self, batch: DataProto) -> bool:
        """Return whether the forward pass of the update also computes the old log-probs, the importance weights and the
        entropy."""
        return (
            self._updates_actor and old_log_probs_from_update(self.config) and self.mismatch.has_weights_by_row(batch)
        )

    def _sync_weights(self) -> None:
        """Send the weights of the current policy version to the rollout engines."""
        self.recovery.retry_on_worker_loss(self.weight_sync.sync, self.policy_version)

    def _free_generation_devices(self) -> None:
        """Free the devices that engines share with the trainer: pause generation and release the engines' weights."""
        self.recovery.retry_on_worker_loss(self.weight_sync.release_weights)

    @property
    def _prompt_source(self) -> PromptSource:
        """Source of further prompts for dynamic sampling."""
        return self.state.prompts

    def _next_prompts(self) -> DataProto:
        """Return the prompts of the next step."""
        return self.state.prompts.next_batch()

    def _collect_rollouts(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        """Return the batch of the step: scored responses to these prompts. With dynamic sampling, groups without reward
        variance are replaced by responses to further prompts."""
        if self.config.algorithm.filter_groups.enable:
            source, reward_fn = self._prompt_source, self.reward_fn
            return self.dynamic_sampling.fill(
                prompts, metrics, self._generate_and_score, source, reward_fn, self.global_steps
            )
        return self._generate_and_score(prompts, metrics)

    def _generate_and_score(self, prompts: DataProto, metrics: dict[str, float]) -> DataProto:
        """Return scored responses to the prompts."""
        with self.phases("gen", *self.groups.generation_groups):
            batch = self._generate(prompts)
        with self.phases("reward", self.rm_wg):
            return self._compute_reward(batch, metrics)

    def _generate(self, batch: DataProto) -> DataProto:
        """Return `rollout.n` responses to every prompt; the rows of one prompt are adjacent."""
        return self._generate_rows(self.generator.rollout_rows(batch), validate=False)

    def _generate_rows(self, batch: DataProto, validate: bool) -> DataProto:
        """Return a response to every row, for training or with the sampling parameters of validation."""
        reward_fn = self.val_reward_fn if validate else self.reward_fn
        retry = self.recovery.retry_on_worker_loss
        self.weight_sync.require_current_weights()
        return self.generator.generate(batch, self.global_steps, validate, reward_fn, retry)

    def _compute_reward(self, batch: DataProto, metrics: dict[str, float] | None = None) -> DataProto:
        """Add `token_level_scores`: the score of each response on its last token, by reward model and/or functions."""
        return self.generator.score(batch, {} if metrics is None else metrics, self.global_steps)

    def _compute_old_log_prob(self, batch: DataProto, metrics: dict[str, float]) -> DataProto:
        """Add `old_log_probs`: log-probs of the responses under the policy before the update."""
        infer = partial(self._infer, self.actor_wg.compute_log_prob, role="actor")
        batch, batch_metrics = self.mismatch.add_old_log_probs(batch, infer, self.groups.dp_sizes["actor"])
        metrics |= batch_metrics
        return batch

    def _compute_advantage(self, batch: DataProto, metrics: dict[str, float] | None = None) -> DataProto:
        """Add `token_level_rewards` (with the KL penalty, if configured), `advantages` and `returns`.

        Also applies the rollout correction, and removes truncated responses from `response_mask` if configured.
        """
        batch_metrics = add_advantage_columns(
            batch, self.config, self.mismatch, self.kl_ctrl_in_reward, self.use_critic
        )
        if metrics is not None:
            metrics |= batch_metrics
        return batch

    def _update(self, method: Callable[..., Any], batch: DataProto, role: str) -> dict[str, float]:
        """Update a model on the batch and return the metrics. Columns computed by the update are added to `batch`."""
        return self.groups.update(method, batch, role, self.global_steps)

    def _infer(self, method: Callable[..., Any], batch: DataProto, role: str) -> DataProto:
        """Return the columns that a forward pass without update computes, with rows balanced over the ranks."""
        return self.recovery.retry_on_worker_loss(self.groups.infer, method, batch, role)

    def _validate(self) -> dict[str, float]:
        """Validate and return the metrics; log a sample of the responses, and record them."""
        self._sync_weights()
        generate = partial(self._generate_rows, validate=True)
        return self.validator.run(
            self.val_dataloader, generate, self.val_reward_fn, self.global_steps, self.status, self.tracking
        )

    def _record_step(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Update the sampler, record the step and write its dumps."""
        self.last_batch = batch
        if self._skips_old_log_prob_pass:
            metrics |= self.mismatch.compare_old_log_probs(batch)
        if not self.config.algorithm.filter_groups.enable:  # `DynamicSampling.fill` passes batches to the sampler
            self.state.prompts.update_sampler(batch)
        is_bad = self._update_check.has_bad_update(metrics)
        self.record.dump(batch, self.global_steps, self._version_before_update, self.generator.reward_names, is_bad)

    # ---------------------------------------------------------------- checkpoints and logs

    def _save_checkpoint(self) -> None:
        """Snapshot the state and begin to write it; `global_step_N` appears, and is logged, when it is complete."""
        self.record.wait_for_files()  # a run that resumes from the checkpoint does not write them again
        self.state.save(self.groups)

    def _load_checkpoint(self) -> None:
        """Resume from the configured or newest complete checkpoint, if there is one."""
        self.state.load(self.groups)

    def _log_summary(self) -> None:
        """Log what improved, where the time went, and the estimate for the other `trainer.mode`."""
        summary = self.record.summary
        if self.config.trainer.console == LINE:
            logger.info("%s", summary.render(self.config))
            return
        logger.info("Where the time went: %s.", summary.bottleneck(config=self.config))
        if (estimate := summary.other_mode(self.config)) is not None:
            logger.info("%s.", estimate)

    def _log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics of a step to the trackers."""
        self.tracking.log(without_nan(metrics), step)

    def _report_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Send the metrics of a step to the trackers, and record them."""
        self._log_metrics(metrics, step)
        self.record.log(without_nan(metrics), step)
