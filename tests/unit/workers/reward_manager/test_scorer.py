"""Scorer processes: any reward function, and whatever it does costs one sample only. Real processes throughout."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.import_utils import load_user_object
from verl.utils.reward_score import default_compute_score, register_score, registry
from verl.utils.reward_score.calls import parse_result
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

# Does what the answer says.
FUNCTION = """
import ctypes, os, subprocess, sys, threading, time

kept = []

def say(extra_info, what):
    with open(extra_info["file"], "a") as file:
        file.write(f"{what}\\n")

def child(extra_info, own_session):
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        say(extra_info, os.getpid())
        time.sleep(1000)
    while not os.path.exists(extra_info["file"]):
        time.sleep(0.01)

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError("what was missing")
    if solution_str == "sleep":
        time.sleep(1000)
    if solution_str == "say and sleep":
        say(extra_info, time.time())
        time.sleep(1000)
    if solution_str == "say and spin":
        say(extra_info, time.time())
    while "spin" in solution_str:
        pass
    if solution_str == "command":
        command = subprocess.Popen(["sleep", "1000"])
        say(extra_info, command.pid)
        time.sleep(1000)
    if solution_str == "daemon":
        child(extra_info, own_session=True)
        time.sleep(1000)
    if solution_str == "leave a child":
        child(extra_info, own_session=True)
    if solution_str == "exit and leave a child":
        child(extra_info, own_session=False)
        os._exit(4)
    if solution_str == "fork and return":
        os.fork()
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "quit":
        sys.exit("enough")
    if solution_str == "crash":
        ctypes.string_at(0)
    if solution_str == "eat":
        while True:
            kept.append(bytearray(2**24))
    if solution_str == "leak":
        kept.append(bytearray(2**24))
    if solution_str == "pid":
        return {"score": 1.0, "pid": os.getpid(), "server": os.getppid()}
    if solution_str == "return":
        return ground_truth
    if solution_str == "lock":
        return {"score": 1.0, "lock": threading.Lock()}
    if solution_str == "pause":
        time.sleep(ground_truth)
    if solution_str == "slow":
        time.sleep(0.4)
    if solution_str == "slow import":
        known = "slow_package" in sys.modules
        import slow_package
        return {"score": 1.0, "known": known, "pid": os.getpid()}
    return {"score": float(ground_truth), "length": len(solution_str)}
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "my_reward.py"
    file.write_text(FUNCTION)
    found = load_user_object(str(file), "score", key="custom_reward_function.path")
    file.unlink()  # the function travels by content
    return found


@pytest.fixture
def pool(function):
    with ScorerPool(function, processes=2, timeout=1.0) as made:
        yield made


def sample(text: str, truth: float = 0.5, **extra) -> Sample:
    return Sample("mine", text, truth, extra)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_scores_come_back_in_the_order_asked_for(pool):
    futures = [pool.submit(sample("x" * (i % 7), i / 8)) for i in range(500)]
    assert [future.result().value for future in futures] == [i / 8 for i in range(500)]
    assert futures[6].result() == Score(0.75, {"score": 0.75, "length": 6})


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("raise", "raised", "KeyError: 'what was missing'"),
        ("lock", "invalid", "cannot be pickled"),
        ("exit", "died", "lost its process, which ended with exit code 3"),
        ("quit", "died", "lost its process, which ended with exit code 1"),
        ("crash", "died", "lost its process, which was killed by SIGSEGV"),
        ("sleep", "timeout", "took longer than 1 s and was stopped"),
        ("spin", "timeout", "took longer than 1 s and was stopped"),
    ],
)
def test_a_failing_call_costs_its_own_sample(pool, text, kind, error):
    scores = pool.score([sample(text if i == 40 else "fine") for i in range(80)])
    assert error in scores[40].error
    assert (scores[40].value, scores[40].kind) == (0.0, kind)
    others = scores[:40] + scores[41:]
    assert all(score == Score(0.5, {"score": 0.5, "length": 4}) for score in others)


