"""End a run with cause and remedy after too many rejected updates, non-finite weights, or a rank killed for memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.config import PPOConfig, SupervisedConfig
from verl.config.layout import active_roles, serves_reward_model
from verl.config.schema import pick
from verl.planning.remedies import PHASES
from verl.single_controller.base.errors import WorkerDiedError
from verl.trainer.recovery.exit_messages import describe_resume
from verl.utils.exceptions import cause_chain
from verl.utils.fs import expand_path
from verl.workers.roles.memory import host_advice
from verl.workers.roles.training import LOST_AT

logger = logging.getLogger(__name__)

ROLES = ("actor", "critic")
# Metrics: the share of optimizer steps of a training step that were not taken, by reason (`engine.common.step_checks`).
_NOT_TAKEN = ("skipped_steps", "empty_steps", "loss_scale_search_steps", "refused_steps")

# Phases that the memory plan knows under another name.
_PLANNED_AS = {"validation rollout": "gen", "validation reward": "reward"}

_ACTOR = "actor_rollout_ref.actor"
_MAX_NAMED_TENSORS = 3
# Config key of the model that a role starts from.
_MODEL_KEYS = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}


def update_remedies(config: PPOConfig) -> str:
    """Return advice for updates that made the weights non-finite, with the values of this run."""
    actor = config.actor_rollout_ref.actor
    lower = [(f"{_ACTOR}.optim.lr", actor.optim.lr, actor.optim.lr / 2)]
    if config.critic.enable:
        lower.append(("critic.optim.lr", config.critic.optim.lr, config.critic.optim.lr / 2))
    lower.append((f"{_ACTOR}.clip_ratio", actor.clip_ratio, actor.clip_ratio / 2))
    lower += [(f"{_ACTOR}.grad_clip", actor.grad_clip, 1.0)] if actor.grad_clip > 1 else []
    lower += [(f"{_ACTOR}.ppo_epochs", actor.ppo_epochs, 1)] if actor.ppo_epochs > 1 else []
    advice = f"Lower, in this order: {', '.join(f'{key} ({now:g} → {new:g})' for key, now, new in lower)}"
    kl = "" if actor.use_kl_loss else f"; or add {_ACTOR}.use_kl_loss=True {_ACTOR}.kl_loss_coef=0.01"
    return f"{advice}{kl}."


class TrainingStoppedError(RuntimeError):
    """The run was stopped because further updates would be useless or harmful."""


class NonFiniteError(TrainingStoppedError):
    """Training was stopped because gradients or weights are not finite, or an update would make them so."""


class NoSamplesError(TrainingStoppedError):
    """Training was stopped because every sample of several batches is masked."""


class StepGuard:
    """Checks the metrics of each training step for updates that were not taken."""

    def __init__(self, limit: int, remedies: str = "") -> None:
        """`remedies`: text for errors about updates that were refused or not finite (`update_remedies`)."""
        self._limit, self._remedies = limit, remedies
        self.updated: set[str] = set()
        """Roles whose weights an update of this run has changed."""
        self._non_finite_in_a_row = 0
        self._empty_in_a_row = 0

    def harmful(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an update of this step was skipped or refused, or has made weights non-finite."""
        rejected = _roles_with(metrics, "skipped_steps") or _roles_with(metrics, "refused_steps")
        return bool(rejected) or any(f"{role}/{LOST_AT}" in metrics for role in ROLES)

    def took_update(self, metrics: Mapping[str, float], role: str) -> bool:
        """Return whether any update of the step reached the role's weights."""
        took = sum(metrics.get(f"{role}/{name}", 0.0) for name in _NOT_TAKEN) < 1 - 1e-9
        self.updated |= {role} if took else set()
        return took

    def check(self, metrics: Mapping[str, float], reward_error: str | None = None) -> None:
        """Raise after `limit` consecutive steps with non-finite gradients or without an unmasked sample.

        A refused update (learning rate far too large) raises at once: it would be refused again.
        """
        self._check_size(metrics)
        self._check_finite(metrics)
        self._check_samples(metrics, reward_error)

    def _check_size(self, metrics: Mapping[str, float]) -> None:
        roles = _roles_with(metrics, "refused_steps")
        if roles:
            rates = ", ".join(f"{role}/lr {metrics.get(f'{role}/lr', 0.0):g}" for role in roles.split(" and "))
            raise NonFiniteError(
                f"the update of {roles} was refused: its learning rate ({rates}) is more than 100 times the typical"
                " size of a weight and would overwrite them. It did not reach the weights; the batch is dumped."
                f" {self._remedies}"
            )

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        roles = _roles_with(metrics, "skipped_steps")
        if not roles:
            self._non_finite_in_a_row = 0
            return
        self._non_finite_in_a_row += 1
        logger.warning("non-finite gradient in %s: that update was skipped and did not reach the weights", roles)
        if self._non_finite_in_a_row >= self._limit:
            raise NonFiniteError(
                f"the gradient of {roles} was not finite in {self._non_finite_in_a_row} training steps in a row"
                " (trainer.max_nonfinite_steps). None of these updates reached the weights; batches are dumped."
                f" {self._remedies}"
            )

    def _check_samples(self, metrics: Mapping[str, float], reward_error: str | None) -> None:
        roles = _roles_with(metrics, "empty_steps", at_least=1.0)
        if not roles:
            self._empty_in_a_row = 0
            return
        self._empty_in_a_row += 1
        logger.warning("every sample of this step is masked: weights and schedule of %s are unchanged", roles)
        if self._empty_in_a_row < self._limit:
            return
        raise no_samples_error(f"{self._empty_in_a_row} training steps", reward_error)


