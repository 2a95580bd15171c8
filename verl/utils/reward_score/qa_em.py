"""Questions with short answers, between `<answer>` tags: exact match, contained match and F1, as for SQuAD.

Text is compared without case, punctuation and articles (Rajpurkar et al., arXiv 1606.05250), but for the point and the
sign of a number; any of the golden answers will do. What a retriever put between `<information>` tags is not of the
model and is not searched.
"""

from __future__ import annotations

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from verl.utils.reward_score.marked import last_tagged, without_tagged
from verl.utils.reward_score.registry import register_score

_PUNCTUATION = str.maketrans("", "", string.punctuation.replace(".", "").replace("-", ""))
# A decimal point and the sign of a number mean something: 3.5 is not 35, nor -5.
_POINT = re.compile(r"\.(?!\d)|(?<=[^\W\d])\.")
_HYPHEN = re.compile(r"(?<=\w)-|-(?!\.?\d)")
_LAYOUT = re.compile(r"\\(?:boxed|fbox|mbox|text[a-z]{0,2}|math[a-z]{2})(?=\s*\{)|</?[a-z]{1,8}>")
_MINUS = re.compile(r"(?<!\w)[−–](?=\.?\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def extract_solution(solution_str: str) -> str | None:
    """What stands in the last `<answer>…</answer>`; None without one."""
    return last_tagged(without_tagged(solution_str, "information"), "answer")


def answer_of(ground_truth: Any) -> str:
    """A right answer in the right format."""
    return f"<answer>{golden_answers(ground_truth)[0]}</answer>"


@register_score(
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "searchR1_*",
    "hotpotqa_*",
    "hotpotqa/hotpot_qa",
    "RUC-NLPIR/FlashRAG_datasets",
    "rajpurkar/squad*",
    "squad*",
    answer=answer_of,
    extract=extract_solution,
)
def compute_score_em(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` where the answer is one of the golden ones, `format_score` for any other answer, 0 without one."""
    answer = extract_solution(solution_str)
    golden = golden_answers(ground_truth)
    if answer is None:
        return 0.0
    return score if em_check(answer, golden) else format_score


compute_score = compute_score_em


def compute_score_subem(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """The same, where the answer need only contain a golden one. Listing everything scores: use it to validate."""
    answer = extract_solution(solution_str)
    golden = golden_answers(ground_truth)
    if answer is None:
        return 0.0
    return score if subem_check(answer, golden) else format_score


def compute_score_f1(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` times the best F1 of words with a golden answer, at least `format_score`; 0 without an answer."""
    answer = extract_solution(solution_str)
    golden = golden_answers(ground_truth)
    if answer is None:
        return 0.0
    return max(format_score, score * f1_score(answer, golden))


def em_check(prediction: str, golden: str | Iterable[str]) -> bool:
    """Whether a text equals one of the golden answers, normalised."""
    found = _comparable(prediction)
    return any(found == _comparable(one) for one in golden_answers(golden))


def subem_check(prediction: str, golden: str | Iterable[str]) -> bool:
    """Whether a text contains one of the golden answers as whole words, normalised."""
    found = f" {_comparable(prediction)} "
    return any(f" {_comparable(one)} " in found for one in golden_answers(golden))


def f1_score(prediction: str, golden: str | Iterable[str]) -> float:
    """The harmonic mean of precision and recall of words, with the golden answer where it is highest."""
    found = Counter(_comparable(prediction).split())
    best = 0.0
    for one in golden_answers(golden):
        wanted = Counter(_comparable(one).split())
        common, total = (found & wanted).total(), found.total() + wanted.total()
        best = max(best, 2 * common / total if total else 0.0)
    return best


def normalize_answer(s: str) -> str:
    """Lower case, without punctuation, articles and layout, one space between words; Unicode in its plainest form."""
    text = s.lower()
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _MINUS.sub("-", text)).casefold()
        text = "".join(filter(_is_read, text))
    if "\\" in text or "<" in text:
        text = _LAYOUT.sub("", text)
    text = _HYPHEN.sub("", _POINT.sub("", text.translate(_PUNCTUATION)))
    return " ".join(_ARTICLES.sub(" ", text).split())


def golden_answers(ground_truth: Any) -> list[str]:
    """The right answers, written as one text, a list of them, or `{"target": …}`; empty ones are left out."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", ground_truth.get("golden_answers"))
    given = [ground_truth] if isinstance(ground_truth, str | int | float) or ground_truth is None else ground_truth
    answers = [str(one) for one in given if one is not None and str(one).strip()]
    if not answers:
        raise ValueError("ground_truth: no golden answer. Write a text, a list of texts, or {'target': [texts]}.")
    return answers


@functools.lru_cache(maxsize=4096)
def _is_read(character: str) -> bool:
    """Whether a character is more than punctuation or an invisible mark."""
    return character.isascii() or unicodedata.category(character)[0] not in "PC"


def _comparable(text: str) -> str:
    """Normalised; but an answer that is nothing else than an article or punctuation (`A`, `+`) stays what it is."""
    return normalize_answer(text) or text.strip().lower()
