"""Request model of the sandbox server, in its own module: parser processes import it by name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator

from verl.sandbox.fusion_api import DEFAULT_SECONDS, MAX_FILES, decode_files
from verl.utils.http_server.json_body import RequestModel

__all__ = ["RunRequest"]

_Path = Annotated[str, Field(max_length=4096)]


class RunRequest(RequestModel):
    """Body of `POST /run_code`: one program to run. Fields of other versions of the API are ignored."""

    model_config = ConfigDict(extra="ignore")

    code: str
    language: Annotated[str, Field(max_length=40)] = "python"
    stdin: str = ""
    files: Annotated[dict[_Path, bytes], Field(max_length=MAX_FILES)] = Field(default_factory=dict)
    fetch_files: Annotated[list[_Path], Field(max_length=MAX_FILES)] = Field(default_factory=list)
    run_timeout: Annotated[float, Field(gt=0)] = DEFAULT_SECONDS
    compile_timeout: Annotated[float, Field(gt=0)] = DEFAULT_SECONDS
    memory_limit_MB: int = -1
    """Memory limit; -1: the server's default."""

    @field_validator("files", mode="before")
    @classmethod
    def _decode_files(cls, files: Any) -> Any:
        return decode_files(files) if isinstance(files, dict) else files

    @field_validator("memory_limit_MB")
    @classmethod
    def _check_memory(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be at least 1, or -1 for the server's default")
        return value

    @property
    def memory_mb(self) -> int | None:
        """The memory limit; None: the server's default."""
        return None if self.memory_limit_MB == -1 else self.memory_limit_MB
