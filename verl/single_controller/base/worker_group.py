"""WorkerGroup: calling a registered method on all ranks of a role as if it were one object."""

from __future__ import annotations

import difflib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from verl.protocol import DataProtoFuture
from verl.single_controller.base.decorator import Execute, MethodSpec, method_specs
from verl.single_controller.base.dispatch import MeshPlace
from verl.single_controller.base.handle import RankHandle


class ResourcePool:
    """How many processes on each node."""

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
        """For every rank, how many ranks its node has."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A worker class and what to construct it with, before there is a process to do it in."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        # A class that users wrapped with ray.remote stands for the class itself: the group decides how it is hosted.
        self.cls: type = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", cls)
        self.cls = getattr(self.cls, "__ray_actor_class__", self.cls)
        self.args, self.kwargs = args, kwargs
        # Modules imported before it is constructed, so that what users register exists in every process.
        self.imports: list[str] = []
        # The configuration of the whole run, if there is one (see `Worker.run_config`).
        self.run_config: Any = None

    def __call__(self) -> Any:
        """Construct it here."""
        for module in self.imports:
            importlib.import_module(module)
        return self.cls(*self.args, **self.kwargs)

    def roles(self) -> dict[str, ClassWithInitArgs]:
        """The roles of one process: a single one, named after its class."""
        return {self.cls.__name__: self}


class ColocatedClasses(ClassWithInitArgs):
    """Several roles that share one process per rank, each with its own methods."""

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        if not class_dict:
            raise ValueError("create_colocated_worker_cls: no classes given.")
        self.class_dict = {str(prefix): cls for prefix, cls in class_dict.items()}

    def roles(self) -> dict[str, ClassWithInitArgs]:
        return dict(self.class_dict)


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Put the given roles into one process per rank; `group.spawn(prefix_set)` gives a group for each."""
    return ColocatedClasses(class_dict)


# A class that may still be changed, and one that Ray hosts: here the group decides how a class is hosted.
create_colocated_worker_raw_cls = create_colocated_worker_cls


class WorkerGroup(ABC):
    """The ranks of one role. Registered methods of its class are methods here.

    A subclass says how ranks are started and how a call reaches them (`_submit`); splitting, collecting, futures and
    errors are the same for all.
    """

    def __init__(self, role: str, specs: dict[str, MethodSpec], world_size: int) -> None:
        self.role = role
        self._specs = specs
        self._world_size = world_size
        self._mesh_places: dict[str, list[MeshPlace]] = {}
        for name, spec in specs.items():
            if hasattr(type(self), name):
                raise ValueError(f"{role}: the registered method {name!r} hides WorkerGroup.{name}; name it otherwise.")
            setattr(self, name, partial(self._call, name, spec))

    @property
    def world_size(self) -> int:
        return self._world_size

    @classmethod
    @abstractmethod
    def reserve(cls, pools: Sequence[ResourcePool]) -> None:
        """Reserve what the pools ask for, or say at once what is missing."""

    @classmethod
    @abstractmethod
    def cpu_pool(cls, process_on_nodes: Sequence[int], name: str) -> ResourcePool | None:
        """A pool for processes that need no device and reserve nothing."""

    @abstractmethod
    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Any]:
        """A group for each of the named colocated roles, over the same processes."""

    @abstractmethod
    def _submit(
        self, ranks: Sequence[int], method: str, args: list[list[Any]], kwargs: dict[str, list[Any]], lane: str
    ) -> Callable[[], list[Any]]:
        """Start the call on the given ranks; what is returned waits for their outputs, or raises a WorkerError."""

    @abstractmethod
    def ask(self, method: str, within: float) -> list[Any]:
        """The ranks' answers to a control call without arguments; None of a rank that gives none within the seconds."""

    @abstractmethod
    def handle(self, rank: int) -> RankHandle:
        """For control calls on one rank from other processes."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes of the group."""

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def mesh_places(self, name: str) -> list[MeshPlace]:
        """Where every rank stands in a mesh that the workers registered (asked once, then kept)."""
        if name not in self._mesh_places:
            self._mesh_places[name] = self.execute_all_sync("mesh_place", name)
        return self._mesh_places[name]

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method, registered or not, on all ranks. If every argument is a list with one entry per rank, each
        rank gets its entry; otherwise all get all arguments."""
        return DataProtoFuture(self._start(range(self.world_size), method, args, kwargs))

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`; waits for the list of results."""
        return self._start(range(self.world_size), method, args, kwargs)()

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_all_async`."""
        return self.execute_all_async(method, *args, **kwargs)

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on rank 0 only."""
        wait = self._start([0], method, args, kwargs)
        return DataProtoFuture(lambda: wait()[0])

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `execute_rank_zero_async`; waits for the result."""
        return self._start([0], method, args, kwargs)()[0]

    def execute_rank_zero(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The same as `execute_rank_zero_async`."""
        return self.execute_rank_zero_async(method, *args, **kwargs)

    def _call(self, method: str, spec: MethodSpec, /, *args: Any, **kwargs: Any) -> Any:
        if spec.materialize_futures:
            args = tuple(_value(arg) for arg in args)
            kwargs = {key: _value(arg) for key, arg in kwargs.items()}
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
        return self._submit(ranks, method, *self._entries(args, kwargs), self._lane(method))

    def _entries(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[list[Any]], dict[str, list[Any]]]:
        given = [*args, *kwargs.values()]
        each_its_own = bool(given) and all(isinstance(arg, list) and len(arg) == self.world_size for arg in given)

        def per_rank(arg: Any) -> list[Any]:
            return arg if each_its_own else [arg] * self.world_size

        return [per_rank(arg) for arg in args], {key: per_rank(arg) for key, arg in kwargs.items()}

    def _lane(self, method: str) -> str:
        spec = self._specs.get(method)
        return spec.lane if spec else "compute"

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that do not exist.
        known = sorted(self.__dict__.get("_specs", {}))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Registered: {known}."
        raise AttributeError(f"{type(self).__name__} of {self.__dict__.get('role')!r} has no method {name!r}.{hint}")


def specs_of(cls_with_init: ClassWithInitArgs) -> dict[str, dict[str, MethodSpec]]:
    """The registered methods of every role."""
    return {prefix: method_specs(cls.cls) for prefix, cls in cls_with_init.roles().items()}


def check_prefixes(prefix_set: Iterable[str], known: Iterable[str]) -> list[str]:
    """The prefixes as strings; an unknown one is an error that lists the known."""
    prefixes = [str(prefix) for prefix in prefix_set]
    unknown = set(prefixes) - set(known)
    if unknown:
        raise ValueError(f"spawn: no role {sorted(unknown)} in this group; there is {sorted(known)}.")
    return prefixes


def _value(arg: Any) -> Any:
    return arg.get() if isinstance(arg, DataProtoFuture) else arg
