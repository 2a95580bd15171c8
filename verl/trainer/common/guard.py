"""Updates that cannot be taken never reach the weights; too many of them, weights that are lost, and ranks that were
killed for memory end the run with cause and remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from verl.config import PPOConfig, SupervisedConfig
from verl.config.layout import active_roles, serves_reward_model
from verl.config.schema import pick
from verl.planning.remedies import PHASES
from verl.single_controller.base.errors import WorkerDiedError
from verl.trainer.common.ending import what_the_same_command_does
from verl.trainer.common.nonfinite_weights import explain_initial_weights
from verl.utils.exceptions import cause_chain
from verl.workers.roles.memory import host_advice
from verl.workers.roles.training import LOST_AT

logger = logging.getLogger(__name__)

ROLES = ("actor", "critic")
# Shares of a training step's optimizer steps that were not taken, by reason (see `engine.common.step_checks`).
_NOT_TAKEN = ("skipped_steps", "empty_steps", "loss_scale_search_steps", "refused_steps")

# Phases that do the work of another.
_SAME = {"validation rollout": "gen", "validation reward": "reward"}

_ACTOR = "actor_rollout_ref.actor"
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
    """The run was stopped because going on would teach nothing, or harm."""


class NonFiniteError(TrainingStoppedError):
    """Training was stopped because its gradients or weights are not finite, or would not stay so."""


class NoSamplesError(TrainingStoppedError):
    """Training was stopped because its batches hold nothing to learn from."""


class StepGuard:
    """Looks at what became of each training step's updates."""

    def __init__(self, limit: int, remedies: str = "") -> None:
        """`remedies`: text for errors about updates that were refused or not finite (`update_remedies`)."""
        self._limit, self._remedies = limit, remedies
        self.updated: set[str] = set()
        """Roles whose weights an update of this run has changed."""
        self._non_finite_in_a_row = 0
        self._empty_in_a_row = 0

    def harmful(self, metrics: Mapping[str, float]) -> bool:
        """Whether an update of this step was kept from the weights because it would have harmed them, or has done."""
        kept_away = _who(metrics, "skipped_steps") or _who(metrics, "refused_steps")
        return bool(kept_away) or any(f"{role}/{LOST_AT}" in metrics for role in ROLES)

    def took_update(self, metrics: Mapping[str, float], role: str) -> bool:
        """Whether any of the step's updates reached the role's weights."""
        took = sum(metrics.get(f"{role}/{name}", 0.0) for name in _NOT_TAKEN) < 1 - 1e-9
        self.updated |= {role} if took else set()
        return took

    def check(self, metrics: Mapping[str, float], reward_error: str | None = None) -> None:
        """Raise after `limit` steps in a row that were not finite, or of which no update had a sample to learn from.

        An update that is far too large will be so again: it ends the run at once.
        """
        self._check_size(metrics)
        self._check_finite(metrics)
        self._check_samples(metrics, reward_error)

    def _check_size(self, metrics: Mapping[str, float]) -> None:
        who = _who(metrics, "refused_steps")
        if who:
            rates = ", ".join(f"{role}/lr {metrics.get(f'{role}/lr', 0.0):g}" for role in who.split(" and "))
            raise NonFiniteError(
                f"the update of {who} was refused: its learning rate ({rates}) is more than 100 times the typical size"
                " of a weight, and nothing would be left of them. It did not reach the weights; the batch is dumped."
                f" {self._remedies}"
            )

    def _check_finite(self, metrics: Mapping[str, float]) -> None:
        who = _who(metrics, "skipped_steps")
        if not who:
            self._non_finite_in_a_row = 0
            return
        self._non_finite_in_a_row += 1
        logger.warning("non-finite gradient in %s: that update was skipped and did not reach the weights", who)
        if self._non_finite_in_a_row >= self._limit:
            raise NonFiniteError(
                f"the gradient of {who} was not finite in {self._non_finite_in_a_row} training steps in a row"
                " (trainer.max_nonfinite_steps). None of these updates reached the weights; batches are dumped."
                f" {self._remedies}"
            )

    def _check_samples(self, metrics: Mapping[str, float], reward_error: str | None) -> None:
        who = _who(metrics, "empty_steps", at_least=1.0)
        if not who:
            self._empty_in_a_row = 0
            return
        self._empty_in_a_row += 1
        logger.warning("no sample of this step counts: %s learnt nothing, weights and schedule are unchanged", who)
        if self._empty_in_a_row < self._limit:
            return
        raise no_samples(f"{self._empty_in_a_row} training steps", reward_error)


