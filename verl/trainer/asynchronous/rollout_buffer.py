"""RolloutBuffer: tracks prompt groups in flight and finished groups, and selects the groups of the next batch.

A version is the number of trained batches; the trainer takes one batch per version. A group submitted at version `v` is
trained at version `v + max_staleness` at the latest (*in time*), or dropped. `capacity` makes that possible: groups in
flight, finished or in the current batch never exceed `max_staleness + 1` batches, which also bounds memory. No prompt
is submitted while two batches are finished or being trained, so that responses do not become stale in the buffer if
training is the bottleneck. Groups that finish early are trained early.

Strategy `wait`: a batch is delayed if otherwise not all groups in flight could be trained in time. Strategy `drop`:
groups that became too old are dropped, and their prompts are submitted again later. A prompt is dropped at most once:
batches wait for its second group, since long responses would otherwise never be trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

IN_FLIGHT, FINISHED, SURPLUS = "in_flight", "finished", "surplus"
"""Reasons why a group became too old. IN_FLIGHT: it did not finish in time. FINISHED: it finished, but earlier batches
were full. SURPLUS: it was one of the surplus groups, since batches wait for all other groups."""
TRAINED_STALE = "stale_samples"
"""Key in `RolloutBuffer.counts`: responses that were trained at a later version than that of their oldest token."""


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The responses to one prompt, from submission to training."""

    serial: int
    """Number in the order of submission; a prompt that is submitted again gets a new one."""
    uid: str
    response_count: int
    sent_at: int
    """The version at which it was submitted."""
    oldest: int | None = None
    """Version of its oldest sampled token; None until it is finished."""
    partial: int = 0
    """Number of responses with tokens of several weight versions."""
    state: Any = None
    """Data of the caller, not used here."""
    promised: bool = False
    """Whether the group is guaranteed to be trained in time: batches wait for it."""

    @property
    def base_version(self) -> int:
        """The version from which its staleness is counted."""
        return self.sent_at if self.oldest is None else self.oldest


_SAVED_NAMES = {"response_count": "answers", "state": "rows"}
"""Fields of a PromptGroup that have another name in checkpoints."""


@dataclass(frozen=True, slots=True)
class _TrainedGroup:
    """Data of a group that is being trained, for metrics."""

    staleness: int
    response_count: int
    partial: int


