"""Scorer processes: any reward function, and whatever it does costs one sample only. Real processes throughout."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl.utils.import_utils import load_user_object
from verl.utils.reward_score import default_compute_score, register_score, registry
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

# Does what the answer says.
FUNCTION = """
import os, signal, subprocess, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "raise":
        raise KeyError("what was missing")
    if solution_str == "sleep":
        time.sleep(1000)
    while solution_str == "spin":
        pass
    if solution_str == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(extra_info["file"], "w").write(str(child.pid))
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if solution_str == "pid":
        return {"score": 1.0, "pid": os.getpid(), "server": os.getppid()}
    if solution_str == "nan":
        return float("nan")
    if solution_str == "text":
        return "good"
    if solution_str == "dict":
        return {"acc": 1.0}
    if solution_str == "lock":
        import threading
        return {"score": 1.0, "lock": threading.Lock()}
    if solution_str == "slow":
        time.sleep(0.4)
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


def wait_until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_scores_come_back_in_the_order_asked_for(pool):
    futures = [pool.submit(sample("x" * (i % 7), i / 8)) for i in range(500)]
    assert [future.result().value for future in futures] == [i / 8 for i in range(500)]
    assert futures[6].result() == Score(0.75, {"score": 0.75, "length": 6})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "KeyError: 'what was missing'"),
        ("nan", "returned nan"),
        ("text", "returned a str, not a number: 'good'"),
        ("dict", "a dict without 'score' (it has: acc)"),
        ("lock", "cannot be sent"),
        ("exit", "ended its process with exit code 3"),
        ("crash", "ended its process by SIGSEGV"),
        ("sleep", "took longer than 1 s and was stopped"),
        ("spin", "took longer than 1 s and was stopped"),
    ],
)
def test_a_failing_call_costs_its_own_sample(pool, text, error):
    futures = [pool.submit(sample(text if i == 40 else "fine")) for i in range(80)]
    scores = [future.result(timeout=20) for future in futures]
    assert error in scores[40].error
    assert scores[40].value == 0.0
    others = scores[:40] + scores[41:]
    assert all(score == Score(0.5, {"score": 0.5, "length": 4}) for score in others)


@pytest.mark.parametrize("how", ["sleep", "spin"])
def test_many_hanging_samples_wait_out_one_time_limit_together_and_delay_nobody(function, how):
    with ScorerPool(function, processes=2, timeout=2.0) as pool:
        futures = [pool.submit(sample(how if i % 10 == 5 else "fine")) for i in range(400)]
        start = time.monotonic()
        assert all(future.result().error is None for i, future in enumerate(futures) if i % 10 != 5)
        assert all("longer than 2 s" in future.result().error for future in futures[5::10])
        # One after the other on two processes the 40 would take 40 s.
        assert time.monotonic() - start < 15


def test_a_slow_sample_that_was_set_aside_still_gets_its_score(pool):
    futures = [pool.submit(sample("slow" if i == 3 else "fine")) for i in range(400)]
    assert all(future.result(timeout=20).error is None for future in futures)


def test_a_scorer_that_died_is_replaced_from_the_same_server(pool):
    first = pool.submit(sample("pid")).result().extra
    pool.submit(sample("exit")).result()
    second = pool.submit(sample("pid")).result().extra
    assert first["pid"] != second["pid"]
    assert first["server"] == second["server"] != os.getpid()


def test_what_a_hanging_function_started_is_killed_with_it(pool, tmp_path):
    file = tmp_path / "pid"
    assert pool.submit(sample("child", file=str(file))).result(timeout=20).error
    wait_until(lambda: not alive(int(file.read_text())))


def test_closing_ends_every_process_and_a_closed_pool_can_be_used_again(function):
    pool = ScorerPool(function, processes=2, timeout=60.0)
    told = pool.submit(sample("pid")).result().extra
    hanging = pool.submit(sample("spin"))
    time.sleep(0.1)
    pool.close()
    wait_until(lambda: not alive(told["pid"]) and not alive(told["server"]))
    with pytest.raises(RuntimeError, match="the scorer pool was closed before the sample was scored"):
        hanging.result(timeout=5)
    assert pool.submit(sample("fine")).result().value == 0.5
    pool.close()
    pool.close()


def test_a_lost_server_is_an_error_for_what_it_had_and_the_pool_starts_anew(pool, tmp_path):
    server = pool.submit(sample("pid")).result().extra["server"]
    hanging = pool.submit(sample("child", file=str(tmp_path / "pid")))
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    os.kill(server, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="the process that starts scorers is gone"):
        hanging.result(timeout=20)
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    assert pool.submit(sample("fine")).result(timeout=20).value == 0.5


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
    with pytest.raises(ValueError, match=r"cannot travel to a scorer process .*num_processes=0"):
        ScorerPool(lambda **_: lock and 1.0, 1, 1.0).submit(sample("x"))
    with pytest.raises(ValueError, match=r"(?s)cannot be loaded in a scorer process.*only_here"):
        ScorerPool(_needs_a_module_that_only_exists_here(), 1, 1.0).submit(sample("x"))


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
        del registry._TABLE["mine/registered"]


def test_a_pool_is_pickled_without_its_processes(pool):
    pool.submit(sample("fine")).result()
    import cloudpickle

    again = pickle.loads(cloudpickle.dumps(pool))
    with again:
        assert again.submit(sample("fine")).result().value == 0.5
