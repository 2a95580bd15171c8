"""CheckpointManager and resume: newest complete step, retention, copies elsewhere, and errors that name the file."""

import logging
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from verl.utils.checkpoint.checkpoint_manager import (
    CheckpointManager,
    find_latest_ckpt_path,
    reading,
    resolve_resume,
)
from verl.utils.checkpoint.manifest import drop_part, read_manifest, write_manifest

REPOSITORY = Path(__file__).parents[4]


def save(root, step, max_to_keep=None, remote=None, content=None) -> Path:
    manager = CheckpointManager(root, max_to_keep, remote)
    folder = manager.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights.bin").write_bytes(content or f"weights {step}".encode())
    if isinstance(max_to_keep, dict) and "critic" in max_to_keep:
        (folder / "critic").mkdir()
        (folder / "critic" / "values.bin").write_bytes(b"values")
    (folder / "trainer.pt").write_bytes(b"state")
    path = manager.commit(step)
    assert manager.uploader is None or manager.uploader.wait(10) == []
    return path


def steps(root) -> list[str]:
    return sorted(path.name for path in Path(root).glob("global_step_*"))


def hidden(root) -> list[str]:
    return sorted(path.name for path in Path(root).iterdir() if path.name.startswith(".") and path.name != ".lock")


def start(code: str) -> subprocess.Popen:
    """Another process that runs `code`, has printed `begun`, and goes on when its input is closed."""
    code = f"import sys; from verl.utils.checkpoint import checkpoint_manager as c\n{code}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    assert process.stdout.readline() == b"begun\n"
    return process


@pytest.fixture
def memory_url():
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    store = fsspec.filesystem("memory")
    if store.exists(url):
        store.rm(url, recursive=True)


# ---------------------------------------------------------------- saving


def test_a_step_appears_only_when_committed(tmp_path):
    manager = CheckpointManager(tmp_path)
    folder = manager.begin(3)
    assert folder.parent == tmp_path
    (folder / "weights").write_bytes(b"w")
    assert steps(tmp_path) == []
    assert find_latest_ckpt_path(tmp_path) is None
    assert folder.exists(), "looking for steps must not remove the one being written"
    path = manager.commit(3)
    assert path == tmp_path / "global_step_3" == resolve_resume("auto", tmp_path)
    assert manager.verify(path) == []
    assert (tmp_path / "latest").read_text() == "global_step_3"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert hidden(tmp_path) == []


def test_commit_needs_its_begin_and_files(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=r"commit\(1\).*begin\(1\)"):
        manager.commit(1)
    manager.begin(1)
    with pytest.raises(ValueError, match=r"commit\(2\).*begin\(2\)"):
        manager.commit(2)
    with pytest.raises(ValueError, match=r"\.global_step_1\.tmp-.*: step 1\b"):
        manager.commit(1)
    with pytest.raises(ValueError, match=r"^step: -1 "):
        manager.begin(-1)
    assert steps(tmp_path) == []


def test_a_save_under_way_in_this_process_is_left_alone_until_it_is_abandoned(tmp_path):
    """By another trainer of the same process, as a notebook makes them: it begins, and it looks for a step."""
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    folder = first.begin(1)
    (folder / "half").write_bytes(b"h")
    for manager, said in ((first, r"begin\(2\) .*\b1\b"), (second, r"^trainer\.default_local_dir: .*experiment_name")):
        with pytest.raises(ValueError, match=said):
            manager.begin(2)
    assert resolve_resume("auto", tmp_path) is None
    other = start(f"print('begun', flush=True); c.CheckpointManager({str(tmp_path)!r}).begin(3)")
    other.communicate()
    assert other.returncode == 1, "the lock against other processes is still held"
    assert (folder / "half").exists()
    first.abandon()
    save(tmp_path, 2)
    assert steps(tmp_path) == ["global_step_2"]
    assert hidden(tmp_path) == []


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, content=b"old")
    path = save(tmp_path, 1, content=b"new")
    assert (path / "actor" / "weights.bin").read_bytes() == b"new"
    assert CheckpointManager.verify(path) == []
    assert hidden(tmp_path) == []


