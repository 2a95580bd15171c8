"""Mistakes in data, code, tools, device and model name are reported before Ray starts: each with place and remedy."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config import ConfigError, GenerationConfig, PPOConfig, RMConfig, SFTConfig, load_config
from verl.trainer.common import file_preview, preflight
from verl.utils import fs
from verl.utils.dataset import rows as rows_module

TURNS = "actor_rollout_ref.rollout.multi_turn"
SYNTAX = "def compute_score(solution_str, ground_truth)\n    return 1.0\n"


def row(number, **changes):
    whole = {
        "prompt": [{"role": "user", "content": f"question {number}"}],
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }
    return {name: value for name, value in (whole | changes).items() if value is not None}


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def written(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """The problems of a run whose configuration is right but for these overrides."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    good = parquet(tmp_path / "good.parquet", [row(number) for number in range(8)])
    monkeypatch.setenv("RAY_ADDRESS", "local")

    def found(*overrides, check=preflight.ppo_preflight, root=PPOConfig):
        base = [f"data.train_files={good}", f"actor_rollout_ref.model.path={model}", "data.train_batch_size=4"]
        base += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.mode=async"]
        if root is not PPOConfig:
            base = [f"data.train_files={good}", f"model.path={model}", "data.train_batch_size=4"]
        if root is GenerationConfig:
            base = [f"data.path={good}", f"data.output_path={tmp_path}/out.parquet", f"model.path={model}"]
        try:
            load_config({}, [*base, *overrides], root=root, preflight=check)
        except ConfigError as error:
            return {problem.key: str(problem) for problem in error.problems}
        return {}

    return found


def test_a_correct_configuration_has_no_problem_and_loads_no_heavy_package(problems):
    assert problems() == {}


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_a_missing_column_names_file_row_key_and_columns(tmp_path, problems, name):
    rows = [{"question": "1 + 1", "answer": "2"}] * 4
    file = tmp_path / name
    if name.endswith("parquet"):
        parquet(file, rows)
    else:
        written(file, "".join(json.dumps(each) + "\n" for each in rows))
    text = problems(f"data.train_files={file}")["data.train_files"]
    assert str(file) in text


def test_all_problems_of_a_file_are_listed(tmp_path):
    file = parquet(tmp_path / "a.parquet", [{"question": "1 + 1", "answer": "2"}] * 4)
    with pytest.raises(ConfigError) as error:
        load_config(
            {}, [f"data.train_files={file}", f"actor_rollout_ref.model.path={tmp_path}"], root=PPOConfig,
            preflight=preflight.ppo_preflight,
        )  # fmt: skip
    told = [str(problem) for problem in error.value.problems if problem.key == "data.train_files"]
    assert [f"{file} row 0 (and 3 more rows)" in text for text in told] == [True] * 3
    for text, option in zip(told, ("prompt_key", "reward_fn_key", "ground_truth_key"), strict=True):
        assert f"data.{option}" in text
        assert text.endswith("Columns: question, answer.")


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", "", "0 bytes"),
        ("a.parquet", "", "0 bytes"),
        ("a.jsonl", "\n\n", "the file has no rows"),
        ("a.jsonl", json.dumps(row(1)) + '\n{"prompt": \n', "a.jsonl line 2"),
        ("a.json", '[{"prompt": 1},]', "a.json: not valid JSON"),
        ("a.parquet", "not parquet at all", "a.parquet: it cannot be read"),
        ("a.csv", "prompt\n", "a.csv: "),
        ("a.jsonl", json.dumps(row(1)) + "\n" + "[" * 100_000 + "\n", "a.jsonl line 2: not valid JSON"),
        ("a.json", '[{"prompt": ' + "[" * 100_000, "a.json: not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, problems, name, content, place):
    text = problems(f"data.train_files={written(tmp_path / name, content)}")["data.train_files"]
    assert place in text


def test_a_file_without_rows_and_a_wrong_validation_file(tmp_path, problems):
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    wrong = parquet(tmp_path / "val.parquet", [row(1, data_source="openai/gsm8")])
    told = problems(f"data.train_files={empty}", f"data.val_files={wrong}")
    assert f"{empty}: the file has no rows" in told["data.train_files"]
    assert "Did you mean 'openai/gsm8k'?" in told["data.val_files"]
    assert told["data.val_files"].index("custom_reward_function.path") < told["data.val_files"].index("Known:")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"], "data.train_batch_size"),
        (["data.train_max_samples=3"], "data.train_batch_size"),
        (["algorithm.filter_groups.enable=True", "data.gen_batch_size=12"], "data.gen_batch_size"),
    ],
)
def test_a_batch_larger_than_the_dataset(problems, overrides, key):
    assert "or less, or use more data" in problems("algorithm.adv_estimator=grpo", *overrides)[key]


