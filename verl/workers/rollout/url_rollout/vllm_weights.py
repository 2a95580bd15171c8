"""Weights to a `vllm serve`: by gloo or NCCL to our extension of its workers, which says what has come, bit for bit."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict

import torch

from verl.types.weights import Bucket, WeightMismatchError
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.utils.weight_fingerprint import fingerprints
from verl.workers.rollout.bucket_layout import bucket_layout, end_of
from verl.workers.rollout.url_rollout.vllm_dialect import VllmDialect
from verl.workers.rollout.url_rollout.vllm_worker import device_name
from verl.workers.rollout.url_rollout.weights import during, own_address

__all__ = ["VllmLine"]


class VllmLine:
    """This process and the server's workers, in a group that is made at the first update."""

    def __init__(self, dialect: VllmDialect, device: torch.device) -> None:
        self._dialect, self._device = dialect, device
        self._group: TransferGroup | None = None
        self._run = ""
        self._updates = 0

    def leave(self) -> None:
        self._group = None

    def begin(self) -> None:
        if self._group is None:
            self._join()
        self._dialect.rpc("verl_begin_update")

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert self._group is not None
        bucket: Bucket = dict(tensors)
        layout = bucket_layout(bucket)
        flat = torch.zeros(end_of(layout), dtype=torch.uint8, device=self._group.device)
        for piece in layout:
            piece.view(flat).copy_(bucket[piece.name])
        sent = fingerprints({piece.name: piece.view(flat) for piece in layout})
        pieces = [asdict(piece) for piece in layout]
        group = self._group
        received = during(
            self._dialect.server, lambda: group.broadcast(flat), self._dialect.rpc, "verl_receive", pieces
        )
        for rank, found in enumerate(received):
            for name, total in sent.items():
                if found.get(name) != total:
                    raise WeightMismatchError(
                        f"weights: {name!r} came to worker {rank} of {self._dialect.server.url} as another one"
                        f" (fingerprint {found.get(name)} there, {total} here). The hand-over lost or changed data."
                    )

    def finish(self) -> None:
        missing = sorted({name for names in self._dialect.rpc("verl_finish_update") for name in names})
        if missing and self._dialect.model["quantization"] is None:  # scales are made, not sent
            raise WeightMismatchError(
                f"weights: {missing[0]!r} of {self._dialect.server.url} got no value ({len(missing)} did not). vLLM"
                " knows this model under other names than transformers."
            )
        self._updates += 1
        self._dialect.name_weights(f"verl-{self._run}-{self._updates}")

    def _join(self) -> None:
        self._run, self._updates = uuid.uuid4().hex[:8], 0
        host = TransferHost(own_address(self._dialect.server))
        size = 1 + len(self._dialect.workers)
        ours = device_name(self._device)
        theirs = {worker["device"] for worker in self._dialect.workers}
        # Two members of an NCCL group cannot be on one GPU; and both sides need one.
        backend = "gloo" if "cpu" in theirs | {ours} or ours in theirs else "nccl"

        def meet() -> None:
            self._group = TransferGroup(host, 0, size, backend, self._device)

        address = host.address
        during(self._dialect.server, meet, self._dialect.rpc, "verl_join", address.host, address.port, size, backend)
