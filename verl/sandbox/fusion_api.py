"""The SandboxFusion API over HTTP: requests and results, to and from JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from verl.sandbox.types import Limits, Result

RUN, PING, PONG = "/run_code", "/v1/ping", "pong"
MAX_FILES = 1024
"""Maximum number of files in a request."""
DEFAULT_SECONDS = 10.0
"""run_timeout and compile_timeout of a request that sets none."""


class ServerFailed(RuntimeError):
    """The server reported that it could not run the code, for a reason that is not in the code."""


def run_request(
    code: str,
    language: str,
    stdin: str,
    files: Mapping[str, bytes],
    fetch: Sequence[str],
    limits: Limits | None,
    memory_mb: int | None,
) -> dict[str, Any]:
    """The JSON of a request; without `limits` the server's timeouts apply, without `memory_mb` its memory limit."""
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
    """The JSON of a response. A program that exited by itself is `Finished`, whatever its return code."""
    compiled = None if result.compile is None else _run_to_json(result.compile)
    compile_failed = result.compile is not None and result.compile.status != "finished"
    response = {
        "status": {"finished": "Success", "output": "Success", "refused": "SandboxError"}.get(result.status, "Failed"),
        "message": _MESSAGES.get(result.status, ""),
        "compile_result": compiled,
        "run_result": None if compile_failed or result.status == "refused" else _run_to_json(result),
        "executor_pod_name": None,
        "files": {name: base64.b64encode(content).decode() for name, content in result.files.items()},
    }
    if result.status == "refused":
        response["message"] = result.stderr
    return response


def result_from_json(response: Any) -> Result:
    """The result in a response. ServerFailed: the server could not run the code, or the response is not of this API."""
    try:
        if response["status"] == "SandboxError":
            raise ServerFailed(f"SandboxError: {response.get('message')}")
        compiled = None if response.get("compile_result") is None else _run_from_json(response["compile_result"])
        if response.get("run_result") is None:
            if compiled is None:
                raise ServerFailed(f"neither compiled nor ran the code: {response.get('message')}")
            # The code did not compile.
            return Result(
                "error", compiled.return_code, "", compiled.stderr or compiled.stdout, compiled.seconds, compiled
            )
        result = _run_from_json(response["run_result"])
        if result.status == "error" and response.get("message") == _MESSAGES["memory"]:
            result.status = "memory"
        elif result.status == "finished" and response.get("message") == _MESSAGES["output"]:
            result.status = "output"
        result.compile, result.files = compiled, decode_files(response.get("files") or {})
        return result
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ServerFailed(f"the response is not the result of a run ({error!r})") from error


# `message` of a response, by `Result.status`. The API has no status for memory and output: clients read the message.
_MESSAGES = {
    "memory": "the program needed more memory than its limit",
    "output": "the output was longer than its limit and is cut",
    "timeout": "the program ran longer than its time limit",
}


def _run_to_json(result: Result) -> dict[str, Any]:
    status = {"timeout": "TimeLimitExceeded", "memory": "Error"}.get(result.status, "Finished")
    return {
        "status": status,
        "execution_time": result.seconds,
        "return_code": None if result.status == "timeout" else result.return_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
    }


def _run_from_json(run: Mapping[str, Any]) -> Result:
    code = run.get("return_code")
    exit_status = "finished" if code == 0 else "error"
    status: Any = {"Finished": exit_status, "TimeLimitExceeded": "timeout"}.get(run["status"], "error")
    seconds = float(run.get("execution_time") or 0.0)
    return Result(status, code, run.get("stdout") or "", run.get("stderr") or "", seconds)


def decode_files(files: Mapping[Any, Any]) -> dict[str, bytes]:
    """Decode contents from base64; ValueError names a file that is not base64. Decodes at most MAX_FILES + 1 files."""
    contents = {}
    for number, (name, content) in enumerate(files.items()):
        if number > MAX_FILES:
            break  # enough for the request model, which rejects more than MAX_FILES
        try:
            contents[name] = content if isinstance(content, bytes) else base64.b64decode(content, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"the content of {name[:200]!r} is not base64 ({error})") from error
    return contents
