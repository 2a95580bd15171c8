"""Whether models and datasets of the Hugging Face hub can be obtained: one short attempt, before anything starts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

logger = logging.getLogger(__name__)

TIMEOUT_S = 4.0


@dataclass(frozen=True)
class HubRepo:
    """A repository of the hub: `kind` is model or dataset."""

    name: str
    kind: str = "model"


def find_hub_problems(repos: Collection[HubRepo], timeout: float | None = None) -> dict[HubRepo, str]:
    """Cause and remedy for each repository that cannot be obtained.

    All are requested concurrently, once. Repositories in the local cache can be used without the hub: if it is
    unreachable, HF_HUB_OFFLINE is set for this process and its children, so that they do not wait for it.
    """
    if not repos:
        return {}
    from huggingface_hub import constants

    cached = {repo for repo in repos if _is_cached(repo)}
    if constants.HF_HUB_OFFLINE:
        return {repo: _offline(repo) for repo in repos if repo not in cached}
    timeout = TIMEOUT_S if timeout is None else timeout
    errors = _request_all(repos, timeout)
    if cached and len(errors) == len(repos) and not any(map(_is_answer, errors.values())):
        logger.warning("the hub (%s) cannot be reached: using the copies in the local cache", constants.ENDPOINT)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
    return {repo: _problem(repo, error) for repo, error in errors.items() if repo not in cached}


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
        except Exception as error:  # noqa: BLE001 (every kind of failure is reported)
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


def _is_answer(error: Exception) -> bool:
    """Whether the hub answered, with an HTTP error."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError)


def _problem(repo: HubRepo, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"{repo.name!r} is gated. Accept its terms on its hub page, and set HF_TOKEN."
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo.name!r} is neither a local path nor a {repo.kind} on {constants.ENDPOINT} that you may read. Check "
            "the name, or set HF_TOKEN for a private one."
        )
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{repo.name!r} is not a local path, and the hub ({constants.ENDPOINT}) cannot be reached ({reason}). Give a"
        f" local folder, check the network and HF_ENDPOINT, or fetch it on a machine with access: {_command(repo)}"
    )


def _offline(repo: HubRepo) -> str:
    from huggingface_hub import constants

    return (
        f"{repo.name!r} is not a local path and not in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set. Give a"
        f" local folder, or unset HF_HUB_OFFLINE, or fetch it on a machine with access: {_command(repo)}"
    )


def _command(repo: HubRepo) -> str:
    return f"hf download {'' if repo.kind == 'model' else f'--repo-type {repo.kind} '}{repo.name}"
