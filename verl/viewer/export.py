"""`verl view --export run.html`: one self-contained page with a part of the data, which says what is left out.

The file contains the results of the same queries as the server's, each compressed; the page reads them instead of
sending requests. Scripts and styles are allowed by their hash only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlencode

from verl.utils.disk import atomic_write
from verl.viewer.run import QUERIES, ViewedRun
from verl.viewer.server import STATIC, run_names

MAX_BYTES = 20_000_000
# In an order in which every file follows the files that it imports.
MODULES = (
    "dom.js", "api.js", "chart.js", "health.js", "overview.js", "groups.js", "answer.js", "rows.js", "timeline.js",
    "validation.js", "app.js",
)  # fmt: skip
IMPORT = re.compile(r"^import .*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?=const|function|async function|class)", re.MULTILINE)
# Maximum number of steps with groups and responses (evenly spaced), and of steps with a timeline (the newest).
_MAX_STEPS = 8
_MAX_TIMELINE_STEPS = 20
# Share of the budget that validation responses may use.
_VALIDATION_SHARE = 0.3
_PROMPTS_AT_ONCE = 100


def write_export(runs: Sequence[ViewedRun], path: Path, max_bytes: int = MAX_BYTES) -> int:
    """Write the page; return its size in bytes. Raises ValueError if even the metrics do not fit."""
    content = _Content(max_bytes, reserved=len(_page({}, "")) + 4096)
    summaries = [run.summary() for run in runs]
    names = run_names(summaries)
    content.add("runs?", [{"name": name, **run} for name, run in zip(names, summaries, strict=True)], required=True)
    for number, run in enumerate(runs):
        for query in ("metrics", "config", "events", "health", "series", "validation"):
            content.add(_key(query, run=number), QUERIES[query][0](run), required=True)
    notes = [_add_run(content, number, run, summaries[number], len(runs)) for number, run in enumerate(runs)]
    prefix = [f"{name}: " if len(runs) > 1 else "" for name in names]
    omissions = "Exported file. " + " ".join(f"{p}{note}" for p, note in zip(prefix, notes, strict=True))
    page = _page(content.entries, omissions).encode()
    with atomic_write(path) as file:
        file.write(page)
    return len(page)


_AddDetails: TypeAlias = Callable[["_Content", int, ViewedRun, int, int], bool]
"""Adds the texts of a step as long as the remaining bytes suffice; returns whether all fit."""


class _Content:
    """Compressed results of queries in a page of at most `max_bytes`, of which other parts need `reserved` bytes."""

    def __init__(self, max_bytes: int, reserved: int) -> None:
        self.entries: dict[str, str] = {}
        self.left = max_bytes - reserved
        self._max_bytes = max_bytes

    def add(self, key: str, value: Any, required: bool = False) -> bool:
        """Add a result if it fits; returns whether it does."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        packed = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
        size = len(packed) + len(json.dumps(key)) + 4
        if size > self.left:
            if required:
                limit = f"{self._max_bytes / 1e6:g} MB"
                raise ValueError(f"--export: the metrics of these runs are larger than {limit}. Export fewer runs.")
            return False
        self.entries[key] = packed
        self.left -= size
        return True


def _add_run(content: _Content, number: int, run: ViewedRun, summary: dict[str, Any], runs: int) -> str:
    """Add timelines, validation responses and responses of some steps of a run; return what is left out."""
    budget = content.left // (runs - number)
    end = content.left - budget
    notes = _add_timelines(content, number, run, summary["last_step"] or 0, end)
    uids = [prompt["uid"] for prompt in run.validation()["prompts"]]
    added = _add_validation(content, number, run, uids, max(end, content.left - int(_VALIDATION_SHARE * budget)))
    if added < len(uids):
        notes.append(f"responses to {added} of {len(uids)} validation prompts")
    for name in _STEP_PAGES:
        notes += _add_steps(content, number, run, name, summary["steps"][name], end)
    return f"It contains {'; '.join(notes)}. Search is left out." if notes else "Only search is left out."


def _add_timelines(content: _Content, number: int, run: ViewedRun, last: int, end: int) -> list[str]:
    """Add timelines of the newest steps, until `end` bytes are left; return notes on what is left out."""
    first = last + 1
    for step in range(last, max(-1, last - _MAX_TIMELINE_STEPS), -1):
        timeline = run.timeline(step, step)
        if content.left <= end or not content.add(_key("timeline", run=number, first=step, last=step), timeline):
            break
        first = step
    if first > last:
        return ["no timeline"]
    return [f"timeline of steps {first} to {last}"] if first > 0 else []


