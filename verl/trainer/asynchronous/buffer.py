"""Buffer: which prompt groups are out, which have come back, which make the next batch; none is older than allowed.

A version is a trained batch: the trainer takes one at every version. A group whose first request left at version `v`
may be trained at `v + max_staleness` at the latest. That is promised by admission: groups that are out, finished or in
the batch being trained are never more than `max_staleness + 1` batches, which also bounds memory; and none goes out
while two batches are answered: where training is the slower one, answers do not grow old in the queue. What finishes
early goes first. `wait` holds a batch back as soon as what is still out could not all be trained in time any more;
`drop` sends prompts of what became too old back to the stream, each once: the next time it is waited for, or long
answers would never be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Buffer", "Group"]

IN_FLIGHT, FINISHED, SURPLUS = "in_flight", "finished", "surplus"
"""Why a group was dropped as too old: it was not finished; it was, and batches were full; over-sampling sent it."""
STALE = "stale_samples"


@dataclass(slots=True, eq=False)
class Group:
    """The answers to one prompt, on their way through the run."""

    serial: int
    """Its place in the run's stream: a prompt that is sent again has a new one."""
    uid: str
    answers: int
    sent_at: int
    """The version at which its first request left."""
    oldest: int | None = None
    """Version of its oldest sampled token; None until it is finished."""
    partial: int = 0
    """Answers whose tokens are of several versions."""
    rows: Any = None
    """Whatever the trainer keeps for it."""
    promised: bool = False
    """It will be trained in time: batches wait for it."""

    @property
    def born(self) -> int:
        """The version its age is counted from."""
        return self.sent_at if self.oldest is None else self.oldest


@dataclass(frozen=True, slots=True)
class _Used:
    """What is remembered of a group that is being trained."""

    staleness: int
    answers: int
    partial: int


