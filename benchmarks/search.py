"""Retrieval: queries per second of BM25 (in process, over HTTP) and dense, time and memory of building their indices.

    python benchmarks/search.py [--documents 200000] [--corpus FILE] [--dense_documents 20000] [--retriever_model DIR]

The baseline is bm25s called directly, with all texts and tokens in memory. Documents are synthetic
(100 words each, word frequencies as in English: rank^-1) unless `--corpus` names a file. Every index
is built in a separate process, whose anonymous memory (RssAnon) is sampled 20 times per second. The dense encoder is a
BERT of two layers with random weights unless `--retriever_model` names one; it takes most of the time of a dense query.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.search_server import serving
from verl.search.client import RetrieverClient
from verl.search.retriever import open_retriever

VOCABULARY, DOCUMENT_WORDS = 100_000, 100
QUERIES, BATCH = 2_000, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000, help="number of synthetic documents")
    parser.add_argument("--corpus", help="JSON lines of {id, contents} instead of synthetic documents")
    parser.add_argument("--dense_documents", type=int, default=20_000, help="documents of the dense index; 0: none")
    parser.add_argument("--retriever_model", help="folder of a sentence encoder")
    parser.add_argument("--build", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.build:
        return build(*options.build, options.retriever_model)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["VERL_CACHE"] = str(folder / "cache")
        corpus = Path(options.corpus) if options.corpus else make_corpus(folder / "corpus.jsonl", options.documents)
        lines = sum(1 for _ in corpus.open())
        print(f"{lines} documents, {corpus.stat().st_size / 2**20:.0f} MB; {os.cpu_count()} cores")
        queries = make_queries(QUERIES)
        for name in ("plain", "bm25"):
            print_build(name, corpus, folder)
        bm25_speed(corpus, folder, queries)
        if options.dense_documents:
            dense = make_corpus(folder / "dense.jsonl", options.dense_documents)
            model = options.retriever_model or str(random_encoder(folder / "encoder"))
            print_build("dense", dense, folder, model)
            dense_speed(dense, folder, model, queries[:200])


def make_corpus(path: Path, documents: int) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as out:
        for first in range(0, documents, 1000):
            documents_words = zipf(rng, (min(1000, documents - first), DOCUMENT_WORDS))
            for number, words in enumerate(documents_words, first):
                text = " ".join(f"w{word}" for word in words)
                out.write(json.dumps({"id": str(number), "contents": f'"Title {number}"\n{text}'}) + "\n")
    return path


def make_queries(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    return [" ".join(f"w{word}" for word in words) for words in zipf(rng, (count, 8))]


def zipf(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Random word ranks with probability proportional to 1 / rank."""
    return (VOCABULARY ** rng.random(shape)).astype(np.int64)


def print_build(name: str, corpus: Path, folder: Path, model: str | None = None) -> None:
    command = [sys.executable, __file__, "--build", name, str(corpus), str(folder / "index")]
    command += ["--retriever_model", model] if model else []
    completed = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(completed.stdout.splitlines()[-1])
    label = "bm25s directly" if name == "plain" else name
    print(f"build {label:15} {figures['seconds']:7.1f} s   {figures['peak_mb']:7.0f} MB peak memory")


def build(name: str, corpus: str, index_path: str, model: str | None) -> None:
    """Build one index in this process and print seconds and peak memory as JSON."""
    import bm25s

    if name == "dense":
        import sentence_transformers  # noqa: F401 - its import is not measured
    before, memory = anonymous_mb(), PeakMemory()
    begin = time.monotonic()
    if name == "plain":
        texts = [json.loads(line)["contents"] for line in Path(corpus).read_text().splitlines()]
        tokens = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        index = bm25s.BM25()
        index.index(tokens, show_progress=False)
        index.save(f"{index_path}-plain", show_progress=False)
    else:
        open_retriever(corpus, name, index_path=index_path, model=model)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "peak_mb": memory.peak_mb() - before}))


def anonymous_mb() -> float:
    """Anonymous resident memory of this process in MB."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


class PeakMemory:
    """Samples the memory of this process in a thread until `peak_mb` is called."""

    def __init__(self) -> None:
        self._peak, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def peak_mb(self) -> float:
        self._stop.set()
        self._thread.join()
        return self._peak

    def _sample(self) -> None:
        while not self._stop.wait(0.05):
            self._peak = max(self._peak, anonymous_mb())


def bm25_speed(corpus: Path, folder: Path, queries: list[str]) -> None:
    import bm25s

    baseline = bm25s.BM25.load(str(folder / "index-plain"), mmap=True)
    retriever = open_retriever(str(corpus), index_path=str(folder / "index"))

    def retrieve_directly(batch: list[str]) -> Any:
        tokens = bm25s.tokenize(batch, stopwords="en", return_ids=False, show_progress=False)
        return baseline.retrieve(tokens, k=3, show_progress=False)

    print_speed("bm25s directly", lambda: [retrieve_directly(batch) for batch in batches(queries)], len(queries))
    print_speed("bm25 in process", lambda: [retriever.retrieve(batch, 3) for batch in batches(queries)], len(queries))
    with serving(corpus, "--index_path", str(folder / "index")) as server:
        print_speed("bm25 over HTTP", lambda: asyncio.run(send_queries(server.url, queries)), len(queries))


async def send_queries(url: str, queries: list[str]) -> None:
    """Send one query per request with 256 requests in flight, like 256 concurrent trajectories."""
    client, slots = RetrieverClient(url, cache_size=0), asyncio.Semaphore(256)

    async def send(query: str) -> None:
        async with slots:
            await client.retrieve([query], 3)

    await asyncio.gather(*map(send, queries))
    await client.close()


def dense_speed(corpus: Path, folder: Path, model: str, queries: list[str]) -> None:
    retriever = open_retriever(str(corpus), "dense", index_path=str(folder / "index"), model=model)
    print_speed("dense in process", lambda: [retriever.retrieve(batch, 3) for batch in batches(queries)], len(queries))


def random_encoder(folder: Path) -> Path:
    """A BERT of two layers with random weights, whose tokens are letters and digits of the synthetic words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", *"wTitle", *map(str, range(10)), *(f"{number:03}" for number in range(1000))]
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
    return folder


def batches(queries: list[str]) -> list[list[str]]:
    return [queries[first : first + BATCH] for first in range(0, len(queries), BATCH)]


def print_speed(name: str, run: Any, queries: int) -> None:
    run()  # loads the pages of the index
    begin = time.monotonic()
    run()
    print(f"{name:21} {queries / (time.monotonic() - begin):7.0f} queries/s")


if __name__ == "__main__":
    main()
