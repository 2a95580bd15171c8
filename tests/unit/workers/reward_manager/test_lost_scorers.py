"""Scorers, and the process that starts them, are killed and stopped from outside: scores are those of a quiet day."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from verl.utils.import_utils import load_user_object
from verl.utils.process_tree import thread_states
from verl.workers.reward_manager.scorer import Sample, Score, ScorerPool

FUNCTION = """
import os, signal, time

def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "wait":
        with open(extra_info["pids"], "a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\\n")
        while not os.path.exists(extra_info["go"]):
            time.sleep(0.01)
    if solution_str == "exit":
        os._exit(3)
    if solution_str in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, solution_str))
    if solution_str == "pause":
        time.sleep(extra_info["seconds"])
    return {"score": ground_truth, "pid": os.getpid(), "server": os.getppid()}
"""


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    file = tmp_path_factory.mktemp("reward") / "my_reward.py"
    file.write_text(FUNCTION)
    return load_user_object(str(file), "score", key="custom_reward_function.path")


@pytest.fixture
def pool(function):
    with ScorerPool(function, processes=2, timeout=300.0) as made:
        yield made


def sample(text: str, truth: float = 0.5, **extra: object) -> Sample:
    return Sample("mine", text, truth, extra)


def wait_for_lines(file: Path, count: int) -> list[list[int]]:
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count:
            return [[int(number) for number in line.split()] for line in lines]
        time.sleep(0.01)
    raise AssertionError(f"{count} lines were not written")


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGSTOP))]
)
def test_a_sample_that_loses_its_scorer_is_scored_by_another_one(pool, tmp_path, number):
    pids, go = tmp_path / "pids", tmp_path / "go"
    waiting = pool.submit(sample("wait", pids=str(pids), go=str(go)))
    others = [pool.submit(sample("fine", i / 8)) for i in range(20)]
    first = wait_for_lines(pids, 1)[0]
    os.kill(first[0], number)
    again = wait_for_lines(pids, 2)[1]  # long before its time is up
    go.touch()
    assert waiting.result().error is None
    assert [each.result().value for each in others] == [i / 8 for i in range(20)]
    assert again[0] != first[0]
    assert again[1] == first[1], "from the same server"
    assert pool.scored_again == 1


def test_a_killed_server_is_replaced_and_what_ran_is_scored_again(pool, tmp_path):
    pids, go = tmp_path / "pids", tmp_path / "go"
    waiting = pool.submit(sample("wait", pids=str(pids), go=str(go)))
    worker, server = wait_for_lines(pids, 1)[0]
    os.kill(server, signal.SIGKILL)
    assert wait_for_lines(pids, 2)[1][1] != server
    go.touch()
    assert waiting.result().error is None
    assert thread_states(worker) in ([], ["Z"]), "gone with it"


def test_a_stopped_server_is_replaced_when_it_is_needed(pool):
    server = pool.submit(sample("fine")).result().extra["server"]
    os.kill(server, signal.SIGSTOP)
    ended = pool.submit(sample("exit")).result()  # only it knows how
    assert "exit code 3" in ended.error
    assert pool.submit(sample("fine")).result().extra["server"] != server
    assert thread_states(server) == []


@pytest.mark.slow
def test_an_idle_scorer_that_was_stopped_gets_no_sample(pool):
    idle = pool.submit(sample("fine")).result().extra["pid"]
    os.kill(idle, signal.SIGSTOP)
    large = pool.submit(sample("fine", filler="x" * 2**22)).result()  # more than a socket takes
    assert large.error is None
    assert large.extra["pid"] != idle
    assert pool.scored_again == 0, "it had not begun"


@pytest.mark.parametrize(("text", "how"), [("SIGKILL", "was killed by SIGKILL"), ("SIGSTOP", "was stopped")])
def test_a_sample_that_does_it_to_every_scorer_costs_itself(pool, text, how):
    scores = pool.score([sample(text if i == 7 else "fine") for i in range(40)])
    assert (scores[7].kind, scores[7].value) == ("died", 0.0)
    assert f"lost its process, which {how} (" in scores[7].error
    assert scores[7].error.endswith("), after 2 other processes were lost")
    assert all(score.error is None and score.value == 0.5 for score in scores[:7] + scores[8:])
    assert pool.scored_again == 2


@pytest.mark.slow
def test_scores_are_right_whoever_is_killed_or_stopped_at_random(function):
    """The server and all that it started are fair game, in the middle of whatever they do."""
    chosen, over, done = random.Random(3), threading.Event(), []

    def disturb(pool: ScorerPool) -> None:
        while not over.wait(chosen.uniform(0.1, 0.4)):
            known = pool.submit(sample("fine")).result()
            victim = known.extra["server"] if chosen.random() < 0.3 else known.extra["pid"]
            try:
                os.kill(victim, chosen.choice([signal.SIGKILL, signal.SIGSTOP]))
                done.append(victim)
            except ProcessLookupError:
                pass

    with ScorerPool(function, processes=2, timeout=300.0) as pool:
        thread = threading.Thread(target=disturb, args=(pool,))
        thread.start()
        try:
            scores: list[Score] = []
            while len(done) < 15:
                scores += pool.score([sample("pause", i / 4, seconds=0.004) for i in range(40)])
        finally:
            over.set()
            thread.join()
    assert [score.error for score in scores if score.error] == []
    assert [score.value for score in scores] == [i / 4 for i in range(40)] * (len(scores) // 40)


def test_calls_that_take_long_teach_the_pool_to_send_them_alone(function):
    """Else each would be taken for stuck, its neighbours sent to others, and its scorer ended."""
    with ScorerPool(function, processes=1, timeout=60.0) as pool:
        pool.score([sample("fine")] * 400)  # short ones: many to a message
        scores = pool.score([sample("pause", seconds=0.05)] * 40)
    assert len({score.extra["pid"] for score in scores}) < 20
