"""`python -m verl.agent.gateway` on a tiny model: what the engine sampled is what the file holds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import anthropic
import openai
import pytest

from tests.support.tiny import save_tiny_model, tiny_tokenizer
from verl.agent.gateway import __main__ as program


def started(folder, log, out):
    command = [sys.executable, "-m", "verl.agent.gateway", "--model", str(folder), "--port", "0", "--device", "cpu"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, "--out", str(out)], stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    while not (found := re.search(r"at (http://127\.0\.0\.1:\d+)/sessions/<name>", log.read_text())):
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    return process, found[1]


def test_a_session_that_cannot_be_written_leaves_no_half_line_in_its_file_only(tmp_path, monkeypatch):
    """The file is rotated while the session is written."""
    out, rotated = tmp_path / "sessions.jsonl", tmp_path / "sessions.jsonl.1"
    out.write_text("{}\n")

    def pieces(state):
        yield '{"id": ' + "x" * 2**20
        out.rename(rotated)
        out.write_text('{"id": "of another program"}\n')
        raise OSError("no space left")

    monkeypatch.setattr(program, "json_pieces", pieces)
    arguments = ["--model", "a", "--out", str(out)]
    gateway = program.Gateway(None, None, program._parser().parse_args(arguments))
    with pytest.raises(OSError, match="no space left"):
        gateway._append({})
    assert rotated.read_text() == "{}\n"
    assert out.read_text() == '{"id": "of another program"}\n'


@pytest.mark.processes
@pytest.mark.slow
def test_an_agent_is_tried_and_its_sessions_are_written(tmp_path):
    folder, out = save_tiny_model(tmp_path / "model"), tmp_path / "made" / "sessions.jsonl"
    process, address = started(folder, tmp_path / "log", out)
    try:
        messages = [{"role": "user", "content": "hi"}]
        with openai.OpenAI(base_url=f"{address}/sessions/one/v1", api_key="any") as client:
            asked = {"model": "any", "max_tokens": 6, "seed": 3, "temperature": 0.7}
            told = client.chat.completions.create(messages=messages, logprobs=True, **asked).choices[0]
            following = [*messages, told.message, {"role": "user", "content": "go on"}]
            pieces = list(client.chat.completions.create(messages=following, stream=True, **asked))
            assert sum(bool(piece.choices[0].delta.content) for piece in pieces) > 1, "told as it is sampled"
        url, key = f"{address}/sessions/one", {"x-api-key": "any"}
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE", headers={"x-api-key": "other"}))
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE", headers=key)).close()
        with anthropic.Anthropic(base_url=f"{address}/sessions/two", api_key="any") as client:
            client.messages.create(model="any", max_tokens=4, messages=messages)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
    one, two = map(json.loads, out.read_text().splitlines())
    assert (one["id"], two["id"]) == ("one", "two")
    assert one["requests"] | {"under_way": 0} == {"start": 1, "extension": 1, "cut_off": 0, "under_way": 0}
    first, second = one["nodes"]
    text = tiny_tokenizer().decode(first["token_ids"], skip_special_tokens=True)
    assert text == told.message.content
    assert len(first["log_probs"]) == len(first["versions"]) == len(first["token_ids"]) == len(told.logprobs.content)
    assert (second["parent"], two["nodes"][0]["parent"]) == (0, None)
