"""The two-step problems of examples/smollm2: right solutions score, splits share nothing, seeds repeat."""

import itertools
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "smollm2"))
from make_data import SHOWN, make, problems
from reward import compute_score


def test_every_solution_scores_1_and_another_number_0():
    for problem in itertools.islice(problems(3, 15), 300):
        assert min(problem.steps) >= 0
        assert eval(problem.question.removeprefix("What is ").removesuffix("?")) == problem.steps[1]
        assert compute_score("two_step", problem.solution, str(problem.steps[1])) == 1
        assert compute_score("two_step", problem.solution + " Or 99.", str(problem.steps[1])) == 0
    assert compute_score("two_step", "I do not know.", "3") == 0


def test_splits_share_no_problem_and_the_same_seed_gives_the_same_files(tmp_path):
    rows = {}
    for folder in ("one", "two"):
        make(tmp_path / folder, train=80, test=20, largest=9, seed=5)
        rows[folder] = [
            pq.read_table(tmp_path / folder / f"{split}.parquet").to_pylist() for split in ("train", "test")
        ]
    assert rows["one"] == rows["two"]
    train, test = ({row["prompt"][-1]["content"] for row in split} for split in rows["one"])
    assert (len(train), len(test)) == (80, 20)
    assert not train & test
    assert not (train | test) & {problem.question for problem in SHOWN}


def test_more_problems_than_there_are_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"--largest 4: .*\b100 rows"):
        make(tmp_path, train=80, test=20, largest=4, seed=5)
