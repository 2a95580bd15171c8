"""Answers made from forms, whose verdict follows from how they were made: what the scorers are measured with.

`<scorer>.txt` holds rows of values and, under `[right …]` or `[wrong …]` with the name of the rows, one form per line.
A right one says the truth, once, in some notation; a wrong one says something else, or the truth among other things.
`<t>` stands for the truth, other names for other values or spellings; every row makes a case of every form.

Of each kind the forms are divided in two by a rule that knows nothing of the scorers: those that a report named come
first, then the others by the SHA-256 of their template; the first half is looked at while a scorer is being mended, the
second is held out. Forms marked `later` are a third part: they were written when the scorers were done, to attack them.

    python -m tests.support.scorer_forms [--part looked-at] [--show] [gsm8k math …]
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
LOOKED_AT, HELD_OUT, LATER = PARTS = ("looked-at", "held-out", "later")
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})|\\n(?![a-z])")
_PLACE = re.compile(r"<([a-z_]+)>")


@dataclass(frozen=True)
class Form:
    """A template, the values to fill it with, and whether what it makes is right."""

    template: str
    rows: list[dict[str, Any]]
    right: bool
    named: bool = False  # a report gave it as an example
    later: bool = False  # written when the scorer was done
    limit: bool = False  # known to be judged wrongly; docs/rewards.md says so

    def place(self) -> tuple[bool, str]:
        return not self.named, hashlib.sha256(self.template.encode()).hexdigest()


@dataclass(frozen=True)
class Case:
    """One answer with its ground truth, and the verdict that it must get."""

    scorer: str
    part: str
    right: bool
    text: str
    truth: Any
    extra_info: Any
    form: Form

    def score(self) -> float:
        told = default_compute_score(SOURCES[self.scorer], self.text, self.truth, self.extra_info)
        return float(told["score"] if isinstance(told, dict) else told)

    def is_judged_well(self) -> bool:
        return (self.score() == 1.0) == self.right


def cases(scorer: str) -> list[Case]:
    """All cases of a scorer, those looked at first."""
    written = forms(scorer)
    made = []
    for right in (True, False):
        first = sorted((form for form in written if form.right is right and not form.later), key=Form.place)
        parts = [(LOOKED_AT if 2 * place < len(first) else HELD_OUT, form) for place, form in enumerate(first)]
        parts += [(LATER, form) for form in written if form.right is right and form.later]
        for part, form in parts:
            for row in form.rows:
                text = _PLACE.sub(lambda found, row=row: row.get(found.group(1), found.group()), form.template)
                truth = row.get("truth", row.get("t"))
                made.append(Case(scorer, part, right, text, truth, row.get("extra"), form))
    return made


def forms(scorer: str) -> list[Form]:
    """The forms of a scorer as they are written down; in a line, `\\n` is a line break and `\\u200b` that character."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    found, kind, name, marks = [], "", "", ""
    for line in Path(__file__).with_name(f"{scorer}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("rows "):
            _, name, row = line.split(" ", 2)
            rows[name].append(json.loads(row))
        elif header := re.fullmatch(r"\[(right|wrong) (\w+)((?: named| later| limit)*)\]", line):
            kind, name, marks = header.groups()
        elif line and not line.startswith("# "):
            template = _ESCAPED.sub(_character, line)
            found.append(Form(template, rows[name], kind == "right", **dict.fromkeys(marks.split(), True)))
    return found


def _character(found: re.Match[str]) -> str:
    return chr(int(found.group(1), 16)) if found.group(1) else "\n"
