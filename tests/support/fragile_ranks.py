"""Ranks of the policy that kill themselves where a file tells them to, once; the processes import it by name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.config.names import ROLLOUTS
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.roles.requests import Collected


def arm(model_path: str, where: str) -> None:
    """The next rank of this model that comes by is to die there."""
    _file(model_path, where).touch()


def _file(model_path: str, where: str) -> Path:
    return Path(model_path).parent / f"die in {where}"


class FragileWorker(ActorRolloutRefWorker):
    """Dies after its first finished answer, with the first weights in place, or in the reference's pass."""

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

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto, **sampling: Any) -> DataProto:
        def answered(place: int, output: Any) -> None:
            self._die_if_armed("generate")

        self.rollout.resume()
        return self.rollout.generate_sequences(prompts, on_finished=answered, **sampling)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def collect_outputs(self, client: str, within: float, pieces: bool = False) -> Collected:
        collected = super().collect_outputs(client, within, pieces)
        if collected.answers:
            self._die_if_armed("answer")  # before anybody hears of them
        return collected

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("ref"))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        self._die_if_armed("reference")
        return super().compute_ref_log_prob(data)

    def _die_if_armed(self, where: str) -> None:
        try:
            _file(self.config.model.path, where).unlink()
        except FileNotFoundError:
            return
        os.kill(self.pid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def pid(self) -> int:
        return os.getpid()


class HostedWorker(FragileWorker):
    """Its engine is native in a process of its own, which dies in the rank's place."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        ROLLOUTS["native"] = replace(ROLLOUTS["native"], package="torch")
        super().init_model()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rollout"))
    def generate_sequences(self, prompts: DataProto, **sampling: Any) -> DataProto:
        self._die_if_armed("generate")  # later, all answers may be there already
        return super().generate_sequences(prompts, **sampling)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, lane="control")
    def pid(self) -> int:
        return self.rollout.pid
