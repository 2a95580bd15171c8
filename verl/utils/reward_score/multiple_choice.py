"""Multiple choice: one letter, stated as `Answer: B`, `\\boxed{B}`, `(B)`, alone at the end, or by the option's text.

Of several statements of a kind the last counts. One that names several letters is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.utils.reward_score.boxed import last_boxed
from verl.utils.reward_score.qa_em import normalize_answer
from verl.utils.reward_score.registry import register_score
from verl.utils.reward_score.tags import last_tagged

_LETTERS = "ABCDEFGHIJ"
_MOST_CHARACTERS = 300
_NAMED = re.compile(r"\b(?:answer|choice|option)(?:[*_ \t]{0,8}[:：]|[*_ \t]{1,8}is\b[:：]?)", re.IGNORECASE)
_DECORATION = re.compile(r"[*_$`{}]|\\(?:text|math)(?:bf|rm)?(?![a-z])")
# A letter, alone or with a mark behind it and then the option's text: no prose, where `a` is a word.
_LETTER = re.compile(r"(?:(?:option|choice)\s+)?\(?([A-J])(?:\s*$|\s*[.):,]+\s*(.*)|\s+[-–—]\s+(.*))", re.IGNORECASE)
_SEVERAL = re.compile(r"(?:(?:,|&|or\b|and\b)\s*)*\(?[A-J](?:\s*$|\s*[.,;:)/&+]|\s+(?:or|and)\b)")
_ONLY_LETTER = re.compile(r"\(?([A-J])[.)]*", re.IGNORECASE)
_IN_BRACKETS = re.compile(r"\(([A-J])\)")


def extract_solution(solution_str: str, choices: Any = None) -> str | None:
    """The letter that a text settles on; None if it names none, or several at once. `choices`: the options' texts."""
    options = _options(choices)
    for statement in (last_tagged(solution_str, "answer"), last_boxed(solution_str), _named(solution_str)):
        if statement and (letter := _stated(statement[:_MOST_CHARACTERS], options)) is not None:
            return letter
    return _on_last_line(solution_str, options)


def answer_of(ground_truth: Any) -> str:
    """A right answer in the right format."""
    return f"Answer: {_truth(ground_truth)}"


@register_score(
    "multiple_choice",
    "cais/mmlu",
    "mmlu",
    "mmlu_*",
    "TIGER-Lab/MMLU-Pro",
    "Idavidrein/gpqa",
    "gpqa*",
    "allenai/ai2_arc",
    "ai2_arc",
    "arc_*",
    "tau/commonsense_qa",
    "commonsense_qa",
    "openbookqa",
    answer=answer_of,
    extract=extract_solution,
)
def compute_score(
    solution_str: str, ground_truth: Any, extra_info: Any = None, format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right letter, `format_score` for another one, 0 where none is stated.

    `ground_truth` is a letter, or the option's place from 0. With the options in `extra_info["choices"]` (a list, or
    texts by letter) an answer may also be the text of an option.
    """
    choices = extra_info.get("choices", extra_info.get("options")) if isinstance(extra_info, Mapping) else None
    truth = _truth(ground_truth)
    found = extract_solution(solution_str, choices)
    if found is None:
        return 0.0
    return score if found == truth else format_score


def _named(text: str) -> str | None:
    """What follows the last `answer:` or `answer is`, on its line or the next."""
    last = None
    for found in _NAMED.finditer(text):
        last = found.end()
    return None if last is None else text[last : last + _MOST_CHARACTERS].strip().partition("\n")[0]


def _stated(statement: str, options: Mapping[str, str]) -> str | None:
    """The letter of a text that should be an answer and nothing else."""
    plain = _DECORATION.sub("", statement).strip()
    found = _LETTER.match(plain)
    if found is None:
        return _option_with_text(plain, options)
    behind = (found.group(2) or found.group(3) or "").strip()
    return None if _SEVERAL.match(behind) else found.group(1).upper()


def _on_last_line(text: str, options: Mapping[str, str]) -> str | None:
    """A letter alone, or the only one in brackets; not `D. …`, which ends a list of the options."""
    lines = text.rstrip()[-_MOST_CHARACTERS:].splitlines()
    plain = _DECORATION.sub("", lines[-1]).strip() if lines else ""
    alone = _ONLY_LETTER.fullmatch(plain)
    if alone is not None:
        return alone.group(1).upper()
    bracketed = set(_IN_BRACKETS.findall(plain))
    if len(bracketed) == 1 and not plain.startswith("("):
        return bracketed.pop()
    return _option_with_text(plain, options)


def _option_with_text(text: str, options: Mapping[str, str]) -> str | None:
    wanted = normalize_answer(text)
    same = [letter for letter, option in options.items() if wanted and normalize_answer(option) == wanted]
    return same[0] if len(same) == 1 else None


def _options(choices: Any) -> dict[str, str]:
    """Texts by letter, from a list, from texts by letter, or from {"label": […], "text": […]}."""
    if choices is None:
        return {}
    if isinstance(choices, Mapping) and "label" in choices and "text" in choices:
        return {str(label): str(text) for label, text in zip(choices["label"], choices["text"], strict=True)}
    if isinstance(choices, Mapping):
        return {str(label): str(text) for label, text in choices.items()}
    return {letter: str(text) for letter, text in zip(_LETTERS, choices, strict=False)}


def _truth(ground_truth: Any) -> str:
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool) and 0 <= ground_truth < len(_LETTERS):
        return _LETTERS[ground_truth]
    letter = str(ground_truth).strip().strip("().").upper()
    if len(letter) != 1 or letter not in _LETTERS:
        raise ValueError(f"ground_truth {ground_truth!r} is not one of the letters {_LETTERS[0]} to {_LETTERS[-1]}.")
    return letter
