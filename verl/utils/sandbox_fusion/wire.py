"""The words of the SandboxFusion API: a request to run code, and what came of it, to and from JSON."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.utils.sandbox import Result

RUN, PING, PONG = "/run_code", "/v1/ping", "pong"


class ServerFailed(RuntimeError):
    """The server answered that it could not run the code, which is no fault of the code."""


@dataclass(frozen=True)
class RunRequest:
    """One program to run. `memory_mb` None: as much as the server gives."""

    code: str
    language: str = "python"
    stdin: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    fetch: tuple[str, ...] = ()
    run_s: float = 10.0
    compile_s: float = 10.0
    memory_mb: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "language": self.language,
            "compile_timeout": self.compile_s,
            "run_timeout": self.run_s,
            "memory_limit_MB": -1 if self.memory_mb is None else self.memory_mb,
            "stdin": self.stdin,
            "files": {name: base64.b64encode(content).decode() for name, content in self.files.items()},
            "fetch_files": list(self.fetch),
        }

    @classmethod
    def from_json(cls, given: Any) -> RunRequest:
        """The request that a client sent; a ValueError names the field and what is wrong with it.

        Null is the same as not given; fields of other versions of the API are no concern of ours.
        """
        if not isinstance(given, dict):
            raise ValueError(f"the body must be an object with the field code, not {_kind(given)}")
        fields = {name: value for name, value in given.items() if value is not None}
        if "code" not in fields:
            raise ValueError("code: is missing; it is the program to run")
        texts = {name: _text(name, fields[name]) for name in ("code", "language", "stdin") if name in fields}
        fetch = fields.get("fetch_files", [])
        if not isinstance(fetch, list) or not all(isinstance(name, str) for name in fetch):
            raise ValueError("fetch_files: must be a list of paths")
        memory = fields.get("memory_limit_MB", -1)
        if isinstance(memory, bool) or not isinstance(memory, int) or not (memory == -1 or memory > 0):
            raise ValueError(f"memory_limit_MB: {memory!r} must be a whole number above 0, or -1 for the server's own")
        return cls(
            **texts,
            files=_contents(fields.get("files", {})),
            fetch=tuple(fetch),
            run_s=_seconds("run_timeout", fields.get("run_timeout", cls.run_s)),
            compile_s=_seconds("compile_timeout", fields.get("compile_timeout", cls.compile_s)),
            memory_mb=None if memory == -1 else memory,
        )


def result_to_json(result: Result) -> dict[str, Any]:
    """What a client is told. A program that ended by itself is `Finished`, whatever it returned."""
    compiled = None if result.compile is None else _run_to_json(result.compile)
    broken = result.compile is not None and result.compile.status != "finished"
    told = {
        "status": {"finished": "Success", "output": "Success", "refused": "SandboxError"}.get(result.status, "Failed"),
        "message": _IN_WORDS.get(result.status, ""),
        "compile_result": compiled,
        "run_result": None if broken or result.status == "refused" else _run_to_json(result),
        "executor_pod_name": None,
        "files": {name: base64.b64encode(content).decode() for name, content in result.files.items()},
    }
    if result.status == "refused":
        told["message"] = result.stderr
    return told


def result_from_json(told: Any) -> Result:
    """The other way; a ServerFailed where the server failed, or what it said is no answer of this API."""
    try:
        if told["status"] == "SandboxError":
            raise ServerFailed(f"SandboxError: {told.get('message')}")
        compiled = None if told.get("compile_result") is None else _run_from_json(told["compile_result"])
        if told.get("run_result") is None:
            if compiled is None:
                raise ServerFailed(f"neither compiled nor ran the code: {told.get('message')}")
            return Result(
                "error", compiled.return_code, "", compiled.stderr or compiled.stdout, compiled.seconds, compiled
            )
        result = _run_from_json(told["run_result"])
        if result.status == "error" and told.get("message") in _STATUS_OF_WORDS:
            result.status = _STATUS_OF_WORDS[told["message"]]
        elif result.status == "finished" and told.get("message") == _IN_WORDS["output"]:
            result.status = "output"
        result.compile, result.files = compiled, _contents(told.get("files") or {})
        return result
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ServerFailed(f"answered what is no result of a run ({error!r})") from error


_IN_WORDS = {
    "memory": "the program needed more memory than its limit",
    "output": "the output was longer than its limit and is cut",
    "timeout": "the program ran longer than its time limit",
}
_STATUS_OF_WORDS: dict[Any, Any] = {_IN_WORDS["memory"]: "memory"}


def _run_to_json(result: Result) -> dict[str, Any]:
    status = {"timeout": "TimeLimitExceeded", "memory": "Error"}.get(result.status, "Finished")
    return {
        "status": status,
        "execution_time": result.seconds,
        "return_code": None if result.status == "timeout" else result.return_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


def _run_from_json(told: Mapping[str, Any]) -> Result:
    code = told.get("return_code")
    ended = "finished" if code == 0 else "error"
    status: Any = {"Finished": ended, "TimeLimitExceeded": "timeout"}.get(told["status"], "error")
    seconds = float(told.get("execution_time") or 0.0)
    return Result(status, code, told.get("stdout") or "", told.get("stderr") or "", seconds)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a text, not {_kind(value)}")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}: {value!r} must be a number of seconds above 0")
    return float(value)


def _contents(value: Any) -> dict[str, bytes]:
    if not isinstance(value, dict):
        raise ValueError(f"files: must be an object of path and content in base64, not {_kind(value)}")
    found = {}
    for name, content in value.items():
        try:
            found[name] = base64.b64decode(_text("files", content), validate=True)
        except binascii.Error as error:
            raise ValueError(f"files: the content of {name!r} is not base64 ({error})") from error
    return found


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false"}.get(type(value), repr(value))
