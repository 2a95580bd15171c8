"""copy_to_local: every kind of source, once per node, never half, and errors that say what to do."""

import json
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest

from verl.utils import fs, hdfs_io
from verl.utils.fs import copy_to_local, is_hub_id


@pytest.fixture
def memory_url():
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    store = fsspec.filesystem("memory")
    if store.exists(url):
        store.rm(url, recursive=True)


def put(url: str, content: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(content)


def test_local_path_is_used_in_place_and_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert copy_to_local("model") == str(tmp_path / "model")
    assert copy_to_local(tmp_path / "model") == str(tmp_path / "model")
    assert copy_to_local(f"file://{tmp_path}/model") == str(tmp_path / "model")


def test_home_and_environment_variables_are_expanded(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    assert copy_to_local("~/data") == str(tmp_path / "data")
    assert copy_to_local("$DATA_ROOT/data") == str(tmp_path / "data")
    with pytest.raises(ValueError, match=r"(?s)data.train_files.*NOT_SET_HERE"):
        copy_to_local("$NOT_SET_HERE/data", key="data.train_files")


def test_url_of_a_file_is_copied_and_reused_until_it_changes(tmp_path, memory_url):
    put(f"{memory_url}/train.parquet", b"one")
    first = copy_to_local(f"{memory_url}/train.parquet", cache_dir=tmp_path)
    assert Path(first).name == "train.parquet"
    assert Path(first).read_bytes() == b"one"
    before = os.stat(first)
    assert copy_to_local(f"{memory_url}/train.parquet", cache_dir=tmp_path) == first
    assert os.stat(first).st_ino == before.st_ino
    put(f"{memory_url}/train.parquet", b"two!")
    assert Path(copy_to_local(f"{memory_url}/train.parquet", cache_dir=tmp_path)).read_bytes() == b"two!"


def test_url_of_a_folder_is_copied_whole(tmp_path, memory_url):
    put(f"{memory_url}/set/train/a.jsonl", b"a")
    put(f"{memory_url}/set/test.jsonl", b"b")
    local = Path(copy_to_local(f"{memory_url}/set", cache_dir=tmp_path))
    found = {str(path.relative_to(local)): path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert found == {"train/a.jsonl": b"a", "test.jsonl": b"b"}
    assert local.name == "set"


def test_cache_folder_comes_from_the_environment(tmp_path, memory_url, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    put(f"{memory_url}/x.txt", b"x")
    assert copy_to_local(f"{memory_url}/x.txt").startswith(str(tmp_path / "cache"))


def test_many_askers_at_once_fetch_once(tmp_path):
    fetched = []

    def fetch(partial: Path) -> None:
        partial.mkdir()
        fetched.append(partial.stat().st_ino)
        (partial / "weights").write_bytes(b"w" * 1000)

    target = tmp_path / "cache" / "model"
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: fs.create_once(target, fetch), range(16)))
    assert set(results) == {str(target)}
    assert fetched == [target.stat().st_ino]  # once, and renamed into place, not copied


def test_processes_of_one_node_share_one_copy(tmp_path):
    script = (
        "import sys, time, pathlib; from verl.utils import fs\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "def fetch(partial):\n"
        "    (root / 'fetches').open('a').write('x')\n"
        "    time.sleep(0.5)\n"
        "    partial.write_bytes(b'whole')\n"
        "print(pathlib.Path(fs.create_once(root / 'c' / 'f', fetch)).read_bytes().decode())\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in started] == ["whole"] * 3
    assert (tmp_path / "fetches").read_text() == "x"


def test_a_failed_or_killed_copy_is_never_seen_and_the_next_one_succeeds(tmp_path):
    target = tmp_path / "model"

    def breaks(partial: Path) -> None:
        partial.mkdir()
        (partial / "half").write_text("x")
        raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        fs.create_once(target, breaks)
    assert not target.exists()
    killed = tmp_path / ".model.deadbeef.partial"
    killed.mkdir()

    fs.create_once(target, lambda partial: partial.write_text("whole"))
    assert target.read_text() == "whole"
    assert not list(tmp_path.glob(".*.partial"))


def test_shared_memory_holds_a_copy_that_follows_the_source(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(fs, "SHARED_MEMORY", shared)
    model = tmp_path / "model"
    model.mkdir()
    (model / "w").write_text("1")
    first = copy_to_local(model, use_shm=True)
    assert first.startswith(str(shared))
    assert (Path(first) / "w").read_text() == "1"
    assert copy_to_local(model, use_shm=True) == first
    (model / "w").write_text("22")
    assert (Path(copy_to_local(model, use_shm=True)) / "w").read_text() == "22"
    assert copy_to_local(model / "w", use_shm=True).startswith(str(shared))


def test_without_room_in_shared_memory_the_disk_is_used(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fs, "SHARED_MEMORY", tmp_path / "absent")
    (tmp_path / "f").write_text("x")
    with caplog.at_level("WARNING", logger="verl"):
        assert copy_to_local(tmp_path / "f", use_shm=True) == str(tmp_path / "f")
    assert "use_shm" in caplog.text


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "openai/gsm8k"])
def test_hub_ids_are_recognised(name):
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["/a/b", "./a", "../a", "a/b/c", "data/train.parquet", "train.jsonl", "", "a b"])
def test_paths_are_not_hub_ids(name):
    assert not is_hub_id(name)


def test_missing_path_names_key_and_place(tmp_path):
    with pytest.raises(ValueError, match=r"data\.val_files: .*test\.parquet"):
        copy_to_local(tmp_path / "test.parquet", key="data.val_files")
    with pytest.raises(ValueError, match=r"^path: 'memory://.*/none'"):
        copy_to_local(f"memory://{uuid.uuid4().hex}/none", cache_dir=tmp_path)


def test_unknown_or_unsupported_url_says_what_to_install(tmp_path):
    with pytest.raises(ValueError, match=r"^path: 'nosuch://bucket/x' .*\bnosuch\."):
        copy_to_local("nosuch://bucket/x", cache_dir=tmp_path)
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"^path: 's3://bucket/x' .*fsspec\[s3\]"):
            copy_to_local("s3://bucket/x", cache_dir=tmp_path)


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of a model hub that a snapshot download asks for."""

    files: ClassVar = {"config.json": b'{"model_type": "tiny"}', "model.safetensors": b"weights"}
    sha = "a" * 40
    seen: ClassVar = []

    def _answer(self) -> bytes | None:
        path = self.path.split("?")[0]
        type(self).seen.append((self.command, path, self.headers.get("authorization")))
        if path.startswith("/api/models/org/tiny/revision/"):
            info = {"id": "org/tiny", "sha": self.sha, "siblings": [{"rfilename": name} for name in self.files]}
            return self._send(json.dumps(info).encode())
        if path.startswith("/api/models/org/tiny/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": f"{n}-1"} for n, c in self.files.items()]
            return self._send(json.dumps(tree).encode())
        name = path.rsplit("/", 1)[-1]
        if path.startswith("/org/tiny/resolve/") and name in self.files:
            return self._send(self.files[name], {"ETag": f'"{name}-1"', "X-Repo-Commit": self.sha})
        return self._send(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

    def _send(self, body: bytes, headers: dict | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD = lambda self: self._answer()

    def log_message(self, *args) -> None:
        pass


def run_copy(repo: str, home: Path, **env: str) -> subprocess.CompletedProcess:
    """In a process of its own: the hub client reads its environment when it is imported."""
    script = f"from verl.utils.fs import copy_to_local; print(copy_to_local({repo!r}, key='model.path'))"
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**base, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_hub_download_honours_endpoint_token_and_cache_and_says_what_is_missing(tmp_path):
    FakeHub.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        fetched = run_copy("org/tiny", tmp_path, HF_ENDPOINT=endpoint, HF_TOKEN="hf_secret")
        unknown = run_copy("org/other", tmp_path, HF_ENDPOINT=endpoint)
    finally:
        server.shutdown()
        server.server_close()
    assert fetched.returncode == 0, fetched.stderr
    folder = Path(fetched.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert any(authorization == "Bearer hf_secret" for _, _, authorization in FakeHub.seen)
    assert "model.path: 'org/other' is neither a local path" in unknown.stderr

    offline = run_copy("org/tiny", tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(folder), offline.stderr
    absent = run_copy("org/absent", tmp_path, HF_HUB_OFFLINE="1")
    assert "hf download org/absent" in absent.stderr.splitlines()[-1]
    unreachable = run_copy("org/absent", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "hf download org/absent" in unreachable.stderr.splitlines()[-1]


def test_hdfs_io_copies_files_and_folders_like_cp(tmp_path, memory_url):
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "train.parquet").write_bytes(b"t")
    (tmp_path / "out" / "deep" / "x").write_bytes(b"x")
    assert not hdfs_io.exists(f"{memory_url}/gsm8k")
    hdfs_io.makedirs(f"{memory_url}/gsm8k")
    hdfs_io.makedirs(f"{memory_url}/gsm8k")
    assert hdfs_io.exists(f"{memory_url}/gsm8k")

    placed = hdfs_io.copy(src=str(tmp_path / "out"), dst=f"{memory_url}/gsm8k")
    assert placed == f"{memory_url}/gsm8k/out"
    assert hdfs_io.exists(f"{memory_url}/gsm8k/out/deep/x")
    hdfs_io.copy(f"{memory_url}/gsm8k/out", str(tmp_path / "back"))
    assert (tmp_path / "back" / "train.parquet").read_bytes() == b"t"
    assert (tmp_path / "back" / "deep" / "x").read_bytes() == b"x"
    hdfs_io.copy(tmp_path / "out" / "train.parquet", tmp_path / "new" / "name.parquet")
    assert (tmp_path / "new" / "name.parquet").read_bytes() == b"t"


def test_hdfs_io_refuses_to_copy_a_file_or_folder_onto_itself(tmp_path, memory_url):
    (tmp_path / "link").symlink_to(tmp_path / "data")
    hdfs_io.makedirs(f"{memory_url}/data")
    (tmp_path / "data").mkdir()
    for folder in (tmp_path / "data", f"{memory_url}/data"):
        put(f"{folder}/x", b"x")
    for src, dst in (("data/x", "data/x"), ("data/x", "data"), ("data", ""), ("data/x", "link")):
        with pytest.raises(ValueError, match=rf"^dst: '{tmp_path}/{dst}.* src\."):
            hdfs_io.copy(tmp_path / src, tmp_path / dst)
    with pytest.raises(ValueError, match=r"^dst: 'memory://.*/data/x' .*src"):
        hdfs_io.copy(f"{memory_url}/data/x", f"{memory_url}/data/")
    assert (tmp_path / "data" / "x").read_bytes() == b"x"
    assert fsspec.filesystem("memory").cat(f"{memory_url}/data/x") == b"x"


def test_hdfs_io_refuses_what_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^src: '.*none'"):
        hdfs_io.copy(tmp_path / "none", tmp_path / "x")
    hdfs_io.makedirs(tmp_path / "made")
    with pytest.raises(FileExistsError):
        hdfs_io.makedirs(tmp_path / "made", exist_ok=False)