def test_large_files_are_checked_by_their_first_rows(tmp_path, problems, monkeypatch):
    monkeypatch.setattr(file_preview, "ReadBudget", partial(file_preview.ReadBudget, rows=2))
    many = [*(row(number) for number in range(5)), row(5, data_source="no such")]
    file = parquet(tmp_path / "many.parquet", many)
    lines = written(tmp_path / "many.jsonl", "".join(json.dumps(each) + "\n" for each in many[:3]) + "not json\n")
    assert problems(f"data.train_files={file}") == {}
    assert "data.train_batch_size" in problems(f"data.train_files={file}", "data.train_batch_size=16")
    assert problems(f"data.train_files={lines}") == {}
    bad = parquet(tmp_path / "bad.parquet", [row(number, data_source="no such") for number in range(5)])
    assert "'no such'" in problems(f"data.train_files={bad}")["data.train_files"]


def test_a_column_that_pyarrow_cannot_convert_is_reported_with_its_row(tmp_path, problems):
    text = pa.array([b"gsm8k", b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.Table.from_pylist([row(0), row(1)])
    pq.write_table(table.drop_columns("data_source").append_column("data_source", text), tmp_path / "a.parquet")
    told = problems(f"data.train_files={tmp_path}/a.parquet", "data.train_batch_size=2")["data.train_files"]
    assert "a.parquet row 1: it cannot be read" in told
    lists = parquet(tmp_path / "b.parquet", [row(number, data_source=["openai/gsm8k"]) for number in range(4)])
    assert "'data_source' is a list, not a string" in problems(f"data.train_files={lists}")["data.train_files"]


def test_the_rows_and_bytes_of_all_files_of_a_key_are_limited(tmp_path, problems, monkeypatch):
    """Six files of 6 MB: every row is parsed once, and only 8 MB of them; lines are counted for the batch size."""
    parsed = []

    def count(line, where):
        parsed.append(len(line))
        return original(line, where)

    original = rows_module.json_object
    monkeypatch.setattr(file_preview, "json_object", count)
    line = json.dumps(row(0, notes="x" * 6000)) + "\n"
    files = [written(tmp_path / f"{number}.jsonl", line * 1000) for number in range(6)]
    assert problems(f"data.train_files=[{','.join(map(str, files))}]") == {}
    assert 7 * 1024**2 < sum(parsed) <= 8 * 1024**2
    keys = ["data.train_batch_size=6001", "actor_rollout_ref.actor.ppo_mini_batch_size=6001"]
    told = problems(f"data.train_files=[{','.join(map(str, files))}]", *keys, "algorithm.adv_estimator=grpo")
    assert "have only 6000 rows" in told["data.train_batch_size"]


def test_a_small_file_leaves_its_share_to_the_next_one(tmp_path):
    small = parquet(tmp_path / "a.parquet", [row(0)])
    large = parquet(tmp_path / "b.parquet", [row(number) for number in range(40)])
    lines = written(tmp_path / "c.jsonl", "".join(json.dumps(row(number)) + "\n\n" for number in range(40)))
    budget = file_preview.ReadBudget(3, rows=21)
    previews = [file_preview.read_preview(str(file), budget) for file in (small, large, lines)]
    assert [(len(preview.rows), preview.row_count) for preview in previews] == [(1, 1), (10, 40), (10, 80)]
    assert previews[2].rows.where(9) == f"{lines} line 19"
    empty = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    assert len(file_preview.read_preview(str(empty), file_preview.ReadBudget(1)).rows) == 0


def test_lines_that_are_not_counted_leave_the_number_of_rows_unknown(tmp_path):
    file = written(tmp_path / "a.jsonl", (json.dumps(row(0)) + "\n") * 10)
    assert file_preview.read_preview(str(file), file_preview.ReadBudget(1, rows=2, counted=10)).row_count is None
    short = written(tmp_path / "b.jsonl", '{"prompt": 1}\n' * 3)
    preview = file_preview.read_preview(str(short), file_preview.ReadBudget(1, size=30))
    assert (len(preview.rows), preview.row_count) == (2, 3)


def test_an_own_dataset_is_not_checked(tmp_path, problems):
    source = written(tmp_path / "mine.py", "class Mine:\n    pass\n")
    data = written(tmp_path / "data.csv", "anything\n")
    custom = [f"data.custom_cls.path={source}", "data.custom_cls.name=Mine", f"data.train_files={data}"]
    assert problems(*custom, "data.train_batch_size=64") == {}
    assert "Correct the name" in problems(*custom, "data.custom_cls.name=Mine2")["data.custom_cls.path"]


def test_rows_of_other_trainers_need_no_data_source_with_an_own_reward_function(tmp_path, problems):
    file = parquet(tmp_path / "a.parquet", [{"prompt": "1 + 1", "answer": "2"}] * 4)
    source = written(tmp_path / "r.py", "def compute_score(solution_str, ground_truth):\n    return 1.0\n")
    assert problems(f"data.train_files={file}", f"custom_reward_function.path={source}") == {}
    named = problems(f"data.train_files={file}", f"custom_reward_function.path={source}", "data.reward_fn_key=level")
    assert "the column 'level' does not exist" in named["data.train_files"], "a column that the user named"


def test_rows_of_an_own_agent_loop_need_no_reward_function(tmp_path, problems):
    file = parquet(tmp_path / "a.parquet", [{"prompt": "1 + 1"}] * 4)
    source = written(tmp_path / "loops.py", "class Mine:\n    pass\n")
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert problems(f"data.train_files={file}", f"{loop}={source}:Mine") == {}
    assert f"{loop}" in problems(f"data.train_files={file}", f"{loop}={source}:Other")
    named = parquet(tmp_path / "b.parquet", [{"prompt": "1 + 1", "agent_name": "mine"}] * 4)
    assert problems(f"data.train_files={named}") == {}
    ours = parquet(tmp_path / "c.parquet", [{"prompt": "1 + 1", "agent_name": "tool_agent"}] * 4)
    assert "data.train_files" in problems(f"data.train_files={ours}")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (SYNTAX, "reward.py line 1: not valid Python"),
        ("x = 1\nreturn x\n", "reward.py line 2: not valid Python"),
        ("import no_such_module_anywhere\n", "reward.py line 1: there is no module 'no_such_module_anywhere'"),
        ("import verl.utils.import_utils\nimport no_such_module_anywhere\n", "reward.py line 2: there is no module"),
        ("def score(solution_str, ground_truth):\n    return 1.0\n", "It defines: score"),
    ],
)
def test_a_reward_file_that_cannot_be_loaded(tmp_path, problems, text, place):
    path = written(tmp_path / "reward.py", text)
    assert place in problems(f"custom_reward_function.path={path}")["custom_reward_function.path"]


