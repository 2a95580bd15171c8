"""Dense retrieval: embeddings by sentence-transformers, nearest neighbours by an approximate faiss index.

The index (inverted lists, 16-bit components) is trained on a sample. Vectors are written to a file while it is built:
memory contains one batch of them and the index itself, two bytes per component.
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

from verl.search.corpus import Corpus, log_progress, text_batches

__all__ = ["FAMILIES", "DenseIndex", "TextEncoder", "build_dense"]

BATCH_DOCUMENTS = 1 << 13
_ENCODER_BATCH = 128
_VECTORS, _INDEX, _METADATA = "vectors.npy", "index.faiss", "index.json"
# Training vectors per inverted list; faiss warns if there are fewer than 39.
_PER_LIST = 64
# A search visits one of this many inverted lists, and at least this many.
_PROBED = 16
SETTINGS = {"retriever": "dense", "index": "IVF,SQfp16", "format": 1}
# Prefixes of queries and passages that models were trained with, by a part of the model's name.
_PREFIXES = {"e5": ("query: ", "passage: "), "bge": ("Represent this sentence for searching relevant passages: ", "")}
FAMILIES = tuple(_PREFIXES)

logger = logging.getLogger(__name__)


class TextEncoder:
    """Encodes texts as unit vectors, with a local sentence-transformers model or any mean-pooled transformers encoder.

    `name` (default: the folder's name) determines the prefixes, unless the model defines them.
    """

    def __init__(self, path: str, name: str | None = None) -> None:
        if not os.path.isdir(path):
            raise ValueError(f"--retriever_model: no folder {path!r}. Use a local sentence-transformers model.")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError("dense retrieval needs sentence-transformers. Run: pip install verl[search]") from error
        _refuse_code(Path(path))
        self._model = SentenceTransformer(path, local_files_only=True, trust_remote_code=False)
        name = (name or os.path.basename(os.path.abspath(path))).lower()
        query, passage = next((pair for family, pair in _PREFIXES.items() if family in name), ("", ""))
        prompts = {kind: text for kind, text in self._model.prompts.items() if text}
        self._query = prompts.get("query", query)
        self._passage = prompts.get("passage", prompts.get("document", passage))

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, dimensions], float32."""
        return self._encode(texts, self._query)

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """[texts, dimensions], float32."""
        return self._encode(texts, self._passage)

    def _encode(self, texts: Sequence[str], prefix: str) -> np.ndarray:
        return self._model.encode(
            list(texts), prompt=prefix, batch_size=_ENCODER_BATCH, normalize_embeddings=True, show_progress_bar=False
        ).astype(np.float32)


class DenseIndex:
    """A faiss index, built by `build_dense` or another program, with the encoder for queries."""

    def __init__(self, path: Path, encoder: TextEncoder, on_gpu: bool = False) -> None:
        faiss = import_faiss()
        self._encoder, self._lock = encoder, threading.Lock()
        file = path if path.is_file() else path / _INDEX
        self._index = _read_index(faiss, file)
        self.documents = int(self._index.ntotal)
        if on_gpu:
            self._index = _on_gpus(faiss, self._index)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(document, score) of the best `k` documents of every query; the score is the cosine."""
        if not queries:
            return []
        with self._lock:
            scores, rows = self._index.search(self._encoder.queries(queries), min(k, self.documents))
        return [
            [(number, value) for number, value in zip(*pair, strict=True) if number >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def build_dense(corpus: Corpus, folder: Path, encoder: TextEncoder) -> None:
    """Write the index of a corpus to a new folder."""
    faiss = import_faiss()
    folder.mkdir(parents=True)
    width = encoder.passages(["width"]).shape[1]
    vectors = np.lib.format.open_memmap(folder / _VECTORS, "w+", np.float16, (len(corpus), width))
    first = 0
    for texts in log_progress(text_batches(corpus, BATCH_DOCUMENTS), len(corpus), "dense: encoding", size=len):
        vectors[first : first + len(texts)] = encoder.passages(texts)
        first += len(texts)
    lists = max(1, min(4 * math.isqrt(len(corpus)), len(corpus) // _PER_LIST))
    index = faiss.index_factory(width, f"IVF{lists},SQfp16", faiss.METRIC_INNER_PRODUCT)
    sample = np.random.default_rng(0).permutation(len(corpus))[: max(lists * _PER_LIST, 1000)]
    index.train(vectors[np.sort(sample)].astype(np.float32))
    for first in log_progress(
        range(0, len(corpus), BATCH_DOCUMENTS), len(corpus), "dense: indexing", size=lambda _: BATCH_DOCUMENTS
    ):
        index.add(np.asarray(vectors[first : first + BATCH_DOCUMENTS], np.float32))
    index.nprobe = min(lists, max(_PROBED, lists // _PROBED))
    faiss.write_index(index, str(folder / _INDEX))
    (folder / _VECTORS).unlink()
    (folder / _METADATA).write_text(json.dumps({"documents": len(corpus), "lists": lists, "probed": index.nprobe}))
    logger.info("dense: %d documents in %d lists, of which a search visits %d", len(corpus), lists, index.nprobe)


def import_faiss() -> Any:
    """Import faiss; a ValueError says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise ValueError("retriever_name=dense needs the package faiss-cpu. Run: pip install verl[search]") from error
    return faiss


def _refuse_code(folder: Path) -> None:
    """Raise ValueError if the configuration in a model folder names classes outside sentence_transformers and torch.nn.

    sentence-transformers before version 6 imports any class that the configuration names, even from the working
    directory.
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
    """Read a faiss index. Vectors that declare more bytes than the file has are rejected."""
    with _vector_byte_limit(faiss, file.stat().st_size):
        try:
            return faiss.read_index(str(file), faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"--index_path: {file} is not a faiss index ({reason}).") from error


@contextmanager
def _vector_byte_limit(faiss: Any, limit: int) -> Iterator[None]:
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):  # before 1.14
        yield
        return
    previous = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(limit)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(previous)


def _on_gpus(faiss: Any, index: Any) -> Any:
    if not hasattr(faiss, "index_cpu_to_all_gpus") or not faiss.get_num_gpus():
        logger.warning(
            "--faiss_gpu: faiss finds no GPU (the package faiss-cpu has no GPU support); searching on the CPU"
        )
        return index
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = options.shard = True
    return faiss.index_cpu_to_all_gpus(index, co=options)
