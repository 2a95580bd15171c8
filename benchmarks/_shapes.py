"""Shapes of known models with random weights, and the speed of matrix products and copies on this device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[int], Any]

# transformers' model type, and its config.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
        },
    ),
    "qwen2.5-3b": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
    ),
    "qwen2.5-7b": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
    ),
    "tiny": (
        "qwen2",
        {
            "vocab_size": 512,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}


def shape_config(shape: str, **more: Any) -> Any:
    """The transformers config of a shape: by default tied embeddings and 4096 positions; `more` overrides keys."""
    from transformers import AutoConfig

    family, sizes = SHAPES[shape]
    common = {"tie_word_embeddings": True, "max_position_embeddings": 4096}
    return AutoConfig.for_model(family, **{**common, **sizes, **more})


def save_random_model(folder: Path, config: Any, dtype: torch.dtype, device: str = "cpu") -> None:
    """Random weights (the same for the same device) in the format of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    del model
    release_memory(device)  # other processes need it


def release_memory(device: str) -> None:
    """Release the memory of deleted engines: they are in reference cycles, and compiled code refers to them."""
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def matmul_rate(device: str) -> float:
    """Operations per second of a large matrix product, in bf16 on a GPU and float32 elsewhere: the best of several."""
    cuda = device == "cuda"
    size, dtype = (8192, torch.bfloat16) if cuda else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(12):
        synchronise(device)
        start = time.perf_counter()
        for _ in range(4):
            left @ right
        synchronise(device)
        best = min(best, (time.perf_counter() - start) / 4)
    del left, right
    if cuda:
        torch.cuda.empty_cache()
    return 2 * size**3 / best


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    size = 2**30 if device == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def synchronise(device: str) -> None:
    """Wait until all queued work of the device is finished."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_each(run: Run, copies: int) -> float:
    """Mean seconds of `run(0) … run(copies - 1)` in one CUDA graph; each run uses other data, so none is cached."""
    for index in range(copies):
        run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(copies):
            run(index)
    best = float("inf")
    for _ in range(4):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best / copies


def write_model(folder: Path, config: Any) -> None:
    """Write random weights in the compute dtype of this machine and a character tokenizer, unless the folder exists."""
    from tests.support.tiny import tiny_tokenizer

    if not folder.is_dir():
        device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
        save_random_model(folder, config, dtype, device)
        tiny_tokenizer().save_pretrained(folder)
