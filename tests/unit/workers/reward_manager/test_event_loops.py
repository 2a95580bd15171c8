"""Async reward functions: many under way at once on one event loop, and whatever one does costs its own sample."""

from __future__ import annotations

import functools
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from verl.utils.import_utils import load_user_object
from verl.utils.process_pool import PoolClosed, ProcessPool
from verl.workers.reward_manager.event_loops import EventLoops
from verl.workers.reward_manager.scorer import Sample, ScorerPool

# Does what the answer says.
FUNCTION = """
import asyncio, functools, os, time

begun = []

class Unreadable:
    def __reduce__(self):
        return int, ("no number",)

async def score(solution_str, ground_truth, extra_info):
    if solution_str == "meet":
        begun.append(ground_truth)
        while len(begun) < extra_info["all"]:
            await asyncio.sleep(0.01)
        return {"score": float(len(begun)), "process": os.getpid()}
    if solution_str == "raise":
        raise KeyError("what was missing")
    if solution_str == "wait":
        await asyncio.sleep(1000)
    if solution_str == "block":
        time.sleep(1000)
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "lambda":
        return {"score": 1.0, "what": lambda: 0}
    if solution_str == "unreadable":
        return {"score": 1.0, "what": Unreadable()}
    await asyncio.sleep(0.2)
    return float(solution_str)

def load_unless(marker):
    if os.path.exists(marker):
        raise OSError("the model's files are gone")
    from verl.utils.reward_score.calls import load_function, score_row_async
    load_function(functools.partial(score_row_async, score), {})
"""


