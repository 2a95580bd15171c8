"""The sandbox over HTTP: a real server in a process of its own, our client and plain requests."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from verl.sandbox import REQUIRE, Limits, Result, SandboxClient, SandboxUnavailable, available
from verl.sandbox.code_runner import CodeSettings
from verl.sandbox.fusion_api import ServerFailed, result_from_json, result_to_json, run_request
from verl.sandbox.request import RunRequest
from verl.utils.http_server.app import create_app
from verl.utils.http_server.server import serve_in_thread
from verl.utils.reward_score.code import compute_score

pytestmark = pytest.mark.processes


def start_server(*options, port=0):
    """(process, url)"""
    level = min(("files", available().level), key=REQUIRE.index)
    command = [sys.executable, "-m", "verl.sandbox.server", f"--port={port}", f"--require={level}", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = None
    while found is None:
        line = process.stdout.readline()
        assert line, "it ended"
        found = re.search(r"serving a code sandbox at (http://127\.0\.0\.1:\d+)", line)
    threading.Thread(target=process.stdout.read, daemon=True).start()
    return process, found[1]


def end(process):
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def url():
    process, url = start_server("--max-concurrent=2", "--max-waiting=1", "--max-body-mb=1", "--max-seconds=40")
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0, "SIGTERM ends it in order"


def post(url, **fields):
    return httpx.post(f"{url}/run_code", json=fields, timeout=60)


def test_a_large_body_is_parsed_in_another_process(url):
    reply = post(url, code="print(len(input()))", stdin="x" * 300_000).json()
    assert reply["run_result"]["stdout"] == "300000\n"


def test_ping_is_answered_with_pong(url):
    answer = httpx.get(f"{url}/v1/ping")
    assert (answer.status_code, answer.json()) == (200, "pong")
    assert SandboxClient(url).problem() is None


def test_a_rejected_key_is_not_reported_as_a_missing_server():
    app = create_app([], health=dict, max_body_bytes=1, api_key="key")
    with serve_in_thread(app, "a server with a key") as port:
        problem = SandboxClient(f"http://127.0.0.1:{port}").problem()
    assert problem is not None
    assert "VERL_API_KEY" in problem
    assert "verl.sandbox.server" not in problem


def test_a_run_has_every_field_of_the_api(url):
    told = post(url, code="print(input()[::-1])", language="python", stdin="abc").json()
    run = told.pop("run_result")
    seconds = run.pop("execution_time")
    assert run == {"status": "Finished", "return_code": 0, "stdout": "cba\n", "stderr": ""}
    assert 0 <= seconds < 10
    assert told == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "executor_pod_name": None,
        "files": {},
    }


def test_only_code_must_be_given_and_null_is_not_given(url):
    assert post(url, code="print(1)", stdin=None, files=None, fetch_files=None, cuda=True).json()["status"] == "Success"


def test_files_go_in_and_come_back(url):
    code = "open('sub/out.bin', 'wb').write(open('sub/in.bin', 'rb').read() * 2)"
    given = {"sub/in.bin": base64.b64encode(b"\0\xff").decode()}
    told = post(url, code=code, files=given, fetch_files=["sub/out.bin"]).json()
    assert base64.b64decode(told["files"]["sub/out.bin"]) == b"\0\xff\0\xff"


def test_how_a_program_fails_is_told(url):
    failed = post(url, code="import sys; print('so far'); sys.exit(3)").json()
    assert (failed["status"], failed["run_result"]["status"], failed["run_result"]["return_code"]) == (
        "Failed",
        "Finished",
        3,
    )
    endless = post(url, code="while True: pass", run_timeout=1).json()
    assert (endless["status"], endless["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    greedy = post(url, code="x = bytearray(10**9)", memory_limit_MB=100).json()
    assert greedy["status"] == "Failed"
    broken = post(url, code="int main() { return }", language="cpp", compile_timeout=20).json()
    assert broken["status"] == "Failed"
    assert (broken["run_result"], broken["compile_result"]["return_code"]) == (None, 1)
    assert "error" in broken["compile_result"]["stderr"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "code: is missing"),
        ({"code": 1}, "code: Input should be a valid string"),
        ({"code": "", "run_timeout": -1}, "run_timeout: Input should be greater than 0"),
        ({"code": "", "run_timeout": 10000}, "run_timeout: 10000 is more than this server's maximum of 40"),
        ({"code": "", "memory_limit_MB": 0}, "memory_limit_MB: must be at least 1"),
        ({"code": "", "files": {"a": "?"}}, "the content of 'a' is not base64"),
        ({"code": "", "fetch_files": "a"}, "fetch_files: Input should be a valid list"),
        ({"code": "", "files": {"../a": ""}}, "'../a'"),
        ({"code": "", "language": "cobol"}, "language 'cobol' is not one of"),
    ],
)
def test_a_bad_request_is_refused_in_words(url, fields, words):
    answer = post(url, **fields)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


def test_other_bad_requests_have_their_own_status(url):
    assert httpx.get(f"{url}/run_code").status_code == 405
    assert httpx.get(f"{url}/other").status_code == 404
    assert httpx.post(f"{url}/run_code", content="code=1").status_code == 415
    as_json = {"content-type": "application/json"}
    assert httpx.post(f"{url}/run_code", content="{", headers=as_json).status_code == 400
    assert post(url, code="#" * 2**20).status_code == 413


def test_a_full_queue_is_told_and_the_client_comes_back(url):
    """Two run, one waits, the fourth is told to come later, does, and is run."""
    answers = []
    sleeping = [
        threading.Thread(target=lambda: answers.append(post(url, code="import time; time.sleep(2)"))) for _ in range(3)
    ]
    for thread in sleeping:
        thread.start()
    time.sleep(1)
    assert post(url, code="print(1)").status_code == 503
    client = SandboxClient(url, attempts=8)
    assert client.run("print(1)").stdout == "1\n"
    client.close()
    for thread in sleeping:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 3


def test_the_client_gives_the_results_of_a_local_sandbox(url):
    client = SandboxClient(f"{url}/run_code")
    done = client.run("print(open('a').read())", files={"a": b"x"}, fetch=["a"], limits=Limits(wall_s=5))
    assert (done.status, done.return_code, done.stdout, done.files) == ("finished", 0, "x\n", {"a": b"x"})
    assert client.run("1/0").status == "error"
    assert client.run("while 1: pass", limits=Limits(wall_s=1)).status == "timeout"
    assert client.run("int main( {", "cpp").compile.return_code == 1
    with pytest.raises(ValueError, match=r"422: .*'cobol'"):
        client.run("", "cobol")
    client.close()


def test_the_client_works_in_several_threads(url):
    client = SandboxClient(url, max_concurrent=2, attempts=8)
    with ThreadPoolExecutor(5) as threads:
        results = list(threads.map(lambda n: client.run(f"print({n})"), range(5)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(5)]
    client.close()


@pytest.mark.slow
def test_a_server_that_is_killed_costs_its_own_runs_and_the_next_one_serves_the_rest():
    process, url = start_server()
    client, errors = SandboxClient(url, attempts=2, pause_s=0.05), []

    def run():
        try:
            client.run("import time; time.sleep(30)", limits=Limits(wall_s=60))
        except SandboxUnavailable as error:
            errors.append(str(error))

    try:
        assert client.run("print(1)").stdout == "1\n"
        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(1)
        end(process)
        thread.join(20)
        assert "2 attempts" in errors[0]
        with pytest.raises(SandboxUnavailable):
            client.run("print(1)")
        assert "python -m verl.sandbox.server" in client.problem()
        process, _ = start_server(port=int(url.rpartition(":")[2]))
        assert client.run("print(2)").stdout == "2\n"
    finally:
        end(process)


def test_rewards_run_on_a_server_and_a_dead_one_is_no_wrong_answer(url):
    answer, truth = "```python\nprint(int(input()) + 1)\n```", {"inputs": ["1", "2"], "outputs": ["2", "4"]}
    assert compute_score(answer, truth, settings=CodeSettings(url=url))["score"] == 0.5
    with pytest.raises(SandboxUnavailable):
        compute_score(answer, truth, settings=CodeSettings(url="http://127.0.0.1:1"))


def test_what_is_no_answer_of_the_api_is_the_servers_fault():
    for told in ("x", {}, {"status": "Success"}, {"status": "Failed", "run_result": {}}, {"status": "SandboxError"}):
        with pytest.raises(ServerFailed):
            result_from_json(told)


def test_a_response_that_is_not_json_is_a_failure_of_the_server_which_is_retried():
    requests = []

    async def respond(request):
        requests.append(request)
        return PlainTextResponse("<html>")

    app = create_app([Route("/run_code", respond, methods=["POST"])], health=dict, max_body_bytes=1 << 16)
    with serve_in_thread(app, "a server without JSON") as port:
        client = SandboxClient(f"http://127.0.0.1:{port}", attempts=2, pause_s=0.0)
        with pytest.raises(SandboxUnavailable, match="<html>"):
            client.run("")
        client.close()
    assert len(requests) == 2


def test_closing_the_client_ends_a_run_in_another_thread():
    received, closed = threading.Event(), threading.Event()

    async def respond(_request):
        received.set()
        await asyncio.to_thread(closed.wait)
        return PlainTextResponse("", 503)

    app = create_app([Route("/run_code", respond, methods=["POST"])], health=dict, max_body_bytes=1 << 16)
    with serve_in_thread(app, "a busy server") as port, ThreadPoolExecutor(1) as threads:
        client = SandboxClient(f"http://127.0.0.1:{port}", pause_s=0.0)
        run = threads.submit(client.run, "")
        received.wait()
        client.close()
        closed.set()
        with pytest.raises(RuntimeError, match="closed"):
            run.result()


def test_requests_and_results_survive_the_wire(url):
    given = run_request("x", "cpp", "in", {"a": b"\xff"}, ["b"], Limits(wall_s=2, compile_s=3), 77)
    request = RunRequest.model_validate(json.loads(json.dumps(given)))
    assert request.model_dump() == given | {"files": {"a": b"\xff"}}
    assert RunRequest(code="").model_dump() | {"language": ""} == {
        **run_request("", "", "", {}, [], None, None),
        "run_timeout": 10,
        "compile_timeout": 10,
    }
    for status, code in (("finished", 0), ("error", 1), ("timeout", None), ("memory", -9), ("output", 0)):
        result = Result(status, code, "out", "err", 0.5, Result("finished", 0), {"a": b"\0"})
        assert result_from_json(result_to_json(result)) == result
