"""The server of `verl view`: queries, search, live updates, headers, token, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.recordings import HOSTILE, UIDS, close, open_writer, write_run, write_step, write_supervised_run
from verl.recording import RecordingError
from verl.utils.http_server.server import serve_in_thread
from verl.viewer.export import write_export
from verl.viewer.run import ViewedRun
from verl.viewer.server import STATIC, create_viewer_app


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), experiment="first")


@pytest.fixture(scope="module")
def client(folder):
    with serve_in_thread(create_viewer_app([ViewedRun(folder)]), "runs") as port:
        yield httpx.Client(base_url=f"http://127.0.0.1:{port}")


def get(client: httpx.Client, query: str, **parameters: Any) -> Any:
    response = client.get(f"/api/{query}", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_runs_have_names_status_and_steps(client, folder):
    (run,) = get(client, "runs")
    assert (run["name"], run["status"], run["last_step"], run["folder"]) == ("first", "finished", 4, str(folder))
    steps = {name: values for name, values in run["steps"].items() if values}
    assert steps == {"groups": [1, 2, 3, 4], "trajectories": [1, 2, 3, 4], "validation": [2, 4]}


def test_only_requested_metrics_are_sent(client):
    result = get(client, "metrics", run=0, names=json.dumps(["reward/mean", "no/such"]))
    assert set(result["columns"]) == {"step", "time", "reward/mean"}
    assert result["columns"]["reward/mean"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "actor/entropy" in result["names"]


def test_missing_values_are_null(client):
    assert get(client, "metrics", run=0)["columns"]["val/math/accuracy"] == [None, 0.5, None, 0.5]


def test_groups_of_a_step(client):
    result = get(client, "groups", run=0, step=2)
    assert result["columns"]["uid"] == UIDS
    assert result["columns"]["score_std"] == [0.0, 0.5, 0.25]
    assert result["has_responses"]


def test_answers_of_a_group_have_counts_and_turns(client):
    result = get(client, "group", run=0, step=2, uid=UIDS[2])
    assert [(a["sample_index"], a["length"], a["trained"], a["score"]) for a in result["responses"]] == [
        (0, 6, 4, 0.0), (1, 6, 4, 0.5)
    ]  # fmt: skip
    assert [turn["source"] for turn in result["responses"][0]["turns"]] == ["model", "environment", "model"]


def test_an_answer_has_tokens_and_exact_values(client):
    (part,) = get(client, "answer", run=0, step=2, uid=UIDS[2], sample=1)["parts"]
    assert part["tokens"] == [" w3", " w4", " w5", " w6", None, " w8"], "-1 is redacted"
    assert part["columns"]["rollout_log_probs"] == [-0.5, -1.0, -1.5, -2.0, None, -0.125]
    assert part["columns"]["mask"] == [1, 1, 0, 0, 1, 1]
    assert part["columns"]["versions"] == [1] * 6
    assert part["rewards"] == {"acc": 0.5}
    assert "entropy" not in part["columns"], "not recorded"


def test_float32_values_have_their_shortest_form(tmp_path):
    import pyarrow as pa

    from verl.viewer.values import numbers

    assert numbers(pa.array([0.1, -5.1936736, float("inf"), None], pa.float32())) == [0.1, -5.1936736, None, None]


def test_timeline_has_tracks_idle_time_and_waits(client):
    result = get(client, "timeline", run=0, first=3, last=3)
    assert [track["track"] for track in result["tracks"]] == ["controller", "actor/0", "actor/1", "engine/0"]
    assert [track["idle"] for track in result["tracks"]] == pytest.approx([0.0, 0.7, 0.9, 0.5])
    assert result["tracks"][0]["spans"] == [["step", 0.0, 10.0, 3], ["gen", 0.0, 6.0, 3]]
    (wait,) = result["waits"]
    assert (wait["slowest"], wait["mean"]) == ("actor/0", pytest.approx(2.0))


def test_planned_memory_stands_beside_the_largest_measured_one(tmp_path):
    writer = open_writer(tmp_path)
    writer.event("memory_plan", 0, data={"gb": {"gen": 5.0, "ref": 2.0}, "device_gb": 80.0})
    for step, peak in ((1, 4.0), (2, 4.5), (3, 4.25)):
        write_step(writer, step, {"memory_gb/gen": peak, "memory_gb/update_actor": 7.0})
    close(writer)
    assert ViewedRun(tmp_path).series()["memory"] == {
        "device_gb": 80.0,
        "phases": [
            {"phase": "gen", "planned": 5.0, "measured": 4.5},
            {"phase": "ref", "planned": 2.0, "measured": None},
            {"phase": "update_actor", "planned": None, "measured": 7.0},
        ],
    }


def test_memory_of_runs_without_a_plan_and_of_supervised_runs(client, tmp_path):
    assert get(client, "series", run=0)["memory"] == {"device_gb": None, "phases": []}
    writer = open_writer(tmp_path)
    write_step(writer, 1, {"perf/memory_allocated_gb_max": 3.0})
    close(writer)
    assert ViewedRun(tmp_path).series()["memory"]["phases"] == [{"phase": "sft", "planned": None, "measured": 3.0}]


def test_validation_shows_each_prompt_over_time(client):
    result = get(client, "validation", run=0)
    assert result["steps"] == [2, 4]
    assert [prompt["uid"] for prompt in result["prompts"]] == UIDS
    assert result["correct"] == [[1.0, 1.0], [0.0, 1.0], [1.0, 0.0]]
    rows = get(client, "validation_answers", run=0, uid=UIDS[0])
    assert [row["response"] for row in rows] == ["answer of step 2", "answer of step 4"]


def test_rows_and_pairs_of_supervised_runs(tmp_path):
    run = ViewedRun(write_supervised_run(tmp_path))
    assert (run.summary()["steps"]["rows"], run.summary()["steps"]["pairs"]) == ([1, 2], [1, 2])
    columns = run.rows(1)["columns"]
    assert (columns["loss"], columns["recorded"]) == ([1.0, None], [True, False])
    assert columns["prompt"] == [HOSTILE, None]
    (part,) = run.row(1, UIDS[0])["parts"]
    assert part["tokens"] == [" w3", " w4"]
    assert part["columns"] == {"mask": [1, 0], "trainer_log_probs": [-1.0, None]}
    with pytest.raises(RecordingError, match=r"\bstep 1\b.*\bb{31,}\."):
        run.row(1, UIDS[1])
    assert [hit["hits"] for hit in run.search("needle")] == [[{"uid": UIDS[0], "sample": 0, "text": "a needle"}]] * 2
    pairs = run.pairs(2)["columns"]
    assert (pairs["margin"], pairs["correct"]) == ([0.5, None], [True, None])
    assert run.pair(2, UIDS[0]) == {
        "step": 2, "uid": UIDS[0], "prompt": "which?", "chosen": HOSTILE, "rejected": "no"
    }  # fmt: skip
    assert write_export([run], tmp_path / "run.html") > 0
    assert "owned'</script>" not in (tmp_path / "run.html").read_text()


def search(client: httpx.Client, **parameters: Any) -> list[dict[str, Any]]:
    lines = client.get("/api/search", params={"run": 0, **parameters}).text.splitlines()
    return [json.loads(line) for line in lines]


def test_search_finds_answers_of_a_step_and_of_the_run_newest_first(client):
    *results, end = search(client, text="NEEDLE", step=2)
    assert [(hit["uid"], hit["sample"]) for hit in results[0]["hits"]] == [(UIDS[0], 0), (UIDS[0], 1)]
    assert end == {"done": True, "is_complete": True}
    *results, _ = search(client, text="needle")
    assert [result["step"] for result in results] == [4, 3, 2, 1]
    *results, _ = search(client, text="no such text")
    assert not any(result["hits"] for result in results)


def test_the_search_text_is_no_pattern(client):
    *results, _ = search(client, text="needl.", step=2)
    assert results[0]["hits"] == []


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("groups?run=0&step=99", 404),
        ("groups?run=0&step=x", 400),
        ("groups?run=0", 400),
        ("groups?run=7&step=1", 404),
        ("answer?run=0&step=1&uid=none&sample=0", 404),
        ("nothing?run=0", 404),
        ("search?run=0", 400),
        ("search?run=0&text=a&step=99", 404),
        ("metrics?run=0&names=5", 400),
    ],
)
def test_invalid_queries_have_one_sentence(client, query, status):
    response = client.get(f"/api/{query}")
    assert response.status_code == status
    assert response.json()["detail"].endswith(".")


def test_no_response_allows_inline_scripts_or_other_origins(client):
    group = f"/api/group?run=0&step=1&uid={UIDS[1]}"
    for path in ("/", "/static/app.js", "/api/runs", group, "/api/search?run=0&text=a"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert client.get(group).headers["content-type"] == "application/json"


def test_the_page_has_no_inline_code_and_never_parses_texts_as_markup():
    page = (STATIC / "index.html").read_text()
    assert "<script>" not in page
    assert " style=" not in page
    scripts = "".join(path.read_text() for path in STATIC.glob("*.js"))
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert name not in scripts
    assert "http://" not in scripts + page
    assert "https://" not in scripts + page


@pytest.mark.parametrize("name", ["../server.py", "..%2Fserver.py", "%2Fetc%2Fpasswd", "none.js", ""])
def test_only_files_of_the_page_are_served(client, name):
    assert client.get(f"/static/{name}").status_code == 404


def test_a_token_is_accepted_as_link_cookie_or_key_only(folder):
    with serve_in_thread(create_viewer_app([ViewedRun(folder)], "secret"), "runs") as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}")
        for path in ("/", "/api/runs", "/static/app.js", "/?token=wrong", "/api/runs?token=wrong"):
            assert client.get(path).status_code == 401, path
        assert client.get("/api/runs", headers={"Cookie": "verl_view=wrong"}).status_code == 401
        assert client.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
        response = client.get("/?token=secret")
        assert (response.status_code, response.headers["location"]) == (303, "/")
        cookie = response.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert client.get("/api/runs").status_code == 200, "the client keeps the cookie"


def test_a_live_run_sends_events_and_new_steps(tmp_path):
    writer = open_writer(tmp_path)
    write_step(writer, 1)
    with serve_in_thread(create_viewer_app([ViewedRun(tmp_path)]), "runs") as port:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)
        assert get(client, "runs")[0]["status"] == "running"
        with client.stream("GET", "/api/follow") as events:
            lines = events.iter_lines()
            assert next(lines).startswith(":")
            write_step(writer, 2)
            assert next(line for line in lines if line.startswith("data:")) == "data: 0"
        close(writer)
        assert get(client, "runs")[0]["last_step"] == 2
        assert get(client, "metrics", run=0)["columns"]["step"] == [1, 2]
        assert get(client, "groups", run=0, step=2)["columns"]["uid"] == UIDS


def test_hostile_texts_are_sent_as_json_texts(client):
    result = get(client, "group", run=0, step=1, uid=UIDS[1])
    assert result["responses"][0]["turns"][0]["text"] == HOSTILE