NO_SCORES = [math.nan, -math.inf, None, "0.5", b"1", [1.0], {"acc": 1.0}, {"score": None}, 1j, 10**400, object]


def test_only_a_finite_number_is_a_score(pool):
    numbers = [1, True, -0.5, Decimal("0.25"), np.float32(0.5), np.int64(3), {"score": 2, 7: "seven"}]
    scores = pool.score([sample("return", result) for result in [*numbers, *NO_SCORES]])
    good, bad = scores[: len(numbers)], scores[len(numbers) :]
    assert [score.value for score in good] == [1.0, 1.0, -0.5, 0.25, 0.5, 3.0, 2.0]
    assert good[-1].extra == {"score": 2, "7": "seven"}
    assert [score.kind for score in bad] == ["invalid"] * len(NO_SCORES)
    assert "returned a str, not a number: '0.5'" in bad[3].error
    assert "a dict without 'score' (it has: acc)" in bad[6].error


def test_a_sample_that_cannot_be_sent_costs_itself(pool):
    scores = pool.score([sample("fine"), sample("fine", lock=threading.Lock()), sample("fine")])
    assert [score.kind for score in scores] == [None, "invalid", None]
    assert "cannot be sent to another process" in scores[1].error


@pytest.mark.slow
def test_samples_that_wait_for_ever_wait_out_their_time_side_by_side(function, tmp_path):
    file = tmp_path / "times"
    with ScorerPool(function, processes=2, timeout=6.0) as pool:
        scores = pool.score([sample("say and sleep" if i % 10 == 5 else "fine", file=str(file)) for i in range(200)])
    assert [i for i, score in enumerate(scores) if score.kind == "timeout"] == list(range(5, 200, 10))
    assert all(score.value == 0.5 for score in scores if score.error is None)
    began = [float(line) for line in file.read_text().split()]
    assert len(began) == 20
    assert max(began) - min(began) < 6.0  # the last began while the first was still there, on two processes


@pytest.mark.slow
def test_samples_that_compute_for_ever_get_their_time_one_after_the_other(function, tmp_path):
    file = tmp_path / "times"
    with ScorerPool(function, processes=1, timeout=0.5) as pool:
        scores = pool.score([sample("say and spin" if i % 10 == 5 else "fine", file=str(file)) for i in range(40)])
    assert [i for i, score in enumerate(scores) if score.kind == "timeout"] == [5, 15, 25, 35]
    began = sorted(float(line) for line in file.read_text().split())
    assert len(began) == 4
    assert all(later - earlier >= 0.4 for earlier, later in itertools.pairwise(began))


@pytest.fixture(scope="module")
def shared_pool(function):
    with ScorerPool(function, processes=2, timeout=30.0) as made:
        yield made


KINDS = {"fine": None, "raise": "raised", "exit": "died", "lock": "invalid", "fork and return": None}


def let_calls_take(seconds, pool):
    """What calls took of late decides how many samples a message carries."""
    if not seconds:
        pool.score([sample("fine")] * 400)
    for _ in range(12 if seconds else 0):
        assert pool.submit(sample("pause", seconds)).result().error is None


@settings(max_examples=10)
@given(
    texts=st.lists(st.sampled_from(["fine"] * 12 + list(KINDS)), max_size=120),
    seconds=st.sampled_from([0.0, 0.002, 0.02]),
)
def test_scores_are_those_of_the_plain_function_however_samples_are_sent(function, shared_pool, texts, seconds):
    let_calls_take(seconds, shared_pool)
    scores = shared_pool.score([sample(text, i / 4) for i, text in enumerate(texts)])
    assert [score.kind for score in scores] == [KINDS[text] for text in texts]
    for i, (text, score) in enumerate(zip(texts, scores, strict=True)):
        if text == "fine":
            assert score == Score(*parse_result(function("mine", text, i / 4, {})))


