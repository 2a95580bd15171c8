"""End a run with cause and remedy after too many rejected updates, non-finite weights, or a rank killed for memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.config import PPOConfig, SupervisedConfig
from verl.config.layout import active_roles, serves_reward_model
from verl.config.schema import get_path
from verl.planning.remedies import PHASES
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.trainer.recovery.exit_messages import describe_resume
from verl.utils.exceptions import cause_chain
from verl.utils.fs import expand_path
from verl.workers.roles.training import LOST_AT, host_advice

logger = logging.getLogger(__name__)

_ROLES = ("actor", "critic")
# Metrics with the share of a training step's optimizer steps that did not change the weights, by reason
# (`engine.common.step_checks`).
_UNCHANGED = ("skipped_steps", "empty_steps", "loss_scale_search_steps", "refused_steps")

# Phases that have another name in the memory plan.
_PLAN_NAMES = {"validation rollout": "gen", "validation reward": "reward"}

_ACTOR = "actor_rollout_ref.actor"
_MAX_NAMED_TENSORS = 3
# Config key of each role's initial model.
_MODEL_KEYS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


def update_remedies(config: PPOConfig) -> str:
    """Return advice against updates that make weights non-finite: keys to lower, with their values in this run."""
    actor = config.actor_rollout_ref.actor
    changes = [(f"{_ACTOR}.optim.lr", actor.optim.lr, actor.optim.lr / 2)]
    if config.critic.enable:
        changes.append(("critic.optim.lr", config.critic.optim.lr, config.critic.optim.lr / 2))
    changes.append((f"{_ACTOR}.clip_ratio", actor.clip_ratio, actor.clip_ratio / 2))
    if actor.grad_clip > 1:
        changes.append((f"{_ACTOR}.grad_clip", actor.grad_clip, 1.0))
    if actor.ppo_epochs > 1:
        changes.append((f"{_ACTOR}.ppo_epochs", actor.ppo_epochs, 1))
    advice = f"Lower, in this order: {', '.join(f'{key} ({now:g} → {new:g})' for key, now, new in changes)}"
    kl = "" if actor.use_kl_loss else f"; or add {_ACTOR}.use_kl_loss=True {_ACTOR}.kl_loss_coef=0.01"
    return f"{advice}{kl}."


class TrainingStoppedError(RuntimeError):
    """The run was stopped because further updates would be useless or harmful."""


class NonFiniteError(TrainingStoppedError):
    """The run was stopped because gradients or weights are not finite, or an update was too large."""


class NoSamplesError(TrainingStoppedError):
    """The run was stopped because every sample of several consecutive batches is masked."""


class UpdateCheck:
    """Checks the metrics of each training step for skipped, refused and empty updates."""

    def __init__(self, limit: int, remedies: str = "") -> None:
        """`limit`: `trainer.max_nonfinite_steps`. `remedies`: advice for error messages (`update_remedies`)."""
        self._limit, self._remedies = limit, remedies
        self.updated: set[str] = set()
        """Roles whose weights were changed by an update of this run."""
        self._non_finite_in_a_row = 0
        self._empty_in_a_row = 0

    def has_bad_update(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an update of this step was skipped or refused, or has made weights non-finite."""
        rejected = _roles_with(metrics, "skipped_steps") or _roles_with(metrics, "refused_steps")
        return bool(rejected) or any(f"{role}/{LOST_AT}" in metrics for role in _ROLES)

    def record_update(self, metrics: Mapping[str, float], role: str) -> bool:
        """Record and return whether an update of the step changed the role's weights."""
        changed = sum(metrics.get(f"{role}/{name}", 0.0) for name in _UNCHANGED) < 1 - 1e-9
        if changed:
            self.updated.add(role)
        return changed

    def check(self, metrics: Mapping[str, float], reward_error: str | None = None) -> None:
        """Raise after `limit` consecutive steps with non-finite gradients or without an unmasked sample.

        A refused update (learning rate far too large) raises immediately: the next one would be refused too.
        """
        self._check_refused(metrics)
        self._check_finite(metrics)
        self._check_samples(metrics, reward_error)

    def _check_refused(self, metrics: Mapping[str, float]) -> None:
        roles = _roles_with(metrics, "refused_steps")
        if roles:
            rates = ", ".join(f"{role}/lr {metrics.get(f'{role}/lr', 0.0):g}" for role in roles.split(" and "))
            raise NonFiniteError(
                f"the update of {roles} was refused: its learning rate ({rates}) is more than 100 times the typical"
                " magnitude of a weight. The weights are unchanged; the batch is dumped."
                f" {self._remedies}"
            )

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        roles = _roles_with(metrics, "skipped_steps")
        if not roles:
            self._non_finite_in_a_row = 0
            return
        self._non_finite_in_a_row += 1
        logger.warning("non-finite gradient in %s: the update was skipped, the weights are unchanged", roles)
        if self._non_finite_in_a_row >= self._limit:
            raise NonFiniteError(
                f"the gradient of {roles} was not finite in {self._non_finite_in_a_row} training steps in a row"
                " (trainer.max_nonfinite_steps). None of these updates changed the weights; batches are dumped."
                f" {self._remedies}"
            )

    def _check_samples(self, metrics: Mapping[str, float], reward_error: str | None) -> None:
        roles = _roles_with(metrics, "empty_steps", at_least=1.0)
        if not roles:
            self._empty_in_a_row = 0
            return
        self._empty_in_a_row += 1
        logger.warning("every sample of this step is masked: weights and schedule of %s are unchanged", roles)
        if self._empty_in_a_row >= self._limit:
            raise no_samples_error(f"{self._empty_in_a_row} training steps", reward_error)


