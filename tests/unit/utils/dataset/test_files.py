"""Which files are meant: folders by their card or their names, hub names, and what to do without the hub."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from verl.utils.dataset.rows import find_files

CARD = """---
configs:
- config_name: main
  {default}
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*.jsonl
---
# About
"""


def make_set(folder, default="default: true"):
    for name in ("main/train-00000.jsonl", "main/test-00000.jsonl", "other/train.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"prompt": "x"}\n')
    (folder / "README.md").write_text(CARD.format(default=default))


def test_a_card_says_which_files_a_split_has(tmp_path):
    make_set(tmp_path)
    assert find_files(str(tmp_path), "train") == [str(tmp_path / "main" / "train-00000.jsonl")]
    assert find_files(str(tmp_path), "validation") == [str(tmp_path / "main" / "test-00000.jsonl")]
    with pytest.raises(ValueError, match=r"\(train-00000\.jsonl, test-00000\.jsonl\)"):
        find_files(str(tmp_path))


def test_without_a_split_files_outside_of_splits_are_not_preferred(tmp_path):
    for name in ("train.jsonl", "rows.jsonl"):
        (tmp_path / name).write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="several splits"):
        find_files(str(tmp_path))


def test_a_card_with_several_parts_and_no_default_asks_for_the_files(tmp_path):
    make_set(tmp_path, default="")
    with pytest.raises(ValueError, match=r"\bmain, other\b"):
        find_files(str(tmp_path), "train")
    assert find_files(str(tmp_path / "other")) == [str(tmp_path / "other" / "train.jsonl")]


def test_a_hub_name_is_found_where_the_download_command_puts_it(tmp_path):
    snapshot = tmp_path / "hub" / "datasets--org--name" / "snapshots" / "abc"
    make_set(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    code = (
        "from verl.utils.dataset.rows import find_files\n"
        "print(find_files('org/name', 'train'))\n"
        "try: find_files('org/missing', 'train')\n"
        "except ValueError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    found, refused = done.stdout.splitlines()
    assert found == str([str(snapshot / "main" / "train-00000.jsonl")])
    assert "hf download --repo-type dataset org/missing" in refused
