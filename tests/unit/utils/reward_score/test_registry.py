"""The table of reward functions: found by data source, extended by decorator, errors that list what is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verl.utils.reward_score import default_compute_score, known_data_sources, register_score, registry, score_function


@pytest.fixture(autouse=True)
def _only_ours_afterwards():
    before = dict(registry._TABLE)
    yield
    registry._TABLE.clear()
    registry._TABLE.update(before)


def test_functions_are_called_with_the_parameters_they_have():
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
    assert set(registry.users_own()) == {"mine/plain", "mine/all", "mine/other"}


def test_an_unknown_source_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"'openai/gsm8'.*known: .*openai/gsm8k.*Did you mean 'openai/gsm8k'\?.*custom"
    ):
        default_compute_score("openai/gsm8", "#### 1", "1")


def test_a_name_that_is_taken_cannot_be_given_to_another_function():
    def other(solution_str, ground_truth):
        return 0.0

    with pytest.raises(ValueError, match="already scores it"):
        register_score("openai/gsm8k")(other)
    assert score_function("openai/gsm8k").compute("#### 1", "1") == 1.0


def test_every_registered_task_scores_its_own_right_answer():
    truths = {"openai/gsm8k": "72", "gsm8k": "72"}
    for source in known_data_sources():
        function = score_function(source)
        assert function.answer is not None, f"{source}: say how a right answer looks (register_score(answer=…))"
        assert function(source, function.answer(truths[source]), truths[source], {}) == 1.0
        assert function.extract("no answer here") is None


def test_scorer_processes_load_it_without_anything_heavy():
    program = (
        "import sys, verl.utils.reward_score.scorer_process; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