def test_another_process_that_is_saving_is_an_error_and_its_work_is_left_alone(tmp_path):
    other = start(
        f"m = c.CheckpointManager({str(tmp_path)!r}); (m.begin(1) / 'w').write_bytes(b'w')\n"
        "print('begun', flush=True); sys.stdin.read(); m.commit(1)"
    )
    with pytest.raises(ValueError, match=r"^trainer\.default_local_dir: .*experiment_name"):
        CheckpointManager(tmp_path).begin(2)
    assert resolve_resume("auto", tmp_path) is None
    other.communicate()
    assert other.returncode == 0
    assert steps(tmp_path) == ["global_step_1"]


# ---------------------------------------------------------------- retention


def test_retention_keeps_the_newest(tmp_path):
    for step in (2, 4, 10, 12):
        save(tmp_path, step, max_to_keep=2)
    assert steps(tmp_path) == ["global_step_10", "global_step_12"]
    with pytest.raises(ValueError, match=r"^trainer\.max_ckpt_to_keep: 0\b"):
        CheckpointManager(tmp_path, max_to_keep=0)
    with pytest.raises(ValueError, match=r"^trainer\.max_critic_ckpt_to_keep: 0\b"):
        CheckpointManager(tmp_path, max_to_keep={"actor": 1, "critic": 0})


def test_retention_leaves_a_step_that_is_read_until_it_is_not(tmp_path):
    first = save(tmp_path, 1)
    with reading(first):
        save(tmp_path, 2, max_to_keep=1)
        assert CheckpointManager.verify(first) == []
    save(tmp_path, 3, max_to_keep=1)
    assert steps(tmp_path) == ["global_step_3"]


def test_retention_sees_readers_in_other_processes(tmp_path):
    first = save(tmp_path, 1)
    reader = start(f"with c.reading({str(first)!r}): print('begun', flush=True); sys.stdin.read()")
    save(tmp_path, 2, max_to_keep=1)
    assert steps(tmp_path) == ["global_step_1", "global_step_2"]
    reader.communicate()
    assert reader.returncode == 0
    save(tmp_path, 3, max_to_keep=1)
    assert steps(tmp_path) == ["global_step_3"]


def test_reading_a_deleted_step_is_an_error(tmp_path):
    first = save(tmp_path, 1)
    save(tmp_path, 2, max_to_keep=1)
    with pytest.raises(FileNotFoundError), reading(first):
        pass


def test_retention_counts_whole_steps_and_never_touches_folders_that_are_not_ours(tmp_path):
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    (damaged / "trainer.pt").unlink()
    (tmp_path / "global_step_99").mkdir()
    save(tmp_path, 3, max_to_keep=2)
    assert steps(tmp_path) == ["global_step_1", "global_step_2", "global_step_3", "global_step_99"]
    save(tmp_path, 4, max_to_keep=2)
    assert steps(tmp_path) == ["global_step_3", "global_step_4", "global_step_99"]


def kept(root) -> dict[int, str]:
    """What is left of every step, by its first letters: a for actor, c for critic."""
    found = {path: {part for part in ("actor", "critic") if (path / part).exists()} for path in Path(root).glob("g*")}
    listed = {path: {name.split("/")[0] for name in read_manifest(path).files} for path in found}
    assert all(parts == listed[path] - {"trainer.pt"} for path, parts in found.items()), "the manifest is true"
    return {int(path.name.split("_")[-1]): "".join(sorted(part[0] for part in found[path])) for path in found}


@pytest.mark.parametrize(
    ("actor", "critic", "left"),
    [
        (2, 2, {3: "ac", 4: "ac"}),
        (3, 1, {2: "a", 3: "a", 4: "ac"}),
        (1, 2, {3: "c", 4: "ac"}),
        (None, 1, {1: "a", 2: "a", 3: "a", 4: "ac"}),
        (1, None, {1: "c", 2: "c", 3: "c", 4: "ac"}),
        (None, None, {1: "ac", 2: "ac", 3: "ac", 4: "ac"}),
    ],
)
def test_each_part_has_a_limit_of_its_own_and_a_step_without_parts_goes(tmp_path, actor, critic, left):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, max_to_keep={"actor": actor, "critic": critic})
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / f"global_step_{step}")
    assert kept(tmp_path) == left
    assert hidden(tmp_path) == []


def test_a_step_that_lost_a_part_is_not_whole_and_the_error_says_why(tmp_path):
    first, second = (save(tmp_path, step, max_to_keep={"actor": 2, "critic": 1}) for step in (1, 2))
    with pytest.raises(
        ValueError, match=rf"critic: .*trainer\.max_critic_ckpt_to_keep.*{second}: set trainer\.resume_from_path"
    ):
        resolve_resume("resume_path", tmp_path, first)
    flip(second)
    with pytest.raises(ValueError, match=r"^trainer\.resume_mode: auto .*global_step_1: critic\b"):
        resolve_resume("auto", tmp_path)