def test_samples_travel_together_where_calls_are_short_and_alone_where_they_are_long(shared_pool):
    def first_message():
        """Samples at the start of a batch that one process got, while the other got those behind them."""
        pids = [score.extra["pid"] for score in shared_pool.score([sample("pid")] * 120)]
        return len(list(itertools.takewhile(lambda pid: pid == pids[0], pids)))

    let_calls_take(0.0, shared_pool)
    assert first_message() >= 16
    let_calls_take(0.02, shared_pool)
    assert first_message() <= 8


def test_memory_beyond_the_limit_costs_the_sample_that_wants_it(function):
    with ScorerPool(function, processes=1, timeout=60.0, memory_limit=2**28) as pool:
        scores = pool.score([sample("eat" if i == 3 else "fine") for i in range(8)])
    assert [score.kind for score in scores] == [None] * 3 + ["memory"] + [None] * 4
    assert "MemoryError" in scores[3].error


def test_memory_that_earlier_samples_left_behind_costs_nobody(function):
    with ScorerPool(function, processes=1, timeout=60.0, memory_limit=2**27) as pool:
        scores = pool.score([sample("leak")] * 20)  # 16 MB each, 128 MB in all
    assert [score.kind for score in scores] == [None] * 20


@pytest.mark.slow
def test_time_spent_on_imports_is_not_the_samples_and_is_spent_once(function, tmp_path, monkeypatch):
    package = tmp_path / "slow_package"
    package.mkdir()
    parts = [f"part_{i}" for i in range(6)]
    (package / "__init__.py").write_text("".join(f"from slow_package import {part}\n" for part in parts))
    for part in parts:
        (package / f"{part}.py").write_text("import time\ntime.sleep(0.3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with ScorerPool(function, processes=1, timeout=1.0) as pool:
        first = pool.submit(sample("slow import")).result()
        pool.submit(sample("exit")).result()
        second = pool.submit(sample("slow import")).result()
    assert first.error is None
    assert second.error is None
    assert (first.extra["known"], second.extra["known"]) == (False, True)
    assert first.extra["pid"] != second.extra["pid"]


def test_a_slow_sample_that_others_pass_still_gets_its_score(pool):
    scores = pool.score([sample("slow" if i == 3 else "fine") for i in range(400)])
    assert all(score.error is None for score in scores)


def test_a_scorer_that_died_is_replaced_from_the_same_server(pool):
    first = pool.submit(sample("pid")).result().extra
    pool.submit(sample("exit")).result()
    second = pool.submit(sample("pid")).result().extra
    assert first["pid"] != second["pid"]
    assert first["server"] == second["server"] != os.getpid()


@pytest.mark.parametrize("text", ["command", "daemon"])
def test_what_a_hanging_function_started_is_killed_with_it(pool, tmp_path, text):
    file = tmp_path / "pid"
    assert pool.submit(sample(text, file=str(file))).result().kind == "timeout"
    wait_until(lambda: not alive(int(file.read_text())))


def test_a_process_that_outlives_its_scorer_does_not_hide_the_death(function, tmp_path):
    file = tmp_path / "pid"
    with ScorerPool(function, processes=1, timeout=1000.0) as pool:  # it holds the scorer's socket open
        score = pool.submit(sample("exit and leave a child", file=str(file))).result()
        assert score.kind == "died"
        assert "exit code 4" in score.error
        wait_until(lambda: not alive(int(file.read_text())))


def test_what_a_function_leaves_running_ends_with_the_pool(function, tmp_path):
    file = tmp_path / "pid"
    with ScorerPool(function, processes=1, timeout=30.0) as pool:
        assert pool.submit(sample("leave a child", file=str(file))).result().error is None
        assert alive(int(file.read_text()))
    wait_until(lambda: not alive(int(file.read_text())))


def test_closing_ends_every_process_and_a_closed_pool_can_be_used_again(function):
    pool = ScorerPool(function, processes=2, timeout=60.0)
    processes = pool.submit(sample("pid")).result().extra
    hanging = pool.submit(sample("spin"))
    time.sleep(0.1)
    pool.close()
    wait_until(lambda: not alive(processes["pid"]) and not alive(processes["server"]))
    with pytest.raises(RuntimeError, match="process pool"):
        hanging.result()
    assert pool.submit(sample("fine")).result().value == 0.5
    pool.close()
    pool.close()


@pytest.mark.slow
def test_no_process_outlives_a_killed_trainer(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTION)
    program = f"""
import sys
from verl.utils.import_utils import load_extern_object
from verl.workers.reward_manager.scorer import Sample, ScorerPool
pool = ScorerPool(load_extern_object({str(tmp_path / "reward.py")!r}, "score"), 2, 1000.0)
extra = pool.submit(Sample("mine", "pid", 1.0)).result().extra
pool.submit(Sample("mine", "spin", 1.0))
sys.stdout.write(f"{{extra['pid']}} {{extra['server']}}\\n")
sys.stdout.flush()
sys.stdin.read()
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert all(alive(pid) for pid in pids)
    trainer.kill()
    trainer.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_function_that_cannot_travel_or_load_says_so_before_any_sample():
    lock = __import__("threading").Lock()
    with pytest.raises(ValueError, match=r"(?s)^custom_reward_function: .*num_processes=0"):
        ScorerPool(lambda **_: lock and 1.0, 1, 1.0)
    with pytest.raises(ValueError, match=r"only_here"):
        ScorerPool(_needs_a_module_that_only_exists_here(), 1, 1.0).submit(sample("x"))


HOLDING = """
import threading

lock = threading.Lock()

class Judge:
    def __call__(self, solution_str):
        with lock:
            return float(solution_str)

judge = Judge()

def score(solution_str, ground_truth, scale):
    return scale * judge(solution_str)

async def score_async(solution_str, ground_truth, scale):
    return score(solution_str, ground_truth, scale)
"""


@pytest.mark.parametrize("name", ["score", "score_async"])
def test_a_file_that_holds_what_cannot_be_pickled_is_run_again_in_the_scorers(tmp_path, name):
    """A client or a lock at the top of a user's file, as the documentation has one."""
    (tmp_path / "holding.py").write_text(HOLDING)
    function = load_user_object(str(tmp_path / "holding.py"), name, key="custom_reward_function.path")
    with ScorerPool(functools.partial(function, scale=2.0), 1, 10.0) as pool:
        assert [score.value for score in pool.score([sample("1"), sample("2")])] == [2.0, 4.0]


def _needs_a_module_that_only_exists_here():
    import types

    module = types.ModuleType("only_here")
    exec("def score(**_):\n    return 1.0", module.__dict__)
    sys.modules["only_here"] = module
    module.__spec__ = __import__("importlib").machinery.ModuleSpec("only_here", None)
    return module.score


def test_without_processes_the_function_runs_here(function):
    pool = ScorerPool(function, processes=0, timeout=1.0)
    assert pool.submit(sample("pid")).result().extra["pid"] == os.getpid()
    assert "KeyError" in pool.submit(sample("raise")).result().error


def test_functions_that_users_registered_are_known_in_scorer_processes():
    @register_score("mine/registered")
    def compute_score(solution_str, ground_truth):
        return 0.25

    try:
        with ScorerPool(default_compute_score, 1, 5.0) as pool:
            assert pool.submit(Sample("mine/registered", "x", "y")).result().value == 0.25
            assert "no reward function" in pool.submit(Sample("mine/unknown", "x", "y")).result().error
    finally:
        del registry.SCORE_FUNCTIONS["mine/registered"]


def test_a_pool_is_pickled_without_its_processes(pool):
    pool.submit(sample("fine")).result()
    import cloudpickle

    again = pickle.loads(cloudpickle.dumps(pool))
    with again:
        assert again.submit(sample("fine")).result().value == 0.5