@pytest.fixture
def function(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    return load_user_object(str(tmp_path / "mine.py"), "score", key="custom_reward_function.path")


@pytest.mark.parametrize("processes", [2, 0])
def test_many_are_under_way_at_once_on_one_loop(function, processes):
    samples = [Sample("mine", "meet", str(number), {"all": 200}) for number in range(200)]
    with ScorerPool(function, processes=processes, timeout=60) as pool:
        scores = pool.score(samples)
        assert pool.score([Sample("mine", "0.5", "")])[0].value == 0.5
    assert [score.value for score in scores] == [200.0] * 200
    assert len({score.extra["process"] for score in scores}) == 1


@pytest.mark.parametrize(
    ("bad", "kinds"),
    [
        (["raise", "wait", "nan", "lambda", "exit"], ["raised", "timeout", "invalid", "invalid", "died"]),
        pytest.param(["raise", "block", "exit"], ["raised", "timeout", "died"], marks=pytest.mark.slow),
    ],
)
def test_a_call_that_fails_in_any_way_costs_its_own_sample(function, bad, kinds):
    samples = [Sample("mine", answer, "") for answer in ["0.25", *bad, *["0.5"] * 20]]
    with ScorerPool(function, processes=1, timeout=4.0) as pool:
        futures = [pool.submit(sample) for sample in samples]
        scores = [future.result() for future in futures]
    assert [score.kind for score in scores] == [None, *kinds, *[None] * 20]
    assert [score.value for score in scores] == [0.25, *[0.0] * len(bad), *[0.5] * 20]
    assert "what was missing" in str(scores[1].error)


def test_a_function_of_lists_may_be_async(tmp_path):
    (tmp_path / "mine.py").write_text("async def score(solution_strs, ground_truths):\n    return [1.0, 0.0]\n")
    function = load_user_object(str(tmp_path / "mine.py"), "score", key="custom_reward_function.path")
    with ScorerPool(function, processes=1, timeout=60, takes_lists=True, batch_size=2) as pool:
        assert [score.value for score in pool.score([Sample("mine", "a", "")] * 2)] == [1.0, 0.0]


def test_an_answer_that_cannot_be_read_here_costs_its_own_sample(function):
    samples = [Sample("mine", answer, "") for answer in ["0.25", "unreadable", "0.5", "0.5"]]
    with ScorerPool(function, processes=1, timeout=60.0) as pool:
        scores = [future.result() for future in [pool.submit(sample) for sample in samples]]
    assert [score.kind for score in scores] == [None, "invalid", None, None]


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_calls_for_which_no_process_can_be_had_are_told_so(tmp_path, function, lost):
    """The process that starts loops goes, and cannot be started again; where calls were under way, or none."""
    marker, outcomes, finished = tmp_path / "gone", [], threading.Semaphore(0)
    load_unless = load_user_object(function.__globals__["__file__"], "load_unless", key="custom_reward_function.path")
    pool = ProcessPool(1, initializer=functools.partial(load_unless, str(marker)))

    def done(number, value, error):
        outcomes.append((value, error))
        finished.release()

    def alone(call):
        raise OSError("the model's files are gone")

    row = {"data_source": "mine", "solution_str": "0.5", "ground_truth": "", "extra_info": {}}
    loops = EventLoops(pool, 1, 60.0, alone)
    try:
        loops.enqueue([row], done)
        assert finished.acquire(timeout=200)
        if lost:
            loops.enqueue([{**row, "solution_str": "wait"}] * 3, done)
        marker.touch()
        pool.close()
        loops.enqueue([row] * 2, done)
        for _ in range(5 if lost else 2):
            assert finished.acquire(timeout=200), "they wait for ever"
    finally:
        loops.close()
    assert outcomes.pop(0)[0][0] == 0.5
    assert {type(error) for _, error in outcomes} == {PoolClosed}
    assert all("files are gone" in str(error) for _, error in outcomes)


CLIENT = """
import asyncio, httpx

client = httpx.AsyncClient(trust_env=False)

async def score(solution_str, ground_truth):
    return float((await client.get(ground_truth + "/" + solution_str)).text)

async def score_lists(solution_strs, ground_truths):
    return await asyncio.gather(*map(score, solution_strs, ground_truths))
"""


class Echo(BaseHTTPRequestHandler):
    """Sends the last part of the response and keeps the connection open."""

    protocol_version = "HTTP/1.1"
    clients: ClassVar[set[tuple[str, int]]] = set()

    def do_GET(self) -> None:
        self.clients.add(self.client_address)
        body = self.path.rpartition("/")[2].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server():
    served = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    Echo.clients.clear()
    thread = threading.Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.mark.parametrize(("name", "processes"), [("score", 0), ("score_lists", 0), ("score_lists", 1)])
def test_a_client_made_once_keeps_its_connections_from_step_to_step(tmp_path, server, name, processes):
    (tmp_path / "mine.py").write_text(CLIENT)
    function = load_user_object(str(tmp_path / "mine.py"), name, key="custom_reward_function.path")
    lists = {"takes_lists": name == "score_lists", "batch_size": None}
    with ScorerPool(function, processes, 60.0, **lists) as pool:
        for step in range(3):
            scores = pool.score([Sample("mine", f"{step}.{number}", server) for number in range(4)])
            assert [(score.value, score.error) for score in scores] == [(step + n / 10, None) for n in range(4)]
    assert len(Echo.clients) <= 4, "connections of earlier steps are used again"


def test_a_function_that_wants_to_end_the_process_does_not_end_the_loop_of_later_ones(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import sys\n\nasync def score(solution_str, ground_truth):\n    sys.exit(int(solution_str))\n"
    )
    function = load_user_object(str(tmp_path / "mine.py"), "score", key="custom_reward_function.path")
    with ScorerPool(function, processes=0, timeout=60.0) as pool:
        for code in (3, 4):
            with pytest.raises(SystemExit, match=str(code)):
                pool.score([Sample("mine", str(code), "")] * 2)


def test_calls_that_are_queued_while_the_loops_are_closed_fail():
    """`close` follows `enqueue` at once: the event loop must have received the calls by then."""
    loops = EventLoops(ProcessPool(1), 1, timeout=1.0, run_isolated=lambda call: None)
    errors = []

    class Lock:
        """Closes the loops when `enqueue` releases the lock."""

        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            loops._lock = self.lock
            self.lock.release()
            loops.close()

    loops._lock = Lock(loops._lock)
    loops._start_process = lambda: None
    loops.enqueue([1, 2], lambda number, value, error: errors.append((number, type(error))))
    assert errors == [(0, PoolClosed), (1, PoolClosed)]
