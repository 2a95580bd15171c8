"""Who waits for whom: from what is known of every rank to one sentence. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.single_controller.base.beat import RankReport
from verl.utils.stacks import Frame, Stack, show, users_frame

_WHY = {
    "stopped": "is stopped (SIGSTOP)",
    "traced": "is stopped by a debugger",
    "dead": "has died",
    "unreachable": "does not answer, nor does its node",
}
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/")


@dataclass(frozen=True)
class Verdict:
    """`kind` tells: stopped, traced, dead, unreachable, silent; user (a function of the user's), behind (a rank does
    not arrive where others wait), mismatch (ranks in different collectives), together (all in the same), idle (no rank
    works, the call does not end), alone (all ranks work, none waits), starting (a process, or an engine), controller,
    debugged."""

    kind: str
    sentence: str
    culprits: tuple[RankReport, ...] = ()
    waiters: tuple[RankReport, ...] = ()


def judge(reports: Sequence[RankReport]) -> Verdict:
    """Of the ranks of all calls that are waited for."""
    for state in ("stopped", "traced", "dead", "unreachable"):
        if found := [report for report in reports if report.state == state]:
            return _blamed(state, found, reports, lambda report: _WHY[report.state])
    if found := [report for report in reports if report.state == "silent"]:
        return _blamed("silent", found, reports, _says_nothing)
    for why in ("stopped", "traced"):
        if found := [report for report in reports if report.beat.helper and report.beat.helper[1] == why]:
            return _blamed(why, found, reports, _waits_for_helper)
    busy = [report for report in reports if report.beat.method is not None]
    if any(_debugged(stack) for report in busy for stack in report.beat.stacks):
        return Verdict("debugged", "a debugger is open")
    if not busy:
        return Verdict("idle", f"{_ranks(reports)} have nothing to do: what they were sent, or their answer, is lost")
    if starting := [report for report in busy if report.beat.activity is not None]:
        return _blamed("starting", starting, reports, lambda report: f"is {report.beat.activity}")
    waiting = [report for report in busy if report.collective]
    working = [report for report in busy if not report.collective]
    if waiting and working:
        kind = "user" if any(_users_place(report) for report in working) else "behind"
        return _blamed(kind, working, reports, _stands_at)
    if working:
        slow = [report for report in working if _users_place(report)] or working
        others = [report for report in reports if report not in slow]
        return _blamed("user" if _users_place(slow[0]) else "alone", slow, [*slow, *others], _stands_at)
    return _all_wait(waiting, [report for report in reports if report not in busy])


def judge_controller(stack: Stack, who: str = "the controller") -> Verdict:
    """Where no rank is waited for: what the controller's own thread does."""
    if _debugged(stack):
        return Verdict("debugged", "a debugger is open")
    place = users_frame(stack) or (stack[0] if stack else None)
    if place is None:
        return Verdict("controller", f"{who} is in no Python code")
    if place.origin == "user":
        return Verdict("user", f"{who} is in the user's function {place}")
    return Verdict("controller", f"{who} is in {_telling(stack)}")


def judge_start(role: str, standing: tuple[str, int, str] | None) -> Verdict:
    """Of ranks that have not said yet where they run; `standing`: (host, pid, state) of what cannot run beside them."""
    late = f"the processes of {role} have not started"
    if standing is None:
        return Verdict("starting", late)
    host, pid, state = standing
    return Verdict(state, f"{late}: one that Ray has started (host {host}, pid {pid}) {_WHY[state]}")


def behind(reports: Sequence[RankReport]) -> RankReport | None:
    """The one rank that works while all others of its group wait for it, or have finished."""
    busy = [report for report in reports if report.beat.method is not None and not report.collective]
    return busy[0] if len(busy) == 1 and len(reports) > 1 else None


