"""Small helpers on plain Python: containers, masked secrets, environment variables, keyword aliases, time limits."""

from __future__ import annotations

import functools
import math
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
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("timeout_limit: signals are received by the main thread only. Use use_signals=False.")
    other = signal.getsignal(signal.SIGALRM)
    if other is None:  # not installed by Python, which could not restore it
        return _run_in_thread(call, seconds, name)
    alarm = _Alarm(other, seconds, name)
    try:
        try:
            alarm.start()
            return call()
        finally:
            alarm.disable()
    finally:  # also if the time limit has ended the inner block after the call
        alarm.restore_other()


class _Alarm:
    """Handler of SIGALRM that ends a call at its time limit.

    A process has only one timer of this kind. If another handler, such as that of an enclosing call, has set it, it is
    set to the earlier of both times, and the other handler is called at its time.
    """

    def __init__(self, other: Any, seconds: float, name: str) -> None:
        self._other, self._seconds, self._name = other, seconds, name
        self._deadline = time.monotonic() + seconds
        self._other_time = math.inf
        self._other_interval = 0.0
        self._in_other = False

    def start(self) -> None:
        self._take_timer()
        signal.signal(signal.SIGALRM, self)
        self._set_timer(min(self._other_time, self._deadline))

    def disable(self) -> None:
        self._deadline = math.inf

    def restore_other(self) -> None:
        self._deadline = math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._other)
        self._set_timer(self._other_time, self._other_interval)

    def __call__(self, number: int, frame: Any) -> None:
        if self._in_other:  # its timer has expired again before it returned
            self._run_other(number, frame)
            return
        if self._other_time <= time.monotonic():
            self._call_other(number, frame)
        expired = self._deadline <= time.monotonic()
        if expired:
            self._deadline = math.inf
        self._set_timer(min(self._other_time, self._deadline))
        if expired:
            raise _timeout_error(self._name, self._seconds)

    def _call_other(self, number: int, frame: Any) -> None:
        """Call the other handler with the timer as the handler expects it. It may set the timer, install another
        handler, and raise."""
        now, interval = time.monotonic(), self._other_interval
        # The signal may be late by more than one interval: Python calls handlers between instructions only.
        missed = (now - self._other_time) // interval if interval else 0
        self._set_timer(self._other_time + interval * (missed + 1) if interval else math.inf, interval)
        self._in_other, installed = True, signal.getsignal(number)  # this alarm, or that of a call within this one
        try:
            self._run_other(number, frame)
        except BaseException:
            if self._deadline <= time.monotonic():  # the call ends with this error
                self._deadline = math.inf
            raise
        finally:
            self._in_other = False
            self._take_timer()
            if (replaced := signal.getsignal(number)) is not installed:
                self._other = replaced
                signal.signal(number, installed)
            self._set_timer(min(self._other_time, self._deadline))

    def _run_other(self, number: int, frame: Any) -> None:
        if callable(self._other):
            self._other(number, frame)
        elif self._other == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _take_timer(self) -> None:
        """Stop the timer of the other handler; keep its time and interval."""
        remaining, self._other_interval = signal.setitimer(signal.ITIMER_REAL, 0)
        self._other_time = time.monotonic() + remaining if remaining else math.inf

    @staticmethod
    def _set_timer(at: float, interval: float = 0.0) -> None:
        if at < math.inf:
            signal.setitimer(signal.ITIMER_REAL, max(at - time.monotonic(), _SHORTEST_TIMER_S), interval)


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