def _add_steps(
    content: _Content, number: int, run: ViewedRun, name: str, recorded: Sequence[int], end: int
) -> list[str]:
    """Add some steps with groups, rows or pairs (`name`: the query), until `end` bytes are left; return notes on what
    is left out."""
    query, add_details = QUERIES[name][0], _STEP_PAGES[name]
    steps = [step for step in _spread(recorded, _MAX_STEPS)
             if content.add(_key(name, run=number, step=step), query(run, step))]  # fmt: skip
    partial = []
    for index, step in enumerate(steps):
        share = (content.left - end) // (len(steps) - index)
        if not add_details(content, number, run, step, content.left - share):
            partial.append(step)
    if len(steps) == len(recorded) and not partial:
        return []
    incomplete = f" (only some responses of {', '.join(map(str, sorted(partial)))})" if partial else ""
    return [f"{name} of {len(steps)} of {len(recorded)} steps: {', '.join(map(str, sorted(steps)))}{incomplete}"]


def _add_validation(content: _Content, number: int, run: ViewedRun, uids: Sequence[str], end: int) -> int:
    """Add the responses to validation prompts until `end` bytes are left; return the number of prompts."""
    added = 0
    for start in range(0, len(uids), _PROMPTS_AT_ONCE):
        for uid, responses in run.validation_responses_of(uids[start : start + _PROMPTS_AT_ONCE]).items():
            if content.left <= end or not content.add(_key("validation_answers", run=number, uid=uid), responses):
                return added
            added += 1
    return added


def _add_responses(content: _Content, number: int, run: ViewedRun, step: int, end: int) -> bool:
    """Add the responses of a step, group by group, until `end` bytes are left; returns whether all fit."""
    groups = run.groups(step)
    if not groups["has_responses"]:
        return True
    columns = groups["columns"]
    for uid in (uid for uid, recorded in zip(columns["uid"], columns["recorded"], strict=True) if recorded):
        if content.left <= end or not content.add(_key("group", run=number, step=step, uid=uid), run.group(step, uid)):
            return False
        for sample, response in run.responses(step, uid).items():
            if not content.add(_key("answer", run=number, step=step, uid=uid, sample=sample), response):
                return False
    return True


def _add_details_of(name: str, detail: str) -> _AddDetails:
    """Return a function like `_add_responses` for rows or pairs; `name`, `detail`: queries of a step and an entry."""

    def add(content: _Content, number: int, run: ViewedRun, step: int, end: int) -> bool:
        columns = QUERIES[name][0](run, step)["columns"]
        uids = [uid for uid, recorded in zip(columns["uid"], columns["recorded"], strict=True) if recorded]
        return all(
            content.left > end
            and content.add(_key(detail, run=number, step=step, uid=uid), QUERIES[detail][0](run, step, uid))
            for uid in uids
        )

    return add


_STEP_PAGES: dict[str, _AddDetails] = {
    "groups": _add_responses,
    "rows": _add_details_of("rows", "row"),
    "pairs": _add_details_of("pairs", "pair"),
}


def _spread(steps: Sequence[int], count: int) -> Iterator[int]:
    """Up to `count` steps: the newest, the first, then evenly spaced ones."""
    if len(steps) <= count:
        yield from reversed(steps)
        return
    chosen = [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]
    yield from (chosen[-1], chosen[0], *reversed(chosen[1:-1]))


def _key(query: str, **parameters: Any) -> str:
    """The key of a result; `api.js` builds the same key."""
    return f"{query}?{urlencode(sorted(parameters.items()))}"


def _page(entries: dict[str, str], omissions: str) -> str:
    script = "".join(EXPORT.sub("", IMPORT.sub("", (STATIC / name).read_text())) for name in MODULES)
    style = (STATIC / "style.css").read_text()
    # Names of runs are user data: an unescaped `<` in them could end the script element or begin a comment.
    data = json.dumps({"data": entries, "omissions": omissions}).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )
    page = (STATIC / "index.html").read_text()
    replacements = {
        "<head>": f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="/static/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/static/app.js"></script>': "",
        "</body>": f'<script type="application/json" id="exported">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }  # fmt: skip
    for old, new in replacements.items():
        if old not in page:
            raise AssertionError(f"index.html has no {old}")
        page = page.replace(old, new)
    return page


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
