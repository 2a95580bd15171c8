"""RayRankHost: the actor of one rank. Batches arrive by reference and results stay in the object store."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import ray

from verl.config.devices import memory_state
from verl.protocol import DataProto
from verl.single_controller.base.dispatch import Shard
from verl.single_controller.base.errors import Failure
from verl.single_controller.base.host import RankHost
from verl.single_controller.base.worker import RankInfo
from verl.single_controller.base.worker_group import ClassWithInitArgs
from verl.single_controller.ray.batch_ref import BatchRef
from verl.single_controller.ray.stored import StoredRows, bundle_rows, store_rows, stored_by
from verl.utils.logging_setup import quiet_warnings
from verl.utils.network import interface_of
from verl.utils.resources import WarmupGcFreeze
from verl.utils.stacks import answer_stack_requests

_INLINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Put:
    """A large argument that lies in the object store; wrapped, so that Ray does not hold the call until it is there."""

    ref: Any


class RayRankHost(RankHost):
    """The actor of one rank. Batches arrive by reference and results stay in the object store."""

    def __init__(self) -> None:
        super().__init__()
        self._gc_freeze = WarmupGcFreeze()

    def describe(self) -> Any:
        """The tuple of the base class, then Ray's node id and the node's `MemoryState`."""
        answer_stack_requests()
        return (*super().describe(), ray.get_runtime_context().get_node_id(), memory_state())

    def prepare(self) -> tuple[str, int]:
        """Address of this node and a free port on it: where rank 0 will listen."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def construct(self, info: RankInfo, cls_with_init: ClassWithInitArgs) -> Failure | None:
        quiet_warnings()
        os.environ.update(info.environment())
        _use_the_nodes_network()
        if info.device_name == "cpu":
            _share_cores(info.local_world_size)
        return super().construct(info, cls_with_init)

    def call_streamed(
        self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str
    ) -> Iterator[Any]:
        """As `call`; the columns of a batch come first, one by one: so they are the caller's own and outlive this
        process. In their places the batch has their numbers.
        """
        columns: list[Any] = []

        def number(content: Any) -> int:
            columns.append(content)
            return len(columns) - 1

        with stored_by(number):
            output = self.call(role, method, args, kwargs, lane)
        for content in [*columns, output]:  # noqa: UP028 - Ray asks for the next by `send`, which lists do not have
            yield content

    def call_rows(self, role: str, method: str, args: list[Any]) -> tuple[Any, Any]:
        """Run a control method that returns (value, DataProto or None); two objects: (value, description of the rows),
        and the rows' tensor columns."""
        output = self.call(role, method, args, {}, "control")
        if isinstance(output, Failure):
            return output, None
        value, rows = output
        return ((value, None), None) if rows is None else _with_bundle_apart(value, rows)

    def call_plain(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        """As `call`, for callers that `ray.get` the result themselves: values travel whole, exceptions are Ray's."""
        output = self.call(role, method, args, kwargs, lane)
        if isinstance(output, Failure):
            raise output.exception() or RuntimeError(f"{output.summary}\n{output.traceback}")
        return BatchRef.from_stored(output).fetch() if isinstance(output, StoredRows) else output

    def receive(self, data: DataProto) -> DataProto:
        return data.fetch() if isinstance(data, BatchRef) else data

    def send(self, output: Any, shard: Shard | None) -> Any:
        if type(output) is not DataProto:
            return output
        lengths = shard.data.lengths if shard is not None and isinstance(shard.data, BatchRef) else None
        if lengths is not None and shard is not None and shard.fillers:
            lengths = lengths[: len(lengths) - shard.fillers]
        return store_rows(output, lengths)

    def call(self, role: str, method: str, args: list[Any], kwargs: dict[str, Any], lane: str) -> Any:
        # Shards come before anything else looks at them: the base class reads their row counts.
        try:
            args = [unwrap(arg) for arg in args]
            kwargs = {key: unwrap(arg) for key, arg in kwargs.items()}
        except Exception as error:  # noqa: BLE001 - carried to the controller, which raises it
            return Failure.of(error)
        try:
            return super().call(role, method, args, kwargs, lane)
        finally:
            if lane == "compute":  # beside others the step is in the middle of its work
                self._gc_freeze.after_call(f"{role}.{method}")


def _with_bundle_apart(value: Any, rows: DataProto) -> tuple[Any, Any]:
    stored, contents = bundle_rows(rows)
    return (value, stored), contents


def wrap(arg: Any, put: dict[int, Put]) -> Any:
    """A large batch by its place in the object store, where it is put once, however many ranks get it."""
    data = arg.data if isinstance(arg, Shard) else arg
    if type(data) is not DataProto or data.nbytes < _INLINE_BYTES:
        return arg
    if id(data) not in put:
        put[id(data)] = Put(ray.put(data))
    return replace(arg, data=put[id(data)]) if isinstance(arg, Shard) else put[id(data)]  # type: ignore[arg-type]


def unwrap(arg: Any) -> Any:
    if isinstance(arg, Shard) and isinstance(arg.data, Put):
        return replace(arg, data=ray.get(arg.data.ref))
    return ray.get(arg.ref) if isinstance(arg, Put) else arg


def _use_the_nodes_network() -> None:
    """Gloo asks the hostname for an address, which many systems resolve to the machine itself: not for other nodes."""
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        name = interface_of(ray.util.get_node_ip_address())
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _share_cores(ranks_on_node: int) -> None:
    """Without a GPU the ranks of a node share its cores; left alone, Ray gives each process one thread."""
    threads = max(1, (os.cpu_count() or 1) // ranks_on_node)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
