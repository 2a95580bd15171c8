"""Multiple choice: one letter, stated as `Answer: B`, `\\boxed{B}`, `(B)`, alone at the end, or by the option's text.

The last statement of each kind counts; a statement that names several letters is not an answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.utils.reward_score.extraction import last_boxed, last_match, last_tagged
from verl.utils.reward_score.normalize import normalize_text, strip_layout, unicode_to_latex
from verl.utils.reward_score.registry import register_score

_LETTERS = "ABCDEFGHIJ"
_MAX_CHARACTERS = 300
# Phrases before an answer.
_CUE = re.compile(
    r"(?:\b(?:answer|choice|option)|(?:^|(?<=\bthe ))correct(?: one)?)[*_ \t]{0,8}"
    r"(?:[:：=]|- | (?:is|(?:should|must|would|will) be)\b(?: \w+ly| indeed| therefore| thus)?[:：]?)|答案 ?[:：是]",
    re.IGNORECASE | re.MULTILINE,
)
_CUE_WORDS = ("answer", "choice", "option", "correct", "答案")
_DECISION = re.compile(
    r"\b(?:I|we)(?:'d|'ll|'m| would| will| am)? (?:choose|pick|select|say|go(?:ing)? with)\b|\bthat leaves\b",
    re.IGNORECASE,
)
_DECISION_WORDS = ("I ", "I'", "we ", "we'", "that leaves")
# Phrases after an answer.
_VERDICT = re.compile(
    r"(?<=[A-J)\]\"'*]) (?:is (?:the |our |my |therefore ){0,2}(?:correct|right|best|answer)|fits|matches)\b"
)
_VERDICT_WORDS = (" is ", " fits", " matches")
_LETTER_IN_LAYOUT = r"[(\[\"'*]{0,4}([A-J])[)\]\"'*]{0,4}"
_LETTER_AT_END = re.compile(rf"(?<![\w'/&-]){_LETTER_IN_LAYOUT}$")
_CONCLUSION = re.compile(
    r"(?:^|\b(?i:so|therefore|hence|thus|it(?:'s|\s+is|\s+(?:must|should)\s+be)|option|choice|letter),?\s+)"
    rf"{_LETTER_IN_LAYOUT}(?:[.!]?$|,?\s+(?:because|since)\b)"
)
_ONLY_LETTER = re.compile(rf"{_LETTER_IN_LAYOUT}\.?", re.IGNORECASE)
_DECORATION = re.compile(r"[*_$`{}\"]|\\(?:text|math)(?:bf|rm)?(?![a-z])|\\[()\[\] ]|^\s*[>#-]+\s+")
# A letter, alone or followed by punctuation and the option's text. Prose does not match: there, `a` is a word.
_LETTER = re.compile(
    r"(?:not\s+[A-J],?\s+but\s+)?(?:(?:option|choice|letter)\s+)?[(\[<']?([A-J])"
    r"(?:[)\]>']?\s*$|[)\]>']?\s*[\])>.:;,]+\s*(.*)|\s+-\s+(.*)|\s+\((.*)\)$|\s+(?:because|since|as|is)\s+(.*))",
    re.IGNORECASE,
)
_SEVERAL = re.compile(r"(?:(?:,|/|&|or\b|and\b)\s*)*\(?[A-J](?:\s*$|\s*[.,;:)\]/&+]|\s+(?:or|and)\b)")
_DENIED = re.compile(r"\b(?:wrong|incorrect|false|not|no)\b|n't\b", re.IGNORECASE)
# Words that leave open which letter is the answer.
_UNDECIDED = re.compile(rf"{_DENIED.pattern}|\b(?:or|and|n?either|nor|but|whether|if|none|never)\b", re.IGNORECASE)
_OPTION_LINE = re.compile(r"^[*(\[]{0,3}(?:[Oo]ption )?([A-J])(?:[)\].:]|\s+-\s)", re.MULTILINE)
_IN_BRACKETS = re.compile(r"[(\[]([A-J])[)\]]")


def extract_solution(solution_str: str, choices: Any = None) -> str | None:
    """The letter that a response decides on; None if it names none or several. `choices`: texts of the options."""
    options = _options(choices)
    for statement in (last_tagged(solution_str, "answer"), last_boxed(solution_str)):
        if statement and (letter := _letter_of_statement(statement[:_MAX_CHARACTERS], options)) is not None:
            return letter
    return _letter_after_cue(solution_str, options) or _letter_on_last_line(solution_str, options)


def answer_of(ground_truth: Any) -> str:
    """A correct response in the expected format."""
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
    """`score` for the correct letter, `format_score` for another one, 0 without one.

    `ground_truth` is a letter, or the index of the option. With the options in `extra_info["choices"]` (a list, or
    texts by letter) an answer may also be the text of an option.
    """
    choices = extra_info.get("choices", extra_info.get("options")) if isinstance(extra_info, Mapping) else None
    truth = _truth(ground_truth)
    letter = extract_solution(solution_str, choices)
    if letter is None:
        return 0.0
    return score if letter == truth else format_score


def _letter_after_cue(text: str, options: Mapping[str, str]) -> str | None:
    """The letter of `B is the answer` or `I choose B` after the last `answer is`, else the letter after `answer is`."""
    cue = last_match(_CUE, text, _CUE_WORDS)
    start = cue.start() if cue else 0
    verdict = last_match(_VERDICT, text, _VERDICT_WORDS, start)
    if verdict is not None and (letter := _letter_before_verdict(text, verdict)) is not None:
        return letter
    for match in (last_match(_DECISION, text, _DECISION_WORDS, start), cue):
        statement = text[match.end() : match.end() + _MAX_CHARACTERS].strip().partition("\n")[0] if match else ""
        if (letter := _letter_of_statement(statement, options)) is not None:
            return letter
    return None


def _letter_before_verdict(text: str, verdict: re.Match[str]) -> str | None:
    """The letter before a verdict, unless it is one of several or the sentence denies it."""
    before = text[max(0, verdict.start() - _MAX_CHARACTERS) : verdict.start()]
    after = re.split(r"[.,;!?\n]", text[verdict.end() : verdict.end() + _MAX_CHARACTERS])[0]
    letter = _LETTER_AT_END.search(before)
    if letter is None or _UNDECIDED.search(_last_clause(before[: letter.start()])) or _DENIED.search(after):
        return None
    return letter.group(1)


def _letter_of_statement(statement: str, options: Mapping[str, str]) -> str | None:
    """The letter of a text that should contain only an answer; None if it names none or several."""
    plain = _plain(statement)
    match = _LETTER.match(plain)
    if match is None:
        conclusion = _CONCLUSION.search(plain)
        return conclusion.group(1) if conclusion and not _UNDECIDED.search(plain) else _option_with_text(plain, options)
    letter, *rest = match.groups()
    after = next((text.strip() for text in rest if text), "")
    named = _option_with_text(after, options)
    denied = _DENIED.match(after.removeprefix("is ")) if rest[-1] or after.startswith("is ") else None
    return None if denied or _SEVERAL.match(after) or named not in (None, letter.upper()) else letter.upper()


def _letter_on_last_line(text: str, options: Mapping[str, str]) -> str | None:
    """A letter alone or after `so`, the only letter in brackets, or the text of one option.

    `D. …` does not count if it ends a list of options.
    """
    lines = text.rstrip()[-_MAX_CHARACTERS:].splitlines()
    plain = _plain(lines[-1]) if lines else ""
    if _OPTION_LINE.match(plain) and len(plain) > 3:
        listed = {match.group(1) for match in _OPTION_LINE.finditer(text)} | set(_IN_BRACKETS.findall(plain))
        return _letter_of_statement(plain, options) if len(listed) == 1 else None
    if alone := _ONLY_LETTER.fullmatch(plain):
        return alone.group(1).upper()
    clause = _last_clause(plain)
    if conclusion := _CONCLUSION.search(clause):
        return None if _UNDECIDED.search(clause) else conclusion.group(1)
    bracketed = set(_IN_BRACKETS.findall(plain))
    if len(bracketed) == 1 and not plain.startswith("("):
        return None if _UNDECIDED.search(plain) else bracketed.pop()
    return _option_with_text(plain, options)


def _plain(statement: str) -> str:
    return _DECORATION.sub("", strip_layout(unicode_to_latex(statement))).strip()


def _last_clause(text: str) -> str:
    return re.split(r"[.;!?\n]\s+|,\s+(?=it\b|so\b)", text)[-1].strip()


def _option_with_text(text: str, options: Mapping[str, str]) -> str | None:
    target = normalize_text(text)
    same = [letter for letter, option in options.items() if target and normalize_text(option) == target]
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