def table(reports: Sequence[RankReport]) -> str:
    """All that is known: a line per rank, then the stacks, innermost first."""
    head = ("rank", "pid", "host", "state", "method", "seconds", "units", "collective")
    rows = [
        (
            f"{report.role}[{report.rank}]",
            str(report.pid),
            report.host,
            report.state,
            report.beat.method or "-",
            f"{report.beat.seconds:.0f}",
            str(report.beat.done),
            report.collective or "-",
        )
        for report in reports
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    for report in reports:
        last = "" if report.state in ("runs", "silent") else ", as it said last"
        for number, stack in enumerate(report.beat.stacks):
            whose = "stack" if number == 0 else "another thread"
            lines += [f"{report.role}[{report.rank}], {whose}{last}:", show(stack)]
    return "\n".join(lines)


def _all_wait(waiting: list[RankReport], left: list[RankReport]) -> Verdict:
    """Nobody works: in collectives that do not fit together, or in one that does not end."""
    groups: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for report in waiting:
        groups[report.collective or "", _own_place(report)].append(report)
    if left:
        gone = f"; {_ranks(left)} {_have(left)} left the call"
        return Verdict("mismatch", f"{_waits(waiting)}{gone}: not all ranks make it", tuple(left), tuple(waiting))
    if len(groups) > 1:
        said = "; ".join(f"{_ranks(some)} in {name} ({place})" for (name, place), some in groups.items())
        return Verdict("mismatch", f"ranks wait in different collectives: {said}", (), tuple(waiting))
    said = f"all ranks wait in {waiting[0].collective} ({_own_place(waiting[0])}): the network between them"
    return Verdict("together", f"{said}, or a rank of another group", (), tuple(waiting))


def _blamed(
    kind: str, culprits: Sequence[RankReport], reports: Sequence[RankReport], why: Callable[[RankReport], str]
) -> Verdict:
    said = "; ".join(f"{name_of(report)} {why(report)}" for report in culprits[:4])
    if len(culprits) > 4:
        said += f"; {len(culprits) - 4} more"
    others = [report for report in reports if report not in culprits]
    parts = [said, _waits([report for report in others if report.collective], " for it" * (len(culprits) == 1))]
    if done := [report for report in others if report.beat.method is None]:
        parts.append(f"{_ranks(done)} {_have(done)} finished")
    return Verdict(kind, "; ".join(filter(None, parts)), tuple(culprits), tuple(others))


def _waits(reports: Sequence[RankReport], for_whom: str = "") -> str:
    by_name: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        by_name[report.collective or ""].append(report)
    return ", ".join(
        f"{_ranks(some)} {'waits' if len(some) == 1 else 'wait'}{for_whom} in {name}" for name, some in by_name.items()
    )


def name_of(report: RankReport) -> str:
    """With all that finds it."""
    return f"rank {report.rank} of {report.role} (host {report.host}, pid {report.pid})"


def _ranks(reports: Sequence[RankReport]) -> str:
    """`ranks 0, 2 of actor and rank 1 of critic`."""
    by_role: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        by_role[report.role].append(report.rank)
    told = []
    for role, ranks in by_role.items():
        shown = ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
        told.append(f"rank{'s' if len(ranks) > 1 else ''} {shown} of {role}")
    return " and ".join(told)


def _have(reports: Sequence[RankReport]) -> str:
    return "has" if len(reports) == 1 else "have"


def _says_nothing(report: RankReport) -> str:
    place = _users_place(report) or next((stack[0] for stack in report.beat.stacks if stack), None)
    at = f", in {place}" if place else ""
    return f"is there and does not answer (it holds the GIL, or its machine is overloaded){at}"


def _waits_for_helper(report: RankReport) -> str:
    pid, why = report.beat.helper or (0, "")
    return f"waits for its engine's process (pid {pid}), which {_WHY[why]}"


def _stands_at(report: RankReport) -> str:
    if report.beat.awaits is not None:
        return f"waits for {report.beat.awaits}"
    if (place := _users_place(report)) is not None:
        return f"is in the user's function {place}"
    stack = report.beat.stacks[0] if report.beat.stacks else ()
    return f"is in {report.beat.method}, at {_telling(stack)}" if stack else f"is in {report.beat.method}"


def _users_place(report: RankReport) -> Frame | None:
    return next(filter(None, map(users_frame, report.beat.stacks)), None)


def _own_place(report: RankReport) -> str:
    """Where a rank's program, not torch, makes the collective."""
    stack = next((stack for stack in report.beat.stacks if stack), ())
    ours = next((frame for frame in stack if frame.origin != "installed"), None)
    return f"{ours.file}:{ours.line}" if ours else "no place known"


def _telling(stack: Stack) -> Frame:
    """A thread's wait says less than the place that waits."""
    return next((frame for frame in stack if frame.origin != "installed"), stack[0])


def _debugged(stack: Stack) -> bool:
    return any(name in frame.file for frame in stack for name in _DEBUGGERS)
