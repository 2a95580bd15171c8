"""Labelled responses for measuring the error rates of the scorers, generated from templates ("forms").

`<scorer>.txt` contains rows of values and, below `[correct …]` or `[wrong …]` with the name of the rows, one form per
line. A correct form states only the ground truth, in some notation; a wrong form states something else, or the ground
truth among other values. `<t>` is replaced by the ground truth, other names by other values or spellings; every row
and form yield one case.

The forms of each label are divided in two halves independently of the scorers: forms from bug reports first, then the
others by the SHA-256 of their template. The first half may be inspected while a scorer is changed (`inspected`), the
second is held out. Forms marked `later` are a third part, written against the finished scorers.

    python -m tests.support.scorer_forms [--part inspected] [--show] [gsm8k math …]
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.reward_score import default_compute_score

SOURCES = {
    "gsm8k": "openai/gsm8k",
    "math": "lighteval/MATH",
    "math_dapo": "math_dapo",
    "qa_em": "hotpotqa",
    "countdown": "countdown",
    "multiple_choice": "mmlu",
}
INSPECTED, HELD_OUT, LATER = PARTS = ("inspected", "held-out", "later")
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})|\\n(?![a-z])")
_PLACEHOLDER = re.compile(r"<([a-z_]+)>")


@dataclass(frozen=True)
class Form:
    """A template, the values to fill it with, and whether the resulting responses are correct."""

    template: str
    rows: list[dict[str, Any]]
    is_correct: bool
    reported: bool = False  # an example from a bug report
    later: bool = False  # written after the scorer was finished
    limit: bool = False  # known to be scored wrongly; documented in docs/guides/rewards.md

    def sort_key(self) -> tuple[bool, str]:
        return not self.reported, hashlib.sha256(self.template.encode()).hexdigest()


@dataclass(frozen=True)
class Case:
    """A response with its ground truth and label."""

    scorer: str
    part: str
    is_correct: bool
    text: str
    truth: Any
    extra_info: Any
    form: Form

    def score(self) -> float:
        result = default_compute_score(SOURCES[self.scorer], self.text, self.truth, self.extra_info)
        return float(result["score"] if isinstance(result, dict) else result)

    def is_scored_correctly(self) -> bool:
        return (self.score() == 1.0) == self.is_correct


def cases(scorer: str) -> list[Case]:
    """All cases of a scorer, the inspected half first."""
    all_forms = forms(scorer)
    result = []
    for is_correct in (True, False):
        first = sorted(
            (form for form in all_forms if form.is_correct is is_correct and not form.later), key=Form.sort_key
        )
        parts = [(INSPECTED if 2 * index < len(first) else HELD_OUT, form) for index, form in enumerate(first)]
        parts += [(LATER, form) for form in all_forms if form.is_correct is is_correct and form.later]
        for part, form in parts:
            for row in form.rows:
                text = _PLACEHOLDER.sub(lambda match, row=row: row.get(match.group(1), match.group()), form.template)
                truth = row.get("truth", row.get("t"))
                result.append(Case(scorer, part, is_correct, text, truth, row.get("extra"), form))
    return result


def forms(scorer: str) -> list[Form]:
    """The forms of a scorer in file order; in a line, `\\n` is a line break and `\\u200b` that character."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    result, label, name, marks = [], "", "", ""
    for line in Path(__file__).with_name(f"{scorer}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("rows "):
            _, name, row = line.split(" ", 2)
            rows[name].append(json.loads(row))
        elif header := re.fullmatch(r"\[(correct|wrong) (\w+)((?: reported| later| limit)*)\]", line):
            label, name, marks = header.groups()
        elif line and not line.startswith("# "):
            template = _ESCAPED.sub(_character, line)
            result.append(Form(template, rows[name], label == "correct", **dict.fromkeys(marks.split(), True)))
    return result


def _character(match: re.Match[str]) -> str:
    return chr(int(match.group(1), 16)) if match.group(1) else "\n"
