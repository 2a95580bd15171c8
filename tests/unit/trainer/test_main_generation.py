"""Generation from a file: n answers per row, the same in one run or in pieces, on either engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.tiny import save_tiny_model
from verl.config import ConfigError
from verl.config.names import ROLLOUTS
from verl.trainer.generation import ResponseStore
from verl.trainer.main_generation import main, run_generation
from verl.utils.dataset.problems import DataError
from verl.workers.rollout.engine_host import EngineHost

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {i} + {i % 3}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(i + i % 3)},
    }
    for i in range(7)
]

# The command sets up logging.
pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def prompts(tmp_path):
    pq.write_table(pa.Table.from_pylist([*ROWS, ROWS[0]]), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


@pytest.fixture
def generate(model_path, prompts, tmp_path):
    def run(file="answers.parquet", **changes):
        config = {
            "data": {
                "path": str(prompts),
                "output_path": str(tmp_path / file),
                "batch_size": 3,
                "max_prompt_length": 64,
                "n_samples": 2,
                **changes.pop("data", {}),
            },
            "model": {"path": model_path},
            "rollout": {"max_new_tokens": 8, "ignore_eos": True, **changes},
            "trainer": {"device": "cpu"},
        }
        return pq.read_table(run_generation(config)).to_pylist()

    return run


def test_every_row_gets_n_answers_and_keeps_its_columns(generate, tmp_path):
    rows = generate()
    assert [{name: row[name] for name in ROWS[0]} for row in rows] == [*ROWS, ROWS[0]]
    answers = [answer for row in rows for answer in row["responses"]]
    assert len(answers) == 16
    # Also those to a prompt that comes twice: every answer has noise of its own.
    assert len(set(answers)) == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answers.parquet", "prompts.parquet"]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_in_flight_are_bounded(generate, monkeypatch, batch_size):
    in_flight, submit = [], EngineHost.submit

    def recorded(host, job, rows, partials=None):
        in_flight.append((len(host.jobs[job].unfinished), len(rows)))
        submit(host, job, rows, partials)

    monkeypatch.setattr(EngineHost, "submit", recorded)
    generate(max_num_seqs=2, data={"batch_size": batch_size})
    assert sum(rows for _, rows in in_flight) == 16
    assert max(before for before, _ in in_flight) < 2 * 2


def test_the_error_of_a_failing_engine_ends_generation_and_completed_batches_stay(generate, monkeypatch, tmp_path):
    changes, collect = {"max_new_tokens": 30, "data": {"batch_size": 1}}, EngineHost.collect

    def failing(host, *args):
        reply = collect(host, *args)
        if any((tmp_path / "answers.parquet.parts").glob("0*.parquet")):
            host.rollout.loop.fail(RuntimeError("the device failed"))
        return reply

    expected = generate("whole.parquet", **changes)
    with monkeypatch.context() as patched:
        patched.setattr(EngineHost, "collect", lambda host, *args, **keys: failing(host, *args, *keys.values()))
        with pytest.raises(RuntimeError, match="the device failed"):
            generate(**changes, max_num_seqs=2)
    assert generate(**changes) == expected


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_gives_the_same_answers(generate, monkeypatch):
    expected = generate()
    monkeypatch.setitem(ROLLOUTS, "native", replace(ROLLOUTS["native"], package="torch"))
    assert generate("hosted.parquet") == expected


def test_both_engines_batches_of_any_size_and_either_file_format_give_the_same_answers(generate, prompts, tmp_path):
    expected = [row["responses"] for row in generate()]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in pq.read_table(prompts).to_pylist()))
    other = generate("hf.parquet", name="hf", max_num_seqs=2, data={"batch_size": 1, "path": str(lines)})
    assert [row["responses"] for row in other] == expected


def test_temperature_zero_is_greedy_and_other_seeds_are_other_answers(generate):
    greedy = generate("greedy.parquet", temperature=0)
    assert all(row["responses"][0] == row["responses"][1] for row in greedy)
    assert greedy[0]["responses"] == greedy[7]["responses"]
    assert generate("1.parquet", seed=1) != generate("2.parquet", seed=2)


def test_stop_strings_and_the_first_rows_only(generate):
    (whole,) = generate("whole.parquet", max_new_tokens=30, data={"max_samples": 1, "n_samples": 1})
    stop = next(character for character in whole["responses"][0] if character.isascii())
    (row,) = generate("cut.parquet", max_new_tokens=30, stop=stop, data={"max_samples": 1, "n_samples": 1})
    assert row["responses"][0] == whole["responses"][0][: whole["responses"][0].index(stop) + 1]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_writes_what_a_whole_one_does(generate, prompts, model_path, tmp_path):
    output = tmp_path / "pieces.parquet"
    slow = {"max_num_seqs": 1, "max_new_tokens": 200}
    command = [sys.executable, "-m", "verl.trainer.main_generation", f"data.path={prompts}", f"model.path={model_path}"]
    command += [f"data.output_path={output}", "data.batch_size=1", "data.max_prompt_length=64", "data.n_samples=2"]
    command += ["rollout.ignore_eos=True", "trainer.device=cpu", *(f"rollout.{name}={v}" for name, v in slow.items())]
    killed = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    folder = tmp_path / "pieces.parquet.parts"
    while not list(folder.glob("0*.parquet")):
        assert killed.poll() is None
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    kept = {path.name: path.read_bytes() for path in folder.glob("0*.parquet")}
    assert 0 < len(kept) < 8
    assert not output.exists()
    # What is there is taken as it is: a sign put into it is found in the end.
    pq.write_table(pa.table({"responses": [["kept", "answers"]]}), folder / "000000.parquet")
    rows = generate("pieces.parquet", data={"batch_size": 1}, max_new_tokens=200)
    whole = generate("whole.parquet", data={"batch_size": 1}, max_new_tokens=200)
    assert rows[0]["responses"] == ["kept", "answers"]
    assert rows[1:] == whole[1:]
    assert (
        pq.read_table(pa.BufferReader(kept["000000.parquet"])).column("responses")[0].as_py() == whole[0]["responses"]
    )
    assert not folder.exists()


def test_a_finished_run_is_not_done_again_and_other_settings_are_refused(generate, tmp_path):
    generate()
    before = (tmp_path / "answers.parquet").stat()
    generate(max_num_batched_tokens=64)  # changes no answer
    assert (tmp_path / "answers.parquet").stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ValueError, match=r"(?s)data\.n_samples.*rollout\.temperature"):
        generate(temperature=0.5, data={"n_samples": 1})
    pq.write_table(pa.table({"a": [1]}), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match=r"main_generation"):
        generate("mine.parquet")


def test_settings_that_were_not_stored_count_as_unset(tmp_path):
    output = tmp_path / "out.parquet"
    with ResponseStore(output, {"seed": 1}, 2) as store:
        store.add(1, [["b", "c"]])
    with ResponseStore(output, {"seed": 1, "rollout.quantization": None}, 2) as store:
        assert store.missing() == [0]


def test_answers_are_whole_or_not_there_and_one_run_writes_at_a_time(tmp_path):
    output = tmp_path / "out.parquet"
    with ResponseStore(output, {"seed": 1}, 2) as store:
        store.add(1, [["b", "c"]])
        (store.folder / ".000000.parquet.partial").write_bytes(b"half of it")
        assert store.missing() == [0]
        with (
            pytest.raises(ValueError, match=r"^data\.output_path: .*out\.parquet\. "),
            ResponseStore(output, {"seed": 1}, 2),
        ):
            pass
    with (
        pytest.raises(ValueError, match=r"^data\.output_path: .*out\.parquet\.parts .*\bseed\b"),
        ResponseStore(output, {"seed": 2}, 2),
    ):
        pass
    with ResponseStore(output, {"seed": 1}, 2) as store:
        assert store.missing() == [0]
        store.add(0, [["a"]])
        store.finish(pa.table({"prompt": ["x", "y"]}))
        assert store.finished
    assert pq.read_table(output).to_pylist() == [
        {"prompt": "x", "responses": ["a"]},
        {"prompt": "y", "responses": ["b", "c"]},
    ]


def test_data_that_cannot_be_answered_is_refused_before_the_model_is_loaded(generate, tmp_path):
    with pytest.raises(DataError, match=r"data.max_prompt_length"):
        generate(data={"max_prompt_length": 4})
    with pytest.raises(DataError) as error:
        generate(data={"max_prompt_length": 4, "max_samples": 1})
    assert "more)" not in str(error.value), "the only row"
    with pytest.raises(ConfigError, match=r"'question' .*data\.prompt_key"):
        generate(data={"prompt_key": "question"})
    pq.write_table(pa.table({"prompt": ["x"], "responses": ["y"]}), tmp_path / "answered.parquet")
    with pytest.raises(DataError, match=r"^.*\n1\. data\.path: .*'responses'"):
        generate(data={"path": str(tmp_path / "answered.parquet")})
    assert len(generate(data={"max_prompt_length": 4, "truncation": "left"})) == 8


def test_all_mistakes_of_the_command_are_told_at_once(monkeypatch, capsys, tmp_path):
    given = [
        f"data.path={tmp_path}/nothing.parquet",
        "data.output_path=out.csv",
        "rollout.temperatur=1",
        "model.path=a/b",
    ]
    monkeypatch.setattr(sys, "argv", ["main_generation", *given, "rollout.name=trtllm"])
    with pytest.raises(SystemExit) as caught:
        main()
    told = capsys.readouterr().err
    assert caught.value.code == 2
    for words in ("no such file", "End it in .parquet", "Did you mean rollout.temperature?", "is not installed"):
        assert words in told


def test_a_configuration_from_python_is_checked_too(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.max_model_len"):
        run_generation(
            {
                "data": {"path": str(tmp_path), "output_path": "x.parquet"},
                "model": {"path": "a/b"},
                "rollout": {"max_model_len": 8},
            }
        )