def test_a_part_that_is_read_stays_until_it_is_not(tmp_path):
    limits = {"actor": 3, "critic": 1}
    first = save(tmp_path, 1, max_to_keep=limits)
    with reading(first):
        save(tmp_path, 2, max_to_keep=limits)
        assert CheckpointManager.verify(first) == []
    save(tmp_path, 3, max_to_keep=limits)
    assert kept(tmp_path) == {1: "a", 2: "a", 3: "ac"}


def test_a_part_that_a_killed_run_did_not_finish_deleting_goes_with_the_next_save(tmp_path):
    limits = {"actor": 3, "critic": 1}
    first = save(tmp_path, 1, max_to_keep=limits)
    drop_part(first, "critic")
    (first / ".manifest.json.123.partial").write_bytes(b"half")
    save(tmp_path, 2, max_to_keep=limits)
    assert kept(tmp_path) == {1: "a", 2: "ac"}
    assert sorted(path.name for path in first.iterdir()) == ["actor", "manifest.json", "trainer.pt"]


def test_steps_without_a_critic_go_by_the_actors_limit(tmp_path):
    save(tmp_path, 1, max_to_keep={"actor": 1})
    save(tmp_path, 2, max_to_keep={"actor": 1, "critic": 5})
    assert kept(tmp_path) == {2: "ac"}


def test_going_back_and_saving_a_lower_step_makes_that_the_newest(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    path = save(tmp_path, 6, max_to_keep=2)
    assert steps(tmp_path) == ["global_step_15", "global_step_6"]
    assert resolve_resume("auto", tmp_path) == path
    assert find_latest_ckpt_path(tmp_path) == str(path)


# ---------------------------------------------------------------- finding


def test_steps_sort_as_numbers_and_other_names_are_ignored(tmp_path):
    assert find_latest_ckpt_path(tmp_path / "nowhere") is None
    assert find_latest_ckpt_path(None) is None
    for name in ("step-9", "step-10", "step-x", "step-", "other-11"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_bytes(b"w")
        write_manifest(tmp_path / name, 1, serial=1)
    assert find_latest_ckpt_path(tmp_path, "step-{}") == str(tmp_path / "step-10")
    assert find_latest_ckpt_path(tmp_path) is None
    with pytest.raises(ValueError, match="directory_format"):
        find_latest_ckpt_path(tmp_path, "step")


def truncate(folder):
    (folder / "actor" / "weights.bin").write_bytes(b"wei")


def flip(folder):
    file = folder / "actor" / "weights.bin"
    content = bytearray(file.read_bytes())
    content[2] ^= 4
    file.write_bytes(content)


def remove(folder):
    (folder / "actor" / "weights.bin").unlink()


def unfinish(folder):
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (truncate, "actor/weights.bin: truncated"),
        (flip, "actor/weights.bin: damaged"),
        (remove, "actor/weights.bin: missing"),
        (unfinish, "manifest.json: missing"),
    ],
)
def test_a_damaged_step_is_named_and_the_one_before_is_used(tmp_path, caplog, damage, named):
    whole = save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest)
    with caplog.at_level(logging.WARNING, logger="verl"):
        assert resolve_resume("auto", tmp_path) == whole
    assert str(newest) in caplog.text
    assert named in caplog.text
    assert find_latest_ckpt_path(tmp_path) == str(whole)
    assert resolve_resume("auto", tmp_path) == whole
    with pytest.raises(ValueError, match=named) as error:
        resolve_resume("resume_path", tmp_path, newest)
    assert f"set trainer.resume_from_path={whole}" in str(error.value)


# ---------------------------------------------------------------- resuming


def test_auto_begins_anew_only_where_there_is_no_step(tmp_path):
    assert resolve_resume("auto", tmp_path / "nowhere") is None
    assert resolve_resume("auto", tmp_path) is None
    truncate(save(tmp_path, 1))
    with pytest.raises(ValueError, match=r"global_step_1: actor/weights.bin: truncated.*resume_mode=disable"):
        resolve_resume("auto", tmp_path)
    assert resolve_resume("disable", tmp_path) is None


