"""BM25 in bounded memory: the library's own scores, an index that is built once, memory that stays."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

from verl.search import bm25
from verl.search.corpus import Corpus
from verl.search.retriever import open_retriever

bm25s = pytest.importorskip("bm25s")
WORDS = [f"word{number}" for number in range(300)]


def corpus_file(path, documents, seed=0, longest=40):
    rng = random.Random(seed)
    with path.open("w") as out:
        for number in range(documents):
            text = " ".join(rng.choices(WORDS, weights=range(1, 301), k=rng.randint(0, longest)))
            out.write(json.dumps({"id": str(number), "contents": f'"T{number}"\n{text}'}) + "\n")
    return path


def test_scores_are_the_librarys_own(tmp_path, monkeypatch):
    monkeypatch.setattr(bm25, "BATCH_DOCUMENTS", 7)  # batches that do not divide the corpus
    corpus = Corpus(corpus_file(tmp_path / "c.jsonl", 100), tmp_path)
    bm25.build_bm25(corpus, tmp_path / "index")
    ours = bm25.BM25Index(tmp_path / "index")
    plain = bm25s.BM25()
    plain.index(
        bm25s.tokenize([found.contents for found in corpus], stopwords="en", show_progress=False), show_progress=False
    )
    rng = random.Random(1)
    queries = [" ".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(50)]
    _, wanted = plain.retrieve(
        bm25s.tokenize(queries, stopwords="en", return_ids=False, show_progress=False), k=5, show_progress=False
    )
    for hits, scores in zip(ours.search(queries, 5), wanted, strict=True):
        assert [score for _, score in hits] == pytest.approx(scores[scores > 0], rel=1e-5)


def test_the_best_document_comes_first_and_nothing_matches_nothing(tmp_path):
    path = tmp_path / "c.jsonl"
    texts = ("the colour of tavor is red", "the colour of belan is blue", "nothing here")
    path.write_text("".join(json.dumps({"id": n, "contents": text}) + "\n" for n, text in enumerate(texts)))
    retriever = open_retriever(str(path), index_path=str(tmp_path / "kept"))
    (hits, none, empty) = retriever.retrieve(["What colour has Belan?", "zzz qqq", ""], topk=10)
    assert [hit.document.id for hit in hits] == ["1", "0"]
    assert hits[0].score > hits[1].score > 0
    assert none == empty == []


def test_an_index_is_built_once_for_its_content_and_settings(tmp_path, monkeypatch):
    path, kept = corpus_file(tmp_path / "c.jsonl", 30), str(tmp_path / "kept")
    built = []
    monkeypatch.setattr(bm25, "build_bm25", lambda *given, build=bm25.build_bm25: (built.append(1), build(*given)))
    first = open_retriever(str(path), index_path=kept).retrieve(["word299"])
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(path.read_bytes())
    assert open_retriever(str(copy), index_path=kept).retrieve(["word299"]) == first
    assert len(built) == 1
    monkeypatch.setitem(bm25.SETTINGS, "k1", 1.2)
    open_retriever(str(path), index_path=kept)
    assert len(built) == 2
    corpus_file(path, 31)
    assert len(open_retriever(str(path), index_path=kept).corpus) == 31
    assert len(built) == 3


def test_a_build_that_dies_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    path, kept = corpus_file(tmp_path / "c.jsonl", 30), tmp_path / "kept"

    def dies(folder, *_):
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(bm25, "write_scores", dies)
        with pytest.raises(OSError, match="disk full"):
            open_retriever(str(path), index_path=str(kept))
    assert list(kept.glob("bm25-*")) == []
    assert open_retriever(str(path), index_path=str(kept)).retrieve(["word299"])[0]


def test_an_index_of_another_library_or_corpus_is_refused(tmp_path):
    path = corpus_file(tmp_path / "c.jsonl", 3)
    lucene = tmp_path / "lucene"
    lucene.mkdir()
    (lucene / "segments_1").touch()
    with pytest.raises(ValueError, match="Lucene"):
        open_retriever(str(path), index_path=str(lucene))


MEASURE = """
import resource, sys
from pathlib import Path
from verl.search import bm25
from verl.search.corpus import Corpus
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
bm25.import_bm25s()
corpus = Corpus(sys.argv[1], Path(sys.argv[2]))
peak, before, split = 0, anonymous(), bm25.split_words
def watched(texts):
    global peak
    peak = max(peak, anonymous() - before)
    return split(texts)
bm25.split_words, bm25.BATCH_DOCUMENTS = watched, 512
bm25.build_bm25(corpus, Path(sys.argv[2]) / "index")
print(max(peak, anonymous() - before) // 1024)
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Ten times the documents, and building takes hardly more memory of its own: the corpus is never held."""
    taken = {}
    for documents in (1_500, 15_000):
        path = corpus_file(tmp_path / f"{documents}.jsonl", documents, longest=120)
        command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path / f"of-{documents}")]
        taken[documents] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    size = path.stat().st_size // 2**20
    assert taken[15_000] < taken[1_500] + size, (taken, size)
