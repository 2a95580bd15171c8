"""Decode speed of the native engine with LoRA adapters, and the seconds of a weight sync of adapters.

    python benchmarks/lora_decode.py --shape 7b --sequences 64 256

Rows: the base model, merged weights, one adapter for all sequences (as in training), and four adapters that sequences
select (as in a server). `of base`: tokens/s over those of the base model. The second table is the sync from a training
engine to a rollout in the same process: frozen weights once, then adapters only, and merged weights for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, release_memory, shape_config, synchronise
from decode_step import time_steps

from verl.config import FSDPConfig, ModelConfig, OptimConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.lora import AdapterOptions
from verl.inference.sequence import NO_ADAPTER, Adapter, Sequence
from verl.types.request import Request, SamplingParams
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.sharding_manager import InProcessTransfer, SyncStats

_ACTOR = "actor_rollout_ref.actor"
_PROMPT = 32
_ADAPTERS = 4
_seeds = itertools.count()


def rollout_config(sequences: int, length: int, **more: Any) -> RolloutConfig:
    keys = {
        "max_num_seqs": sequences, "max_model_len": length, "load_format": "dummy", "free_weights": False,
        "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.6,
    }  # fmt: skip
    return as_config(RolloutConfig, {**keys, **more})


def random_engine(folder: str, config: RolloutConfig, device: str, options: AdapterOptions | None) -> BuiltEngine:
    engine = build_engine(folder, as_config(ModelConfig, {"path": folder}), config, torch.device(device), None, options)
    for tensor in engine.weights.tensors.values():
        tensor.normal_(0.0, 0.02)
    for slot in range(options.slots if options else 0):
        assert engine.model.adapters is not None
        for tensor in engine.model.adapters.weights(slot).values():
            tensor.normal_(0.0, 0.02)
    return engine


def merge(engine: BuiltEngine, rank: int) -> None:
    """Add products of random matrices to the weights of linear layers, as a merged adapter does."""
    for name, weight in engine.weights.tensors.items():
        if "_proj.weight" in name:
            rows, columns = weight.shape
            up, down = (torch.randn(size, device=weight.device) for size in ((rows, rank), (rank, columns)))
            weight.add_((up @ down * 4e-4).to(weight.dtype))


def decode_seconds(engine: BuiltEngine, sequences: int, steps: int, adapters: int, device: str) -> float:
    """Median seconds of a decode step with all sequences; `adapters`: number of slots that sequences select."""
    seed, vocab = next(_seeds), engine.model.vocab_size
    ids = torch.randint(vocab, (sequences, _PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()
    params = SamplingParams(max_new_tokens=5 * steps, ignore_eos=True)
    added = [Sequence(Request(f"{seed}-{i}", prompt, params), i) for i, prompt in enumerate(ids)]
    for index, sequence in enumerate(added):
        sequence.adapter = Adapter(1 + index % adapters, index % adapters) if adapters else NO_ADAPTER
    engine.engine.add(added)
    while any(not sequence.output.token_ids for sequence in added):
        engine.engine.step()
    return time_steps(engine, steps, device)


def decode_rows(folder: str, options: argparse.Namespace, steps: int) -> list[dict[str, Any]]:
    variants: dict[str, tuple[AdapterOptions | None, int]] = {
        "base": (None, 0),
        "merged": (None, 0),
        "one adapter": (AdapterOptions(options.rank), 0),
        f"{_ADAPTERS} adapters": (AdapterOptions(options.rank, _ADAPTERS, shared=False), _ADAPTERS),
    }
    config = rollout_config(max(options.sequences), _PROMPT + 6 * steps)
    rows, base = [], {}
    for name, (adapters, selected) in variants.items():
        engine = random_engine(folder, config, options.device, adapters)
        if name == "merged":
            merge(engine, options.rank)
        for sequences in options.sequences:
            seconds = decode_seconds(engine, sequences, steps, selected, options.device)
            base.setdefault(sequences, seconds)
            row = {"engine": name, "sequences": sequences, "ms/step": 1e3 * seconds, "tokens/s": sequences / seconds}
            rows.append(row | {"of base": base[sequences] / seconds, "weights GB": engine.model.region.size / 2**30})
        for region in (engine.kv.region, engine.model.region):
            region.close()
        del engine
        release_memory(options.device)
    return rows


def training_engine(config: Any, rank: int, device: str) -> FSDPEngine:
    from transformers import AutoModelForCausalLM

    half = device == "cuda"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if half else torch.float32)
    precision = {"mixed_precision": "bf16" if half else "fp32"}
    return FSDPEngine(
        model,
        model_config=as_config(ModelConfig, {"path": "random weights", "lora_rank": rank}),
        engine_config=as_config(FSDPConfig, precision, at=f"{_ACTOR}.fsdp_config"),
        optim=as_config(OptimConfig, {"lr": 1e-3}, at=f"{_ACTOR}.optim"),
        grad_clip=1.0,
        total_steps=10,
        device=device,
        background_save=False,
    )


def sync_rows(folder: str, config: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    engine = training_engine(config, options.rank, options.device)
    release_memory(options.device)
    rows = []
    for merged in (False, True):
        model = as_config(ModelConfig, {"path": folder, "lora_rank": options.rank}, "actor_rollout_ref.model")
        keys = rollout_config(8, 64, engine_kwargs={"native": {"merge_lora": merged, "num_blocks": 64}})
        rollout = NativeRollout(folder, model, keys, options.device)
        transfer = InProcessTransfer(engine, rollout)
        syncs = [_timed_sync(transfer, version, options.device) for version in range(4)]
        name = "merged weights" if merged else "adapters"
        if not merged:
            rows.append(_sync_row("frozen weights and adapters, first sync", syncs[:1]))
        rows.append(_sync_row(f"{name}, later syncs", syncs[1:]))
        rollout.close()
        del rollout, transfer
        release_memory(options.device)
    return rows


def _timed_sync(transfer: InProcessTransfer, version: int, device: str) -> tuple[float, SyncStats]:
    synchronise(device)
    start = time.perf_counter()
    stats = transfer.sync(version)
    synchronise(device)
    return time.perf_counter() - start, stats


def _sync_row(name: str, syncs: list[tuple[float, SyncStats]]) -> dict[str, Any]:
    _, stats = syncs[0]
    seconds = statistics.median(seconds for seconds, _ in syncs)
    return {"sync": name, "seconds": seconds, "MB": stats.bytes / 1e6, "tensors": stats.tensors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shape", default="1.5b" if cuda else "smollm2-135m")
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256] if cuda else [4])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--layers", type=int, help="layers of the model (default: those of the shape)")
    parser.add_argument("--json", help="append the results to this file")
    options = parser.parse_args()
    shape = options.shape if options.shape in SHAPES else f"qwen2.5-{options.shape}"
    changes = {} if options.layers is None else {"num_hidden_layers": options.layers}
    config = shape_config(shape, eos_token_id=None, bos_token_id=None, **changes)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        rows = decode_rows(folder, options, steps=30 if options.device == "cuda" else 3)
        report(f"decoding with LoRA adapters of rank {options.rank}, {shape}", rows, options.json)
        report(f"weight sync, {shape}", sync_rows(folder, config, options), options.json)


if __name__ == "__main__":
    main()
