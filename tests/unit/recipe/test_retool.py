"""The tiny ReTool recipe: its task is what it says; the whole of it learns to run code (outside the CI tier)."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from recipe.retool.task import CALL, TAGS, demonstration, make_task
from verl.agent.chat import Chat
from verl.agent.chat_check import check_template
from verl.tools.sandbox_fusion_tools import code_schema
from verl.utils.reward_score import default_compute_score
from verl.utils.tool_calls import get_parser

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("task")
    make_task(made, rows={"sft": 200, "train": 50, "val": 50})
    return made


def test_demonstrations_are_calls_that_the_parser_reads_and_answers_that_the_reward_reads():
    rng, calls = random.Random(0), 0
    for _ in range(300):
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        *said, answer = demonstration(a, b, rng)["messages"]
        if len(said) > 1:
            (call,) = get_parser("hermes").parse(said[1]["content"])[1]
            assert (call.name, call.error) == ("code_interpreter", None)
            assert f"print({a} * {b})" in call.arguments
            assert said[2]["content"] == str(a * b)
            assert default_compute_score("openai/gsm8k", answer["content"], str(a * b)) == 1.0
            calls += 1
    assert 30 < calls < 90


def test_texts_survive_the_tokenizer_and_its_template_can_be_appended_to(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = [
        message["content"] for row in pq.read_table(folder / "sft.parquet").to_pylist() for message in row["messages"]
    ]
    for text in [*texts, *TAGS, 'Traceback:\n  File "main.py", line 1']:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(f"{CALL[0]}37 * 84{CALL[1]}")["input_ids"]) == 7
    (said,) = check_template(Chat(tokenizer, [code_schema("Runs code.").model_dump()]), "strict")
    assert "does not list the tools" in said


def test_problems_of_the_test_are_new(folder):
    read = {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in ("train", "val", "sft")}
    asked = {name: {str(row.get("prompt") or row["messages"][:1]) for row in rows} for name, rows in read.items()}
    assert not asked["val"] & (asked["train"] | asked["sft"])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_a_tiny_model_learns_to_run_code(tmp_path):
    ours = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # its python3 is this one
    done = subprocess.run(
        ["bash", "recipe/retool/run_tiny_cpu.sh"],
        cwd=ROOT,
        env={**os.environ, "PATH": ours, "FOLDER": str(tmp_path / "tiny")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (_, before), (ran, after) = re.findall(r"step \d+\)\s+([\d.]+)%\s+([\d.]+)%", done.stdout)
    assert float(before) < 50
    assert float(ran) > 80
    assert float(after) > 80