def test_a_syntax_error_is_reported_in_the_file_that_contains_it(tmp_path, problems, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path / "preflight_helper.py", "from preflight_deeper import x\n")
    deeper = written(tmp_path / "preflight_deeper.py", "x = (1,\n\n")
    path = written(
        tmp_path / "reward.py", "import preflight_helper\n\ndef compute_score(solution_str, ground_truth): ...\n"
    )
    text = problems(f"custom_reward_function.path={path}")["custom_reward_function.path"]
    assert f"{deeper} line 1" in text
    assert "reward.py" not in text


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import no_such_module_anywhere\nexcept ImportError:\n    pass\ndef compute_score(a): ...\n",
        "from json import *\n",
        "globals()['compute_score'] = print\n",
        "from os.path import join as compute_score\nimport xml.etree.ElementTree\n",
        "if True:\n    compute_score = lambda solution_str, ground_truth: 1.0\n",
        "import os, sys\nsys.path.insert(0, os.path.dirname(__file__))\nimport preflight_near\n"
        "compute_score = preflight_near.score\n",
        "from sys import path\npath.append('folder')\nimport preflight_near\ncompute_score = preflight_near.score\n",
        "import preflight_paths\nimport preflight_near\ncompute_score = preflight_near.score\n",
        "for name in ('compute_score',):\n    vars()[name] = print\n",
        "locals()['compute_score'] = print\n",
        "import sys\nsys.modules[__name__].compute_score = print\n",
        "def build():\n    global compute_score\n    compute_score = print\nbuild()\n",
        "from preflight_marked import score as compute_score\n",
        "from preflight_latin import score as compute_score\n",
    ],
)
def test_what_only_running_a_file_can_tell_is_no_problem(tmp_path, problems, monkeypatch, text):
    folder = tmp_path / "importable"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    written(folder / "preflight_paths.py", "import sys\nsys.path.append('another folder')\n")
    (folder / "preflight_marked.py").write_bytes(b"\xef\xbb\xbfdef score(solution_str, ground_truth): ...\n")
    latin = "# -*- coding: latin-1 -*-\nUNIT = 'é'\ndef score(solution_str, ground_truth): ...\n"
    (folder / "preflight_latin.py").write_bytes(latin.encode("latin-1"))
    assert problems(f"custom_reward_function.path={written(tmp_path / 'reward.py', text)}") == {}


