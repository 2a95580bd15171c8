"""Dense retrieval: texts as vectors by sentence-transformers, their neighbours by an approximate index of faiss.

The index (inverted lists, 16-bit components) is trained on a sample. Vectors pass through a file while it is built:
memory holds a portion of them, and in the end the index itself, two bytes for each component.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from verl.search.corpus import Corpus
from verl.search.progress import portions, reported

__all__ = ["FAMILIES", "DenseIndex", "Encoder", "build_dense"]

_PORTION = 1 << 13
_BATCH = 128
_VECTORS, _INDEX, _FACTS = "vectors.npy", "index.faiss", "index.json"
# A list should have this many vectors to learn its centre from; faiss warns below 39.
_PER_LIST = 64
_PROBED = 16
SETTINGS = {"retriever": "dense", "index": "IVF,SQfp16", "format": 1}
# Models that were trained with words of their own before a query or a passage, by what is in their name.
_PREFIXES = {"e5": ("query: ", "passage: "), "bge": ("Represent this sentence for searching relevant passages: ", "")}
FAMILIES = tuple(_PREFIXES)

logger = logging.getLogger(__name__)


class Encoder:
    """A local sentence-transformers folder (or any encoder of transformers, mean-pooled): texts to unit vectors.

    Its name says which words it was trained with: `called`, else the folder's.
    """

    def __init__(self, path: str, called: str | None = None) -> None:
        if not os.path.isdir(path):
            raise ValueError(f"--retriever_model: no folder {path!r}. Give a local sentence-transformers model.")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError("dense retrieval needs sentence-transformers. Run: pip install verl[search]") from error
        _refuse_code(Path(path))
        self._model = SentenceTransformer(path, local_files_only=True, trust_remote_code=False)
        name = (called or os.path.basename(os.path.abspath(path))).lower()
        query, passage = next((pair for word, pair in _PREFIXES.items() if word in name), ("", ""))
        own = {kind: text for kind, text in self._model.prompts.items() if text}
        self._query, self._passage = own.get("query", query), own.get("passage", own.get("document", passage))

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, dimensions], float32."""
        return self._encode(texts, self._query)

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, dimensions], float32."""
        return self._encode(texts, self._passage)

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        return self._model.encode(
            list(texts), prompt=prefix, batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False
        ).astype(np.float32)


class DenseIndex:
    """An index of `build_dense`, or a faiss file made elsewhere, and the encoder of its queries."""

    def __init__(self, path: Path, encoder: Encoder, on_gpu: bool = False) -> None:
        faiss = library()
        self._encoder, self._busy = encoder, threading.Lock()
        file = path if path.is_file() else path / _INDEX
        self._index = _read_index(faiss, file)
        self.documents = int(self._index.ntotal)
        if on_gpu:
            self._index = _on_gpus(faiss, self._index)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(document, score) of the best `k` of every query; the score is the cosine."""
        if not queries:
            return []
        with self._busy:
            scores, rows = self._index.search(self._encoder.queries(queries), min(k, self.documents))
        return [
            [(number, value) for number, value in zip(*pair, strict=True) if number >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def build_dense(corpus: Corpus, folder: Path, encoder: Encoder) -> None:
    """Write the index of a corpus into a folder."""
    faiss = library()
    folder.mkdir(parents=True)
    width = encoder.passages(["width"]).shape[1]
    vectors = np.lib.format.open_memmap(folder / _VECTORS, "w+", np.float16, (len(corpus), width))
    first = 0
    for texts in reported(portions(corpus, _PORTION), len(corpus), "dense: encoding", size=len):
        vectors[first : first + len(texts)] = encoder.passages(texts)
        first += len(texts)
    lists = max(1, min(4 * math.isqrt(len(corpus)), len(corpus) // _PER_LIST))
    index = faiss.index_factory(width, f"IVF{lists},SQfp16", faiss.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).permutation(len(corpus))[: max(lists * _PER_LIST, 1000)]
    index.train(vectors[np.sort(sample)].astype(np.float32))
    for first in reported(range(0, len(corpus), _PORTION), len(corpus), "dense: indexing", size=lambda _: _PORTION):
        index.add(np.asarray(vectors[first : first + _PORTION], np.float32))
    index.nprobe = min(lists, max(_PROBED, lists // _PROBED))
    faiss.write_index(index, str(folder / _INDEX))
    (folder / _VECTORS).unlink()
    (folder / _FACTS).write_text(json.dumps({"documents": len(corpus), "lists": lists, "probed": index.nprobe}))
    logger.info("dense: %d documents in %d lists, of which %d are looked at", len(corpus), lists, index.nprobe)


def library() -> Any:
    """faiss, or how to get it."""
    try:
        import faiss
    except ImportError as error:
        raise ValueError("retriever_name=dense needs the package faiss-cpu. Run: pip install verl[search]") from error
    return faiss


def _refuse_code(folder: Path) -> None:
    """Raise ValueError where a folder of sentence-transformers names classes that are not the library's or torch's.

    The library itself imports them in versions before 6, and modules beside the working directory are among them.
    """
    modules = folder / "modules.json"
    listed = json.loads(modules.read_text(encoding="utf-8")) if modules.is_file() else []
    for module in listed:
        names = {"type": str(module["type"])}
        config = folder / os.path.normpath(str(module.get("path") or "")) / "config.json"
        if config.is_file():
            content = json.loads(config.read_text(encoding="utf-8"))
            names |= {key: str(value) for key, value in content.items() if key.endswith("activation_function")}
        foreign = [name for name in names.values() if not name.startswith(("sentence_transformers.", "torch.nn."))]
        if foreign:
            raise ValueError(f"--retriever_model: {folder} names the class {foreign[0]}, which may run any code.")


def _read_index(faiss: Any, file: Path) -> Any:
    """An index of faiss. A vector that it declares is no larger than the file."""
    with _vectors_up_to(faiss, file.stat().st_size):
        try:
            return faiss.read_index(str(file), faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"--index_path: {file} is not an index of faiss ({reason}).") from error


@contextmanager
def _vectors_up_to(faiss: Any, limit: int) -> Iterator[None]:
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):  # before 1.14
        yield
        return
    usual = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(limit)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(usual)


def _on_gpus(faiss: Any, index: Any) -> Any:
    if not hasattr(faiss, "index_cpu_to_all_gpus") or not faiss.get_num_gpus():
        logger.warning("--faiss_gpu: this faiss sees no GPU (the package faiss-cpu never does); searching on the CPU")
        return index
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
