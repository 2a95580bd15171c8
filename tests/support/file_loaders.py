"""Every function that reads files of torch, numpy or pickle, with a valid file in which the pickle can be replaced."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from tests.support.malicious_files import zip_of
from tests.support.tiny import tiny_model


@dataclass(frozen=True)
class Loader:
    """`write(folder, pickle)` puts the pickle where `load(folder)` reads one."""

    write: Callable[[Path, bytes], Path]
    """Returns the file that errors must name."""
    load: Callable[[Path], Any]
    inert: bool = False
    """Objects of unknown classes are loaded as placeholders, so a file with one may load."""


def save_folder(folder: Path, state: Mapping[str, torch.Tensor]) -> None:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def weights() -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(8.0).reshape(2, 4)}


def pickle_loaders() -> dict[str, Loader]:
    """By name: loaders of files that contain pickles, or in which other readers would expect one."""
    return {
        "engine: names of a checkpoint": Loader(_metadata, _names),
        "engine: tensors, .metadata": Loader(_metadata, _load_tensors),
        "engine: tensors, data": Loader(_data, _load_tensors),
        "engine: chunks, .metadata": Loader(_metadata, _load_chunks),
        "engine: chunks, data": Loader(_data, _load_chunks),
        "engine: extra.pt": Loader(_archive("extra.pt"), _load_extra),
        "engine: digests of weights": Loader(_archive("pytorch_model.bin"), _digests),
        "trainer: state": Loader(_archive("trainer.pt"), _load_plain),
        "protocol: DataProto": Loader(_archive("batch.pt"), _load_batch),
        "merger: .metadata": Loader(_metadata, _merger_folder),
        "merger: data": Loader(_data, _merger_folder, inert=True),
        "merger: shards": Loader(_archive("model_world_size_1_rank_0.pt"), _merger_shards, inert=True),
        "models: pytorch_model.bin": Loader(_model, _load_model),
        "search: lines of a corpus": Loader(_npz, _load_corpus),
        "search: BM25": Loader(_bm25, _load_bm25),
        "search: faiss": Loader(_faiss, _load_faiss),
    }


def archive_loaders() -> dict[str, Loader]:
    """Loaders of files of `torch.save`; their `write` takes a complete archive instead of a pickle."""
    names = ("engine: extra.pt", "engine: digests of weights", "trainer: state", "merger: shards")
    chosen = {name: pickle_loaders()[name] for name in (*names, "models: pytorch_model.bin")}
    return chosen | {"engine: tensors, data": Loader(_data_archive, _load_tensors)}


def _metadata(folder: Path, content: bytes) -> Path:
    save_folder(folder, weights())
    (folder / ".metadata").write_bytes(content)
    return folder / ".metadata"


def _data(folder: Path, content: bytes) -> Path:
    return _data_archive(folder, zip_of(content))


def _data_archive(folder: Path, archive: bytes) -> Path:
    """Replace the tensor in the data file by an archive, and its offset and length in `.metadata`."""
    save_folder(folder, weights())
    metadata = metadata_of(folder)
    (info,) = metadata.storage_data.values()
    (folder / info.relative_path).write_bytes(archive)
    info.offset, info.length = 0, len(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder / info.relative_path


def _archive(name: str) -> Callable[[Path, bytes], Path]:
    def write(folder: Path, content: bytes) -> Path:
        folder.mkdir(exist_ok=True)
        file = folder / name
        file.write_bytes(content if content.startswith(b"PK") else zip_of(content))
        return file

    return write


def _model(folder: Path, content: bytes) -> Path:
    tiny_model().config.save_pretrained(folder)
    return _archive("pytorch_model.bin")(folder, content)


def _names(folder: Path) -> Any:
    from verl.workers.engine.common.sharded_checkpoint import stored_tensors

    return stored_tensors(folder)


def _load_tensors(folder: Path) -> Any:
    from verl.workers.engine.common.sharded_checkpoint import load_tensors

    load_tensors({"weight": torch.zeros(2, 4)}, folder)


def _load_chunks(folder: Path) -> Any:
    from verl.workers.engine.common.sharded_checkpoint import Chunk, load_chunks

    load_chunks([Chunk("weight", (2, 4), (0, 0), torch.zeros(2, 4))], folder)


def _load_extra(folder: Path) -> Any:
    from verl.workers.engine.common.engine_checkpoint import restore_extra

    return restore_extra(folder, None, torch.device("cpu"))  # type: ignore[arg-type]


def _digests(folder: Path) -> Any:
    from verl.workers.engine.common.checkpoint_compatibility import weight_digests

    return weight_digests(folder)


def _load_plain(folder: Path) -> Any:
    from verl.utils.nested import load_plain

    return load_plain(folder / "trainer.pt")


def _load_batch(folder: Path) -> Any:
    from verl import DataProto

    return DataProto.load_from_disk(folder / "batch.pt")


def _merger_folder(folder: Path) -> Any:
    from verl.model_merger.formats import dcp_tensors
    from verl.model_merger.lazy_tensors import read_tensor

    return [read_tensor(tensor) for tensor in dcp_tensors(folder).values()]


def _merger_shards(folder: Path) -> Any:
    from verl.model_merger.formats import rank_files, shard_tensors
    from verl.model_merger.lazy_tensors import read_tensor

    return [read_tensor(tensor) for tensor in shard_tensors(rank_files(folder)).values()]


def _load_model(folder: Path) -> Any:
    from verl.models.loading import pretrained_model, read_config

    return pretrained_model(str(folder), read_config(str(folder)), "causal_lm")


def _corpus(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "corpus.jsonl"
    file.write_text('{"id": 1, "contents": "one"}\n')
    return file


def _npy(content: bytes) -> bytes:
    """An array of objects in numpy's format: a header, then a pickle."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return header.getvalue() + content


def _npz(folder: Path, content: bytes) -> Path:
    import zipfile

    from verl.search.corpus import Corpus

    Corpus(_corpus(folder), folder)
    (lines,) = (folder / "corpora").glob("*.npz")
    with zipfile.ZipFile(lines, "w") as archive:
        for name in ("starts.npy", "digest.npy"):
            archive.writestr(name, _npy(content))
    return lines


def _load_corpus(folder: Path) -> Any:
    from verl.search.corpus import Corpus

    return Corpus(folder / "corpus.jsonl", folder)


def _bm25(folder: Path, content: bytes) -> Path:
    import shutil

    from verl.search.bm25 import build_bm25
    from verl.search.corpus import Corpus

    shutil.rmtree(folder / "index", ignore_errors=True)
    build_bm25(Corpus(_corpus(folder), folder), folder / "index")
    file = folder / "index" / "indptr.csc.index.npy"
    file.write_bytes(_npy(content))
    return file


def _load_bm25(folder: Path) -> Any:
    from verl.search.bm25 import BM25Index

    return BM25Index(folder / "index")


def _faiss(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "index.faiss").write_bytes(content)
    return folder / "index.faiss"


def _load_faiss(folder: Path) -> Any:
    from verl.search.dense import DenseIndex

    return DenseIndex(folder / "index.faiss", None)  # type: ignore[arg-type]
