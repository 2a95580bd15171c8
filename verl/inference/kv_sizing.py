"""How many KV blocks there are: as many as all sequences can use, if the memory beside everything else allows it."""

from __future__ import annotations

import logging

import torch

from verl.config.devices import host_memory_available
from verl.inference.kv_memory import bytes_per_block
from verl.inference.models import InferenceModel

__all__ = ["choose_num_blocks", "host_memory_available"]

logger = logging.getLogger(__name__)

# Of host memory, which programs share without saying what they will need.
_HOST_SHARE = 0.25
# Of device memory, for kernels' workspaces and captured graphs.
_DEVICE_RESERVE = 0.03
# float32 columns of [sequences, vocabulary] that sampling holds at most beside the logits.
_LOGIT_COPIES = 3


def choose_num_blocks(
    model: InferenceModel,
    block_size: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    weight_bytes: int,
) -> int:
    """Blocks for `max_num_seqs` sequences of `max_model_len` tokens, or as many as fit; said in the log.

    On a GPU, weights and KV may take `gpu_memory_utilization` of its memory, and never more than is free. On a CPU, KV
    may take a quarter of what is available.
    """
    each = bytes_per_block(model, block_size)
    per_sequence = -(-max_model_len // block_size)
    wanted = max_num_seqs * per_sequence
    if model.device.type == "cuda":
        room = _device_room(model, max_num_seqs, gpu_memory_utilization, weight_bytes)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        room = int(_HOST_SHARE * host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(wanted, max(0, room) // each)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * each)}, and there is room for {_gb(max(0, room))}. {remedy}."
        )
    logger.info(
        "rollout: %s of KV memory: %d blocks of %d tokens (%s)",
        _gb(blocks * each),
        blocks,
        block_size,
        f"enough for {max_num_seqs} sequences of {max_model_len} tokens"
        if blocks == wanted
        else f"{blocks / wanted:.0%} of what {max_num_seqs} sequences of {max_model_len} tokens can take",
    )
    return blocks


def _device_room(model: InferenceModel, max_num_seqs: int, utilization: float, weight_bytes: int) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    logits = max_num_seqs * model.vocab_size * 4 * (1 + _LOGIT_COPIES)
    return min(int(utilization * total) - weight_bytes, free - int(_DEVICE_RESERVE * total)) - logits


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
