"""The cases of benchmarks/memory_plan.py can be planned, and its results are resumed and compared."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import memory_plan
from _memory_cases import CASES, TINY_CASES

from verl.config import PPOConfig, RMConfig, SFTConfig, load_config

ROOTS = {"train": PPOConfig, "sft": SFTConfig, "rm": RMConfig}


@pytest.mark.parametrize("name", [*CASES, *TINY_CASES])
def test_every_case_is_a_valid_run_on_a_gpu(name, tmp_path):
    case = CASES.get(name) or TINY_CASES[name]
    overrides = [*case.run_overrides(tmp_path), "trainer.device=cuda"]
    config = load_config(None, overrides, check_files=False, root=ROOTS[case.program])
    assert config.trainer.total_training_steps == 2


def test_the_cases_cover_what_the_table_promises():
    assert len(CASES) == 20
    assert {case.program for case in CASES.values()} == {"train", "sft", "rm"}
    assert {case.shape for case in CASES.values()} == {f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b")}
    assert max(case.length for case in CASES.values()) == 32768


def record(case, planned=10.0, measured=10.2, problem=None):
    gb = {"update_actor": planned}
    planned_gb = {"planned_gb": gb, "planned_total_gb": gb | {"train": 5.0}}
    return {
        "case": case,
        "commit": "abc",
        **planned_gb,
        "measured_gb": {"update_actor": measured},
        "host_gb": 4.0,
        "problem": problem,
    }


def test_finished_cases_are_not_repeated_and_failed_ones_are(tmp_path, monkeypatch, capsys):
    out = tmp_path / "results.jsonl"
    memory_plan.append(out, record("tiny"))
    memory_plan.append(out, record("tiny, PPO", problem="failed"))
    with out.open("a") as file:
        file.write('{"case": "tiny, s')  # the machine was lost while it was written
        file.write("\n")
    ran = []
    monkeypatch.setattr(memory_plan, "measure", lambda name, case, limit: ran.append(name) or record(name))
    monkeypatch.setattr("sys.argv", ["memory_plan.py", "--out", str(out), "--cases", *TINY_CASES, "--commit", "def"])
    memory_plan.main()
    assert ran == ["tiny, PPO", "tiny, sft", "tiny, rm"]
    assert {name: result["commit"] for name, result in memory_plan.read_results(out).items()}["tiny, sft"] == "abc"
    assert "4 of 4 device phases" in capsys.readouterr().out


def test_rows_compare_plan_and_measurement():
    rows = memory_plan.table([record("tiny", 10.0, 10.6), record("0.5b", 10.0, 10.4), record("7b", problem="failed")])
    assert [row.get("within") for row in rows if row["phase"] == "update_actor"] == [False, True]
    assert [row["phase"] for row in rows if row["case"] == "7b"] == ["failed"]
    assert memory_plan.summary(rows) == "1 of 2 device phases within 5 % or 0.5 GB"
    assert memory_plan.is_within(100.0, 104.0)
    assert json.dumps(rows)
