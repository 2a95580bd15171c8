"""A small file takes little memory, whatever sizes it declares."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.file_loaders import archive_loaders, metadata_of, save_folder, weights
from tests.support.malicious_files import memory_archives, safetensors_file
from tests.support.memory import peak_process_memory

# The archives would take 90 MB to 4 GB.
LIMIT = 48 * 2**20
FEW = ("compressed storage", "compressed pickle", "repeated element", "memo index")


@pytest.fixture(scope="module")
def archives() -> dict[str, bytes]:
    return memory_archives()


@pytest.mark.parametrize("name", archive_loaders())
def test_an_archive_takes_no_more_memory_than_it_holds(name: str, archives: dict[str, bytes], tmp_path: Path) -> None:
    """All of them where files are mapped and where they are described; a few where the same reader is used."""
    loader = archive_loaders()[name]
    thorough = name in ("trainer: state", "merger: shards")
    chosen = archives if thorough else {each: archives[each] for each in FEW}
    for number, (technique, content) in enumerate(chosen.items()):
        folder = tmp_path / str(number)
        file = loader.write(folder, content)
        with peak_process_memory() as peak:
            with pytest.raises((ValueError, RuntimeError)) as refused:
                loader.load(folder)
            assert file.name in str(refused.value), technique
        assert peak.bytes < LIMIT, technique


@pytest.mark.parametrize("change", ["shape", "shared bytes", "length"])
def test_chunks_take_no_more_memory_than_the_data_files(change: str, tmp_path: Path) -> None:
    from verl.model_merger.formats import dcp_tensors
    from verl.model_merger.lazy_tensors import read_tensor

    save_folder(tmp_path, weights())
    metadata = metadata_of(tmp_path)
    ((index, info),) = metadata.storage_data.items()
    entry = metadata.state_dict_metadata["weight"]
    if change == "shared bytes":
        for number in range(1000):
            metadata.state_dict_metadata[f"copy{number}"] = entry
            metadata.storage_data[type(index)(f"copy{number}", index.offset)] = info
    else:
        huge = torch.Size((10**6, 10**4))
        entry.size = entry.chunks[0].sizes = huge
        info.length = 10**12 if change == "length" else info.length
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with peak_process_memory() as peak, pytest.raises(ValueError, match=r"distcp|chunk"):
        [read_tensor(tensor) for tensor in dcp_tensors(tmp_path).values()]
    assert peak.bytes < LIMIT


@pytest.mark.parametrize(
    "content",
    [
        safetensors_file(b"{}", 2**60),
        safetensors_file(b"{}", 2**33),
        safetensors_file(json.dumps({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]}}).encode()),
        safetensors_file(
            json.dumps({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}).encode()
        ),
        safetensors_file(
            json.dumps({f"{n}": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for n in range(99)}).encode(),
            content=b"1",
        ),
        safetensors_file(b"[" * 100_000),
    ],
    ids=["header", "large header", "shape", "offsets", "shared bytes", "nested"],
)
def test_a_safetensors_file_takes_no_more_memory_than_it_has(content: bytes, tmp_path: Path) -> None:
    from verl.model_merger.lazy_tensors import folder_tensors

    (tmp_path / "model.safetensors").write_bytes(content)
    with peak_process_memory() as peak, pytest.raises(ValueError, match=r"model\.safetensors"):
        folder_tensors(tmp_path)
    assert peak.bytes < LIMIT


def test_a_faiss_index_takes_no_more_memory_than_its_file(tmp_path: Path) -> None:
    import faiss

    from verl.search.dense import DenseIndex

    file = tmp_path / "index.faiss"
    index = faiss.IndexFlatIP(16)
    index.add(np.ones((500, 16), np.float32))
    faiss.write_index(index, str(file))
    assert DenseIndex(file, None).documents == 500
    count = struct.pack("<Q", 500 * 16)
    file.write_bytes(file.read_bytes().replace(count, struct.pack("<Q", 10**8), 1))
    with peak_process_memory() as peak, pytest.raises(ValueError, match=r"index\.faiss"):
        DenseIndex(file, None)
    assert peak.bytes < LIMIT


def test_a_compressed_list_of_lines_is_refused(tmp_path: Path) -> None:
    from verl.search.corpus import Corpus

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "contents": "one"}\n')
    Corpus(corpus, tmp_path)
    (lines,) = (tmp_path / "corpora").glob("*.npz")
    np.savez_compressed(lines, starts=np.zeros(2**23, np.int64), digest=np.str_("x"))
    with peak_process_memory() as peak, pytest.raises(ValueError, match=r"\.npz: .*compressed"):
        Corpus(corpus, tmp_path)
    assert peak.bytes < LIMIT
