"""What the user left out of a policy loss's keys becomes the loss's own, and how that is told."""

from __future__ import annotations

from verl.config.actor import ActorConfig
from verl.config.names import loss_traits


def fill_in(actor: ActorConfig) -> None:
    """What the user left out becomes the loss's own; `clip_ratio` alone stands for both distances."""
    own = loss_traits(actor.policy_loss.loss_mode)
    if actor.loss_agg_mode is None:
        actor.loss_agg_mode = own.loss_agg_mode
    if actor.clip_ratio is None:
        low, high = own.clip_range
        actor.clip_ratio = low
        actor.clip_ratio_low = low if actor.clip_ratio_low is None else actor.clip_ratio_low
        actor.clip_ratio_high = high if actor.clip_ratio_high is None else actor.clip_ratio_high


def describe(actor: ActorConfig) -> str:
    """The loss of a resolved configuration in one line, and where it is not the loss's own."""
    mode = actor.policy_loss.loss_mode
    own = loss_traits(mode)
    found = [mode, _beside(actor.loss_agg_mode, own.loss_agg_mode)]
    if own.clip is None:
        found.append("no clip")
    else:
        chosen = (actor.clip_ratio_low, actor.clip_ratio_high)
        found.append(f"clip {_beside(_distances(chosen), _distances(own.clip))}")
    return ", ".join(found)


def _beside(value: str, own: str) -> str:
    return value if value == own else f"{value} (its own: {own})"


def _distances(clip: tuple[float, float]) -> str:
    return f"{clip[0]:g}/{clip[1]:g}"
