"""Small helpers on plain Python: containers, masked secrets, environment variables, keyword aliases, time limits."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def append_to_dict(data: dict[str, list[Any]], new_data: Mapping[str, Any]) -> None:
    """Add `new_data` to the lists in `data`, in place: a list extends, any other value is appended."""
    for key, value in new_data.items():
        collected = data.setdefault(key, [])
        if isinstance(value, list):
            collected.extend(value)
        else:
            collected.append(value)


def union_two_dict(dict1: Mapping[str, Any], dict2: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict of both; a key in both must have equal values (also tensors and arrays)."""
    from verl.utils.nested import deep_equal

    for key in dict1.keys() & dict2.keys():
        if not deep_equal(dict1[key], dict2[key]):
            raise ValueError(f"union_two_dict: {key!r} is in both with different values: {dict1[key]}, {dict2[key]}.")
    return {**dict1, **dict2}


@contextmanager
def temp_env_var(key: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block and restore it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def keyword_aliases(**aliases: str) -> Callable[[F], F]:
    """Decorator: accept other names of keyword arguments: `keyword_aliases(filepath="path")`."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for alias, name in aliases.items():
                if alias in kwargs and name not in kwargs:  # with both, the function itself rejects the alias
                    kwargs[name] = kwargs.pop(alias)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


# 0 would disarm a timer whose time has passed.
_SHORTEST_TIMER_S = 1e-6


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: `TimeoutError` when a call takes longer than `seconds`.

    With signals (main thread only) the call is interrupted. Without, its thread cannot be stopped and continues: run
    code that may never end in another process, as is done for reward functions.
    """
    if seconds <= 0:
        raise ValueError(f"timeout_limit: seconds is {seconds}; it must be above 0.")
    run = _run_with_alarm if use_signals else _run_in_thread

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            return run(lambda: function(*args, **kwargs), seconds, getattr(function, "__name__", repr(function)))

        return limited

    return decorate


def _run_with_alarm(call: Callable[[], T], seconds: float, name: str) -> T:
    def stop(number: int, frame: Any) -> None:
        raise _timeout_error(name, seconds)

    outer_seconds, interval = signal.getitimer(signal.ITIMER_REAL)
    if 0 < outer_seconds <= seconds:  # the limit of an enclosing call ends this one first
        return call()
    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer_seconds:
            remaining = outer_seconds - (time.monotonic() - start)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, _SHORTEST_TIMER_S), interval)


def _run_in_thread(call: Callable[[], T], seconds: float, name: str) -> T:
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True, name=f"timeout_limit of {name}")
    thread.start()
    thread.join(seconds)
    if "error" in outcome:
        raise outcome["error"]
    if "value" not in outcome:
        raise _timeout_error(name, seconds)
    return outcome["value"]


def _timeout_error(name: str, seconds: float) -> TimeoutError:
    return TimeoutError(f"{name} took longer than {seconds} s.")


MASK = "[secret]"
# Names of secrets. `token` alone is not one of them: most keys with this word count tokens.
_SECRET = re.compile(
    r"(^|_)(api_?key|(access|private|secret|account|signing)_key|secret|password|passwd|credentials?|alert_url"
    r"|(auth|access|api|bearer|session|refresh|hf|hub|github|gitlab)_token)$"
    r"|(?-i:^[A-Z0-9_]+_TOKEN$)",  # environment variables
    re.I,
)
# Parts of URLs that authenticate: user and password (or a token without password), and parameters.
_SECRET_OF_URL = re.compile(
    r"(?P<before>://)[^/?#\s]+(?=@)"
    r"|(?P<parameter>[?&](?:key|api_?key|token|access_token|auth|sig|signature|secret|password)=)[^&#\s]+",
    re.I,
)


def mask_secrets(value: Any) -> Any:
    """Return nested dicts and lists in which the values of keys like `api_key`, and passwords and keys in URLs, are
    replaced by `[secret]`."""
    if isinstance(value, Mapping):
        return {
            key: MASK if item and isinstance(key, str) and _SECRET.search(key) else mask_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, str):
        return _SECRET_OF_URL.sub(lambda match: f"{match['before'] or match['parameter']}{MASK}", value)
    return [mask_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command, in which secrets (see `mask_secrets`) are replaced by `[secret]`."""
    masked = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        is_secret = value and _SECRET.search(key.rpartition(".")[2].replace("-", "_"))
        masked.append(f"{key}={MASK}" if is_secret else mask_secrets(argument))
    return masked
