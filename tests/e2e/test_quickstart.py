"""The quick start: its task, its figures, and (outside the CI tier) its learning curve."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples" / "quickstart"), str(ROOT / "examples")]
from plot import Line, text_chart, write_png  # noqa: E402
from run import STEPS, WARM_START_STEPS, environment, tracking_overrides, training_overrides  # noqa: E402
from task import LARGEST, ROWS, SHARE_OF_LOSSES, Problem, make_task, problems, word_tokenizer  # noqa: E402

from tests.support.commands import compose_config  # noqa: E402
from verl.utils.reward_score import default_compute_score  # noqa: E402
from verl.utils.tracking import tracking_folders  # noqa: E402

pytestmark = pytest.mark.processes


def test_right_answers_score_1_and_the_hasty_teachers_mistakes_0():
    rng = random.Random(0)
    for problem in itertools.islice(problems(3), 300):
        shown = problem.demonstration(rng)
        right = shown.endswith(f"#### {problem.result}")
        assert default_compute_score("openai/gsm8k", shown, str(problem.result)) == float(right)
        assert 0 <= problem.result <= 2 * LARGEST
    assert Problem("…", 7, 5, "-").result == 2


def test_losses_are_as_frequent_in_every_split():
    stream = problems(1)
    for split, rows in ROWS.items():
        losses = sum(problem.operator == "-" for problem in itertools.islice(stream, rows))
        spread = (SHARE_OF_LOSSES * (1 - SHARE_OF_LOSSES) / rows) ** 0.5
        assert abs(losses / rows - SHARE_OF_LOSSES) < 3 * spread, split


def test_every_text_survives_the_tokenizer(tmp_path):
    files = make_task(tmp_path, rows={"sft": 50, "train": 20, "val": 10})
    tokenizer = word_tokenizer()
    for row in pq.read_table(files["sft"]).to_pylist():
        for text in row.values():
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    train, val = (set(map(str, pq.read_table(files[name])["prompt"].to_pylist())) for name in ("train", "val"))
    assert not train & val, "validation problems are new"


def test_the_curve_is_drawn(tmp_path):
    lines = [Line("accuracy", [(0, 0.4), (10, 0.9)]), Line("reward", [(1, 0.3), (10, 0.8)])]
    picture = write_png(tmp_path / "curve.png", "curve", lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "100%" in text_chart(lines)


@pytest.mark.slow
def test_the_note_of_a_dead_ray_does_not_keep_the_quick_start_from_its_own(monkeypatch):
    """A killed node leaves its address where `ray.init` looks: the trainer says so, the quick start does not care."""
    start = [sys.executable, "-c", "from verl.trainer.common.ray_cluster import start_ray; start_ray(1)"]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:  # short: sockets lie in it
        (Path(folder) / "ray").mkdir()
        (Path(folder) / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        monkeypatch.setenv("RAY_TMPDIR", folder)
        plain = subprocess.run(start, capture_output=True, text=True, check=False)
        assert "nothing answers at 127.0.0.1:1" in plain.stderr
        started = subprocess.run(start, env=environment(), capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stderr


def test_the_pages_name_the_steps_that_run():
    page = (ROOT / "examples/quickstart/README.md").read_text()
    assert re.findall(r"total_training_steps=(\d+)", page) == [str(STEPS)]
    first_run = (ROOT / "docs/start/first_run.md").read_text()
    assert re.findall(r"(\d+)\s+supervised\s+steps", first_run) == [str(WARM_START_STEPS)]
    assert re.findall(r"(\d+)\s+steps\s+of\s+PPO", first_run) == [str(STEPS)]


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_metrics_lie_beside_the_checkpoints(tmp_path, algo):
    files = {name: tmp_path / name for name in ("train", "val")}
    overrides = training_overrides(algo, files, tmp_path / "start", tmp_path) + tracking_overrides(tmp_path, algo)
    trainer = compose_config(["-m", "verl.trainer.main_ppo", *overrides]).trainer
    assert tracking_folders(trainer) == [tmp_path / algo] == [Path(trainer.default_local_dir)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_quick_start_learns(tmp_path, algo):
    command = [sys.executable, "examples/quickstart/run.py", "--algo", algo, "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    before, after = re.search(r"accuracy (\d+)% before, (\d+)% after", done.stdout).groups()
    assert int(before) < 50
    assert int(after) > 85
    assert (tmp_path / f"{algo}.png").exists()
    assert (tmp_path / algo / "metrics.jsonl").exists()
    assert not (tmp_path / "runs").exists()
