"""Regular clients: requests whose results are recorded before an attack and must be the same during it."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.attacks.support.gateway_attacks import VICTIM, VICTIM_SECRET
from tests.attacks.support.keys import API_KEY, bearer

__all__ = ["RegularClients", "regular_work"]

Work = Callable[[str], Any]
"""url -> the result, comparable with ==."""
_PAUSE_S = 0.1
_TIMEOUT_S = 120.0
_BATCH = 16
"""--max-num-seqs of the servers."""
_CONCURRENT_CLIENTS = 8
_numbers = itertools.count()


class RequestFailed(Exception):
    """A regular request got another status than 200."""


def request(url: str, method: str, path: str, content: Any = None, key: str = API_KEY) -> Any:
    """One request on a new connection: (parsed JSON, or the text of a stream)."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json", **bearer(key)})
        response = connection.getresponse()
        received = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RequestFailed(f"{method} {path}: {response.status} {received[:300]!r}")
    if response.headers.get_content_type() == "text/event-stream":
        return received.decode()
    return json.loads(received)


def regular_work(server: str) -> list[Work]:
    return {"sandbox": _sandbox, "search": _search, "inference": _inference, "gateway": _gateway}[server]()


@dataclass
class RegularClients:
    """Several clients that repeat the work until `stop`. `problems` are failed requests and changed results."""

    url: str
    work: Sequence[Work]
    clients: int = 2
    expected: list[Any] = field(default_factory=list)
    ok: int = 0
    changed: int = 0
    failed: int = 0
    slowest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def record(self) -> None:
        """Record the results without an attack, and that they are reproducible, also by concurrent clients.

        Concurrent clients use every worker process of the server: the idle level includes what each of them loads.
        """
        self.expected = [work(self.url) for work in self.work]
        with ThreadPoolExecutor(_CONCURRENT_CLIENTS) as threads:
            for _ in range(_CONCURRENT_CLIENTS):
                for work, expected in zip(self.work, self.expected, strict=True):
                    results = list(threads.map(work, [self.url] * _CONCURRENT_CLIENTS))
                    assert all(result == expected for result in results), "regular requests are not reproducible"

    def start(self) -> None:
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        order = list(range(len(self.work)))
        order = order[number:] + order[:number]
        for place in itertools.cycle(order):
            if self._ended.is_set():
                return
            self._once(place)
            self._ended.wait(_PAUSE_S)

    def _once(self, place: int) -> None:
        began = time.monotonic()
        try:
            result = self.work[place](self.url)
        except (OSError, http.client.HTTPException, RequestFailed, ValueError) as error:
            self.failed += 1
            self.problems.append(f"request {place} failed after {time.monotonic() - began:.1f} s: {error!r}"[:500])
            return
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        if result == self.expected[place]:
            self.ok += 1
        else:
            self.changed += 1
            self.problems.append(f"request {place} changed: {str(self.expected[place])[:300]} -> {str(result)[:300]}")


# ---------------------------------------------------------------- the work of each server


def _sandbox() -> list[Work]:
    def run(**fields: Any) -> Work:
        def work(url: str) -> Any:
            result = request(url, "POST", "/run_code", fields)
            result["run_result"].pop("execution_time")
            return result

        return work

    copy = "open('out', 'wb').write(open('in', 'rb').read() * 2)"
    return [
        run(code="print(sum(range(1000)))"),
        run(code="print(input()[::-1])", stdin="hello"),
        run(code=copy, files={"in": "AP8="}, fetch_files=["out"]),
        run(code="import sys; print('a'); sys.exit(3)"),
        run(code="print(len(input()))", stdin="x" * 300_000),  # large enough for the parser's process
        run(code="print('x' * 100000)"),
    ]


def _search() -> list[Work]:
    def search(**fields: Any) -> Work:
        return lambda url: request(url, "POST", "/retrieve", fields)

    return [
        search(queries=["green apple 3"], topk=3, return_scores=True),
        search(queries=["red pear", "blue plum garden 4", "fig"], topk=5),
        search(queries=["nothing of this kind exists"], topk=2, return_scores=True),
        search(queries=["white melon " * 3] * 20, topk=1),
        search(queries=["yellow lime"], padding="x" * 300_000),  # large enough for the parser's process
    ]


