"""WorkerGroup: calls methods on all ranks of a role as on one object. RankHandle: calls methods on one rank.

Errors of these calls have role, rank, host and method; `Failure` carries a worker's exception to the controller.
"""

from __future__ import annotations

import difflib
import importlib
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import Execute, MeshPlace, MethodSpec, method_specs
from verl.utils.exceptions import PicklableError

if TYPE_CHECKING:
    from verl.single_controller.ray.column_store import StoredRows


class ResourcePool:
    """Number of processes on each node."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = list(process_on_nodes or [])
        for i, count in enumerate(self._store):
            if count < 1:
                raise ValueError(f"resource pool: node {i} has {count} processes; each needs at least 1.")
        if max_colocate_count < 1:
            raise ValueError(f"resource pool: max_colocate_count is {max_colocate_count}; it must be at least 1.")
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    @property
    def store(self) -> list[int]:
        """Processes per node."""
        return list(self._store)

    @property
    def world_size(self) -> int:
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of ranks on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its local rank on its node."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A worker class and its constructor arguments, to be constructed in the worker processes."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        # Unwrap classes that users wrapped with ray.remote: the group creates the actors itself.
        self.cls: type = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)
        self.cls = getattr(self.cls, "__ray_actor_class__", self.cls)
        self.args, self.kwargs = args, kwargs
        # Modules imported before construction, so that user registrations exist in every process.
        self.imports: list[str] = []
        # Configuration of the whole run, or None (see `Worker.run_config`).
        self.run_config: Any = None

    def __call__(self) -> Any:
        """Construct the worker in this process."""
        for module in self.imports:
            importlib.import_module(module)
        return self.cls(*self.args, **self.kwargs)

    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles of one process by name; here a single one, named after its class."""
        return {self.cls.__name__: self}


class ColocatedClasses(ClassWithInitArgs):
    """Several roles that share one process per rank."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise ValueError("create_colocated_worker_cls: class_dict is empty.")
        self.class_dict = {str(prefix): cls for prefix, cls in class_dict.items()}

    def roles(self) -> dict[str, ClassWithInitArgs]:
        return dict(self.class_dict)


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Combine roles into one process per rank. `spawn(prefix_set)` of their group returns a group for each role."""
    return ColocatedClasses(class_dict)


# Public alias for scripts that pass raw classes: the group creates the Ray actors, so both names mean the same.
create_colocated_worker_raw_cls = create_colocated_worker_cls


class RankHandle(ABC):
    """One rank of a group, for control calls from processes other than its controller. Picklable."""

    role: str
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.role}"

    @abstractmethod
    def notify(self, method: str, *args: Any) -> None:
        """Start a control call without waiting for it."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Run a control call and return its result.

        Raises the exception of the method, or WorkerDiedError if the process died. `method` may be a path:
        "host.submit" is the method `submit` of the worker's attribute `host`.
        """

    @abstractmethod
    def call_rows(self, method: str, *args: Any) -> tuple[Any, StoredRows | None]:
        """As `call`, for a method that returns (value, DataProto or None).

        The tensor columns of the DataProto stay in the object store of the rank's node, as one object that is owned by
        the caller: it outlives the rank's process.
        """


