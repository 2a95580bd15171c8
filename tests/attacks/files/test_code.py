"""No loader executes what a file names."""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.file_loaders import Loader, metadata_of, pickle_loaders, save_folder, weights
from tests.support.malicious_files import EXTENSION, Hostile, code_pickles

ERRORS = (ValueError, RuntimeError, OSError)


@pytest.fixture
def extension() -> Iterator[None]:
    """`posix.mkdir` has a number, as a class of an installed package may have."""
    copyreg.add_extension("posix", "mkdir", EXTENSION)
    yield
    copyreg.remove_extension("posix", "mkdir", EXTENSION)


@pytest.mark.usefixtures("extension")
def test_every_pickle_works_where_it_is_trusted(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for technique, content in code_pickles(canary).items():
        try:
            pickle.loads(content + b".")
        except AttributeError:
            assert technique == "torch._tensor rebuild"  # after the call
        canary.rmdir()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("name", pickle_loaders())
def test_a_pickle_is_not_executed(name: str, tmp_path: Path) -> None:
    loader, canary = pickle_loaders()[name], tmp_path / "canary"
    for number, (technique, content) in enumerate(code_pickles(canary).items()):
        folder = tmp_path / str(number)
        file = loader.write(folder, content + b".")
        message = _error(loader, folder)
        assert not canary.exists(), technique
        if message is None:
            assert loader.inert, technique
        else:
            assert file.name in message or file.parent.name in message, (technique, message)


@pytest.mark.parametrize("name", ["engine: tensors, .metadata", "engine: chunks, .metadata", "merger: .metadata"])
@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "entry", "file name", "name of an object"])
def test_metadata_with_one_hostile_object_is_refused(name: str, place: str, tmp_path: Path) -> None:
    loader, canary, folder = pickle_loaders()[name], tmp_path / "canary", tmp_path / "step"
    save_folder(folder, weights())
    metadata, hostile = metadata_of(folder), Hostile(canary)
    (info,) = metadata.storage_data.values()
    if place == "entry":
        metadata.state_dict_metadata["other"] = hostile  # type: ignore[assignment]
    elif place == "file name":
        info.relative_path = hostile  # type: ignore[assignment]
    elif place == "name of an object":
        metadata.storage_data[hostile] = info
    else:
        setattr(metadata, place, hostile)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    message = _error(loader, folder)
    assert not canary.exists()
    assert message is not None
    assert "os.makedirs" in message
    assert ".metadata" in message


@pytest.mark.parametrize("name", ["engine: tensors, data", "engine: chunks, data"])
def test_an_object_in_place_of_a_tensor_is_refused(name: str, tmp_path: Path) -> None:
    """torch's planner unpickles what `.metadata` calls bytes."""
    canary, folder = tmp_path / "canary", tmp_path / "step"
    dcp.save({"weight": Hostile(canary)}, checkpoint_id=folder, no_dist=True)
    message = _error(pickle_loaders()[name], folder)
    assert not canary.exists()
    assert message is not None
    assert "weight" in message


@pytest.mark.parametrize("path", ["../secret", "/etc/hostname", "a/../../secret", ".", "a\0b"])
@pytest.mark.parametrize("name", ["engine: names of a checkpoint", "merger: .metadata"])
def test_files_outside_of_a_checkpoint_are_not_read(name: str, path: str, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    save_folder(folder, weights())
    metadata = metadata_of(folder)
    (info,) = metadata.storage_data.values()
    os.rename(folder / info.relative_path, tmp_path / "secret")
    info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    message = _error(pickle_loaders()[name], folder)
    assert message is not None
    assert "outside the folder" in message


def test_a_manifest_that_leads_out_of_its_step_is_damaged(tmp_path: Path) -> None:
    from verl.utils.checkpoint.manifest import FileRecord, Manifest, decode_manifest, encode_manifest

    for name in ("../secret", "/etc/hostname", "actor/../../secret"):
        content = encode_manifest(Manifest(1, 1, {name: FileRecord(1, 1)}))
        with pytest.raises(ValueError, match=rf"^manifest\.json: .*{re.escape(repr(name))}"):
            decode_manifest(content)


def test_pickles_of_a_megatron_checkpoint_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    """`common.pt` only says that Core wrote the folder."""
    from verl.model_merger.formats import core_folder, dcp_tensors

    canary = tmp_path / "canary"
    save_folder(tmp_path, weights())
    torch.save(Hostile(canary), tmp_path / "common.pt")
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert core_folder(tmp_path) == tmp_path
    assert dcp_tensors(tmp_path).keys() == {"weight"}
    assert not canary.exists()


def _error(loader: Loader, folder: Path) -> str | None:
    try:
        loader.load(folder)
    except ERRORS as error:
        return str(error)
    return None
