"""Fetch models, datasets and files from URLs and the Hugging Face hub to local disk, once per node.

Processes of a node share one copy: the first one fetches it under a file lock to a temporary name and renames it when
it is complete. `find_hub_problems` checks beforehand, with one short request each, which repositories can be obtained
from the hub.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.manifest import LATEST, MANIFEST

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow", ".txt", ".py", ".yaml", ".yml")
SHARED_MEMORY = Path("/dev/shm")
_STEP_FOLDER = re.compile(r"global_step_\d+")
# Folders of a step with the model in Hugging Face format: of supervised and of reinforcement learning.
_EXPORTS = ("huggingface", "actor/huggingface")
HUB_TIMEOUT_S = 4.0


def copy_to_local(
    src: str | os.PathLike[str],
    cache_dir: str | os.PathLike[str] | None = None,
    use_shm: bool = False,
    *,
    repo_type: str = "model",
    revision: str | None = None,
    key: str = "path",
    always_recopy: bool = False,
) -> str:
    """Return the absolute local path of `src`; fetch it first if necessary.

    `src`: a local path or `file://` URL (used in place), any fsspec URL (`s3://`, `gs://`, `hdfs://`, `memory://`, …),
    or a hub id (`org/name`; `repo_type` model or dataset, at `revision`). `~` and environment variables are expanded.
    Hub downloads follow HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the hub cache; other copies are stored under
    `cache_dir` (or $VERL_CACHE, or `~/.cache/verl`) as `<md5_encode(src)>/<basename>`, and are fetched again when the
    source has changed, or with `always_recopy`. `use_shm` copies the result to shared memory if it fits, for many
    processes that load the same weights. Errors begin with `key`.
    """
    location = expand_path(src)
    local = location.removeprefix("file://")
    if os.path.exists(local):
        path = os.path.abspath(local)
    elif "$" in location:
        raise ValueError(f"{key}: an environment variable in {os.fspath(src)!r} is not set. Set it or use a full path.")
    elif "://" in location and local == location:
        path = _copy_from_url(location, cache_root(cache_dir), key, always_recopy)
    elif is_hub_id(location):
        path = download_from_hub(HubRepo(location, repo_type), revision, cache_dir, key)
    else:
        raise ValueError(f"{key}: there is no {local!r} (looked at {os.path.abspath(local)}). Check the path.")
    return _copy_to_shared_memory(Path(path)) if use_shm else path


def resolve_model_path(path: str | os.PathLike[str], key: str = "model.path") -> str:
    """Return the local folder that transformers loads for `path`: as `copy_to_local`, but also for checkpoints.

    A step folder (`…/global_step_N` of supervised or reinforcement learning, local or at a URL) stands for the model
    exported into it; of a step at a URL only that part is fetched. A run's local folder stands for its newest step.
    """
    location = expand_path(path).rstrip("/")
    if "://" in location and _STEP_FOLDER.fullmatch(os.path.basename(location)):
        fs, remote = filesystem_of(location, key)
        inside = next((f"/{part}" for part in _EXPORTS if fs.exists(f"{remote}/{part}/config.json")), "")
        return copy_to_local(location + inside, key=key)
    folder = Path(copy_to_local(location, key=key))
    newest = folder / LATEST
    if newest.is_file() and _STEP_FOLDER.fullmatch(step := newest.read_text().strip()):
        folder = folder / step
    for part in _EXPORTS:
        if (folder / part / "config.json").is_file():
            return str(folder / part)
    if _STEP_FOLDER.fullmatch(folder.name) and (folder / MANIFEST).is_file():
        raise ValueError(
            f"{key}: {folder} is a checkpoint without an exported model (looked for {' and '.join(_EXPORTS)}). "
            "Save one by having hf_model in checkpoint.save_contents, or choose another step."
        )
    return str(folder)


def expand_path(path: str | os.PathLike[str]) -> str:
    """Expand `~` and environment variables. In URLs only variables are expanded."""
    return os.path.expanduser(os.path.expandvars(os.fspath(path)))


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form of a hub id: `name` or `org/name`, not a path and not a data file."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_DATA_SUFFIXES)


def is_non_local(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a URL (`hdfs://`, `s3://`, …) that is not on the local disk."""
    location = expand_path(path)
    return "://" in location and not location.startswith("file://")


