"""Questions with short answers, between `<answer>` tags: exact match, contained match and F1, as for SQuAD.

Texts are compared after `normalize_text`; an answer must match any one of the golden answers. Text between
`<information>` tags comes from a retriever, not from the model, and is not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from verl.utils.reward_score.extraction import last_tagged, without_tagged
from verl.utils.reward_score.normalize import normalize_text
from verl.utils.reward_score.registry import register_score

normalize_answer = normalize_text  # its name in SQuAD's script


def extract_solution(solution_str: str) -> str | None:
    """The content of the last `<answer>…</answer>`; None without one."""
    return last_tagged(without_tagged(solution_str, "information"), "answer")


def answer_of(ground_truth: Any) -> str:
    """A correct response in the expected format."""
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
    """`score` if the answer is one of the golden ones, `format_score` for any other answer, 0 without one."""
    answer = extract_solution(solution_str)
    golden = golden_answers(ground_truth)
    if answer is None:
        return 0.0
    return score if em_check(answer, golden) else format_score


compute_score = compute_score_em


def compute_score_subem(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` if the answer contains a golden one. Listing everything scores, so use it for validation only."""
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
    """Whether a text equals one of the golden answers after normalisation."""
    text = _comparable(prediction)
    return any(text == _comparable(answer) for answer in golden_answers(golden))


def subem_check(prediction: str, golden: str | Iterable[str]) -> bool:
    """Whether a text contains one of the golden answers as whole words after normalisation."""
    text = f" {_comparable(prediction)} "
    return any(f" {_comparable(answer)} " in text for answer in golden_answers(golden))


def f1_score(prediction: str, golden: str | Iterable[str]) -> float:
    """The F1 (harmonic mean of precision and recall) of words, with the best golden answer."""
    words = Counter(_comparable(prediction).split())
    best = 0.0
    for answer in golden_answers(golden):
        golden_words = Counter(_comparable(answer).split())
        common, total = (words & golden_words).total(), words.total() + golden_words.total()
        best = max(best, 2 * common / total if total else 0.0)
    return best


def golden_answers(ground_truth: Any) -> list[str]:
    """The golden answers of a text, a list of texts, or `{"target": …}`; empty ones are dropped."""
    if isinstance(ground_truth, Mapping):
        ground_truth = ground_truth.get("target", ground_truth.get("golden_answers"))
    is_single = isinstance(ground_truth, str | int | float) or ground_truth is None
    values = [ground_truth] if is_single else ground_truth
    answers = [str(value) for value in values if value is not None and str(value).strip()]
    if not answers:
        raise ValueError("ground_truth: no golden answer. Write a text, a list of texts, or {'target': [texts]}.")
    return answers


def _comparable(text: str) -> str:
    """The normalised text; an answer of only an article or punctuation (`A`, `+`) is kept as it is."""
    return normalize_text(text) or text.strip().lower()
