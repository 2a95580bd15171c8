"""Limits of queries: what takes long is rejected before it is searched, and the error names the limit."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.search_server import write_corpus
from verl.search.client import LocalSearcher, RetrieverError
from verl.search.corpus import Corpus
from verl.search.retriever import (
    MAX_QUERIES,
    MAX_QUERY_CHARACTERS,
    MAX_QUERY_WORDS,
    MAX_REQUEST_WORDS,
    MAX_TOPK,
    QueryLimit,
    Retriever,
    check_queries,
    open_retriever,
)


class Counting:
    """An index that counts the queries it is asked."""

    documents, searched = 1, 0

    def search(self, queries, k):
        self.searched += len(queries)
        return [[(0, 1.0)] for _ in queries]


@pytest.fixture
def index():
    return Counting()


@pytest.fixture
def retriever(tmp_path, index):
    path = write_corpus(tmp_path / "c.jsonl", {"Tavor": "The colour of Tavor is red."})
    return Retriever(Corpus(str(path), tmp_path / "cache"), index)


@pytest.mark.parametrize(
    ("queries", "topk", "words"),
    [
        (["word " * 1_000_000], None, f"^queries: .*5000000 characters; .*{MAX_QUERY_CHARACTERS}"),
        (["ab " * (MAX_QUERY_WORDS + 1)], None, f"^queries: .*513 words; .*{MAX_QUERY_WORDS}"),
        (["ab-" * (MAX_QUERY_WORDS + 1)], None, f"^queries: .*513 words; .*{MAX_QUERY_WORDS}"),
        (["ab"], 0, rf"^topk: 0\. .*\b1 to {MAX_TOPK}\b"),
        (["ab"], MAX_TOPK + 1, rf"^topk: 1001\. .*\b1 to {MAX_TOPK}\b"),
        (["ab"], 10**400, "^topk: .*12 digits"),
    ],
)
def test_a_query_beyond_a_limit_is_not_searched(retriever, index, queries, topk, words):
    for call in (retriever.retrieve, check_queries):
        with pytest.raises(QueryLimit, match=words):
            call(queries, topk)
    with pytest.raises(RetrieverError, match=words) as refused:
        asyncio.run(LocalSearcher(retriever).retrieve(queries, topk))
    assert refused.value.refused
    assert index.searched == 0


def test_a_default_topk_beyond_the_limit_is_rejected_before_the_corpus_is_read(tmp_path):
    with pytest.raises(QueryLimit, match=f"topk: {MAX_TOPK + 1}"):
        open_retriever(str(tmp_path / "missing.jsonl"), topk=MAX_TOPK + 1)


def test_a_request_is_limited_as_a_whole():
    with pytest.raises(QueryLimit, match=rf"^queries: {MAX_QUERIES + 1}\b.*\b{MAX_QUERIES}\b"):
        check_queries(["ab"] * (MAX_QUERIES + 1))
    many = ["ab " * MAX_QUERY_WORDS] * (MAX_REQUEST_WORDS // MAX_QUERY_WORDS)
    check_queries(many)
    with pytest.raises(QueryLimit, match=rf"^queries: {MAX_REQUEST_WORDS + 1}\b.*\b{MAX_REQUEST_WORDS}\b"):
        check_queries([*many, "ab"])


def test_queries_at_the_limits_are_answered(retriever, index):
    queries = ["x" * MAX_QUERY_CHARACTERS, "ab " * MAX_QUERY_WORDS, ""]
    assert [len(hits) for hits in retriever.retrieve(queries, MAX_TOPK)] == [1, 1, 1]
    assert index.searched == 3
