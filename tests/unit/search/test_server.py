"""The retriever as a process behind HTTP, and the client that asks it: what is said, and what happens when it dies."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from tests.support.search_server import serving, write_corpus
from verl.agent.toolbox import Toolbox
from verl.config import ConfigError, RetrieverConfig, as_config
from verl.config.rollout import MultiTurnConfig
from verl.search.client import CircuitBreaker, RetrieverClient, RetrieverError, check_retriever, format_documents
from verl.utils.tool_calls import ToolCall

pytest.importorskip("bm25s")
pytestmark = pytest.mark.processes
TEXTS = {"Tavor": "The colour of Tavor is red.", "Belan": "The colour of Belan is blue.", "Corin": "Corin is old."}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl", TEXTS)


@pytest.fixture(scope="module")
def server(corpus):
    with serving(corpus, "--topk", "2") as running:
        yield running


def ask(server, **body):
    return httpx.post(server.url, json=body, trust_env=False)


def test_answers_have_the_fields_that_clients_know(server):
    scored = ask(server, queries=["colour of Belan", "Corin"], topk=1, return_scores=True).json()
    (first,), (second,) = scored["result"]
    assert first["document"] == {"id": "1", "contents": '"Belan"\nThe colour of Belan is blue.'}
    assert first["score"] > 0
    assert second["document"]["id"] == "2"
    plain = ask(server, queries=["colour of Belan"], topk=None, return_scores=False).json()
    assert plain["result"] == [[first["document"], {"id": "0", "contents": '"Tavor"\nThe colour of Tavor is red.'}]]
    assert ask(server, queries=["colour of Belan"]).json() == plain
    assert ask(server, queries=[]).json() == {"result": []}
    health = httpx.get(f"{server.base}/health", trust_env=False).json()
    assert health | {"queries": 0} == {"status": "ok", "retriever": "bm25", "documents": 3, "topk": 2, "queries": 0}


def test_a_large_body_is_parsed_as_a_small_one(server):
    padded = ask(server, queries=["Corin"], topk=1, padding="x" * 300_000)
    assert padded.json() == ask(server, queries=["Corin"], topk=1).json()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"queries": "text"},
        {"queries": [1]},
        {"queries": ["a"], "topk": 0},
        {"queries": ["a"] * 2000},
        {"queries": ["a"] * 100, "topk": 1000},
        [1],
    ],
)
def test_what_is_no_question_is_refused_with_the_reason(server, body):
    reply = httpx.post(server.url, json=body, trust_env=False)
    assert reply.status_code == 422
    assert reply.json()["detail"]
    assert httpx.post(server.url, content="x" * (9 << 20), trust_env=False).status_code == 413


def test_the_limit_on_documents_holds_for_the_default_topk(corpus):
    with serving(corpus, "--topk", "100") as server:
        assert ask(server, queries=["a"] * 655).status_code == 200
        for topk in (None, 100):
            reply = ask(server, queries=["a"] * 656, topk=topk)
            assert reply.status_code == 422
            assert "656 with topk 100" in str(reply.json()["detail"])


def test_many_callers_share_requests_and_equal_questions_are_asked_once(server):
    async def run():
        client = RetrieverClient(server.url)
        queries = [f"colour of {name} {number}" for name in ("Tavor", "Belan") for number in range(50)]
        found = await asyncio.gather(*(client.retrieve([query], 1) for query in queries * 2))
        assert [hits[0].document.id for (hits,) in found] == (["0"] * 50 + ["1"] * 50) * 2
        assert client.counts["cached"] == 100
        assert client.counts["requests"] < 10
        again = await client.retrieve(["colour of Tavor 3"], 1)
        assert again[0][0].document.id == "0"
        assert client.counts["cached"] == 101
        await client.close()

    asyncio.run(run())


def test_a_refused_question_does_not_cost_others_theirs(server):
    async def run():
        client = RetrieverClient(server.url)
        good, bad = await asyncio.gather(client.retrieve(["Corin"], 1), client.retrieve([7], 1), return_exceptions=True)
        assert good[0][0].document.id == "2"
        assert isinstance(bad, RetrieverError)
        assert "queries.0" in str(bad)
        with pytest.raises(RetrieverError, match="UnicodeEncodeError"):
            await asyncio.wait_for(client.retrieve(["half a character: \ud800"], 1), 10)
        assert client.breaker.state == "closed"
        assert client.counts["failures"] == 2
        await client.close()

    asyncio.run(run())


@pytest.mark.slow
def test_a_service_that_dies_is_left_alone_and_found_again(corpus):
    async def run(server):
        client = RetrieverClient(server.url, breaker=CircuitBreaker(failures=3, cooldown_s=0.5), cache_size=0)
        assert await client.retrieve(["Corin"], 1)
        server.kill()
        for _ in range(3):
            with pytest.raises(RetrieverError, match=r"/retrieve: (ConnectError|circuit breaker)"):
                await client.retrieve(["Corin"], 1)
        assert client.breaker.state != "closed"
        sent = client.counts["requests"]
        with pytest.raises(RetrieverError, match="/retrieve: circuit breaker"):
            await client.retrieve(["Belan"], 1)
        assert client.counts["requests"] == sent
        assert client.counts["failures"] == 4
        server.start()
        await asyncio.sleep(0.6)
        assert (await client.retrieve(["Belan"], 1))[0][0].document.id == "1"
        assert client.breaker.state == "closed"
        await client.close()

    with serving(corpus) as server:
        asyncio.run(run(server))


def test_a_service_that_says_nothing_costs_no_more_than_its_time():
    async def run():
        async def silent(reader, writer):
            await asyncio.sleep(30)

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        client = RetrieverClient(f"http://127.0.0.1:{port}/retrieve", timeout_s=0.2)
        with pytest.raises(RetrieverError, match="Timeout"):
            await asyncio.wait_for(client.retrieve(["a"], 1), 5)
        assert client.counts["requests"] == 1
        await client.close()
        listener.close()

    asyncio.run(run())


def test_a_run_without_its_retriever_is_told_how_to_start_it(server, caplog):
    caplog.set_level("INFO", "verl.search")
    retriever = RetrieverConfig(url=server.url, topk=3, timeout=5.0, corpus_path=None)
    check_retriever(retriever)
    assert f"search: 3 documents at {server.url}" in caplog.text
    retriever.url = "http://127.0.0.1:9/retrieve"
    with pytest.raises(ValueError, match=r"(?s)retriever.url.*python -m verl.search.server --corpus_path"):
        check_retriever(retriever)


def test_a_corpus_is_searched_in_this_process(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    from verl.search.client import open_searcher

    async def run():
        searcher = open_searcher(RetrieverConfig(url=None, topk=2, timeout=5.0, corpus_path=str(corpus)))
        (hits,) = await searcher.retrieve(["colour of Belan"])
        await searcher.close()
        return hits

    told = format_documents(asyncio.run(run()))
    assert told == "Doc 1(Title: Belan) The colour of Belan is blue.\nDoc 2(Title: Tavor) The colour of Tavor is red.\n"


def test_a_server_that_cannot_start_says_why(tmp_path, capfd):
    from verl.search.server import main

    assert main(["--corpus_path", str(tmp_path / "none.jsonl"), "--port", "0"]) == 2
    assert "there is no file" in capfd.readouterr().err


def tool_file(folder, url):
    file = folder / "tools.yaml"
    file.write_text(
        "tools:\n  - class_name: verl.tools.search_tool.SearchTool\n"
        f"    config: {{type: native, retrieval_service_url: '{url}', topk: 1, timeout: 5, num_workers: 4}}\n"
    )
    return as_config(MultiTurnConfig, {"tool_config_path": str(file), "max_tool_response_length": 1000})


def test_the_search_tool_answers_several_queries_and_its_failure_is_the_models_to_read(server, tmp_path):
    def call(queries):
        return ToolCall("search", json.dumps({"query_list": queries}))

    async def run():
        toolbox = Toolbox.load(tool_file(tmp_path, server.url))
        await toolbox.check()
        async with toolbox.session({}) as session:
            one = await session.call(call(["colour of Belan"]))
            two = await session.call(call(["Corin", "zzz"]))
            wrong = await session.call(call("no list"))
        await toolbox.close()
        assert one.text == "Doc 1(Title: Belan) The colour of Belan is blue."
        assert two.text == "Query: Corin\nDoc 1(Title: Corin) Corin is old.\n---\nQuery: zzz\nNothing was found."
        assert two.metrics == {"query_count": 2, "total_results": 1}
        assert wrong.failure == "arguments"
        toolbox = Toolbox.load(tool_file(tmp_path, "http://127.0.0.1:9/retrieve"))
        with pytest.raises(ConfigError, match=r"= search: .*verl\.search\.server --corpus_path"):
            await toolbox.check()
        async with toolbox.session({}) as session:
            failed = await session.call(call(["Corin"]))
        await toolbox.close()
        assert failed.failure == "exception"
        assert "The search failed" in failed.text

    asyncio.run(run())


def test_queries_of_disconnected_clients_are_dropped_and_the_queue_is_bounded(monkeypatch):
    from verl.search import server as module

    class Slow:
        corpus, topk, seen = [], 1, []

        def retrieve(self, queries, topk):
            self.seen.append(list(queries))
            time.sleep(0.05)
            return [[] for _ in queries]

    async def run():
        search = module.SearchServer(Slow(), "slow")
        first = asyncio.ensure_future(search.search(["first"], 1))
        await asyncio.sleep(0)
        left = [asyncio.ensure_future(search.search([f"left {number}"], 1)) for number in range(5)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        assert await search.search(["last"], 1) == [[]]
        await first
        assert Slow.seen == [["first"], ["last"]]
        monkeypatch.setattr(module, "MAX_WAITING", 2)
        waiting = []
        for _ in range(2):  # the first is searched, the second waits
            waiting.append(asyncio.ensure_future(search.search(["a"] * 3, 1)))
            await asyncio.sleep(0.01)
        with pytest.raises(module.HttpError) as full:
            await search.search(["b"], 1)
        assert full.value.status == 503
        await asyncio.gather(*waiting)
        search.close()

    asyncio.run(run())
