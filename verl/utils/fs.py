"""Bring a model, a dataset or a file to local disk, wherever it is named from, once per node.

Processes of a node that ask for the same thing at once share one copy: the first fetches it under a file lock, into a
name of its own beside the target, and renames it into place when it is whole. A half copy is never seen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.manifest import LATEST, MANIFEST

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DATA_SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".arrow", ".txt", ".py", ".yaml", ".yml")
_SHARED_MEMORY = Path("/dev/shm")
_STEP_FOLDER = re.compile(r"global_step_\d+")
# Where a step folder holds the model as transformers loads it: of supervised learning, of reinforcement learning.
_EXPORTS = ("huggingface", "actor/huggingface")


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
    """The absolute local path of `src`, fetched first where needed.

    `src`: a local path or `file://` URL (used in place), any fsspec URL (`s3://`, `gs://`, `hdfs://`, `memory://`, …),
    or a hub id (`org/name`; `repo_type` model or dataset, at `revision`). `~` and environment variables are expanded.
    Hub downloads follow HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and the hub cache; other copies are found under
    `cache_dir` (or $VERL_CACHE, or `~/.cache/verl`) as `<md5_encode(src)>/<basename>`, and are fetched anew when the
    source has changed, or with `always_recopy`. `use_shm` puts the result into shared memory, for many processes that
    load the same weights, when it fits. `key` begins every error.
    """
    location = expand_path(src)
    local = location.removeprefix("file://")
    if os.path.exists(local):
        path = os.path.abspath(local)
    elif "$" in location:
        raise ValueError(f"{key}: an environment variable in {os.fspath(src)!r} is not set. Set it or write it out.")
    elif "://" in location and local == location:
        path = _copy_from_url(location, cache_root(cache_dir), key, always_recopy)
    elif is_hub_id(location):
        path = _download_from_hub(location, repo_type, revision, cache_dir, key)
    else:
        raise ValueError(f"{key}: there is no {local!r} (looked at {os.path.abspath(local)}). Check the path.")
    return _copy_to_shared_memory(Path(path)) if use_shm else path


def resolve_model_path(path: str | os.PathLike[str], key: str = "model.path") -> str:
    """The local folder that transformers loads for `path`: what `copy_to_local` gives, except for checkpoints of ours.

    A step folder (`…/global_step_N` of supervised or reinforcement learning, local or at a URL) stands for the model
    that was exported into it; of a step at a URL only that part is fetched. A run's local folder stands for its newest
    step.
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
    """`~` and environment variables written out; URLs keep their form."""
    return os.path.expanduser(os.path.expandvars(os.fspath(path)))


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: `name` or `org/name`, not a path and not a data file."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith(_DATA_SUFFIXES)


