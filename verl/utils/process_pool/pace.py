"""Pace: what a pool's calls take of late, and what follows: how many go together, and when one takes long."""

from __future__ import annotations

# A call takes long when it takes this many times what calls typically take, and not less than that.
_LONG = 20
_FIRST_GUESS_SECONDS = 0.1
_LONG_SECONDS = 0.005
# So often a call that takes long is looked at: does it compute, wait, or was it stopped.
LOOK_SECONDS, _LOOK_AT_LEAST_SECONDS = 0.25, 2.0
# Work per message: much against the time until a busy machine lets the pool send the next one.
_MESSAGE_SECONDS = 0.1
_MOST_PER_MESSAGE = 256
# How long answers may pile up before they are read: long against what reading costs.
_PILE_SECONDS = 0.005


class Pace:
    """Learns from every answer."""

    def __init__(self) -> None:
        self._typical = _FIRST_GUESS_SECONDS

    def learn(self, seconds: float, answers: int) -> None:
        """So many answers took so long together. One that takes long must not change what is taken for long."""
        most = 4 * self._typical + 0.001
        self._typical += 0.3 * (min(seconds / answers, most) - self._typical)

    def share(self, waiting: int, processes: int) -> int:
        """How many calls the next message carries: worth a message, and at the end evenly over the workers."""
        enough = min(_MOST_PER_MESSAGE, int(_MESSAGE_SECONDS / max(self._typical, 1e-9)))
        return max(1, min(enough, max(waiting // (2 * processes), enough // 16), waiting))

    def pile(self, left: int) -> float:
        """Seconds to let answers pile up where the first worker to be done has so many calls left."""
        return min(_PILE_SECONDS, left * self._typical)

    def next_look(self, since: float, looked_at: float, timeout: float) -> float:
        """When a call that began at `since`, and was last looked at then, is to be looked at or stopped."""
        seen = looked_at - since
        long = min(max(_LONG_SECONDS, _LONG * self._typical), timeout / 4)
        # Hundreds may be waiting at a time: the longer one does, the less often it is looked at.
        pause = max(LOOK_SECONDS, min(seen / 2, _LOOK_AT_LEAST_SECONDS))
        return min(looked_at + pause if seen else since + long, since + timeout)