class WorkerGroup(ABC):
    """The ranks of one role. Registered methods of the worker class become methods of the group.

    A subclass starts the ranks and sends calls to them (`_submit`); dispatch, collection, futures and errors are here.
    """

    def __init__(self, role: str, specs: dict[str, MethodSpec], world_size: int) -> None:
        self.role = role
        self._specs = specs
        self._world_size = world_size
        self._mesh_places: dict[str, list[MeshPlace]] = {}
        for name, spec in specs.items():
            if hasattr(type(self), name):
                raise ValueError(f"{role}: the registered method {name!r} hides WorkerGroup.{name}. Rename it.")
            setattr(self, name, partial(self._call, name, spec))

    @property
    def world_size(self) -> int:
        return self._world_size

    @classmethod
    @abstractmethod
    def reserve(cls, pools: Sequence[ResourcePool]) -> None:
        """Reserve the resources of the pools; raise without waiting if some are missing."""

    @classmethod
    @abstractmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> ResourcePool | None:
        """Return a pool for processes without devices, which reserves nothing; None if that is not supported."""

    @abstractmethod
    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Any]:
        """Return a group for each of these colocated roles; all use the processes of this group."""

    @abstractmethod
    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        """Start a call on `ranks`. The returned function waits for their outputs, or raises a WorkerError.

        `args`, `kwargs`: for each argument, a list of its values on all ranks of the group. `lane`: calls of different
        lanes (e.g. compute and control) run concurrently on a rank.
        """

    @abstractmethod
    def query_ranks(self, method: str, timeout: float) -> list[Any]:
        """Call a control method without arguments on all ranks; return the replies, None after `timeout` seconds."""

    @abstractmethod
    def handle(self, rank: int) -> RankHandle:
        """Return a handle for control calls on one rank. It can be sent to other processes."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the processes of the group."""

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def mesh_places(self, name: str) -> list[MeshPlace]:
        """Positions of all ranks in a mesh that the workers registered; cached after the first call."""
        if name not in self._mesh_places:
            self._mesh_places[name] = self.execute_all_sync("mesh_place", name)
        return self._mesh_places[name]

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, registered or not, on all ranks; return a future of the list of results.

        If every argument is a list with one entry per rank, each rank gets its entry; otherwise every rank gets all
        arguments.
        """
        return DataProtoFuture(self._start(range(self.world_size), method, args, kwargs))

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`; return the list of results."""
        return self._start(range(self.world_size), method, args, kwargs)()

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_all_async`."""
        return self.execute_all_async(method, *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `execute_all_async`, on rank 0 only: lists with one entry per rank are reduced to the first entry."""
        wait = self._start([0], method, args, kwargs)
        return DataProtoFuture(lambda: wait()[0])

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `execute_rank_zero_async`; return the result."""
        return self._start([0], method, args, kwargs)()[0]

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method, *args, **kwargs)

    def _call(self, method: str, spec: MethodSpec, /, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method: dispatch the arguments to the ranks and collect their outputs as registered."""
        if spec.materialize_futures:
            args = tuple(wait_for_result(arg) for arg in args)
            kwargs = {key: wait_for_result(arg) for key, arg in kwargs.items()}
        dispatch_fn, collect_fn = spec.functions()
        try:
            rank_args, rank_kwargs = dispatch_fn(self, *args, **kwargs)
        except ValueError as error:
            raise ValueError(f"{self.role}.{method}: {error}") from error
        ranks = [0] if spec.execute_mode is Execute.RANK_ZERO else range(self.world_size)
        wait = self._submit(ranks, method, rank_args, rank_kwargs, spec.lane)
        future = DataProtoFuture(lambda: collect_fn(self, wait()))
        return future.get() if spec.blocking else future

    def _start(
        self, ranks: Sequence[int], method: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Callable[[], list[Any]]:
        rank_args, rank_kwargs = self._args_of_ranks(args, kwargs)
        return self._submit(ranks, method, rank_args, rank_kwargs, self._lane_of(method))

    def _args_of_ranks(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        """Return a list with one entry per rank for each argument (see `execute_all_async`)."""
        values = [*args, *kwargs.values()]
        is_per_rank = bool(values) and all(isinstance(arg, list) and len(arg) == self.world_size for arg in values)

        def per_rank(arg: Any) -> list[Any]:
            return arg if is_per_rank else [arg] * self.world_size

        return [per_rank(arg) for arg in args], {key: per_rank(arg) for key, arg in kwargs.items()}

    def _lane_of(self, method: str) -> str:
        """Return the lane of a method; "compute" if it is not registered."""
        spec = self._specs.get(method)
        return spec.lane if spec else "compute"

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that do not exist.
        known = sorted(self.__dict__.get("_specs", {}))
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {similar[0]!r}?" if similar else f" Registered: {known}."
        raise AttributeError(f"{type(self).__name__} of {self.__dict__.get('role')!r} has no method {name!r}.{hint}")


def specs_of(cls_with_init: ClassWithInitArgs) -> dict[str, dict[str, MethodSpec]]:
    """Return the registered methods of every role, by role and method name."""
    return {prefix: method_specs(cls.cls) for prefix, cls in cls_with_init.roles().items()}


def check_prefixes(prefix_set: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the names of roles as strings. ValueError: one of them is not in `known`."""
    prefixes = [str(prefix) for prefix in prefix_set]
    unknown = set(prefixes) - set(known)
    if unknown:
        raise ValueError(f"spawn: this group has no role {sorted(unknown)}; it has {sorted(known)}.")
    return prefixes


def wait_for_result(value: Any) -> Any:
    """Wait for a future and return its result; return other values unchanged."""
    return value.get() if isinstance(value, DataProtoFuture) else value


class CallCancelled(RuntimeError):
    """Raised inside a compute call by `Worker.check_cancelled()` after the group's `cancel()`."""


class WorkerError(PicklableError, RuntimeError):
    """A call on a worker group failed. `summary`: the cause; `role`, `rank`, `host`, `method`: the failed call."""

    phase: str | None = None
    """Phase of the training step (`verl.trainer.common.run_status`), if a trainer made the call."""
    step: int | None = None

    def __init__(self, summary: str, role: str, rank: int, host: str, method: str, detail: str = "") -> None:
        self.summary = summary
        self.role, self.rank, self.host, self.method = role, rank, host, method
        where = f"role {role!r}, rank {rank}, host {host}, method {method!r}"
        super().__init__(f"{summary} ({where})" + (f"\n{detail}" if detail else ""))


class WorkerCallError(WorkerError):
    """The worker's method raised. `worker_traceback`: its traceback; `__cause__`: its exception, if picklable."""

    def __init__(
        self,
        failure: Failure,
        role: str,
        rank: int,
        host: str,
        method: str,
        others: Sequence[WorkerCallError] = (),
    ) -> None:
        """`others`: the errors of other ranks, one of which may be the cause."""
        self.failure, self.others = failure, tuple(others)
        self.worker_traceback = failure.traceback
        summary = f"worker raised {failure.summary}" + _describe_others(failure, others)
        super().__init__(summary, role, rank, host, method, f"worker traceback:\n{failure.traceback}")
        self.__cause__ = failure.exception()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.__cause__ = self.failure.exception()  # pickle does not keep causes


# Different errors of other ranks in a message, and characters of each.
_OTHER_ERRORS, _OTHER_ERROR_LENGTH = 3, 200


def _describe_others(failure: Failure, others: Sequence[WorkerCallError]) -> str:
    """Describe the errors of other ranks: their number, and those that differ from `failure`."""
    if not others:
        return ""
    ranks: dict[str, int] = {}
    for other in others:
        if other.failure.summary != failure.summary:
            ranks.setdefault(other.failure.summary.partition("\n")[0][:_OTHER_ERROR_LENGTH], other.rank)
    errors = [f"rank {rank}: {summary}" for summary, rank in ranks.items()][:_OTHER_ERRORS]
    return f"; {len(others)} other rank(s) failed too" + (f" ({'; '.join(errors)})" if errors else "")


class WorkerDiedError(WorkerError):
    """The worker's process died. Its group raises this on every call until it is restarted."""

    advice: str = ""
    """The remedy in the message if host memory is the likely cause, else empty."""

    def replace_advice(self, advice: str) -> None:
        """Replace the general advice in the message by this one."""
        self.summary = self.summary.replace(self.advice, advice)
        self.args = (self.args[0].replace(self.advice, advice),)
        self.advice = advice


class HangError(WorkerError):
    """No progress for `trainer.hang_timeout`. `summary`: which rank waits for which; the detail: the last heartbeat and
    stack of every rank. A restarted run may succeed."""

    exit_immediately: bool = False
    """Ray itself hangs: the program exits without waiting for it."""


@dataclass(frozen=True)
class Failure:
    """An exception of a worker, in a form that is always picklable."""

    summary: str
    traceback: str
    pickled: bytes | None

    @classmethod
    def from_exception(cls, error: BaseException) -> Failure:
        """Capture `error`, including the object itself if it is picklable."""
        try:
            pickled = pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):
            pickled = None
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return cls(f"{type(error).__name__}: {error}", text, pickled)

    def exception(self) -> BaseException | None:
        """The original exception; None: it was not picklable."""
        if self.pickled is None:
            return None
        try:
            # Bytes from our own worker over Ray, which unpickles all messages anyway.
            loaded = pickle.loads(self.pickled)
        except Exception as error:  # noqa: BLE001 - unpickling may raise anything; report it
            return RuntimeError(f"{self.summary} (the exception itself does not unpickle here: {error})")
        return loaded if isinstance(loaded, BaseException) else None


def result_or_raise(output: Any) -> Any:
    """The output of a rank's method; if it is a `Failure`, raise its exception."""
    if isinstance(output, Failure):
        raise output.exception() or RuntimeError(f"{output.summary}\n{output.traceback}")
    return output