def is_non_local(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is the URL of another place (`hdfs://`, `s3://`, …) than this machine's disk."""
    location = expand_path(path)
    return "://" in location and not location.startswith("file://")


def md5_encode(path: str | os.PathLike[str]) -> str:
    """The name of the folder, under the cache, that a remote file is copied into."""
    return hashlib.md5(os.fspath(path).encode(), usedforsecurity=False).hexdigest()


def filesystem_of(url: str, key: str = "path") -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path inside it; a clear error where support is missing."""
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


def made_once(target: Path, fetch: Callable[[Path], object]) -> str:
    """Have `fetch` fill a name beside `target` and rename it into place, unless another process already has."""
    if target.exists():
        return str(target)
    with _lock(target.parent / f".{target.name}"):
        # Whoever holds the lock is alone: parts that are here were left by a process that died.
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
    """Where copies and prepared data are kept: `cache_dir`, or $VERL_CACHE, or `~/.cache/verl`."""
    chosen = cache_dir or os.environ.get("VERL_CACHE")
    return Path(expand_path(chosen)).absolute() if chosen else Path.home() / ".cache" / "verl"


def _copy_from_url(url: str, cache: Path, key: str, always_recopy: bool) -> str:
    fs, remote = filesystem_of(url, key)
    try:
        is_folder = fs.isdir(remote)
        version = _fingerprint(fs, remote, is_folder)
    except FileNotFoundError as error:
        raise ValueError(f"{key}: there is nothing at {url!r}. Check the address and your access rights.") from error
    name = os.path.basename(remote.rstrip("/")) or "root"
    if always_recopy:
        version += uuid.uuid4().hex
    # Every version has a place of its own: whoever reads an older one is not disturbed. A link names the newest.
    target = cache / ".versions" / hashlib.sha256(f"{url}\0{version}".encode()).hexdigest()[:20] / name

    def fetch(partial: Path) -> None:
        logger.info("copying %s to %s", url, target)
        if is_folder:
            partial.mkdir(parents=True)
            fs.get(remote.rstrip("/") + "/", str(partial), recursive=True)
        else:
            fs.get_file(remote, str(partial))

    made_once(target, fetch)
    return _linked(cache / md5_encode(url) / name, target)


def _linked(link: Path, target: Path) -> str:
    """`link` names `target` from now on: switched at once, never absent in between."""
    link.parent.mkdir(parents=True, exist_ok=True)
    inside = os.path.relpath(target, link.parent)
    if not link.is_symlink() or os.readlink(link) != inside:
        beside = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}.link")
        beside.symlink_to(inside)
        os.replace(beside, link)
    return str(link)


def _download_from_hub(
    repo: str, repo_type: str, revision: str | None, cache_dir: str | os.PathLike[str] | None, key: str
) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    hub_cache = Path(expand_path(cache_dir or constants.HF_HUB_CACHE))
    command = f"hf download {'' if repo_type == 'model' else f'--repo-type {repo_type} '}{repo}"
    try:
        with _lock(hub_cache / ".locks" / f"verl-{repo_type}-{repo.replace('/', '--')}"):
            folder = snapshot_download(repo, repo_type=repo_type, revision=revision, cache_dir=hub_cache)
    except GatedRepoError as error:
        raise ValueError(
            f"{key}: {repo!r} is gated. Accept its terms on its hub page, set HF_TOKEN, then run: {command}"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{key}: {repo!r} is neither a local path (looked at {os.path.abspath(repo)}) nor a {repo_type} on the hub "
            f"that you may read. Check the name, or set HF_TOKEN for a private one."
        ) from error
    except (OSError, EntryNotFoundError) as error:
        raise ValueError(
            f"{key}: {repo!r} is not a local path, and the hub cannot be reached to fetch it ({error}). "
            f"Give a local folder; or have it in {hub_cache}, where this fetches it on a machine with access: {command}"
        ) from error
    return os.path.abspath(folder)


def _copy_to_shared_memory(source: Path) -> str:
    """A copy in memory-backed storage; the source itself where that is absent or too small. It stays until reboot."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    stats = [(str(path.relative_to(source)), path.stat()) for path in files]
    needed = sum(stat.st_size for _, stat in stats)
    version = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    digest = hashlib.sha256(f"{source}\0{version}".encode()).hexdigest()[:20]
    target = _SHARED_MEMORY / f"verl-{os.getuid()}" / digest / source.name
    if target.exists():
        return str(target)
    free = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else 0
    if needed > free:
        logger.warning(
            "use_shm: %s needs %.1f GB, %s has %.1f GB free; using it from disk",
            source, needed / 1e9, _SHARED_MEMORY, free / 1e9,
        )  # fmt: skip
        return str(source)
    copy: Callable[[Path, Path], object] = shutil.copyfile if source.is_file() else shutil.copytree
    return made_once(target, lambda partial: copy(source, partial))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _lock(stem: Path) -> Any:
    """An exclusive lock among the processes of this node; the system releases it when its holder dies."""
    from filelock import FileLock

    stem.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(f"{stem}.lock")


def _fingerprint(fs: Any, remote: str, is_folder: bool) -> str:
    """Changes when the source does, by whatever the file system tells of its files: size, time, entity tag."""
    entries = fs.find(remote, detail=True) if is_folder else {remote: fs.info(remote)}
    told = ("size", "ETag", "etag", "mtime", "LastModified", "last_modified", "created", "generation", "md5")
    return repr([(name, [str(info[part]) for part in told if part in info]) for name, info in sorted(entries.items())])