def md5_encode(path: str | os.PathLike[str]) -> str:
    """Return the name of the folder in the cache that a remote file is copied to."""
    return hashlib.md5(os.fspath(path).encode(), usedforsecurity=False).hexdigest()


def filesystem_of(url: str, key: str = "path") -> tuple[Any, str]:
    """Return the fsspec file system of a path or URL, and the path inside it. ValueError: it is not supported."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(expand_path(url))
    except ImportError as error:
        scheme = url.split("://")[0]
        raise ValueError(
            f"{key}: {url!r} needs a package for {scheme}:// that is not installed ({error}). "
            f"Run: pip install 'fsspec[{scheme}]'"
        ) from error
    except ValueError as error:
        raise ValueError(f"{key}: {url!r} cannot be read: {error}. Check the part before '://'.") from error


def create_once(target: Path, fetch: Callable[[Path], object]) -> str:
    """Call `fetch` with a temporary path and rename that to `target`, unless another process already has."""
    if target.exists():
        return str(target)
    with _lock(target.parent / f".{target.name}"):
        # Under the lock, existing partial files are of processes that died.
        for stale in target.parent.glob(f".{target.name}.*.partial"):
            _remove(stale)
        if not target.exists():
            partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
            try:
                fetch(partial)
                os.replace(partial, target)
            finally:
                _remove(partial)
    return str(target)


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of copies and prepared data: `cache_dir`, or $VERL_CACHE, or `~/.cache/verl`."""
    folder = cache_dir or os.environ.get("VERL_CACHE")
    return Path(expand_path(folder)).absolute() if folder else Path.home() / ".cache" / "verl"


def _copy_from_url(url: str, cache: Path, key: str, always_recopy: bool) -> str:
    fs, remote = filesystem_of(url, key)
    try:
        is_folder = fs.isdir(remote)
        version = _fingerprint(fs, remote, is_folder)
    except FileNotFoundError as error:
        raise ValueError(f"{key}: {url!r} does not exist. Check the address and your access rights.") from error
    name = os.path.basename(remote.rstrip("/")) or "root"
    if always_recopy:
        version += uuid.uuid4().hex
    # Every version has its own folder, so readers of an older one are not disturbed; a link points to the newest.
    target = cache / ".versions" / hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:20] / name

    def fetch(partial: Path) -> None:
        logger.info("copying %s to %s", url, target)
        if is_folder:
            partial.mkdir(parents=True)
            fs.get(remote.rstrip("/") + "/", str(partial), recursive=True)
        else:
            fs.get_file(remote, str(partial))

    create_once(target, fetch)
    return _set_link(cache / md5_encode(url) / name, target)


def _set_link(link: Path, target: Path) -> str:
    """Let `link` point to `target`, atomically."""
    link.parent.mkdir(parents=True, exist_ok=True)
    relative = os.path.relpath(target, link.parent)
    if not link.is_symlink() or os.readlink(link) != relative:
        temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}.link")
        temporary.symlink_to(relative)
        os.replace(temporary, link)
    return str(link)


@dataclass(frozen=True)
class HubRepo:
    """A repository of the hub: `kind` is model or dataset."""

    name: str
    kind: str = "model"

    @property
    def download_command(self) -> str:
        """The shell command that fetches it into the cache."""
        return f"hf download {'' if self.kind == 'model' else f'--repo-type {self.kind} '}{self.name}"


def find_hub_problems(repos: Collection[HubRepo]) -> dict[HubRepo, str]:
    """Return cause and remedy for each repository that cannot be obtained.

    All are requested concurrently, once. Repositories in the local cache can be used without the hub: if it is
    unreachable, HF_HUB_OFFLINE is set for this process and its children, so that they do not wait for it.
    """
    if not repos:
        return {}
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    cached = {repo for repo in repos if _is_cached(repo)}
    if constants.HF_HUB_OFFLINE:
        return {
            repo: f"{repo.name!r} is not a local path and not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set."
            " Give a local folder, or unset HF_HUB_OFFLINE, or fetch it on a machine with access:"
            f" {repo.download_command}"
            for repo in repos
            if repo not in cached
        }
    errors = _request_all(repos, HUB_TIMEOUT_S)
    hub_responds = any(isinstance(error, HfHubHTTPError) for error in errors.values())
    if cached and len(errors) == len(repos) and not hub_responds:
        logger.warning("the hub (%s) cannot be reached: using the copies in the local cache", constants.ENDPOINT)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
    return {repo: _hub_problem(repo, error) for repo, error in errors.items() if repo not in cached}