def test_a_function_inside_a_class_is_named_with_a_dot(tmp_path, problems):
    path = written(tmp_path / "reward.py", "class Scorer:\n    def score(solution_str, ground_truth): ...\n")
    keys = [f"custom_reward_function.path={path}", "custom_reward_function.name="]
    assert problems(keys[0], keys[1] + "Scorer.score") == {}
    assert "It defines: Scorer" in problems(keys[0], keys[1] + "Scorers.score")["custom_reward_function.path"]


@pytest.mark.parametrize(
    ("text", "key", "place"),
    [
        ("- class_name: a.B\n", f"{TURNS}.tool_config_path", "Begin it with 'tools:'"),
        ("tools:\n  - class_name: [a.B\n    config: {}\n", f"{TURNS}.tool_config_path", "line 3, column 11"),
        ("tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTol\n", "tools[0].class_name", "Gsm8kTool"),
        ("tools:\n  - class_name: verl.tools.gsm8k_tol.Gsm8kTool\n", "tools[0].class_name", "no module"),
        ("tools:\n  - class_name: {folder}/mine.py:Tol\n", "tools[0].class_name", "It defines: Tool"),
    ],
)
def test_a_wrong_tool_file_is_reported_with_file_and_key(tmp_path, problems, text, key, place):
    written(tmp_path / "mine.py", "class Tool:\n    pass\n")
    path = written(tmp_path / "tools.yaml", text.replace("{folder}", str(tmp_path)))
    told = problems(f"{TURNS}.enable=True", f"{TURNS}.tool_config_path={path}")
    (problem,) = told.values()
    assert key in problem
    assert str(path) in problem
    assert place in problem


@pytest.mark.parametrize(
    ("text", "is_problem"),
    [
        ("def add(a: int, b: int) -> int:\n    return a + b\n", True),
        ("from verl.tools.function_tool import function_tool\ndef add(a: int) -> int:\n    return a\n", True),
        ("from verl.tools.function_tool import function_tool as t\n@t\ndef add(a: int) -> int:\n    return a\n", False),
        ("import verl.tools.function_tool as f\nadd = f.function_tool(lambda: 1)\n", False),
        ("from preflight_tools import add\n", False),
        ("import json, re\nfrom verl.tools import function_tool\ndef add(a: int) -> int:\n    return a\n", True),
        ("from preflight_package import search\ndef helper(): ...\n", False),
        ("from sympy import simplify\ndef helper(): ...\n", False),
        ("try:\n    from preflight_tools import add\nexcept ImportError:\n    pass\ndef helper(): ...\n", False),
        ("import sys\nif sys.version_info > (3,):\n    import preflight_tools as p\n    add = p.add\n", False),
    ],
)
def test_a_file_of_tools_without_a_decorated_function(tmp_path, problems, monkeypatch, text, is_problem):
    monkeypatch.syspath_prepend(tmp_path)
    marked = (
        "from verl.tools.function_tool import function_tool\n@function_tool\ndef add(a: int) -> int:\n    return a\n"
    )
    written(tmp_path / "preflight_tools.py", marked)
    (tmp_path / "preflight_package").mkdir()
    written(tmp_path / "preflight_package" / "__init__.py", "from .impl import search\n")
    written(tmp_path / "preflight_package" / "impl.py", marked.replace("add", "search"))
    path = written(tmp_path / "tools.py", text)
    told = problems(f"{TURNS}.enable=True", f"{TURNS}.function_tool_path={path}")
    assert list(told) == ([f"{TURNS}.function_tool_path"] if is_problem else [])


def test_a_gpu_that_is_not_there(problems, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "trainer.device=cpu" in problems("trainer.device=cuda")["trainer.device"]
    assert "trainer.device" in problems("trainer.device=cuda", check=preflight.basic_preflight)
    sft = {"check": preflight.supervised_preflight, "root": SFTConfig}
    assert "trainer.device" in problems("trainer.device=cuda", "data.prompt_key=data_source", **sft)
    assert "trainer.device" not in problems("trainer.device=cuda", "trainer.nnodes=2")
    with monkeypatch.context() as changed:
        changed.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert "trainer.device" not in problems("trainer.device=cuda")
    # A program that has called ray.init("10.0.0.1:6379") itself.
    joined = ModuleType("ray")
    joined.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "ray", joined)
    assert "trainer.device" not in problems("trainer.device=cuda")


