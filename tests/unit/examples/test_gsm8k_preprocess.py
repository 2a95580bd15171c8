"""The GSM8K script: parquet files in the row schema, ready for RLHFDataset and its reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.tiny import tiny_tokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score, known_data_sources

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "data_preprocess" / "gsm8k.py"
DATA = ROOT.parent / "shared" / "data" / "gsm8k"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_local_files_become_training_rows(tmp_path):
    for split in ("train", "test"):
        rows = [{"question": f"{split} {i}?", "answer": f"So 1,00{i}.\n#### 1,00{i}"} for i in range(3)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = run("--local_save_dir", tmp_path / "out", "--local_dataset_path", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test.parquet: 3 rows" in done.stdout
    assert pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": 'train 1? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1001"},
        "extra_info": {"split": "train", "index": 1, "question": "train 1?", "answer": "So 1,001.\n#### 1,001"},
    }


def test_a_missing_folder_says_where_the_data_comes_from(tmp_path):
    done = run("--local_save_dir", tmp_path, "--local_dataset_path", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "Get it from openai/grade-school-math" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gsm8k (openai/grade-school-math)")
def test_the_real_data_trains_and_every_ground_truth_scores_one(tmp_path):
    assert run("--local_save_dir", tmp_path, "--local_dataset_path", DATA).returncode == 0
    dataset = RLHFDataset(str(tmp_path / "test.parquet"), tiny_tokenizer(), {"max_prompt_length": 2048})
    dataset.validate(data_sources=known_data_sources())
    assert len(dataset) == 1319
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 7473
    for row in pq.read_table(tmp_path / "test.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], row["extra_info"]["answer"], truth) == 1.0
