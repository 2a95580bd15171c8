"""How much memory the engine takes beside its weights: KV blocks, logits, a step. The memory plan asks here, too."""

from __future__ import annotations

import logging

import torch

from verl.config.devices import host_memory_available
from verl.inference.kv_memory import bytes_per_block
from verl.inference.models import InferenceModel

__all__ = ["choose_num_blocks", "device_room", "host_room", "logit_bytes", "step_bytes"]

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
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        logits = logit_bytes(max_num_seqs, model.vocab_size)
        room = device_room(total, free, gpu_memory_utilization, weight_bytes, logits)
        remedy = "Raise gpu_memory_utilization, or lower max_model_len"
    else:
        room = host_room(host_memory_available())
        remedy = "Free host memory, or lower max_model_len"
    blocks = min(wanted, room // each)
    if blocks < per_sequence:
        raise ValueError(
            f"max_model_len: the KV of one sequence of {max_model_len} tokens takes"
            f" {_gb(per_sequence * each)}, and there is room for {_gb(room)}. {remedy}."
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


def device_room(total: int, free: int, utilization: float, weight_bytes: int, logits: int) -> int:
    """Bytes for KV on a GPU of `total` bytes, `free` of them once the weights are there."""
    return max(0, min(int(utilization * total) - weight_bytes, free - int(_DEVICE_RESERVE * total)) - logits)


def host_room(available: int) -> int:
    """The same on a CPU."""
    return int(_HOST_SHARE * available)


def logit_bytes(sequences: int, vocab: int, truncated: bool = True) -> int:
    """Logits of so many sequences and what sampling holds beside them; without top-k and the like a GPU needs none."""
    return sequences * vocab * 4 * (1 + (_LOGIT_COPIES if truncated else 0))


def step_bytes(tokens: int, hidden: int, intermediate: int, itemsize: int) -> int:
    """Activations of a step at its fullest: residual, a norm's output, and the MLP's three products."""
    return tokens * itemsize * (2 * hidden + 3 * intermediate)


def _gb(size: int) -> str:
    return f"{size / 2**30:.2f} GB"
