"""When a run that died is started again: a pure decision over how its attempts ended and what they had saved."""

from __future__ import annotations

from dataclasses import dataclass, field

_FIRST_DELAY_S = 2.0
_LONGEST_DELAY_S = 60.0


@dataclass(frozen=True)
class Ending:
    """How an attempt ended, if not well."""

    cause: str
    """One sentence, without its full stop."""
    restartable: bool
    """Another attempt may end otherwise."""
    place: str | None = None
    """Step, phase and role that died, where they are known: twice at the same one is no accident."""


@dataclass(frozen=True)
class Restart:
    """Start the run again after a while; `number` counts from 1 since the last new checkpoint."""

    number: int
    delay: float


@dataclass(frozen=True)
class GiveUp:
    """`reason` is None where the cause itself says why there is no other attempt."""

    reason: str | None = None


@dataclass(frozen=True)
class Record:
    """What happened since the newest whole checkpoint of this command, `saved` (None: there is none)."""

    saved: str | None = None
    restarts: int = 0
    places: frozenset[str] = field(default=frozenset())


def decide(record: Record, ending: Ending, saved: str | None, max_restarts: int) -> tuple[Record, Restart | GiveUp]:
    """`saved` names the newest whole checkpoint of this command: a new one means progress, and counts begin anew."""
    if saved is not None and saved != record.saved:
        record = Record(saved)
    if not ending.restartable:
        return record, GiveUp()
    if ending.place in record.places:
        return record, GiveUp(f"it died twice at the same place ({ending.place})")
    if record.restarts >= max_restarts:
        return record, GiveUp(f"trainer.max_restarts = {max_restarts}, and no step was saved since the first of them")
    places = record.places if ending.place is None else record.places | {ending.place}
    number = record.restarts + 1
    delay = min(_FIRST_DELAY_S * 2 ** (number - 1), _LONGEST_DELAY_S)
    return Record(record.saved, number, places), Restart(number, delay)