def no_samples(among: str, reward_error: str | None) -> NoSamplesError:
    """The end of a run in which every answer `among` so many steps or batches in a row is masked."""
    cause = (
        "Mend what the last reward error names, or set reward_model.on_error=zero to go on with a score of 0 for"
        f" samples that cannot be scored. The last reward error:\n{reward_error}"
        if reward_error
        else "No reward failed: look at what else masks them, algorithm.truncated_responses=mask"
        " (response_length/clip_ratio) or algorithm.rollout_correction.rollout_rs (rollout_corr/masked_fraction), and"
        " at the answers (trainer.rollout_data_dir)."
    )
    return NoSamplesError(
        f"not one sample of {among} in a row could be learnt from (trainer.max_nonfinite_steps): every answer is"
        f" masked. Weights, optimizer and schedule are as they were before the first of them. {cause}"
    )


class WeightGuard:
    """Raises NonFiniteError for weights that are not finite and attributes them to an update or to the loaded model."""

    def __init__(self, config: PPOConfig, guard: StepGuard, resumed_from: Callable[[], Path | None]) -> None:
        self._config, self._guard, self._resumed_from = config, guard, resumed_from

    def check(self, metrics: dict[str, float], step: int, log: Callable[..., None], settle: Callable[[], None]) -> None:
        """Log the metrics and raise if the weights are not finite after this step's updates. `settle` waits for a save
        in progress, which may become the checkpoint to resume from."""
        for role in ROLES:
            if f"{role}/{LOST_AT}" in metrics:
                log(metrics, step)
                settle()
                update = round(metrics[f"{role}/{LOST_AT}"])
                if not update and role not in self._guard.updated:
                    raise NonFiniteError(f"the weights of the {role} are not finite. {self._explain_initial(role)}.")
                by = f"by update {update} of step {step}" if update else f"before step {step}"
                raise NonFiniteError(
                    f"the weights of the {role} were lost {by}: they are not finite, or give no finite numbers. They"
                    f" are not saved; {what_the_same_command_does(self._config.trainer)}. The batch of step {step} is"
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
                f" saved; {what_the_same_command_does(self._config.trainer)}. {update_remedies(self._config)}"
            ) from error

    def _explain_initial(self, role: str) -> str:
        key = _MODEL_KEYS[role]
        return explain_initial_weights(key, pick(self._config, key), self._resumed_from())


@contextmanager
def advises_on_memory(config: PPOConfig | SupervisedConfig) -> Iterator[None]:
    """Around a run: a rank killed for the machine's memory ends it with the keys of its phase, cheapest first.

    The group that lost the rank knows neither its phase nor the configuration.
    """
    try:
        yield
    except Exception as error:
        died = next((cause for cause in cause_chain(error) if isinstance(cause, WorkerDiedError)), None)
        if died is not None and died.advice and died.phase is not None:
            phase = _planned_phase(config, died.phase)
            if phase in PHASES:
                roles = None if isinstance(config, SupervisedConfig) else active_roles(config)
                died.advise(host_advice(phase, config, roles=roles))
        raise


def _planned_phase(config: PPOConfig | SupervisedConfig, phase: str) -> str:
    """What the memory plan calls a phase."""
    if isinstance(config, SupervisedConfig):
        return "sft"
    found = _SAME.get(phase, phase)
    return "judge" if found == "reward" and serves_reward_model(config) else found


def _who(metrics: Mapping[str, float], name: str, at_least: float = 0.0) -> str:
    """The roles of whose updates a larger share than nothing, and at least this, was not taken for that reason."""
    shares = {role: metrics.get(f"{role}/{name}", 0.0) for role in ROLES}
    return " and ".join(role for role, share in shares.items() if share > 0 and share >= at_least - 1e-9)