def test_resume_path_errors_say_what_to_set(tmp_path):
    early, late = save(tmp_path, 1), save(tmp_path, 8)
    assert resolve_resume("resume_path", tmp_path / "other", str(early)) == early
    with pytest.raises(ValueError, match=r"^trainer\.resume_from_path: trainer\.resume_mode=resume_path"):
        resolve_resume("resume_path", tmp_path)
    with pytest.raises(ValueError, match=rf"^trainer\.resume_from_path: .*global_step_5 .*{early}: set "):
        resolve_resume("resume_path", tmp_path, tmp_path / "global_step_5")
    with pytest.raises(ValueError, match=rf"^trainer\.resume_from_path: .* a folder .*{late}: set "):
        resolve_resume("resume_path", tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"nowhere/global_step_5 .*nowhere\.$"):
        resolve_resume("resume_path", tmp_path, tmp_path / "nowhere" / "global_step_5")
    with pytest.raises(ValueError, match=r"(?s)resume_mode.*'latest'"):
        resolve_resume("latest", tmp_path)


def test_many_problems_are_summed_up(tmp_path):
    manager = CheckpointManager(tmp_path)
    folder = manager.begin(1)
    for shard in range(9):
        (folder / f"shard_{shard}").write_bytes(b"s")
    path = manager.commit(1)
    for shard in range(9):
        (path / f"shard_{shard}").unlink()
    with pytest.raises(ValueError, match=r"shard_4"):
        resolve_resume("resume_path", tmp_path, path)


# ---------------------------------------------------------------- copies elsewhere


def test_a_copy_travels_and_is_resumed_from_on_a_new_machine(tmp_path, memory_url):
    save(tmp_path / "old", 1, remote=memory_url)
    save(tmp_path / "old", 2, remote=memory_url)
    assert fsspec.filesystem("memory").cat(f"{memory_url}/latest") == b"global_step_2"
    fetched = resolve_resume("auto", tmp_path / "new", remote=memory_url)
    assert fetched.name == "global_step_2"
    assert tmp_path / "new" in fetched.parents
    assert CheckpointManager.verify(fetched) == []
    # The next save is newer than what it began from, also for the copies.
    own = save(tmp_path / "new", 3, remote=memory_url)
    assert resolve_resume("auto", tmp_path / "new", remote=memory_url) == own
    assert not fetched.exists()


def test_local_is_preferred_unless_the_copy_is_newer_and_whole(tmp_path, memory_url):
    first = save(tmp_path, 1, remote=memory_url)
    second = save(tmp_path, 2, remote=memory_url)
    assert resolve_resume("auto", tmp_path, remote=memory_url) == second
    truncate(second)
    fetched = resolve_resume("auto", tmp_path, remote=memory_url)
    assert fetched.name == "global_step_2"
    assert fetched != second
    fsspec.filesystem("memory").pipe(f"{memory_url}/global_step_2/trainer.pt", b"????")
    assert resolve_resume("auto", tmp_path, remote=memory_url) == first


def test_an_unfinished_copy_is_passed_over(tmp_path, memory_url):
    for step in (1, 2):
        save(tmp_path / "old", step, remote=memory_url)
    fsspec.filesystem("memory").rm(f"{memory_url}/global_step_2/manifest.json")
    assert resolve_resume("auto", tmp_path / "new", remote=memory_url).name == "global_step_1"
    assert resolve_resume("auto", tmp_path / "new", remote=f"{memory_url}/nothing") is None


def test_resume_path_may_be_a_url(tmp_path, memory_url):
    save(tmp_path / "old", 1, remote=memory_url)
    path = resolve_resume("resume_path", tmp_path / "new", f"{memory_url}/global_step_1")
    assert (path / "actor" / "weights.bin").read_bytes() == b"weights 1"


def test_a_copy_is_replaced_whole(tmp_path, memory_url):
    manager = CheckpointManager(tmp_path, remote=memory_url)
    (manager.begin(1) / "only_in_the_first").write_bytes(b"w")
    manager.commit(1)
    manager.uploader.wait(10)
    save(tmp_path, 1, remote=memory_url)
    assert not fsspec.filesystem("memory").exists(f"{memory_url}/global_step_1/only_in_the_first")


def test_an_unknown_remote_is_refused_before_anything_is_saved(tmp_path):
    with pytest.raises(ValueError, match="default_hdfs_dir"):
        CheckpointManager(tmp_path, remote="nosuchscheme://bucket")


def test_importing_it_needs_no_torch():
    code = "import sys, verl.utils.checkpoint.checkpoint_manager; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0
