"""Alerts of the health rules are posted to a webhook: once, without blocking, again if the server refused them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.support.recordings import close, open_writer, write_step
from verl.config import ConfigError, load_config
from verl.recording import schema
from verl.recording.health import AlertPoster

RUN = {"experiment": "grpo", "project": "tests"}


class Webhook:
    """A real HTTP server that stores what is posted and replies with the next of `statuses`, at last 200."""

    def __init__(self, *statuses: int) -> None:
        self.messages: list[dict[str, Any]] = []
        self.received = threading.Semaphore(0)
        replies = list(statuses)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["content-length"]))
                self.messages.append(json.loads(body))
                handler.send_response(replies.pop(0) if replies else 200)
                handler.send_header("content-length", "0")
                handler.end_headers()
                self.received.release()

            def log_message(handler, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/secret"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def webhook() -> Iterator[Any]:
    started: list[Webhook] = []

    def start(*statuses: int) -> Webhook:
        started.append(Webhook(*statuses))
        return started[-1]

    yield start
    for hook in started:
        hook.server.shutdown()
        hook.server.server_close()


def truncated_run(folder, steps: int = 5):
    writer = open_writer(folder, data={"max_response_length": 64})
    for step in range(1, steps + 1):
        write_step(writer, step, {"response_length/clip_ratio": 0.5, "response_length/mean": 60.0})
    writer.event("end", steps)
    close(writer)
    return folder / schema.FOLDER


def test_an_alert_is_posted_once_with_its_figure_and_remedy(tmp_path, webhook):
    hook = webhook()
    poster = AlertPoster(truncated_run(tmp_path), hook.url, RUN, interval=0.01)
    assert hook.received.acquire(timeout=30)
    poster.close()
    (message,) = hook.messages
    assert (message["rule"], message["level"], message["experiment"]) == ("truncation", "alert", "grpo")
    assert (message["first_step"], message["last_step"]) == (1, 5)
    assert message["settings"]["data.max_response_length"] == "128"
    assert message["text"].startswith("grpo, step 5: Many responses are truncated. 50%")


def test_a_refused_alert_is_posted_again_and_the_address_is_not_logged(tmp_path, webhook, caplog, monkeypatch):
    monkeypatch.setattr("verl.recording.health.MAX_CHECK_SHARE", 1.0)  # no pauses by the cost of a check
    hook = webhook(500, 503)
    poster = AlertPoster(truncated_run(tmp_path), hook.url, RUN, interval=0.01)
    for _ in range(3):
        assert hook.received.acquire(timeout=30)
    poster.close()
    assert [message["rule"] for message in hook.messages] == ["truncation"] * 3
    (record,) = [record for record in caplog.records if "alert_url" in record.message]
    assert "status 500" in record.message
    assert "secret" not in caplog.text


def test_alerts_of_a_short_run_are_posted_when_it_ends(tmp_path, webhook):
    hook = webhook()
    AlertPoster(truncated_run(tmp_path), hook.url, RUN).close()
    assert len(hook.messages) == 1


def test_a_server_that_does_not_exist_is_no_error_of_the_run(tmp_path, caplog):
    AlertPoster(truncated_run(tmp_path), "http://127.0.0.1:9/secret", RUN).close()
    assert "ConnectError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("url", ["hooks.example.org/x", "ftp://host/x", "https:///x"])
def test_an_address_without_scheme_or_host_is_rejected(url):
    needed = ["data.train_files=x.parquet", "actor_rollout_ref.model.path=x"]
    with pytest.raises(ConfigError, match=r"trainer\.record\.alert_url"):
        load_config(None, [*needed, f"trainer.record.alert_url='{url}'"])
