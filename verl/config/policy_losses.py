"""What each policy loss is called and takes by itself: the values of its paper, where the user has set none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config.actor import ActorConfig


@dataclass(frozen=True)
class LossDefaults:
    """The defaults of `actor.loss_agg_mode` and of the clip keys under one `policy_loss.loss_mode`."""

    paper: str  # arXiv
    loss_agg_mode: str
    clip: tuple[float, float] | None = None  # distances down and up; None: the loss does not clip the ratio

    @property
    def clip_range(self) -> tuple[float, float]:
        """Those distances; where nothing is clipped, the usual ones, which nobody reads."""
        return self.clip or _USUAL_CLIP


_USUAL_CLIP = (0.2, 0.2)
# In the order in which they are listed to users. A weight that is clipped at 1 - 1 has no lower bound.
POLICY_LOSSES = {
    "vanilla": LossDefaults("1707.06347", "token-mean", clip=_USUAL_CLIP),
    "gspo": LossDefaults("2507.18071", "seq-mean-token-mean", clip=(3e-4, 4e-4)),
    # 2506.13585 tunes the upper bound of the weight and names none; 5 is that of ScaleRL (2510.13786).
    "cispo": LossDefaults("2506.13585", "token-mean", clip=(1.0, 4.0)),
    "sapo": LossDefaults("2511.20347", "seq-mean-token-mean"),
    "gpg": LossDefaults("2504.02546", "token-mean"),
    "clip_cov": LossDefaults("2505.22617", "token-mean", clip=_USUAL_CLIP),
    "kl_cov": LossDefaults("2505.22617", "token-mean"),
    "geo_mean": LossDefaults("2507.20673", "seq-mean-token-mean", clip=(0.4, 0.4)),
}


def defaults_of(loss_mode: str) -> LossDefaults:
    """Those of a loss; a loss of the user's own starts from the usual ones."""
    return POLICY_LOSSES.get(loss_mode, POLICY_LOSSES["vanilla"])


def fill_in(actor: ActorConfig) -> None:
    """What the user left out becomes the loss's own; `clip_ratio` alone stands for both distances."""
    own = defaults_of(actor.policy_loss.loss_mode)
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
    own = defaults_of(mode)
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
