"""RankHandle: one rank of a group, for calls from processes that are not its controller. It travels in arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from verl.single_controller.base.errors import Failure

if TYPE_CHECKING:
    from verl.single_controller.ray.stored import StoredRows

__all__ = ["RankHandle", "result_of"]


class RankHandle(ABC):
    """Control calls only: they answer beside the rank's work."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.role}"

    @abstractmethod
    def tell(self, method: str, *args: Any) -> None:
        """Call it; nobody waits for the end."""

    @abstractmethod
    def ask(self, method: str, *args: Any) -> Any:
        """Its result. Raises what the method raised, and a WorkerDiedError where the process is gone.

        `method` may be a path: "host.submit" is the method `submit` of the worker's attribute `host`.
        """

    @abstractmethod
    def ask_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        """As `ask`, for a method that returns (value, DataProto or None).

        The tensor columns of the DataProto stay in the object store of the rank's node, as one object that belongs to
        the caller: it outlives the rank's process.
        """


def result_of(output: Any) -> Any:
    """What a rank's method returned; what it raised is raised."""
    if isinstance(output, Failure):
        raise output.exception() or RuntimeError(f"{output.summary}\n{output.traceback}")
    return output
