"""The SandboxFusion API: requests to run code and results, to and from JSON."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_serializer, field_validator

from verl.utils.http_server.json_body import RequestModel
from verl.utils.sandbox import Result

RUN, PING, PONG = "/run_code", "/v1/ping", "pong"
_MOST_FILES = 1024
_Path = Annotated[str, Field(max_length=4096)]


class ServerFailed(RuntimeError):
    """The server answered that it could not run the code, which is no fault of the code."""


class RunRequest(RequestModel):
    """`POST /run_code`: one program to run. Fields of other versions of the API are ignored."""

    model_config = ConfigDict(extra="ignore")

    code: str
    language: Annotated[str, Field(max_length=40)] = "python"
    stdin: str = ""
    files: Annotated[dict[_Path, bytes], Field(max_length=_MOST_FILES)] = Field(default_factory=dict)
    fetch_files: Annotated[list[_Path], Field(max_length=_MOST_FILES)] = Field(default_factory=list)
    run_timeout: Annotated[float, Field(gt=0)] = 10.0
    compile_timeout: Annotated[float, Field(gt=0)] = 10.0
    memory_limit_MB: int = -1
    """-1: the server's default."""

    @field_validator("files", mode="before")
    @classmethod
    def _decode_files(cls, files: Any) -> Any:
        return _decoded(files) if isinstance(files, dict) else files

    @field_serializer("files")
    def _encode_files(self, files: Mapping[str, bytes]) -> dict[str, str]:
        return {name: base64.b64encode(content).decode() for name, content in files.items()}

    @field_validator("memory_limit_MB")
    @classmethod
    def _check_memory(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be at least 1, or -1 for the server's default")
        return value

    @property
    def memory_mb(self) -> int | None:
        return None if self.memory_limit_MB == -1 else self.memory_limit_MB


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
        result.compile, result.files = compiled, _decoded(told.get("files") or {})
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


def _decoded(files: Mapping[Any, Any]) -> dict[str, bytes]:
    """Contents from base64; a ValueError names the file that is not."""
    contents = {}
    for number, (name, content) in enumerate(files.items()):
        if number > _MOST_FILES:
            break  # the model rejects their number
        try:
            contents[name] = content if isinstance(content, bytes) else base64.b64decode(content, validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise ValueError(f"the content of {name[:200]!r} is not base64 ({error})") from error
    return contents
