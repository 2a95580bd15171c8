"""Dense retrieval with a real encoder of random weights: neighbours, the kept index, a file made elsewhere."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

from verl.search import dense
from verl.search.retriever import open_retriever
from verl.utils import fs

# Importing them takes seconds, and every pytest worker imports every file.
pytestmark = pytest.mark.skipif(
    not (find_spec("faiss") and find_spec("sentence_transformers")), reason="needs faiss and sentence_transformers"
)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(200))]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A BERT of two layers, one token per word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder") / "tiny"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    BertModel(config).save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("corpus") / "c.jsonl"
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 200, 12)) for _ in range(2000)]
    path.write_text("".join(json.dumps({"id": n, "contents": text}) + "\n" for n, text in enumerate(texts)))
    return path, texts


def test_a_text_finds_itself_and_the_index_is_kept(encoder, corpus, tmp_path, monkeypatch, caplog):
    path, texts = corpus
    monkeypatch.setattr(dense, "BATCH_DOCUMENTS", 300)  # batches that do not divide the corpus
    built = []
    monkeypatch.setattr(dense, "build_dense", lambda *given, build=dense.build_dense: (built.append(1), build(*given)))
    first = open_retriever(str(path), "dense", 3, index_path=str(tmp_path), model=str(encoder), faiss_gpu=True)
    assert "searching on the CPU" in caplog.text
    found = first.retrieve(texts[:100])
    assert sum(hits[0].document.id == str(number) for number, hits in enumerate(found)) >= 95
    assert found[0][0].score == pytest.approx(1.0, abs=2e-3)
    again = open_retriever(str(path), "dense", 3, index_path=str(tmp_path), model=str(encoder))
    assert again.retrieve(texts[:10]) == first.retrieve(texts[:10])
    assert built == [1]


def test_an_exact_index_made_elsewhere_is_read_and_one_of_another_corpus_refused(
    encoder, corpus, tmp_path, monkeypatch
):
    import faiss

    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    path, texts = corpus
    vectors = dense.TextEncoder(str(encoder)).passages(texts)
    exact = faiss.IndexFlatIP(vectors.shape[1])
    exact.add(vectors)
    faiss.write_index(exact, str(tmp_path / "flat.index"))
    retriever = open_retriever(str(path), "dense", 1, index_path=str(tmp_path / "flat.index"), model=str(encoder))
    assert [hits[0].document.id for hits in retriever.retrieve(texts[:20])] == [str(number) for number in range(20)]
    exact.add(vectors[:1])
    faiss.write_index(exact, str(tmp_path / "other.index"))
    with pytest.raises(ValueError, match=r"\b2001\b.*c\.jsonl .*\b2000\b.*--index_path"):
        open_retriever(str(path), "dense", index_path=str(tmp_path / "other.index"), model=str(encoder))


def test_models_that_want_words_before_a_text_get_them(encoder, tmp_path):
    named = tmp_path / "e5-tiny"
    named.symlink_to(encoder)
    plain, prefixed = dense.TextEncoder(str(encoder)), dense.TextEncoder(str(named))
    assert np.allclose(prefixed.queries(["w1 w2"]), plain.queries(["query: w1 w2"]))
    assert np.allclose(prefixed.passages(["w1 w2"]), plain.queries(["passage: w1 w2"]))
    with pytest.raises(ValueError, match=r"--retriever_model: .*/none'"):
        dense.TextEncoder(str(tmp_path / "none"))


@pytest.mark.parametrize(("name", "from_hub"), [("e5", False), ("e5", True), ("dense", True)])
def test_an_encoder_by_its_family_or_hub_name_gets_its_words(encoder, tmp_path, monkeypatch, name, from_hub):
    """As Search-R1 starts it: `--retriever_name e5 --retriever_model org/e5-tiny`."""
    hashed = tmp_path / "cache" / "0123"  # as a hub's folder is named
    hashed.parent.mkdir()
    hashed.symlink_to(encoder)
    monkeypatch.setattr(fs, "download_from_hub", lambda *_: str(hashed))
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("".join(json.dumps({"id": n, "contents": f"w{n} w{n + 1}"}) + "\n" for n in range(20)))
    model = "org/e5-tiny" if from_hub else str(encoder)
    retriever = open_retriever(str(corpus), name, 1, index_path=str(tmp_path), model=model)
    (hit,) = retriever.retrieve(["w100 w150"])[0]
    plain = dense.TextEncoder(str(encoder))
    query, passages = (
        plain.queries(["query: w100 w150"]),
        plain.passages([f"passage: w{n} w{n + 1}" for n in range(20)]),
    )
    assert hit.score == pytest.approx((passages @ query[0]).max(), abs=2e-3)
    assert hit.score != pytest.approx(
        (plain.passages([hit.document.contents]) @ plain.queries(["w100 w150"])[0])[0], abs=5e-3
    )
