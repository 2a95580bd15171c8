"""The table of reward functions: found by data source, extended by decorator, errors that list what is known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils.reward_score import default_compute_score, known_data_sources, register_score, registry, score_function

DOCS = Path(__file__).parents[4] / "docs/guides/rewards.md"


@pytest.fixture(autouse=True)
def _only_ours_afterwards():
    before = dict(registry.SCORE_FUNCTIONS)
    yield
    registry.SCORE_FUNCTIONS.clear()
    registry.SCORE_FUNCTIONS.update(before)


def test_functions_are_called_with_the_parameters_they_have():
    before = set(registry.user_functions())

    @register_score("mine/plain")
    def plain(solution_str, ground_truth):
        return float(solution_str == ground_truth)

    @register_score("mine/all", "mine/other")
    def everything(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
        return {"score": bonus, "source": data_source, "level": extra_info["level"]}

    assert default_compute_score("mine/plain", "a", "a") == 1.0
    told = default_compute_score("mine/other", "a", "a", {"level": 3}, bonus=0.5)
    assert told == {"score": 0.5, "source": "mine/other", "level": 3}
    assert {"mine/plain", "mine/all", "openai/gsm8k"} <= set(known_data_sources())
    assert set(registry.user_functions()) - before == {"mine/plain", "mine/all", "mine/other"}


def test_an_unknown_source_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"'openai/gsm8'\..*'openai/gsm8k'\?.*custom_reward_function.*\bopenai/gsm8k\b"
    ):
        default_compute_score("openai/gsm8", "#### 1", "1")


def test_a_name_that_is_taken_cannot_be_given_to_another_function():
    def other(solution_str, ground_truth):
        return 0.0

    with pytest.raises(
        ValueError,
        match=r"'openai/gsm8k': verl\.utils\.reward_score\.gsm8k\.compute_score .*custom_reward_function\.path",
    ):
        register_score("openai/gsm8k")(other)
    assert score_function("openai/gsm8k").compute("#### 1", "1") == 1.0


TRUTHS = {
    "gsm8k": "72",
    "math": r"\frac{1}{2}",
    "math_dapo": "34",
    "qa_em": {"target": ["Paris"]},
    "countdown": {"target": 98, "numbers": [44, 19, 35]},
    "multiple_choice": "B",
}


def test_every_registered_task_scores_its_own_right_answer_and_nothing_else():
    for source in known_data_sources():
        function = score_function(source)
        module = function.compute.__module__.rpartition(".")[2]
        if module == "code":  # a right answer is a program, which nobody can make of its tests: test_code.py
            continue
        truth = TRUTHS[module]
        assert function.answer is not None, f"{source}: say how a right answer looks (register_score(answer=…))"
        for text, expected in [(function.answer(truth), 1.0), ("", 0.0), ("no answer here", 0.0)]:
            told = function(source, text, truth, {})
            assert (told["score"] if isinstance(told, dict) else told) == expected, (source, text)
        assert function.extract("no answer here") is None


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("DAPO-17k", "math_dapo"),
        ("aime_2025", "math_dapo"),
        ("aime24", "math_dapo"),
        ("AIME2024", "math_dapo"),
        ("math_dapo_reasoning", "math_dapo"),
        ("searchR1_hotpotqa", "qa_em"),
        ("hotpotqa", "qa_em"),
        ("lighteval/MATH", "math"),
        ("DigitalLearningGmbH/MATH-lighteval", "math"),
        ("HuggingFaceH4/MATH-500", "math"),
        ("countdown", "countdown"),
        ("Jiayi-Pan/Countdown-Tasks-3to4", "countdown"),
        ("TIGER-Lab/MMLU-Pro", "multiple_choice"),
    ],
)
def test_data_sources_that_users_have_are_known(source, module):
    assert score_function(source).compute.__module__ == f"verl.utils.reward_score.{module}"


def test_a_whole_name_goes_before_patterns_and_a_longer_pattern_before_a_shorter():
    for name in ("mine/*", "mine/math/*", "mine/math/one"):
        register_score(name)(lambda solution_str, ground_truth, name=name: {"score": 0.0, "by": name})
        registry.SCORE_FUNCTIONS[name].compute.__qualname__ = name  # three functions, not one registered three times
    told = [default_compute_score(source, "", "")["by"] for source in ("mine/math/one", "mine/math/two", "mine/other")]
    assert told == ["mine/math/one", "mine/math/*", "mine/*"]
    with pytest.raises(ValueError, match=r"(?s)data_source.*'mine'"):
        score_function("mine")


def test_the_selected_function_is_called_as_older_scripts_do():
    from verl.trainer.main_ppo import _select_rm_score_fn

    compute_score = _select_rm_score_fn("openai/gsm8k")
    assert compute_score(solution_str="#### 73", ground_truth="72", format_score=0.1) == 0.1


def test_the_docs_name_every_function_with_data_sources_that_it_scores():
    section = DOCS.read_text().partition("## Built-in functions")[2].partition("\n### ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    sources = {row[0].strip("| `"): re.findall(r"`([^`]+)`", row[3]) for row in rows}
    functions = {source: score_function(source).compute for source in known_data_sources()}
    modules = {source: function.__module__.rpartition(".")[2] for source, function in functions.items()}
    assert set(sources) == set(modules.values())
    assert [name for name, examples in sources.items() if {modules.get(source) for source in examples} != {name}] == []


def test_scorer_processes_load_it_without_anything_heavy():
    program = (
        "import sys, verl.utils.process_pool.fork_server, verl.utils.reward_score.calls\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
