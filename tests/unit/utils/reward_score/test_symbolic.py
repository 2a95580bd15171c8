"""Symbolic equality: right about mathematics, never hanging, on the main thread and on others."""

from __future__ import annotations

import signal
import threading

import pytest

pytest.importorskip("math_verify", reason="needs math-verify (pip install math-verify)")

from verl.utils.reward_score import math as math_scorer
from verl.utils.reward_score.math import symbolically_equal

SLOW = r"\int_{0}^{1}\int_0^1 \sin(x^3y^2)\cos(e^{x})dxdy"


@pytest.mark.parametrize(
    ("truth", "answer", "equal"),
    [
        ("x^2-1", "(x-1)(x+1)", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", True),
        ("1+2i", "2i+1", True),
        ("4", "2+2", True),
        ("2", "1, 2, 3", False),
        (r"\frac{1}{2^{98}}", r"\frac{7}{2^{98}}", False),
        (r"\frac{1}{2^{98}}", "2^{-98}", True),
        # A part that can be read does not stand for the whole.
        (r"\left(\frac{1}{2},\frac{2}{3}\right)", r"\left(\frac{1}{2},\frac{2}{3}\right)+1", False),
    ],
)
def test_answers_are_compared_as_mathematics(truth, answer, equal):
    assert symbolically_equal(truth, answer) is equal


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^9}}",
        "((9999^{9999})^{9999})^{9999}",
        "x^{1000000000}",
        "100000!",
        "((9!)!)!",
        "(" * 150,
        "{" * 150,
        "(" * 100 + "1" + ")" * 100,
        r"\prod_{k=1}^{100000000} k",
        "1+" * 149 + "1",
    ],
)
def test_monstrous_answers_are_wrong_answers(answer):
    assert symbolically_equal("7", answer) is False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a lost alarm, rung again
def test_time_is_limited_on_the_main_thread_and_the_alarm_is_put_back(monkeypatch):
    monkeypatch.setattr(math_scorer, "CPU_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    assert symbolically_equal("3", SLOW) is False
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert symbolically_equal("3", "1+2") is True


@pytest.mark.slow
def test_on_other_threads_a_process_compares_and_is_replaced_when_it_does_not_answer(monkeypatch):
    results = []

    def compare(*pairs):
        thread = threading.Thread(target=lambda: results.extend(symbolically_equal(*pair) for pair in pairs))
        thread.start()
        thread.join()

    compare(("x^2-1", "(x-1)(x+1)"), ("4", "5"))
    monkeypatch.setattr(math_scorer, "HELPER_SECONDS", 0.0)
    compare(("4", "2+2"))  # no answer in no time
    monkeypatch.setattr(math_scorer, "HELPER_SECONDS", 60.0)
    compare(("4", "2+2"))
    assert results == [True, False, False, True]