class Buffer:
    """Plain bookkeeping: no clock, no threads, no tensors. See the file's first lines for what it promises."""

    def __init__(
        self,
        groups_per_batch: int,
        max_staleness: int,
        strategy: str = "drop",
        in_order: bool = False,
        surplus: int = 0,
        batches: int | None = None,
    ) -> None:
        """`in_order`: groups leave in the order in which they were sent. `surplus`: groups that may be out beyond what
        batches need, because some will be rejected. `batches`: the run's last version; nothing is sent for later ones.
        """
        self._per_batch, self._max_staleness, self._in_order = groups_per_batch, max_staleness, in_order
        self._waits, self._surplus, self._batches = strategy == "wait", surplus, batches
        self._out: dict[int, Group] = {}
        self._finished: dict[int, Group] = {}
        self._promised = 0
        """How many of both are promised: sending a batch does not look at all of them for each of its prompts."""
        self._last_serial = -1
        self._again: set[str] = set()
        """Prompts that were dropped for their age and not sent again yet."""
        self._batch_of = -1
        self._batch: dict[int, _Used] = {}
        self.counts: Counter[str] = Counter()
        """Since the run began: `dropped/<why>`, `rejected`, `stale_samples`."""
        self._told: Counter[str] = Counter()
        self.reached = 0
        """The largest staleness that was trained."""

    def room(self, version: int) -> int:
        """Prompts that may go out now."""
        batches = self._max_staleness + 1
        if self._batches is not None:
            batches = min(batches, self._batches - version)
        if batches <= 0:
            return 0
        answered = len(self._finished) + len(self._training(version))
        most = batches * self._per_batch - len(self._out)
        # What waits beside the next batch only grows old: nothing is asked for ahead of that.
        return max(0, min(most, 2 * self._per_batch) + self._surplus - answered)

    def sent(self, group: Group) -> None:
        """A prompt went out."""
        if group.serial <= self._last_serial:
            raise ValueError(f"group {group.serial}: sent after {self._last_serial}. Number groups as they are sent.")
        self._last_serial = group.serial
        before = group.uid in self._again
        self._again.discard(group.uid)
        # No more is promised than the batches hold that are filled before the group is too old.
        promised = self._promised + len(self._training(group.sent_at))
        group.promised = (self._waits or before) and promised < (self._max_staleness + 1) * self._per_batch
        self._promised += group.promised
        self._out[group.serial] = group

    def finished(self, group: Group, oldest: int, partial: int = 0, rows: Any = None) -> None:
        """All its answers are there."""
        del self._out[group.serial]
        # Versions whose update was skipped have the same weights: tokens cannot be older than the request.
        group.oldest, group.partial = max(oldest, group.sent_at), partial
        group.rows = group.rows if rows is None else rows
        self._finished[group.serial] = group

    def dropped(self, version: int) -> list[Group]:
        """Groups that have become too old, in flight or not; their prompts go back to the stream. Once per version."""
        old = [group for group in self._all() if version - group.born > self._max_staleness]
        for group in old:
            why = FINISHED if group.serial in self._finished else IN_FLIGHT
            self.give_up(group, SURPLUS if self._waits or self._in_order else why)
            self._again.add(group.uid)
        return old

    def take(self, version: int, count: int | None = None) -> list[Group] | None:
        """The version's batch, or what it still lacks, in serial order; None: wait for groups that are out."""
        count = self._per_batch - len(self._training(version)) if count is None else count
        if len(self._finished) < count:
            return None
        fresh = [group for group in self._all() if version - group.born <= self._max_staleness]
        if self._in_order:
            chosen = fresh[:count]
            if any(group.serial in self._out for group in chosen):
                return None
        else:
            required = self._required(fresh, version, count)
            if required is None:
                return None
            others = [group for group in fresh if group.serial in self._finished and group not in required]
            chosen = sorted([*required, *others[: count - len(required)]], key=lambda group: group.serial)
        if len(chosen) < count:
            return None
        self._use(chosen, version)
        return chosen

    def reject(self, groups: Iterable[Group]) -> None:
        """Finished groups, taken or not, that are not trained: their prompts are used up, others may go out instead."""
        for group in groups:
            if self._finished.pop(group.serial, None) is not None:
                self._promised -= group.promised
            if (used := self._batch.pop(group.serial, None)) is not None and used.staleness:
                self.counts[STALE] -= used.answers
            self.counts["rejected"] += 1

    def give_up(self, group: Group, why: str) -> None:
        """A group that is lost: the caller puts its prompt back."""
        (self._finished if group.serial in self._finished else self._out).pop(group.serial)
        self._promised -= group.promised
        self.counts[f"dropped/{why}"] += 1

    def in_flight(self) -> list[Group]:
        """Groups that are out."""
        return list(self._out.values())

    def ready(self) -> list[Group]:
        """Finished groups that no batch took yet."""
        return sorted(self._finished.values(), key=lambda group: group.serial)

    def metrics(self, version: int) -> dict[str, float]:
        """Of the batch that this version took; what was dropped and rejected since this was last asked."""
        used = list(self._training(version).values())
        answers = sum(each.answers for each in used)
        partial = sum(each.partial for each in used) / max(1, answers)
        found = {
            "async/queue_depth": float(len(self._finished)),
            "async/in_flight": float(len(self._out)),
            "async/staleness/mean": sum(each.staleness * each.answers for each in used) / max(1, answers),
            "async/staleness/max": float(max((each.staleness for each in used), default=0)),
            "async/partial_share": partial,
            "fully_async/partial/partial_ratio": partial,
            "fully_async/count/stale_samples_processed": float(self.counts[STALE]),
        }
        for age in range(self._max_staleness + 1):
            of_age = sum(each.answers for each in used if each.staleness == age)
            found[f"async/staleness/share_{age}"] = of_age / max(1, answers)
        since = self.counts - self._told
        self._told = self.counts.copy()
        reasons = ["rejected", *(f"dropped/{why}" for why in (IN_FLIGHT, FINISHED, SURPLUS)), *since]
        return found | {f"async/{name}": float(since[name]) for name in reasons if name != STALE}

    def state(self) -> dict[str, Any]:
        """Plain data but for what the trainer keeps for groups (`rows`). Between versions: a batch being trained is not
        in it."""
        return {
            "groups": [{each.name: getattr(group, each.name) for each in fields(group)} for group in self._all()],
            "finished": list(self._finished),
            "last_serial": self._last_serial,
            "again": sorted(self._again),
            "counts": dict(self.counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. What is not in its `finished` is in flight: the caller sends it again, as the
        same group."""
        groups, finished = [Group(**each) for each in state["groups"]], set(state["finished"])
        self._out = {group.serial: group for group in groups if group.serial not in finished}
        self._finished = {group.serial: group for group in groups if group.serial in finished}
        for group in self._out.values():  # also one whose answers could not be saved
            group.oldest, group.partial = None, 0
        self._promised = sum(group.promised for group in groups)
        self._last_serial, self._again = state["last_serial"], set(state["again"])
        self._batch_of, self._batch = -1, {}
        self.counts, self._told = Counter(state["counts"]), Counter(state["counts"])

    def _all(self) -> list[Group]:
        return sorted([*self._out.values(), *self._finished.values()], key=lambda group: group.serial)

    def _training(self, version: int) -> dict[int, _Used]:
        """Groups of the batch that this version took."""
        return self._batch if self._batch_of == version else {}

    def _use(self, chosen: Iterable[Group], version: int) -> None:
        self._batch = self._training(version)
        self._batch_of = version
        for group in chosen:
            del self._finished[group.serial]
            self._promised -= group.promised
            self._batch[group.serial] = used = _Used(version - group.born, group.answers, group.partial)
            self.counts[STALE] += used.answers if used.staleness else 0
            self.reached = max(self.reached, used.staleness)

    def _required(self, fresh: list[Group], version: int, count: int) -> set[Group] | None:
        """Finished groups without which promises would be broken; None where such a group is still out.

        Earliest deadline first: by every later version, what must be trained until then has to fit into the batches
        that are left.
        """
        promised = [group for group in fresh if group.promised]
        chosen: set[Group] = set()
        for last in sorted({group.born + self._max_staleness for group in promised}):
            until = [group for group in promised if group.born + self._max_staleness <= last]
            missing = min(len(until) - self._per_batch * (last - version), count) - len(chosen)
            ready = [group for group in until if group.serial in self._finished and group not in chosen]
            if missing > len(ready):
                return None
            chosen |= set(ready[: max(0, missing)])
        return chosen