class RolloutBuffer:
    """Counts and selects groups; has no clock, threads or tensors. The module docstring states its guarantees."""

    def __init__(
        self,
        groups_per_batch: int,
        max_staleness: int,
        strategy: str = "drop",
        in_order: bool = False,
        surplus: int = 0,
        batches: int | None = None,
    ) -> None:
        """`in_order`: groups are trained in the order of submission. `surplus`: number of additional groups in flight,
        because dynamic sampling rejects some. `batches`: number of batches of the run, for which prompts are submitted.
        """
        self._groups_per_batch, self._max_staleness, self._in_order = groups_per_batch, max_staleness, in_order
        self._strategy_is_wait, self._surplus, self._num_batches = strategy == "wait", surplus, batches
        self._in_flight: dict[int, PromptGroup] = {}
        self._finished: dict[int, PromptGroup] = {}
        self._promised = 0
        """Number of promised groups in `_in_flight` and `_finished`, counted here so that `add` takes constant time."""
        self._last_serial = -1
        self._dropped_uids: set[str] = set()
        """The `uid` of dropped prompts that were not submitted again yet."""
        self._batch_version = -1
        self._batch: dict[int, _TrainedGroup] = {}
        self.counts: Counter[str] = Counter()
        """Totals of the run: `dropped/<reason>`, `rejected`, `stale_samples`."""
        self._reported: Counter[str] = Counter()
        """`counts` at the last call of `metrics`."""
        self.max_trained_staleness = 0
        """The largest staleness in the batches for which `metrics` was called."""

    def capacity(self, version: int) -> int:
        """Return the number of prompts that may be submitted now."""
        batches = self._max_staleness + 1
        if self._num_batches is not None:
            batches = min(batches, self._num_batches - version)
        if batches <= 0:
            return 0
        finished = len(self._finished) + len(self._in_training(version))
        limit = batches * self._groups_per_batch - len(self._in_flight)
        # At most two batches may be finished or in training: more finished groups would only become stale.
        return max(0, min(limit, 2 * self._groups_per_batch) + self._surplus - finished)

    def add(self, group: PromptGroup) -> None:
        """Add a group that was submitted; decide whether it is guaranteed to be trained in time (`promised`)."""
        if group.serial <= self._last_serial:
            raise ValueError(
                f"group {group.serial}: submitted after {self._last_serial}. Number groups in order of submission."
            )
        self._last_serial = group.serial
        was_dropped = group.uid in self._dropped_uids
        self._dropped_uids.discard(group.uid)
        # Promised groups must fit into the batches up to the last one in which this group may be trained.
        promised = self._promised + len(self._in_training(group.sent_at))
        limit = (self._max_staleness + 1) * self._groups_per_batch
        group.promised = (self._strategy_is_wait or was_dropped) and promised < limit
        self._promised += group.promised
        self._in_flight[group.serial] = group

    def mark_finished(self, group: PromptGroup, oldest: int, partial: int = 0) -> None:
        """Mark a group as finished. `oldest`: version of its oldest token. `partial`: see `PromptGroup.partial`."""
        del self._in_flight[group.serial]
        # After a skipped update, two versions have the same weights and tokens may have the earlier one, but they
        # cannot be older than the request.
        group.oldest, group.partial = max(oldest, group.sent_at), partial
        self._finished[group.serial] = group

    def drop_stale(self, version: int) -> list[PromptGroup]:
        """Remove and return groups that have become too old, finished or not. Call it once per version.

        `GroupStream.begin_step` cancels their rows and puts their prompts back.
        """
        old = [group for group in self._all_groups() if version - group.base_version > self._max_staleness]
        for group in old:
            reason = FINISHED if group.serial in self._finished else IN_FLIGHT
            if self._strategy_is_wait or self._in_order:  # batches wait for all other groups
                reason = SURPLUS
            (self._finished if group.serial in self._finished else self._in_flight).pop(group.serial)
            self._promised -= group.promised
            self.counts[f"dropped/{reason}"] += 1  # metric async/dropped/<reason>
            self._dropped_uids.add(group.uid)
        return old

    def take(self, version: int) -> list[PromptGroup] | None:
        """Take the groups that the batch of this version still needs, in serial order; None: wait for groups in
        flight."""
        count = self._groups_per_batch - len(self._in_training(version))
        if len(self._finished) < count:
            return None
        fresh = [group for group in self._all_groups() if version - group.base_version <= self._max_staleness]
        if self._in_order:
            chosen = fresh[:count]
            if any(group.serial in self._in_flight for group in chosen):
                return None
        else:
            required = self._required(fresh, version, count)
            if required is None:
                return None
            others = [group for group in fresh if group.serial in self._finished and group not in required]
            chosen = sorted([*required, *others[: count - len(required)]], key=lambda group: group.serial)
        if len(chosen) < count:
            return None
        self._move_to_batch(chosen, version)
        return chosen

    def reject(self, groups: Iterable[PromptGroup]) -> None:
        """Exclude finished groups, taken or not, from training. They are not submitted again; other prompts may be
        submitted instead."""
        for group in groups:
            if self._finished.pop(group.serial, None) is not None:
                self._promised -= group.promised
            if (taken := self._batch.pop(group.serial, None)) is not None and taken.staleness:
                self.counts[TRAINED_STALE] -= taken.response_count
            self.counts["rejected"] += 1

    def in_flight(self) -> list[PromptGroup]:
        """Return the groups that are not finished."""
        return list(self._in_flight.values())

    def finished_groups(self) -> list[PromptGroup]:
        """Return the finished groups that were not taken yet, in serial order."""
        return sorted(self._finished.values(), key=lambda group: group.serial)

    def metrics(self, version: int) -> dict[str, float]:
        """Return metrics of the batch of this version, and of groups dropped and rejected since the last call.

        Groups that `drop_stale` removed are counted by reason: `async/dropped/in_flight`, `async/dropped/finished` and
        `async/dropped/surplus`. Stale groups that were trained are in `async/staleness/*` and
        `fully_async/count/stale_samples_processed`.
        """
        trained = list(self._in_training(version).values())
        max_staleness = max((group.staleness for group in trained), default=0)
        self.max_trained_staleness = max(self.max_trained_staleness, max_staleness)
        responses = sum(group.response_count for group in trained)
        partial = sum(group.partial for group in trained) / max(1, responses)
        metrics = {
            "async/queue_depth": float(len(self._finished)),
            "async/in_flight": float(len(self._in_flight)),
            "async/staleness/mean": sum(group.staleness * group.response_count for group in trained)
            / max(1, responses),
            "async/staleness/max": float(max_staleness),
            "async/partial_share": partial,
            "fully_async/partial/partial_ratio": partial,
            "fully_async/count/stale_samples_processed": float(self.counts[TRAINED_STALE]),
        }
        for age in range(self._max_staleness + 1):
            of_age = sum(group.response_count for group in trained if group.staleness == age)
            metrics[f"async/staleness/share_{age}"] = of_age / max(1, responses)
        new = self.counts - self._reported
        self._reported = self.counts.copy()
        reasons = ["rejected", *(f"dropped/{why}" for why in (IN_FLIGHT, FINISHED, SURPLUS)), *new]
        return metrics | {f"async/{name}": float(new[name]) for name in reasons if name != TRAINED_STALE}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint between versions: plain data, except the caller's data of groups (`rows`).
        Groups of the batch that is being trained are not included."""
        return {
            "groups": [_saved_fields(group) for group in self._all_groups()],
            "finished": list(self._finished),
            "last_serial": self._last_serial,
            "again": sorted(self._dropped_uids),
            "counts": dict(self.counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`. Groups that are not in its `finished` are in flight: the caller submits them again."""
        groups, finished = [_from_saved_fields(saved) for saved in state["groups"]], set(state["finished"])
        self._in_flight = {group.serial: group for group in groups if group.serial not in finished}
        self._finished = {group.serial: group for group in groups if group.serial in finished}
        for group in self._in_flight.values():  # including finished groups whose trajectories could not be saved
            group.oldest, group.partial = None, 0
        self._promised = sum(group.promised for group in groups)
        self._last_serial, self._dropped_uids = state["last_serial"], set(state["again"])
        self._batch_version, self._batch = -1, {}
        self.counts, self._reported = Counter(state["counts"]), Counter(state["counts"])

    def _all_groups(self) -> list[PromptGroup]:
        return sorted([*self._in_flight.values(), *self._finished.values()], key=lambda group: group.serial)

    def _in_training(self, version: int) -> dict[int, _TrainedGroup]:
        """Return the groups of the batch of this version, by serial."""
        return self._batch if self._batch_version == version else {}

    def _move_to_batch(self, chosen: Iterable[PromptGroup], version: int) -> None:
        """Move finished groups to the batch of this version."""
        self._batch = self._in_training(version)
        self._batch_version = version
        for group in chosen:
            del self._finished[group.serial]
            self._promised -= group.promised
            self._batch[group.serial] = trained = _TrainedGroup(
                version - group.base_version, group.response_count, group.partial
            )
            self.counts[TRAINED_STALE] += trained.response_count if trained.staleness else 0

    def _required(self, fresh: list[PromptGroup], version: int, count: int) -> set[PromptGroup] | None:
        """Return the finished groups that the batch must contain so that all promised groups can be trained in time;
        None if such a group is still in flight.

        Earliest deadline first: for every later version, the promised groups due by then must fit into the remaining
        batches.
        """
        promised = [group for group in fresh if group.promised]
        chosen: set[PromptGroup] = set()
        for deadline in sorted({group.base_version + self._max_staleness for group in promised}):
            due = [group for group in promised if group.base_version + self._max_staleness <= deadline]
            missing = min(len(due) - self._groups_per_batch * (deadline - version), count) - len(chosen)
            ready = [group for group in due if group.serial in self._finished and group not in chosen]
            if missing > len(ready):
                return None
            chosen |= set(ready[: max(0, missing)])
        return chosen


def _saved_fields(group: PromptGroup) -> dict[str, Any]:
    """Return the fields of a group under their names in checkpoints."""
    return {_SAVED_NAMES.get(item.name, item.name): getattr(group, item.name) for item in fields(group)}


def _from_saved_fields(saved: Mapping[str, Any]) -> PromptGroup:
    names = {saved_name: name for name, saved_name in _SAVED_NAMES.items()}
    return PromptGroup(**{names.get(name, name): value for name, value in saved.items()})
