"""An update with and without shared prefixes: seconds, speedup and its bound, memory, micro-batches, and agreement.

    python benchmarks/prefix_sharing.py                              # 1.5B on a GPU, all cases and attention variants
    python benchmarks/prefix_sharing.py --shape tiny --scale 0.1     # on a CPU

One engine in one process runs every case alternately with sharing off and on. The learning rate is 0, so that all runs
of a case compute the same loss and gradient; `loss` and `gradient` show the relative difference from sharing off.
`bound` is the ratio of operations (layers, attention, head) without and with sharing, and `tokens/s` and `MFU` count
the work without sharing; `computed MFU` counts the least work with sharing. `host ms` is the CPU time in which a pass
finds the shared tokens and divides the rows into micro-batches, before its first kernel. In the agent case every turn
is a row whose prompt lacks the reasoning of earlier turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _report import report
from _shapes import matmul_rate, shape_config, synchronise

from verl.config import ActorConfig, FSDPConfig, ModelConfig, OptimConfig, as_config
from verl.models.shared_prefixes import PrefixTree
from verl.protocol import DataProto
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.prefix_sharing import build_prefix_tree, shared_micro_batch_rows
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.roles.policy_loss import PolicyLoss

_ACTOR = "actor_rollout_ref.actor"
_VARIANTS: dict[str, tuple[str, Any]] = {
    "off": ("false", None),
    "on": ("auto", None),
    "on, gather": ("true", "gather"),
    "on, merge": ("true", "merge"),
}
_PASSES = 3  # operations of forward and backward over those of forward; recomputation is not counted

Rows = list[tuple[list[int], list[int]]]
"""Prompt and response of each row."""


class Tokens:
    """Random token sequences."""

    def __init__(self, vocabulary: int, scale: float) -> None:
        self._random, self._vocabulary, self._scale = np.random.default_rng(0), vocabulary, scale

    def __call__(self, count: int) -> list[int]:
        return self._random.integers(2, self._vocabulary, max(1, round(count * self._scale))).tolist()


def groups(tokens: Tokens, prompts: int, n: int, prompt: int, response: int) -> Rows:
    """`n` responses to each of the prompts."""
    return [(question, tokens(response)) for question in (tokens(prompt) for _ in range(prompts)) for _ in range(n)]


def agents(tokens: Tokens, prompts: int, n: int, turns: int) -> Rows:
    """Tool agents: the prompt of a turn has responses (64 of 256 tokens) and tool results (256) of earlier turns."""
    rows: Rows = []
    for question in (tokens(512) for _ in range(prompts)):
        for _ in range(n):
            history = question
            for _ in range(turns):
                answer = tokens(64)
                rows.append((history, tokens(192) + answer))
                history = history + answer + tokens(256)
    return rows


_CASES: dict[str, Callable[[Tokens], Rows]] = {
    "128+256 n=8": lambda tokens: groups(tokens, 32, 8, 128, 256),
    "4096+4096 n=4": lambda tokens: groups(tokens, 3, 4, 4096, 4096),
    "4096+512 n=16": lambda tokens: groups(tokens, 4, 16, 4096, 512),
    "agent, 6 turns": lambda tokens: agents(tokens, 2, 8, 6),
    "nothing shared": lambda tokens: groups(tokens, 256, 1, 128, 256),
}


def batch(rows: Rows, vocabulary: int) -> DataProto:
    """Columns of an update; prompts padded on the left, responses on the right."""
    widths = [max(len(row[side]) for row in rows) for side in (0, 1)]
    ids = torch.zeros(len(rows), sum(widths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(rows):
        columns = slice(widths[0] - len(prompt), widths[0] + len(response))
        ids[row, columns] = torch.tensor(prompt + response)
        mask[row, columns] = 1
    generator = torch.Generator().manual_seed(0)
    responses = mask[:, widths[0] :]
    advantages = torch.randn(len(rows), 1, generator=generator).expand_as(responses)
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, widths[0] :],
        "response_mask": responses,
        "old_log_probs": torch.full(responses.shape, -math.log(vocabulary)) * responses,
        "advantages": advantages * responses,
    }
    return DataProto.from_dict(tensors)


def build_engine(shape: str, device: str, longest: int, compiled: bool) -> FSDPEngine:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        config = shape_config(shape, max_position_embeddings=longest)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return FSDPEngine(
        model,
        model_config=as_config(ModelConfig, {"path": "random weights", "enable_gradient_checkpointing": True}),
        engine_config=as_config(FSDPConfig, {}, at=f"{_ACTOR}.fsdp_config"),
        optim=as_config(OptimConfig, {"lr": 0.0, "weight_decay": 0.0}, at=f"{_ACTOR}.optim"),
        grad_clip=1.0,
        total_steps=1000,
        device=device,
        compile_layers=compiled,
        background_save=False,
    )


@dataclass
class Measured:
    """Results of one variant of a case."""

    seconds: list[float]
    loss: float
    norm: float
    micro_batches: int
    computed_tokens: int
    peak_gb: float


class Case:
    """The rows of a case, its operations without sharing and the fewest with sharing."""

    def __init__(self, name: str, rows: Rows, engine: FSDPEngine, budget: int, device: str) -> None:
        self.name, self._engine, self._device = name, engine, device
        self.data = batch(rows, engine.hf_config.vocab_size)
        self._micro = MicroBatching(max_tokens=max(budget, max(len(prompt) + len(answer) for prompt, answer in rows)))
        config = as_config(ActorConfig, {"loss_agg_mode": "token-mean"})
        self._loss = PolicyLoss(config)
        mask = self.data.batch["attention_mask"]
        lengths, responses = mask.sum(1).numpy(), self.data.batch["response_mask"].sum(1).numpy()
        cost = engine.cost
        self.tokens, self.operations = int(lengths.sum()), float(cost(lengths, responses).sum())
        prefixes = build_prefix_tree(self.data)
        self.fewest_tokens = PrefixTree(prefixes.lengths, prefixes.shared).total
        self.fewest_operations = self.operations - float(cost(prefixes.shared).sum())
        self.host_ms = 1000 * min(self._host_seconds() for _ in range(5))
        self._passes = 0
        engine.model.register_forward_pre_hook(self._count)

    def _host_seconds(self) -> float:
        begin = time.thread_time()
        shared_micro_batch_rows(build_prefix_tree(self.data), self._micro, self._engine.cost)
        return time.thread_time() - begin

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def update(self, variant: str) -> tuple[float, float, float]:
        """Return seconds, loss and gradient norm of one update."""
        engine = self._engine
        engine.prefix_sharing.mode, engine.prefix_sharing.attention = _VARIANTS[variant]
        self._passes = 0
        synchronise(self._device)
        begin = time.perf_counter()
        metrics = engine.forward_backward(self.data, self._loss, self._loss.outputs, micro=self._micro)
        norm = engine.optimizer_step()["grad_norm"]
        synchronise(self._device)
        return time.perf_counter() - begin, metrics["loss"][0], norm

    def warm_up(self, variant: str) -> Measured:
        """Run once to compile, once to measure memory and results."""
        self.update(variant)
        if self._device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        _, loss, norm = self.update(variant)
        peak = torch.cuda.max_memory_allocated() / 2**30 if self._device == "cuda" else 0.0
        return Measured([], loss, norm, self._passes, self._engine.prefix_sharing.computed_tokens, peak)

    def rows(self, variants: list[str], repeats: int, rate: float) -> list[dict[str, Any]]:
        results: dict[str, Measured] = {}
        notes: dict[str, str] = {}
        for variant in variants:
            try:
                results[variant] = self.warm_up(variant)
            except Exception as error:  # noqa: BLE001 - the failure becomes a row of the table
                self._engine.optimizer.zero_grad()
                notes[variant] = f"{type(error).__name__}: {str(error)[:200]}"
        for _ in range(repeats):
            for variant, measured in results.items():
                measured.seconds.append(self.update(variant)[0])
        return [self._row(v, results.get(v), results.get("off"), notes.get(v, ""), rate) for v in variants]

    def _row(
        self, variant: str, measured: Measured | None, off: Measured | None, note: str, rate: float
    ) -> dict[str, Any]:
        row: dict[str, Any] = {"case": self.name, "sharing": variant, "tokens": self.tokens}
        if measured is None:
            return {**row, "note": note}
        seconds = statistics.median(measured.seconds)
        shared = measured.computed_tokens < self.tokens
        work = self.fewest_operations if shared else self.operations
        row |= {"computed tokens": measured.computed_tokens, "fewest tokens": self.fewest_tokens, "s": seconds}
        if off is not None:
            row |= {
                "speedup": statistics.median(off.seconds) / seconds,
                "bound": self.operations / self.fewest_operations,
                "loss": abs(measured.loss - off.loss) / max(abs(off.loss), 1e-9),
                "gradient": abs(measured.norm - off.norm) / max(off.norm, 1e-9),
            }
        return {
            **row,
            "micro-batches": measured.micro_batches,
            "host ms": self.host_ms,
            "peak GB": measured.peak_gb,
            "tokens/s": self.tokens / seconds,
            "MFU": _PASSES * self.operations / seconds / rate,
            "computed MFU": _PASSES * work / seconds / rate,
            "note": note,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--cases", nargs="+", default=list(_CASES), choices=list(_CASES))
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS), choices=list(_VARIANTS))
    parser.add_argument("--max-tokens", type=int, default=32768, help="token budget of a micro-batch")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="do not compile the layers")
    parser.add_argument("--json")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    variants = options.variants if device == "cuda" else [name for name in options.variants if "," not in name]
    rate = matmul_rate(device)
    engine = build_engine(options.shape, device, 8192, compiled=not options.eager)
    vocabulary = engine.hf_config.vocab_size
    for name in options.cases:
        rows = _CASES[name](Tokens(vocabulary, options.scale))
        case = Case(name, rows, engine, round(options.max_tokens * options.scale), device)
        report(f"Shared prefixes, {options.shape}: {name}", case.rows(variants, options.repeats, rate), options.json)


if __name__ == "__main__":
    main()
