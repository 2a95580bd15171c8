"""Diagnose a hang from the reports of all ranks: one sentence with the culprit and the ranks that wait for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.single_controller.base.heartbeat import RankReport
from verl.utils.stacks import Frame, Stack, show, users_frame

_STATES = {
    "stopped": "is stopped (SIGSTOP)",
    "traced": "is stopped by a debugger",
    "dead": "has died",
    "unreachable": "does not answer, nor does its node",
}
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd", "/debugpy/")
_MAX_NAMED_CULPRITS = 4
_MAX_LISTED_RANKS = 8


@dataclass(frozen=True)
class HangDiagnosis:
    """Why a run makes no progress. `kind` is one of

    - stopped, traced, dead, unreachable, silent: the state of a process (`RankReport.state`);
    - user: a function of the user runs;
    - behind: a rank does not arrive in a collective where others wait;
    - mismatch: ranks wait in different collectives; together: all ranks wait in the same one;
    - idle: no rank works, but the call does not end; alone: all ranks work, none waits;
    - starting: a process or an engine starts; controller: the controller itself; debugged: a debugger is open.
    """

    kind: str
    sentence: str
    culprits: tuple[RankReport, ...] = ()
    waiters: tuple[RankReport, ...] = ()


def diagnose_hang(reports: Sequence[RankReport]) -> HangDiagnosis:
    """Diagnose a hang from the reports of the ranks of all open calls."""
    for state in ("stopped", "traced", "dead", "unreachable"):
        if culprits := [report for report in reports if report.state == state]:
            return _diagnose_culprits(state, culprits, reports, lambda report: _STATES[report.state])
    if culprits := [report for report in reports if report.state == "silent"]:
        return _diagnose_culprits("silent", culprits, reports, _describe_silent)
    for state in ("stopped", "traced"):
        if culprits := [
            report for report in reports if report.heartbeat.helper and report.heartbeat.helper[1] == state
        ]:
            return _diagnose_culprits(state, culprits, reports, _describe_helper)
    busy = [report for report in reports if report.heartbeat.method is not None]
    if any(_in_debugger(stack) for report in busy for stack in report.heartbeat.stacks):
        return HangDiagnosis("debugged", "a debugger is open")
    if not busy:
        sentence = f"{_ranks(reports)} {_have(reports)} nothing to do: a request or its answer was lost"
        return HangDiagnosis("idle", sentence)
    if starting := [report for report in busy if report.heartbeat.activity is not None]:
        return _diagnose_culprits("starting", starting, reports, lambda report: f"is {report.heartbeat.activity}")
    waiting = [report for report in busy if report.collective]
    working = [report for report in busy if not report.collective]
    if waiting and working:
        kind = "user" if any(_user_frame(report) for report in working) else "behind"
        return _diagnose_culprits(kind, working, reports, _describe_position)
    if working:
        slow = [report for report in working if _user_frame(report)] or working
        others = [report for report in reports if report not in slow]
        kind = "user" if _user_frame(slow[0]) else "alone"
        return _diagnose_culprits(kind, slow, [*slow, *others], _describe_position)
    return _diagnose_collectives(waiting, [report for report in reports if report not in busy])


def diagnose_controller(stack: Stack, name: str = "the controller") -> HangDiagnosis:
    """Diagnose a controller that waits for no rank, from the stack of its training thread."""
    if _in_debugger(stack):
        return HangDiagnosis("debugged", "a debugger is open")
    frame = users_frame(stack) or (stack[0] if stack else None)
    if frame is None:
        return HangDiagnosis("controller", f"{name} is in no Python code")
    if frame.origin == "user":
        return HangDiagnosis("user", f"{name} is in the user's function {frame}")
    return HangDiagnosis("controller", f"{name} is in {_relevant_frame(stack)}")


def diagnose_start(role: str, blocked: tuple[str, int, str] | None) -> HangDiagnosis:
    """Diagnose ranks that have not started. `blocked`: (host, pid, state) of a process of Ray that cannot run."""
    late = f"the processes of {role} have not started"
    if blocked is None:
        return HangDiagnosis("starting", late)
    host, pid, state = blocked
    return HangDiagnosis(state, f"{late}: one that Ray has started (host {host}, pid {pid}) {_STATES[state]}")


def slowest_rank(reports: Sequence[RankReport]) -> RankReport | None:
    """Return the only rank that still works while all others wait or have finished; None if there is no such rank."""
    busy = [report for report in reports if report.heartbeat.method is not None and not report.collective]
    return busy[0] if len(busy) == 1 and len(reports) > 1 else None


def report_table(reports: Sequence[RankReport]) -> str:
    """Format all reports: a line per rank, then the stacks, innermost frame first."""
    head = ("rank", "pid", "host", "state", "method", "seconds", "units", "collective")
    rows = [
        (
            f"{report.role}[{report.rank}]",
            str(report.pid),
            report.host,
            report.state,
            report.heartbeat.method or "-",
            f"{report.heartbeat.seconds:.0f}",
            str(report.heartbeat.done),
            report.collective or "-",
        )
        for report in reports
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *rows)]
    for report in reports:
        age = "" if report.state in ("runs", "silent") else ", last known"
        for number, stack in enumerate(report.heartbeat.stacks):
            title = "stack" if number == 0 else "another thread"
            lines += [f"{report.role}[{report.rank}], {title}{age}:", show(stack)]
    return "\n".join(lines)


def rank_name(report: RankReport) -> str:
    """Return rank, role, host and pid."""
    return f"rank {report.rank} of {report.role} (host {report.host}, pid {report.pid})"


def _diagnose_collectives(waiting: list[RankReport], finished: list[RankReport]) -> HangDiagnosis:
    """Diagnose ranks that all wait, in different collectives or in one that does not end, or have `finished`."""
    groups: dict[tuple[str, str], list[RankReport]] = defaultdict(list)
    for report in waiting:
        groups[report.collective or "", _calling_line(report)].append(report)
    if finished:
        sentence = (
            f"{_describe_waiting(waiting)}; {_ranks(finished)} {_have(finished)} finished the call"
            " without entering this collective"
        )
        return HangDiagnosis("mismatch", sentence, tuple(finished), tuple(waiting))
    if len(groups) > 1:
        positions = "; ".join(f"{_ranks(ranks)} in {name} ({place})" for (name, place), ranks in groups.items())
        return HangDiagnosis("mismatch", f"ranks wait in different collectives: {positions}", (), tuple(waiting))
    sentence = (
        f"all ranks wait in {waiting[0].collective} ({_calling_line(waiting[0])}): the network between them may be"
        " interrupted, or they wait for a rank of another group"
    )
    return HangDiagnosis("together", sentence, (), tuple(waiting))


def _diagnose_culprits(
    kind: str, culprits: Sequence[RankReport], reports: Sequence[RankReport], describe: Callable[[RankReport], str]
) -> HangDiagnosis:
    """Build a diagnosis that names the culprits and what the other ranks do meanwhile."""
    named = "; ".join(f"{rank_name(report)} {describe(report)}" for report in culprits[:_MAX_NAMED_CULPRITS])
    if len(culprits) > _MAX_NAMED_CULPRITS:
        named += f"; {len(culprits) - _MAX_NAMED_CULPRITS} more"
    others = [report for report in reports if report not in culprits]
    waiting = [report for report in others if report.collective]
    parts = [named, _describe_waiting(waiting, " for it" * (len(culprits) == 1))]
    if done := [report for report in others if report.heartbeat.method is None]:
        parts.append(f"{_ranks(done)} {_have(done)} finished")
    return HangDiagnosis(kind, "; ".join(filter(None, parts)), tuple(culprits), tuple(others))


def _describe_waiting(reports: Sequence[RankReport], for_whom: str = "") -> str:
    by_name: dict[str, list[RankReport]] = defaultdict(list)
    for report in reports:
        by_name[report.collective or ""].append(report)
    return ", ".join(
        f"{_ranks(group)} {'waits' if len(group) == 1 else 'wait'}{for_whom} in {name}"
        for name, group in by_name.items()
    )


def _ranks(reports: Sequence[RankReport]) -> str:
    """`ranks 0, 2 of actor and rank 1 of critic`."""
    by_role: dict[str, list[int]] = defaultdict(list)
    for report in reports:
        by_role[report.role].append(report.rank)
    texts = []
    for role, ranks in by_role.items():
        more = f" … ({len(ranks)} in all)" if len(ranks) > _MAX_LISTED_RANKS else ""
        listed = ", ".join(map(str, ranks[:_MAX_LISTED_RANKS])) + more
        texts.append(f"rank{'s' if len(ranks) > 1 else ''} {listed} of {role}")
    return " and ".join(texts)


def _have(reports: Sequence[RankReport]) -> str:
    return "has" if len(reports) == 1 else "have"


def _describe_silent(report: RankReport) -> str:
    frame = _user_frame(report) or next((stack[0] for stack in report.heartbeat.stacks if stack), None)
    at = f", in {frame}" if frame else ""
    return f"runs but does not answer (it holds the GIL, or its machine is overloaded){at}"


def _describe_helper(report: RankReport) -> str:
    pid, state = report.heartbeat.helper or (0, "")
    return f"waits for its engine's process (pid {pid}), which {_STATES[state]}"


def _describe_position(report: RankReport) -> str:
    if report.heartbeat.silent_peer is not None:
        return f"waits for {report.heartbeat.silent_peer}"
    if (frame := _user_frame(report)) is not None:
        return f"is in the user's function {frame}"
    stack = report.heartbeat.stacks[0] if report.heartbeat.stacks else ()
    return (
        f"is in {report.heartbeat.method}, at {_relevant_frame(stack)}" if stack else f"is in {report.heartbeat.method}"
    )


def _user_frame(report: RankReport) -> Frame | None:
    return next(filter(None, map(users_frame, report.heartbeat.stacks)), None)


def _calling_line(report: RankReport) -> str:
    """Return the line outside of installed packages that calls the collective."""
    stack = next((stack for stack in report.heartbeat.stacks if stack), ())
    frame = next((frame for frame in stack if frame.origin != "installed"), None)
    return f"{frame.file}:{frame.line}" if frame else "unknown line"


def _relevant_frame(stack: Stack) -> Frame:
    """Return the innermost frame outside of installed packages, which is more informative than a wait in a library."""
    return next((frame for frame in stack if frame.origin != "installed"), stack[0])


def _in_debugger(stack: Stack) -> bool:
    return any(name in frame.file for frame in stack for name in _DEBUGGERS)