def no_samples_error(period: str, reward_error: str | None) -> NoSamplesError:
    """Return the error for a run in which every response of `period` (such as "3 training steps") is masked."""
    cause = (
        "Fix the cause of the last reward error, or set reward_model.on_error=zero to continue with a score of 0 for"
        f" samples that cannot be scored. The last reward error:\n{reward_error}"
        if reward_error
        else "No reward failed. Check algorithm.truncated_responses=mask (metric response_length/clip_ratio),"
        " algorithm.rollout_correction.rollout_rs (metric rollout_corr/masked_fraction) and the responses"
        " (trainer.rollout_data_dir)."
    )
    return NoSamplesError(
        f"every response of {period} in a row is masked (trainer.max_nonfinite_steps): there is nothing to"
        f" train on. Weights, optimizer and schedule have not changed since. {cause}"
    )


class WeightCheck:
    """Raises NonFiniteError for non-finite weights and names their origin: an update, or the loaded model."""

    def __init__(self, config: PPOConfig, updates: UpdateCheck, resumed_from: Callable[[], Path | None]) -> None:
        """`resumed_from()` returns the checkpoint that the run resumed from, or None."""
        self._config, self._updates, self._resumed_from = config, updates, resumed_from

    def check(
        self, metrics: dict[str, float], step: int, log: Callable[..., None], wait_for_save: Callable[[], None]
    ) -> None:
        """If weights are not finite after this step's updates: log the metrics and raise. `wait_for_save` waits for a
        save in progress, which may become the checkpoint to resume from."""
        for role in _ROLES:
            if f"{role}/{LOST_AT}" in metrics:
                log(metrics, step)
                wait_for_save()
                update = round(metrics[f"{role}/{LOST_AT}"])
                if not update and role not in self._updates.updated:
                    raise NonFiniteError(f"the weights of the {role} are not finite. {self._explain_initial(role)}.")
                cause = (
                    f"update {update} of step {step} made the weights of the {role} unusable"
                    if update
                    else f"the weights of the {role} were unusable before step {step}"
                )
                raise NonFiniteError(
                    f"{cause}: they, or the outputs of the model, are not finite. They are not saved;"
                    f" {describe_resume(self._config.trainer)}. The batch of step {step} is dumped."
                    f" {update_remedies(self._config)}"
                )

    @contextmanager
    def explain_errors(self, step: int) -> Iterator[None]:
        """Context of a step: convert a FloatingPointError of generation or a save, which read the actor's weights, to a
        NonFiniteError."""
        try:
            yield
        except Exception as error:
            cause = next((cause for cause in cause_chain(error) if isinstance(cause, FloatingPointError)), None)
            if cause is None or isinstance(error, NonFiniteError):
                raise
            step = getattr(error, "step", None) or step  # a background save may belong to an earlier step
            reason = str(cause).rstrip(".")
            if not self._updates.updated:
                raise NonFiniteError(f"step {step}: {reason}. {self._explain_initial('actor')}.") from error
            raise NonFiniteError(
                f"step {step}: {reason}. Earlier updates made the weights unusable; they are not saved;"
                f" {describe_resume(self._config.trainer)}. {update_remedies(self._config)}"
            ) from error

    def _explain_initial(self, role: str) -> str:
        key = _MODEL_KEYS[role]
        return explain_initial_weights(key, get_path(self._config, key), self._resumed_from())