def no_samples_error(period: str, reward_error: str | None) -> NoSamplesError:
    """Return the error for a run in which every response of `period` (such as "3 training steps") is masked."""
    cause = (
        "Fix the cause of the last reward error, or set reward_model.on_error=zero to continue with a score of 0 for"
        f" samples that cannot be scored. The last reward error:\n{reward_error}"
        if reward_error
        else "No reward failed: check what else masks them: algorithm.truncated_responses=mask"
        " (response_length/clip_ratio) or algorithm.rollout_correction.rollout_rs (rollout_corr/masked_fraction), and"
        " at the responses (trainer.rollout_data_dir)."
    )
    return NoSamplesError(
        f"every response of {period} in a row is masked (trainer.max_nonfinite_steps): no sample could be trained"
        f" on. Weights, optimizer and schedule are as they were before the first of them. {cause}"
    )


class WeightGuard:
    """Raises NonFiniteError for weights that are not finite and attributes them to an update or to the loaded model."""

    def __init__(self, config: PPOConfig, guard: StepGuard, resumed_from: Callable[[], Path | None]) -> None:
        self._config, self._guard, self._resumed_from = config, guard, resumed_from

    def check(
        self, metrics: dict[str, float], step: int, log: Callable[..., None], wait_for_save: Callable[[], None]
    ) -> None:
        """Log the metrics and raise if the weights are not finite after this step's updates. `wait_for_save` waits for
        a save in progress, which may become the checkpoint to resume from."""
        for role in ROLES:
            if f"{role}/{LOST_AT}" in metrics:
                log(metrics, step)
                wait_for_save()
                update = round(metrics[f"{role}/{LOST_AT}"])
                if not update and role not in self._guard.updated:
                    raise NonFiniteError(f"the weights of the {role} are not finite. {self._explain_initial(role)}.")
                by = f"by update {update} of step {step}" if update else f"before step {step}"
                raise NonFiniteError(
                    f"the weights of the {role} were lost {by}: they are not finite, or give no finite numbers. They"
                    f" are not saved; {describe_resume(self._config.trainer)}. The batch of step {step} is"
                    f" dumped. {update_remedies(self._config)}"
                )

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Turn a FloatingPointError of generation or a save, which use the actor's weights, into a NonFiniteError."""
        try:
            yield
        except Exception as error:
            cause = next((cause for cause in cause_chain(error) if isinstance(cause, FloatingPointError)), None)
            if cause is None or isinstance(error, NonFiniteError):
                raise
            step = getattr(error, "step", None) or step  # a background save may belong to an earlier step
            reason = str(cause).rstrip(".")
            if not self._guard.updated:
                raise NonFiniteError(f"step {step}: {reason}. {self._explain_initial('actor')}.") from error
            raise NonFiniteError(
                f"step {step}: {reason}. The updates before it left weights that cannot be used, and they are not"
                f" saved; {describe_resume(self._config.trainer)}. {update_remedies(self._config)}"
            ) from error

    def _explain_initial(self, role: str) -> str:
        key = _MODEL_KEYS[role]
        return explain_initial_weights(key, pick(self._config, key), self._resumed_from())


def explain_initial_weights(key: str, path: str, resumed_from: Path | None) -> str:
    """Return source and remedy of non-finite weights that no update of this run has changed; without a final period."""
    if resumed_from is not None:
        return (
            f"No update has changed the weights since the run resumed from {resumed_from}: that checkpoint holds them."
            " Resume from an earlier step (trainer.resume_mode=resume_path trainer.resume_from_path=…)"
        )
    names = non_finite_tensors(path)
    start = f"No update has changed the weights: they are those of {key}={path}"
    if names:
        more = f" and {len(names) - _MAX_NAMED_TENSORS} more" if len(names) > _MAX_NAMED_TENSORS else ""
        shown = ", ".join(names[:_MAX_NAMED_TENSORS]) + more
        return f"{start}, whose files hold NaN or inf in {shown}. Use another copy of the model"
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
    """Around a run: add the keys that reduce memory in the current phase to the error of a rank killed for memory.

    The worker group that raises the error knows neither the phase nor the configuration.
    """
    try:
        yield
    except Exception as error:
        died = next((cause for cause in cause_chain(error) if isinstance(cause, WorkerDiedError)), None)
        if died is not None and died.advice and died.phase is not None:
            phase = _planned_phase(config, died.phase)
            if phase in PHASES:
                roles = None if isinstance(config, SupervisedConfig) else active_roles(config)
                died.replace_advice(host_advice(phase, config, roles=roles))
        raise


def _planned_phase(config: PPOConfig | SupervisedConfig, phase: str) -> str:
    """Return the name of a phase in the memory plan."""
    if isinstance(config, SupervisedConfig):
        return "sft"
    planned = _PLANNED_AS.get(phase, phase)
    return "judge" if planned == "reward" and serves_reward_model(config) else planned


def _roles_with(metrics: Mapping[str, float], name: str, at_least: float = 0.0) -> str:
    """Return the roles whose metric `name` is positive and at least this, joined by "and"."""
    shares = {role: metrics.get(f"{role}/{name}", 0.0) for role in ROLES}
    return " and ".join(role for role, share in shares.items() if share > 0 and share >= at_least - 1e-9)