def _inference() -> list[Work]:
    def complete(**fields: Any) -> Work:
        def work(url: str) -> Any:
            result = request(url, "POST", "/v1/completions", {"model": "tiny", "max_tokens": 12, **fields})
            if isinstance(result, str):
                return _streamed_text(result)
            return [(choice["text"], choice["finish_reason"]) for choice in result["choices"]], result["usage"]

        return work

    def chat(**fields: Any) -> Work:
        def work(url: str) -> Any:
            messages = [{"role": "user", "content": "What is in the garden?"}]
            given = {"model": "tiny", "messages": messages, "max_tokens": 12, **fields}
            result = request(url, "POST", "/v1/chat/completions", given)
            return [(choice["message"]["content"], choice["finish_reason"]) for choice in result["choices"]]

        return work

    return [
        complete(prompt="The quick brown fox", temperature=0),
        complete(prompt=["one", "two", [65, 66, 67]], temperature=1.0, seed=7, n=2),
        complete(prompt="stream", temperature=0, stream=True),
        chat(temperature=0),
        chat(temperature=0.8, seed=3, n=3),
        chat(temperature=0, response_format={"type": "json_object"}, max_tokens=8),
        # The largest batch of the longest prompts, with every kind of sampling: the idle level includes its buffers.
        complete(prompt=["word " * 40] * _BATCH, temperature=0.7, top_p=0.9, seed=1, logprobs=5, max_tokens=16),
        complete(prompt="penalties", temperature=0, presence_penalty=0.5, logit_bias={"65": 1.0}, stop=["never"]),
        complete(prompt="echo " * 40, temperature=0, echo=True, logprobs=1, max_tokens=1),
    ]


def _streamed_text(events: str) -> str:
    contents = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: {")]
    failure = next((content["error"] for content in contents if "error" in content), None)
    if failure is not None:
        raise RequestFailed(f"the stream ended with {failure}"[:300])
    return "".join(choice.get("text") or "" for content in contents for choice in content["choices"])


def _gateway() -> list[Work]:
    messages = [{"role": "user", "content": "hi"}]

    def chat(url: str) -> Any:
        """A session of its own: two turns, a reward, the record."""
        name = f"regular-{next(_numbers)}"
        secret = f"secret-of-{name}"
        base = f"/sessions/{name}"
        given = {"model": "any", "max_tokens": 8, "temperature": 0, "messages": messages}
        first = request(url, "POST", f"{base}/v1/chat/completions", given, secret)["choices"][0]["message"]
        following = [*messages, {"role": "assistant", "content": first["content"]}, *messages]
        turn = request(url, "POST", f"{base}/v1/chat/completions", {**given, "messages": following}, secret)
        request(url, "POST", f"{base}/reward_info", {"reward_info": {"reward": 0.5}}, secret)
        record = request(url, "DELETE", base, key=secret)
        tokens = [node["token_ids"] for node in record["nodes"]]
        return first["content"], turn["choices"][0]["message"]["content"], tokens, record["reward_info"]

    def crowd(url: str) -> Any:
        """Long conversations at the same time, as many as one batch has: the idle level includes its buffers."""
        content = {"role": "user", "content": "word " * 40}
        given = {"model": "any", "max_tokens": 16, "temperature": 0, "messages": [content]}

        def converse(_place: int) -> str:
            name = f"regular-{next(_numbers)}"
            answer = request(url, "POST", f"/sessions/{name}/v1/chat/completions", given, name)
            request(url, "DELETE", f"/sessions/{name}", key=name)
            return str(answer["choices"][0]["message"]["content"])

        with ThreadPoolExecutor(_BATCH) as threads:
            return list(threads.map(converse, range(_BATCH)))

    def anthropic(url: str) -> Any:
        name = f"regular-{next(_numbers)}"
        given = {"model": "any", "max_tokens": 8, "temperature": 0, "messages": messages}
        answer = request(url, "POST", f"/sessions/{name}/v1/messages", given, name)
        request(url, "DELETE", f"/sessions/{name}", key=name)
        return answer["content"], answer["stop_reason"]

    def structured(url: str) -> Any:
        """Output that follows a grammar: the idle level includes the grammar library."""
        name = f"regular-{next(_numbers)}"
        options = {"model": "any", "max_tokens": 8, "temperature": 0, "response_format": {"type": "json_object"}}
        answer = request(url, "POST", f"/sessions/{name}/v1/chat/completions", {**options, "messages": messages}, name)
        request(url, "DELETE", f"/sessions/{name}", key=name)
        return answer["choices"][0]["message"]["content"]

    def victim(url: str) -> Any:
        """The session that is attacked: created by its first use, then only read."""
        if not victim_exists:
            given = {"model": "any", "max_tokens": 8, "temperature": 0, "messages": messages}
            request(url, "POST", f"/sessions/{VICTIM}/v1/chat/completions", given, VICTIM_SECRET)
            victim_exists.append(True)
        return request(url, "GET", f"/sessions/{VICTIM}", key=VICTIM_SECRET)

    victim_exists: list[bool] = []
    return [chat, anthropic, structured, crowd, victim]
