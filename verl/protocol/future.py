"""DataProtoFuture: a batch that is still being computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl.protocol.dataproto import DataProto


class DataProtoFuture:
    """A DataProto still being computed by a non-blocking group call; `get()` waits for it."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        self._resolve: Callable[[], Any] | None = resolve
        self._value: Any = None

    def get(self) -> Any:
        """Wait and return the result; raises what the call raised."""
        if self._resolve is not None:
            self._value = self._resolve()
            self._resolve = None
        return self._value

    @staticmethod
    def concat(data: Sequence[DataProtoFuture]) -> DataProtoFuture:
        """The concatenation, once all are there."""
        return DataProtoFuture(lambda: DataProto.concat([future.get() for future in data]))

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """The chunks, once it is there."""
        return [DataProtoFuture(lambda i=i: self.get().chunk(chunks)[i]) for i in range(chunks)]  # type: ignore[misc]
