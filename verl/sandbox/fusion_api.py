"""The SandboxFusion API: requests to run code and results, to and from JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from verl.sandbox.outcome import Limits, Result

RUN, PING, PONG = "/run_code", "/v1/ping", "pong"
MOST_FILES = 1024
DEFAULT_SECONDS = 10.0
"""run_timeout and compile_timeout of a request that sets none."""


class ServerFailed(RuntimeError):
    """The server answered that it could not run the code, which is no fault of the code."""


def run_request(
    code: str,
    language: str,
    stdin: str,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
    limits: Limits | None,
    memory_mb: int | None,
) -> dict[str, Any]:
    """The JSON of a request; without `limits` the server's times apply, without `memory_mb` its memory."""
    times = {} if limits is None else {"run_timeout": limits.wall_s, "compile_timeout": limits.compile_s}
    return {
        "code": code,
        "language": language,
        "stdin": stdin,
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        "fetch_files": list(fetch),
        "memory_limit_MB": -1 if memory_mb is None else memory_mb,
        **times,
    }


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
        result.compile, result.files = compiled, decode_files(told.get("files") or {})
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


def decode_files(files: Mapping[Any, Any]) -> dict[str, bytes]:
    """Contents from base64; a ValueError names the file that is not."""
    contents = {}
    for number, (name, content) in enumerate(files.items()):
        if number > MOST_FILES:
            break  # the model rejects their number
        try:
            contents[name] = content if isinstance(content, bytes) else base64.b64decode(content, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"the content of {name[:200]!r} is not base64 ({error})") from error
    return contents
