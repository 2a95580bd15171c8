"""User code by path and name: found or explained, checked, and usable where its file does not exist."""

import gc
import itertools
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest

from verl.utils.import_utils import UserCode, load_extern_object, load_user_object, read_user_code

REWARD = """
from __future__ import annotations
import dataclasses
import math

BONUS = 0.5

@dataclasses.dataclass
class Weights:
    scale: float = 2.0

def _helper(x):
    return math.floor(x)

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return Weights().scale * _helper(len(solution_str)) + BONUS

class Dataset:
    def __init__(self, data_files, tokenizer, config): self.files = data_files

counter = []
NOT_CALLABLE = 3
"""

SCORE = {"data_source": "s", "solution_str": "abc", "ground_truth": "g"}
REQUIRED = ("data_source", "solution_str", "ground_truth")


@pytest.fixture
def reward_file(tmp_path):
    file = tmp_path / "my-reward.py"
    file.write_text(REWARD)
    return file


def run_elsewhere(script: str, payload: bytes) -> str:
    """Run in another process, given bytes on standard input, in a folder without the user's file."""
    done = subprocess.run([sys.executable, "-c", script], input=payload, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_object_of_a_file_package_and_dotted_module(reward_file):
    assert load_extern_object(str(reward_file), "compute_score")(**SCORE) == 6.5
    from verl.utils.balancing import ceildiv

    assert load_extern_object("pkg://verl.utils.balancing", "ceildiv") is ceildiv
    assert load_extern_object("verl.utils.balancing", "ceildiv") is ceildiv


def test_the_same_file_is_the_same_module_however_it_is_spelled(reward_file, monkeypatch):
    first = load_extern_object(str(reward_file), "counter")
    first.append(1)
    monkeypatch.chdir(reward_file.parent)
    monkeypatch.setenv("HERE", str(reward_file.parent))
    assert load_extern_object("my-reward.py", "counter") is first
    assert load_extern_object("$HERE/my-reward.py", "counter") is first


def test_threads_that_load_at_once_get_the_whole_module(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\nruns = ['started']\ntime.sleep(0.2)\ndef late():\n    return len(runs)\n")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: load_extern_object(str(file), "late"), range(4)))
    assert len(set(found)) == 1


def test_another_thread_may_import_at_any_moment_of_a_load(reward_file):
    """As an agent's thread does while the next agent is loaded: here at every collection of garbage."""
    load_user_object(str(reward_file), "compute_score", key="reward")
    names = (f"imported_meanwhile_{count}" for count in itertools.count())
    modules = set(sys.modules)

    def imports(phase, info):
        sys.modules[next(names)] = sys

    gc.callbacks.append(imports)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        assert load_user_object(str(reward_file), "compute_score", key="reward")(**SCORE) == 6.5
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(imports)
        for name in sys.modules.keys() - modules:
            del sys.modules[name]


def test_an_edited_file_is_loaded_anew_and_its_equal_is_not_confused(reward_file, tmp_path):
    old = load_extern_object(str(reward_file), "compute_score")
    reward_file.write_text(REWARD.replace("BONUS = 0.5", "BONUS = 1.5"))
    assert load_extern_object(str(reward_file), "compute_score")(**SCORE) == 7.5
    assert old(**SCORE) == 6.5
    other = tmp_path / "elsewhere" / "my-reward.py"
    other.parent.mkdir()
    other.write_text(REWARD)
    assert load_extern_object(str(other), "counter") is not load_extern_object(str(reward_file), "counter")


def test_code_travels_by_content_to_a_process_without_the_file(reward_file):
    code = read_user_code(reward_file)
    assert isinstance(code, UserCode)
    payload = pickle.dumps(code)
    reward_file.unlink()
    script = (
        "import pickle, sys, inspect\n"
        "code = pickle.loads(sys.stdin.buffer.read())\n"
        "module = code.load()\n"
        "assert code.load() is module\n"
        "assert 'Weights().scale' in inspect.getsource(module.compute_score)\n"
        "print(module.compute_score('s', 'abc', 'g'))\n"
    )
    assert run_elsewhere(script, payload) == "6.5"


@pytest.mark.parametrize("pickler", ["cloudpickle", "ray.cloudpickle"])
def test_a_loaded_function_pickles_into_a_process_without_the_file(reward_file, pickler):
    module = pytest.importorskip(pickler)
    function = load_user_object(str(reward_file), "compute_score", key="k", required_params=REQUIRED)
    dataset = load_extern_object(str(reward_file), "Dataset")
    payload = module.dumps((function, dataset))
    reward_file.unlink()
    script = (
        "import pickle, sys\n"
        "function, dataset = pickle.loads(sys.stdin.buffer.read())\n"
        "print(function('s', 'abc', 'g'), dataset('f', None, None).files)\n"
    )
    assert run_elsewhere(script, payload) == "6.5 f"


def test_a_pickled_function_comes_back_in_the_same_process(reward_file):
    function = load_extern_object(str(reward_file), "compute_score")
    assert cloudpickle.loads(cloudpickle.dumps(function))(**SCORE) == 6.5


def test_traceback_of_user_code_shows_its_line_without_the_file(tmp_path):
    import traceback

    file = tmp_path / "bad.py"
    file.write_text("def boom():\n    return {}['missing key']\n")
    boom = load_extern_object(str(file), "boom")
    file.unlink()
    try:
        boom()
    except KeyError:
        assert "return {}['missing key']" in traceback.format_exc()
    else:
        pytest.fail("boom did not raise")


def test_missing_file_names_its_neighbours(reward_file):
    with pytest.raises(FileNotFoundError, match=r"(?s)reward\.py.*reward\.py"):
        load_extern_object(str(reward_file.parent / "reward.py"), "compute_score")
    with pytest.raises(ValueError, match=r"module_path"):
        load_extern_object("", "x")


def test_missing_object_names_what_the_file_defines(reward_file):
    with pytest.raises(AttributeError, match=r"my-reward\.py: .*'score'.*compute_score") as caught:
        load_extern_object(str(reward_file), "score")
    defined = str(caught.value).split("It defines: ")[1]
    assert defined == "BONUS, Weights, compute_score, Dataset, counter, NOT_CALLABLE."


def test_missing_module_and_import_errors_say_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"^pkg://no\.such\.package: .*'no'.*PYTHONPATH"):
        load_extern_object("pkg://no.such.package", "x")
    file = tmp_path / "uses_neighbour.py"
    file.write_text("import neighbour_that_is_not_installed\n")
    with pytest.raises(RuntimeError, match=r"neighbour_that_is_not_installed"):
        load_extern_object(str(file), "x")
    file.write_text("def broken(:\n")
    with pytest.raises(RuntimeError, match=r"uses_neighbour\.py: line 1 .*syntax"):
        load_extern_object(str(file), "x")


def test_a_file_that_raises_shows_its_own_error_each_time(tmp_path):
    file = tmp_path / "raises.py"
    file.write_text("raise RuntimeError('from the user')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="from the user"):
            load_extern_object(str(file), "x")


def test_errors_of_load_user_object_begin_with_the_config_key(reward_file):
    for name, message in [("nothing_here", "'nothing_here'"), ("NOT_CALLABLE", r"'NOT_CALLABLE' .*\bint\b")]:
        with pytest.raises(ValueError, match=rf"^custom_reward_function\.path: .*{message}"):
            load_user_object(str(reward_file), name, key="custom_reward_function.path", required_params=REQUIRED)


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("(data_source, solution_str)", r"f\(data_source, solution_str\) in .* ground_truth\. "),
        ("(data_source, solution_str, ground_truth, api_key)", r"ground_truth, api_key\) in .* api_key\b"),
        (
            "(data_source, solution_str, ground_truth, /)",
            r"ground_truth, /\) in .*\bdata_source, solution_str, ground_truth and",
        ),
        ("(*args)", r"f\(\*args\) in .*\bdata_source, solution_str, ground_truth\. "),
    ],
)
def test_a_wrong_signature_is_refused_with_the_expected_one(tmp_path, signature, problem):
    file = tmp_path / "r.py"
    file.write_text(f"def f{signature}:\n    return 0\n")
    with pytest.raises(ValueError, match=problem) as caught:
        load_user_object(str(file), "f", key="k", required_params=REQUIRED, optional_params=("extra_info",))
    message = str(caught.value)
    assert str(file) in message
    assert "Expected: f(data_source, solution_str, ground_truth, extra_info=...)" in message


@pytest.mark.parametrize(
    "signature",
    [
        "(data_source, solution_str, ground_truth)",
        "(data_source, solution_str, ground_truth, extra_info)",
        "(ground_truth, solution_str, data_source, other=1, **kwargs)",
        "(**kwargs)",
        "(*, data_source, solution_str, ground_truth)",
    ],
)
def test_signatures_that_can_be_called_are_accepted(tmp_path, signature):
    file = tmp_path / "r.py"
    file.write_text(f"def f{signature}:\n    return 1\n")
    found = load_user_object(str(file), "f", key="k", required_params=REQUIRED, optional_params=("extra_info",))
    given = {**SCORE, "extra_info": None} if "extra_info" in signature else SCORE
    assert found(**given) == 1


def test_a_class_is_checked_by_its_constructor(reward_file):
    params = ("data_files", "tokenizer", "config")
    assert load_user_object(str(reward_file), "Dataset", key="data.custom_cls", required_params=params)
    with pytest.raises(ValueError, match=r"^k: Dataset\(data_files, tokenizer, config\) .* processor\."):
        load_user_object(str(reward_file), "Dataset", key="k", required_params=(*params, "processor"))