def _is_cached(repo: HubRepo) -> bool:
    """Whether the cache has a snapshot, which may be incomplete."""
    from huggingface_hub import constants

    folder = os.path.join(constants.HF_HUB_CACHE, f"{repo.kind}s--{repo.name.replace('/', '--')}", "snapshots")
    return os.path.isdir(folder) and any(os.scandir(folder))


def _request_all(repos: Collection[HubRepo], timeout: float) -> dict[HubRepo, Exception]:
    """The exceptions of failed requests; TimeoutError for repositories without an answer within `timeout`."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    errors: dict[HubRepo, Exception] = {}
    calls: dict[str, Callable[..., object]] = {"model": api.model_info, "dataset": api.dataset_info}

    def request(repo: HubRepo) -> None:
        try:
            calls[repo.kind](repo.name, timeout=timeout)
        except Exception as error:  # noqa: BLE001 - every kind of failure is reported
            errors[repo] = error

    # Threads that may outlive this call: a name server that does not answer cannot be interrupted.
    threads = {repo: threading.Thread(target=request, args=(repo,), daemon=True) for repo in repos}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    waiting = [repo for repo, thread in threads.items() if thread.is_alive()]
    return dict(errors) | {repo: TimeoutError(f"no answer within {timeout:g} s") for repo in waiting}


def _hub_problem(repo: HubRepo, error: Exception, cache: Path | None = None) -> str:
    """Cause and remedy of a failed request or download."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            f"{repo.name!r} is gated. Accept its terms on its hub page, and set HF_TOKEN. Test it with:"
            f" {repo.download_command}"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo.name!r} is neither a local path (looked at {os.path.abspath(repo.name)}) nor a {repo.kind} on"
            f" {constants.ENDPOINT} that you may read. Check the name, or set HF_TOKEN for a private one."
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{repo.name!r} is not a local path, and the hub ({constants.ENDPOINT}) cannot be reached ({reason}). Give a"
        f" local folder, check the network and HF_ENDPOINT, or fetch it into {cache or constants.HF_HUB_CACHE} on a"
        f" machine with access: {repo.download_command}"
    )


def download_from_hub(repo: HubRepo, revision: str | None, cache_dir: str | os.PathLike[str] | None, key: str) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    hub_cache = Path(expand_path(cache_dir or constants.HF_HUB_CACHE))
    try:
        with _lock(hub_cache / ".locks" / f"verl-{repo.kind}-{repo.name.replace('/', '--')}"):
            folder = snapshot_download(repo.name, repo_type=repo.kind, revision=revision, cache_dir=hub_cache)
    except (OSError, EntryNotFoundError, RepositoryNotFoundError) as error:
        raise ValueError(f"{key}: {_hub_problem(repo, error, hub_cache)}") from error
    return os.path.abspath(folder)


def _copy_to_shared_memory(source: Path) -> str:
    """Copy to shared memory, where the copy stays until a reboot; return the source itself if it does not fit."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(source)), path.stat()) for path in files]
    needed = sum(stat.st_size for _, stat in stats)
    version = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256(f"{source}\0{version}".encode()).hexdigest()[:20]
    target = SHARED_MEMORY / f"verl-{os.getuid()}" / digest / source.name
    if target.exists():
        return str(target)
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    if needed > free:
        logger.warning(
            "use_shm: %s needs %.1f GB, %s has %.1f GB free; using it from disk",
            source, needed / 1e9, SHARED_MEMORY, free / 1e9,
        )  # fmt: skip
        return str(source)
    copy: Callable[[Path, Path], object] = shutil.copyfile if source.is_file() else shutil.copytree
    return create_once(target, lambda partial: copy(source, partial))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(stem: Path) -> Any:
    """An exclusive lock among the processes of this node; the system releases it when the process ends."""
    from filelock import FileLock

    stem.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{stem}.lock")


def _fingerprint(fs: Any, remote: str, is_folder: bool) -> str:
    """A text that changes with the source: size, time and entity tag of its files, as far as they are known."""
    entries = fs.find(remote, detail=True) if is_folder else {remote: fs.info(remote)}
    fields = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created", "generation", "md5")
    return repr(
        [(name, [str(info[field]) for field in fields if field in info]) for name, info in sorted(entries.items())]
    )
