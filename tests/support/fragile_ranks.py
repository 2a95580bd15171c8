"""Policy ranks that kill themselves once at a point armed by a file (imported by name in the rank processes)."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.names import ROLLOUTS
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.types.trajectory import HostReply
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout.engine_host import CollectedOutputs, EngineHost


def arm(model_path: str, point: str) -> None:
    """Make the next rank of this model die at the point `point`."""
    _file(model_path, point).touch()


def _file(model_path: str, point: str) -> Path:
    return Path(model_path).parent / f"die in {point}"


class FragileWorker(ActorRolloutRefWorker):
    """Dies at an armed point: `start`, `generate` (after the first finished row), `answer` (before a reply), `end`,
    `receive` (after the first bucket of weights) or `reference` (log-probs of the reference policy)."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        if self.parts == {"rollout"}:
            self._die_if_armed("start")
            load = self.rollout.load_bucket

            def load_and_die(bucket: Any) -> None:
                load(bucket)
                self._die_if_armed("receive")

            self.rollout.load_bucket = load_and_die

    def _new_host(self) -> EngineHost:
        host = super()._new_host()
        on_finished, collect, collect_outputs = host._on_finished, host.collect, host.collect_outputs

        def die_on_finished(*args: Any) -> None:
            self._die_if_armed("generate")
            on_finished(*args)

        def die_before_reply(*args: Any) -> tuple[HostReply, DataProto | None]:
            reply, rows = collect(*args)
            if reply.headers is not None:
                self._die_if_armed("answer")  # finished, not reported yet
            return reply, rows

        def die_before_outputs(*args: Any) -> CollectedOutputs:
            collected = collect_outputs(*args)
            if collected.outputs:
                self._die_if_armed("answer")
            return collected

        host._on_finished, host.collect, host.collect_outputs = die_on_finished, die_before_reply, die_before_outputs
        return host

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def end_generation(self) -> None:
        self._die_if_armed("end")
        super().end_generation()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        self._die_if_armed("reference")
        return super().compute_ref_log_prob(data)

    def _die_if_armed(self, point: str) -> None:
        try:
            _file(self.config.model.path, point).unlink()
        except FileNotFoundError:
            return
        os.kill(self.pid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def pid(self) -> int:
        return os.getpid()


class EngineProcessWorker(FragileWorker):
    """Runs the native engine in a separate process, which dies instead of the rank."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        ROLLOUTS["native"] = replace(ROLLOUTS["native"], package="torch")
        super().init_model()

    def _new_host(self) -> EngineHost:
        host = super()._new_host()
        begin = host._begin

        def die_on_begin(*args: Any) -> None:
            self._die_if_armed("generate")  # later, the engine may have finished all rows
            begin(*args)

        host._begin = die_on_begin
        return host

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def pid(self) -> int:
        return self.rollout.pid