@pytest.fixture
def silent_hub(monkeypatch, tmp_path):
    """An address that accepts connections and never answers, as the hub; an empty cache."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(fs, "HUB_TIMEOUT_S", 0.2)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield tmp_path / "cache"


def test_an_unreachable_hub_is_tried_once(problems, silent_hub):
    start = time.monotonic()
    text = problems("actor_rollout_ref.model.path=some-org/some-model")["actor_rollout_ref.model.path"]
    assert "cannot be reached" in text
    assert "hf download some-org/some-model" in text
    assert time.monotonic() - start < 30


def test_the_hub_is_requested_while_the_other_checks_run(problems, monkeypatch):
    """The request is answered only after another check has begun: in sequence, it would fail."""
    begun = threading.Event()
    code = preflight.check_user_code
    monkeypatch.setattr(preflight, "check_user_code", lambda *given: (begun.set(), code(*given)))
    monkeypatch.setattr(
        preflight, "find_hub_problems", lambda repos: dict.fromkeys(repos, "ok" if begun.wait(20) else "not concurrent")
    )
    text = problems("actor_rollout_ref.model.path=some-org/some-model")["actor_rollout_ref.model.path"]
    assert text.endswith("ok")


def test_a_cached_model_needs_no_hub(problems, silent_hub):
    from huggingface_hub import constants

    (silent_hub / "models--some-org--some-model" / "snapshots" / "0").mkdir(parents=True)
    assert problems("actor_rollout_ref.model.path=some-org/some-model") == {}
    assert (os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE) == ("1", True)
    assert "not in" in problems("actor_rollout_ref.model.path=some-org/other")["actor_rollout_ref.model.path"]


def test_the_other_programs_check_their_own_columns(tmp_path, problems):
    wrong = parquet(tmp_path / "wrong.parquet", [{"question": "1 + 1", "answer": "2"}] * 2)
    supervised = preflight.supervised_preflight
    sft = problems(f"data.train_files={wrong}", check=supervised, root=SFTConfig)
    assert "data.response_key" in sft["data.train_files"]
    rm = problems(f"data.train_files={wrong}", check=supervised, root=RMConfig)
    assert "data.rejected_key" in rm["data.train_files"]
    assert "data.train_batch_size" in rm
    generation = problems(f"data.path={wrong}", check=preflight.generation_preflight, root=GenerationConfig)
    assert "data.prompt_key" in generation["data.path"]


def test_generation_without_prompts_and_model_names_the_keys(problems):
    missing = problems("data.path=null", "model.path=null", check=preflight.generation_preflight, root=GenerationConfig)
    assert set(missing) == {"data.path", "model.path"}


@pytest.mark.processes
def test_many_mistakes_at_once_end_with_2_and_without_ray(tmp_path):
    """The command itself: every mistake in one list at the end of its output; torch and ray are never imported."""
    data = parquet(tmp_path / "a.parquet", [{"question": "1 + 1"}] * 4)
    val = written(tmp_path / "val.jsonl", json.dumps(row(1)) + "\nnot json\n")
    reward = written(tmp_path / "reward.py", SYNTAX)
    tools = written(tmp_path / "tools.yaml", "tools:\n  - class_name: verl.tools.gsm8k_tool.Gsm8kTol\n")
    functions = written(tmp_path / "functions.py", "def add(a: int) -> int:\n    return a\n")
    arguments = {
        "data.train_files": data,
        "data.val_files": val,
        "data.train_batch_size": 64,
        "actor_rollout_ref.model.path": tmp_path,
        "algorithm.adv_estimator": "dpo",
        "custom_reward_function.path": reward,
        f"{TURNS}.enable": True,
        f"{TURNS}.tool_config_path": tools,
        f"{TURNS}.function_tool_path": functions,
        "trainer.experiment_name": "../../x",
        "trainer.device": "cuda",
    }
    program = (
        "import sys\nfrom verl.trainer.main_ppo import main\n"
        "try:\n    main()\nfinally:\n    loaded = [n for n in ('torch', 'ray', 'transformers') if n in sys.modules]\n"
        "    print('loaded:', loaded)\n"
    )
    command = [sys.executable, "-c", program, *(f"{key}={value}" for key, value in arguments.items())]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "local"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"
    lines = done.stderr.splitlines()
    for place in (
        "data.train_files: ", "data.val_files: ", "data.train_batch_size = 64", "algorithm.adv_estimator = dpo",
        f"custom_reward_function.path: {reward} line 1", f"{tools}: tools[0].class_name",
        f"{TURNS}.function_tool_path: ",
        "trainer.experiment_name = ../../x", "trainer.device = cuda",
    ):  # fmt: skip
        assert any(place in line for line in lines), place
    assert not list(tmp_path.glob("checkpoints*"))