def explain_initial_weights(key: str, path: str, resumed_from: Path | None) -> str:
    """Return source and remedy of non-finite weights that no update of this run has changed; without a final period."""
    if resumed_from is not None:
        return (
            f"No update has changed the weights since the run resumed from {resumed_from}: they are in that checkpoint."
            " Resume from an earlier step (trainer.resume_mode=resume_path trainer.resume_from_path=…)"
        )
    names = non_finite_tensors(path)
    start = f"No update has changed the weights: they are the weights of {key}={path}"
    if names:
        more = f" and {len(names) - _MAX_NAMED_TENSORS} more" if len(names) > _MAX_NAMED_TENSORS else ""
        shown = ", ".join(names[:_MAX_NAMED_TENSORS]) + more
        return f"{start}, whose files contain NaN or inf in {shown}. Use another copy of the model"
    return (
        f"{start}. No NaN or inf was found in its files: the weights may overflow in this precision. Check the model"
        " with transformers, or compute in float32 (actor_rollout_ref.rollout.dtype, fsdp_config.mixed_precision)"
    )


def non_finite_tensors(path: str) -> list[str]:
    """Return the names of tensors with NaN or inf in the safetensors files of a local folder."""
    folder = expand_path(path)
    if not os.path.isdir(folder):
        return []
    from safetensors import safe_open

    names = []
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    names.append(name)
    return names


@contextmanager
def add_memory_advice(config: PPOConfig | SupervisedConfig) -> Iterator[None]:
    """Context of a run: add advice to the error of a rank killed for memory: keys that reduce memory in its phase.

    The worker group that raises the error knows neither the phase nor the configuration.
    """
    try:
        yield
    except Exception as error:
        died = next((cause for cause in cause_chain(error) if isinstance(cause, WorkerDiedError)), None)
        if died is not None and died.advice and died.phase is not None:
            phase = _phase_in_plan(config, died.phase)
            if phase in PHASES:
                roles = None if isinstance(config, SupervisedConfig) else active_roles(config)
                died.replace_advice(host_advice(phase, config, roles=roles))
        raise


def _phase_in_plan(config: PPOConfig | SupervisedConfig, phase: str) -> str:
    """Return the name of a phase in the memory plan."""
    if isinstance(config, SupervisedConfig):
        return "sft"
    name = _PLAN_NAMES.get(phase, phase)
    return "judge" if name == "reward" and serves_reward_model(config) else name


def _roles_with(metrics: Mapping[str, float], name: str, at_least: float = 0.0) -> str:
    """Return the roles whose metric `name` is positive and not below `at_least`, joined by "and"."""
    shares = {role: metrics.get(f"{role}/{name}", 0.0) for role in _ROLES}
    return " and ".join(role for role, share in shares.items() if share > 0 and share >= at_least - 1e-9)
