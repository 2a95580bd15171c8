"""The manifest: every kind of damage is found and named; checksums taken while writing equal those read back."""

import json
import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.reads import files_read
from verl.utils.checkpoint.manifest import (
    ChecksumRecorder,
    damaged_files,
    decode_manifest,
    drop_part,
    find_problems,
    prepare_records,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def step(tmp_path):
    folder = tmp_path / "step"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "shard_0.bin").write_bytes(b"weights" * 1000)
    (folder / "actor" / ".metadata").write_bytes(b"hidden files count too")
    (folder / "empty").write_bytes(b"")
    write_manifest(folder, 5, serial=2)
    return folder


def test_a_written_step_is_whole_and_lists_every_file(step):
    found = read_manifest(step)
    assert (found.step, found.serial) == (5, 2)
    assert sorted(found.files) == ["actor/.metadata", "actor/shard_0.bin", "empty"]
    assert find_problems(step) == []


def test_missing_truncated_longer_and_flipped_files_are_named(step):
    shard = step / "actor" / "shard_0.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert find_problems(step) == ["actor/shard_0.bin: truncated, 6999 of 7000 bytes"]
    shard.write_bytes(content + b"x")
    assert find_problems(step) == ["actor/shard_0.bin: changed, 7001 of 7000 bytes"]
    shard.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
    assert find_problems(step) == ["actor/shard_0.bin: damaged, its content does not match its checksum"]
    assert damaged_files(step, read_manifest(step), contents=False) == []
    shard.unlink()
    (step / "empty").unlink()
    assert find_problems(step) == ["actor/shard_0.bin: missing", "empty: missing"]


def test_a_missing_or_half_manifest_is_named(step):
    file = step / "manifest.json"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert find_problems(step)[0].startswith("manifest.json: damaged")
    file.unlink()
    assert find_problems(step)[0].startswith("manifest.json: missing")
    assert find_problems(step / "nowhere")[0].startswith("manifest.json: missing")


@pytest.mark.parametrize("replaced", [b"[]", b"{}", b"null", b'{"crc32": 0, "format": "verl.checkpoint/1"}', b"\xff"])
def test_any_other_content_is_a_damaged_manifest(step, replaced):
    (step / "manifest.json").write_bytes(replaced)
    assert find_problems(step)[0].startswith("manifest.json: damaged")


def test_every_flipped_character_of_the_manifest_is_noticed(step):
    file = step / "manifest.json"
    content = bytearray(file.read_bytes())
    for place, byte in enumerate(content):
        if chr(byte).isspace():
            continue  # layout between the fields carries nothing
        file.write_bytes(content[:place] + bytes([byte ^ 1]) + content[place + 1 :])
        assert find_problems(step), f"flip at {place} went unnoticed"


def test_a_step_without_files_cannot_be_finished(tmp_path):
    with pytest.raises(ValueError, match=r": step 1 .*files"):
        write_manifest(tmp_path, 1, serial=1)


@settings(max_examples=30)
@given(pieces=st.lists(st.binary(max_size=50), max_size=10))
def test_checksum_while_writing_equals_checksum_of_the_file(tmp_path_factory, pieces):
    folder = tmp_path_factory.mktemp("step")
    prepare_records(folder)
    with ChecksumRecorder(folder / "actor") as recorder, recorder.open("deep/shard.bin") as stream:
        for piece in pieces:
            stream.write(piece)
        assert stream.tell() == sum(map(len, pieces))
    assert (folder / "actor" / "deep" / "shard.bin").read_bytes() == b"".join(pieces)
    record = write_manifest(folder, 1, serial=1).files["actor/deep/shard.bin"]
    assert (record.size, record.crc32) == (len(b"".join(pieces)), zlib.crc32(b"".join(pieces)))
    assert {path.name for path in folder.iterdir()} == {"actor", "manifest.json"}
    assert find_problems(folder) == []


def test_streamed_files_are_not_read_again_and_others_are(tmp_path):
    prepare_records(tmp_path)
    with ChecksumRecorder(tmp_path / "deep" / "er") as recorder:
        with recorder.open("streamed") as stream:
            stream.write(b"a" * 100)
        with recorder.open("unnamed") as stream:
            stream.write(b"c" * 100)
        os.rename(tmp_path / "deep" / "er" / "unnamed", tmp_path / "deep" / "er" / "named")
        recorder.renamed("unnamed", "named")
    (tmp_path / "plain").write_bytes(b"b" * 100)
    with files_read(tmp_path) as read:
        write_manifest(tmp_path, 1, serial=1)
    assert [path.name for path in read if path.parent.name != ".checksums"] == ["plain"]
    assert find_problems(tmp_path) == []


def test_a_recorder_of_a_folder_in_no_step_leaves_nothing(tmp_path):
    with ChecksumRecorder(tmp_path) as recorder, recorder.open("streamed") as stream:
        stream.write(b"a")
    assert [path.name for path in tmp_path.iterdir()] == ["streamed"]


def test_a_part_deleted_on_purpose_is_said_and_leaves_the_rest_checked(step):
    (step / "critic").mkdir()
    (step / "critic" / "shard").write_bytes(b"c")
    (step / "critic_notes").write_bytes(b"n")
    write_manifest(step, 5, serial=2)
    drop_part(step, "critic")
    drop_part(step, "critic")
    assert find_problems(step) == ["critic: deleted, because of trainer.max_critic_ckpt_to_keep"]
    assert "critic_notes" in read_manifest(step).files
    assert (read_manifest(step).has_part("actor"), read_manifest(step).has_part("critic")) == (True, False)
    (step / "empty").unlink()
    assert find_problems(step)[1:] == ["empty: missing"]


def test_a_stream_written_out_of_order_or_changed_later_is_read_again(tmp_path):
    prepare_records(tmp_path)
    with ChecksumRecorder(tmp_path) as recorder:
        with recorder.open("patched") as stream:
            stream.write(b"????rest")
            stream.seek(0)
            stream.write(b"head")
        with recorder.open("rewritten") as stream:
            stream.write(b"first")
    (tmp_path / "rewritten").write_bytes(b"other")
    os.utime(tmp_path / "rewritten", ns=(1, 1))
    write_manifest(tmp_path, 1, serial=1)
    assert (tmp_path / "patched").read_bytes() == b"headrest"
    assert find_problems(tmp_path) == []


def test_a_manifest_of_another_format_is_not_reported_as_a_wrong_checksum():
    fields = {"format": "verl.checkpoint/99", "step": 1, "serial": 1, "files": {}, "dropped": []}
    crc32 = zlib.crc32(json.dumps(fields, sort_keys=True).encode())
    with pytest.raises(ValueError, match=r"^manifest\.json: .*'verl\.checkpoint/99'.*'verl\.checkpoint/1'"):
        decode_manifest(json.dumps({**fields, "crc32": crc32}).encode())
