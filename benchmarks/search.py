"""Retrieval: queries per second of BM25 (in process, over HTTP) and dense, time and memory of building their indices.

    python benchmarks/search.py [--documents 200000] [--corpus FILE] [--dense_documents 20000] [--retriever_model DIR]

The plain way in the same run is bm25s called directly, with all texts and tokens in memory. Documents are synthetic
(100 words each, word frequencies as in English: rank^-1) unless `--corpus` names a file. Every build is a process of
its own; its memory is what it holds for itself (RssAnon), looked at 20 times a second. The dense encoder is a BERT of
two layers with random weights unless `--retriever_model` names one: the encoder is most of a dense query.
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

WORDS, LENGTH = 100_000, 100
QUERIES, BATCH = 2_000, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--corpus", help="JSON lines of {id, contents} in the place of synthetic documents")
    parser.add_argument("--dense_documents", type=int, default=20_000)
    parser.add_argument("--retriever_model")
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
            drawn = zipf(rng, (min(1000, documents - first), LENGTH))
            for number, words in enumerate(drawn, first):
                text = " ".join(f"w{word}" for word in words)
                out.write(json.dumps({"id": str(number), "contents": f'"Title {number}"\n{text}'}) + "\n")
    return path


def make_queries(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    return [" ".join(f"w{word}" for word in words) for words in zipf(rng, (count, 8))]


def zipf(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Ranks of words, each as frequent as 1 / rank."""
    return (WORDS ** rng.random(shape)).astype(np.int64)


def print_build(name: str, corpus: Path, folder: Path, model: str | None = None) -> None:
    command = [sys.executable, __file__, "--build", name, str(corpus), str(folder / "kept")]
    command += ["--retriever_model", model] if model else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    ours = "bm25s directly" if name == "plain" else name
    print(f"build {ours:15} {facts['seconds']:7.1f} s   {facts['peak_mb']:7.0f} MB of memory at its peak")


def build(name: str, corpus: str, kept: str, model: str | None) -> None:
    """In a process of its own: build one index, and say what it took."""
    import bm25s

    if name == "dense":
        import sentence_transformers  # noqa: F401 - not part of what is measured
    before, watch = anonymous(), Watch()
    begin = time.monotonic()
    if name == "plain":
        texts = [json.loads(line)["contents"] for line in Path(corpus).read_text().splitlines()]
        tokens = bm25s.tokenize(texts, stopwords="en", show_progress=False)
        index = bm25s.BM25()
        index.index(tokens, show_progress=False)
        index.save(f"{kept}-plain", show_progress=False)
    else:
        open_retriever(corpus, name, index_path=kept, model=model)
    seconds = time.monotonic() - begin
    print(json.dumps({"seconds": seconds, "peak_mb": watch.peak() - before}))


def anonymous() -> float:
    """MB that this process holds for itself."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1024


class Watch:
    """Memory of this process while something runs."""

    def __init__(self) -> None:
        self._most, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def peak(self) -> float:
        self._over.set()
        self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._most = max(self._most, anonymous())


def bm25_speed(corpus: Path, folder: Path, queries: list[str]) -> None:
    import bm25s

    plain = bm25s.BM25.load(str(folder / "kept-plain"), mmap=True)
    ours = open_retriever(str(corpus), index_path=str(folder / "kept"))

    def directly(batch: list[str]) -> Any:
        tokens = bm25s.tokenize(batch, stopwords="en", return_ids=False, show_progress=False)
        return plain.retrieve(tokens, k=3, show_progress=False)

    print_speed("bm25s directly", lambda: [directly(batch) for batch in batches(queries)], len(queries))
    print_speed("bm25 in process", lambda: [ours.retrieve(batch, 3) for batch in batches(queries)], len(queries))
    with serving(corpus, "--index_path", str(folder / "kept")) as server:
        print_speed("bm25 over HTTP", lambda: asyncio.run(ask(server.url, queries)), len(queries))


async def ask(url: str, queries: list[str]) -> None:
    """As 256 trajectories ask that search at the same time, each one query."""
    client, slots = RetrieverClient(url, cache_size=0), asyncio.Semaphore(256)

    async def one(query: str) -> None:
        async with slots:
            await client.retrieve([query], 3)

    await asyncio.gather(*map(one, queries))
    await client.close()


def dense_speed(corpus: Path, folder: Path, model: str, queries: list[str]) -> None:
    ours = open_retriever(str(corpus), "dense", index_path=str(folder / "kept"), model=model)
    print_speed("dense in process", lambda: [ours.retrieve(batch, 3) for batch in batches(queries)], len(queries))


def random_encoder(folder: Path) -> Path:
    """A BERT of two layers whose words are the synthetic ones, cut into pieces of a few letters."""
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
    run()  # pages of the index come in
    begin = time.monotonic()
    run()
    print(f"{name:21} {queries / (time.monotonic() - begin):7.0f} queries/s")


if __name__ == "__main__":
    main()
