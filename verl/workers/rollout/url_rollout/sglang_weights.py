"""Weights to SGLang's server, which runs none of our code: by its own group for updates, checked by its checksums."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Sequence

import torch

from verl.types.weights import WeightMismatchError
from verl.utils.transfer_group import TransferGroup, TransferHost
from verl.workers.rollout.bucket_layout import dtype_name
from verl.workers.rollout.url_rollout.sglang_dialect import SGLangDialect
from verl.workers.rollout.url_rollout.weights import during, own_address

__all__ = ["SGLangLine"]

logger = logging.getLogger(__name__)

# Larger tensors are compared after the first update only: a checksum is computed by one core.
_QUICKLY_SUMMED = 1 << 20
# SGLang fills vocabularies up to a multiple of it; what it adds is in its checksum.
_VOCABULARY_IN_STEPS_OF = 64


class SGLangLine:
    """This process and the server's ranks, in a group that is made at the first update."""

    def __init__(self, dialect: SGLangDialect, device: torch.device) -> None:
        self._dialect, self._device = dialect, device
        self._group: TransferGroup | None = None
        self._run = ""
        self._updates = 0
        self._sums: dict[str, str] = {}
        self._large: set[str] = set()
        self._comparable = True

    def leave(self) -> None:
        self._group = None

    def begin(self) -> None:
        if self._group is None:
            self._join()
        self._sums = {}
        self._dialect.command("/begin_weight_update")

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        group = self._group
        assert group is not None

        def broadcast() -> None:
            for name, tensor in tensors:
                here = group.broadcast(tensor.detach().to(group.device).contiguous())
                if self._updates == 0 or name not in self._large:
                    self._note(name, here)

        during(
            self._dialect.server,
            broadcast,
            self._dialect.command,
            "/update_weights_from_distributed",
            names=[name for name, _ in tensors],
            dtypes=[dtype_name(tensor.dtype) for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            group_name=self._run,
            flush_cache=False,
        )

    def finish(self) -> None:
        self._dialect.command("/end_weight_update")
        if self._comparable and self._dialect.ranks == 1:
            self._compare()
        self._updates += 1
        self._dialect.name_weights(f"verl-{self._run}-{self._updates}")

    def _join(self) -> None:
        self._run, self._updates = uuid.uuid4().hex[:8], 0
        host = TransferHost(own_address(self._dialect.server))
        size = 1 + self._dialect.ranks
        both_cuda = self._device.type == self._dialect.device.type == "cuda"
        backend, device = ("nccl", "cuda") if both_cuda else ("gloo", "cpu")
        # Where torch puts the keys of a group of this name, for its members on this kind of device.
        prefix = f"{self._run}/{self._run}//{device}/"

        def meet() -> None:
            self._group = TransferGroup(host, 0, size, backend, self._device, prefix=prefix)

        during(
            self._dialect.server,
            meet,
            self._dialect.command,
            "/init_weights_update_group",
            master_address=host.address.host,
            master_port=host.address.port,
            rank_offset=1,
            world_size=size,
            group_name=self._run,
            backend=backend,
        )

    # ---------------------------------------------------------------- checksums

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        padded = tensor.dim() > 1 and tensor.shape[0] % _VOCABULARY_IN_STEPS_OF
        if self._comparable and self._dialect.ranks == 1 and not padded:
            flat = tensor.cpu().reshape(-1).view(torch.uint8)
            self._sums[name] = hashlib.sha256(flat.numpy().data).hexdigest()
            if tensor.numel() > _QUICKLY_SUMMED:
                self._large.add(name)

    def _compare(self) -> None:
        """Weights that SGLang has under the name that they were sent by, and did not merge with others."""
        skipped = sorted(self._large) if self._updates else []
        said = self._dialect.command("/weights_checker", action="checksum", skip_tensor_list=skipped)
        found: dict[str, str] = said["ranks"][0]["checksums"]
        shared = sorted(self._sums.keys() & found.keys() - set(skipped))
        wrong = [name for name in shared if not self._sums[name].startswith(found[name])]
        if not self._updates and len(wrong) == len(shared):
            self._comparable = False
            logger.warning(
                "rollout: checksums of %s are of another kind than ours: that its weights are the trainer's is seen in"
                " the log-probs alone.",
                self._dialect.server.url,
            )
        elif wrong:
            raise WeightMismatchError(
                f"weights: {wrong[0]!r} at {self._dialect.server.url} is not what was sent ({len(wrong)} of"
                f" {len(shared)} checksums differ). The hand-over lost or changed data."
            )
