"""Long sequences: update and log-probs at 32k and 64k tokens per sequence, generation of 16k-token responses.

    python benchmarks/long_sequences.py --json FILE                      # 1.5B on a GPU, all parts
    python benchmarks/long_sequences.py --resume --json FILE             # continue: skip measurements in FILE
    python benchmarks/long_sequences.py --parts plan                     # limit of one device and layouts beyond it

Training: one packed row per micro-batch, prefixes not shared, gradient checkpointing, the AdamW optimizer of a run.
Generation: all sequences are decoded at several contexts up to the full length; `s` of a response is the mean step
times the tokens of a response. MFU is the work without recomputation relative to the matmul rate measured here.
`scaling` is the time per token relative to the shortest length. The plan is that of `verl plan`: the longest response
that fits on one device, and the Ulysses size with which longer ones fit on several.

Without a GPU everything is tiny: this only tests the script.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from _report import report
from _shapes import SHAPES, matmul_rate, release_memory, shape_config
from decode_step import decode_seconds, longest_measured, random_engine
from prefix_sharing import Tokens, batch, build_engine, groups
from training_step import _all_rows

from verl.utils.balancing import SequenceCost

PROMPT_SHARE = 16
"""A prompt has 1 / PROMPT_SHARE of the tokens of a sequence."""
PARTS = ("train", "generate", "plan")
_PASSES = {"update": 3, "log_prob": 1}


def measure_training(shape: str, length: int, rows: int, device: str, rate: float) -> list[dict[str, Any]]:
    """Rows of the update and the log-prob pass over sequences of `length` tokens."""
    from optimizer_step import median_seconds

    from verl.config import ActorConfig, as_config
    from verl.workers.engine.base import MicroBatching
    from verl.workers.roles.policy_loss import PolicyLoss

    config, prompt = shape_config(shape), length // PROMPT_SHARE
    data = batch(groups(Tokens(config.vocab_size, 1.0), rows, 1, prompt, length - prompt), config.vocab_size)
    release_memory(device)  # of the engine for the previous length
    engine = build_engine(shape, device, longest=length, compiled=device == "cuda")
    loss = PolicyLoss(as_config(ActorConfig, {"loss_agg_mode": "token-mean"}))
    micro = MicroBatching(max_tokens=length)

    def update() -> None:
        engine.forward_backward(data, loss, loss.outputs, micro=micro)
        engine.optimizer_step()

    calls = {"update": update, "log_prob": lambda: engine.infer(data, ("log_probs",), temperature=1.0, micro=micro)}
    cost = SequenceCost.from_config(config.to_dict())
    flops = rows * float(cost(length, length - prompt))
    table = []
    for phase, call in calls.items():
        call()  # compiles and allocates
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = median_seconds(call, lambda: None, 3, device)
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
        row = {"phase": phase, "length": length, "s": seconds, "tokens/s": rows * length / seconds}
        table.append(row | {"MFU": _PASSES[phase] * flops / seconds / rate, "peak GB": peak})
    return table


def measure_generation(shape: str, response: int, sequences: int, device: str) -> list[dict[str, Any]]:
    """Rows of decode steps at contexts up to the full length, and one for whole responses."""
    steps = 16 if device == "cuda" else 2
    contexts = [max(64, response * part // 4) for part in range(1, 5)] if device == "cuda" else [32, 64]
    longest = max(longest_measured(sequences, context, steps) for context in contexts)
    config = shape_config(shape, eos_token_id=None, bos_token_id=None, max_position_embeddings=longest)
    engine = random_engine(config, device, sequences, longest)
    table = []
    for context in contexts:
        seconds = decode_seconds(engine, sequences, context, steps, device)
        row = {"phase": "decode", "length": context, "sequences": sequences, "s": seconds}
        table.append(row | {"tokens/s": sequences / seconds})
    mean = sum(row["s"] for row in table) / len(table)
    response_row = {"phase": "generation", "length": response, "sequences": sequences, "s": mean * response}
    peak = torch.cuda.max_memory_allocated() / 2**30 + engine.kv.region.size / 2**30 if device == "cuda" else None
    return [*table, response_row | {"tokens/s": sequences / mean, "peak GB": peak}]


def plan_rows(shape: str, lengths: list[int], gpu: str) -> list[dict[str, Any]]:
    """The longest response that fits on one device, and the smallest Ulysses size for longer sequences."""
    from verl.cli.plan import parse_arguments, planned_run
    from verl.planning.advice import largest_length
    from verl.planning.phases import GB

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        context = max(lengths) * 64  # memory is the limit, not the context
        shape_config(shape, max_position_embeddings=context).save_pretrained(folder)
        overrides = [
            "algorithm=grpo",
            f"actor_rollout_ref.model.path={folder}",
            "data.train_batch_size=16",
            "--gpu",
            gpu,
        ]
        overrides += ["actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=4"]
        overrides += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
        run = planned_run(parse_arguments([*overrides, "--gpus", "1", "data.max_prompt_length=1024"]))
        limit = largest_length(run.config, context, run.load, run.plan)
        rows.append({"plan": "longest response on one device", "tokens": limit.value, "limit": limit.limit})
        beyond = [limit.value * factor for factor in (2, 4)] if limit.value else []
        for length in [*lengths, *beyond]:
            for ranks in (1, 2, 4, 8, 16):
                keys = [f"data.max_response_length={length - 1024}", "data.max_prompt_length=1024"]
                keys.append(f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={ranks}")
                try:
                    run = planned_run(parse_arguments([*overrides, "--gpus", str(ranks), *keys]))
                    plan = run.plan(run.config)
                except ValueError:  # a size that does not divide the heads
                    continue
                if not plan.excess:
                    total = max(phase.total for phase in plan.phases if not phase.on_host) / GB
                    row = {"plan": "update and generation", "tokens": length, "ulysses": ranks, "GB per device": total}
                    rows.append(row)
                    break
            else:
                rows.append(
                    {"plan": "update and generation", "tokens": length, "note": "does not fit on 1 to 16 devices"}
                )
    return rows


def with_scaling(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the time per token relative to the shortest length of the same phase."""
    shortest: dict[str, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        shortest.setdefault(row["phase"], row)
    return [{**row, "scaling": shortest[row["phase"]]["tokens/s"] / row["tokens/s"]} for row in rows]


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-1.5b" if cuda else "tiny")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 65536] if cuda else [64, 256])
    parser.add_argument("--rows", type=int, default=2, help="sequences of an update")
    parser.add_argument("--response", type=int, default=16384 if cuda else 64, help="tokens of generated responses")
    parser.add_argument("--sequences", type=int, default=64 if cuda else 2, help="sequences decoded at a time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gpu", default="h200", help="the GPU of the plan")
    parser.add_argument("--resume", action="store_true", help="skip training lengths and generation in --json")
    parser.add_argument("--json", help="append every table to this file")
    options = parser.parse_args()
    device = "cuda" if cuda else "cpu"
    labels = {"system": "verl", "variant": "long", "case": "long", "shape": options.shape}
    rows = _all_rows(options.json) if options.resume and options.json else []
    rows = [row for row in rows if row.get("variant") == "long" and row["shape"] == options.shape]
    rate = matmul_rate(device)
    for length in options.lengths if "train" in options.parts else []:
        if not any(row["phase"] == "update" and row["length"] == length for row in rows):
            new = [labels | row for row in measure_training(options.shape, length, options.rows, device, rate)]
            report(f"{options.shape}, {options.rows} sequences of {length} tokens", new, options.json)
            rows += new
    if "generate" in options.parts and not any(row["phase"] == "generation" for row in rows):
        new = [labels | row for row in measure_generation(options.shape, options.response, options.sequences, device)]
        report(f"{options.shape}, responses of {options.response} tokens", new, options.json)
        rows += new
    if rows:
        report("all lengths", with_scaling(rows))
    if "plan" in options.parts:
        title = f"{options.shape} on {options.gpu}: limit of one device and layouts beyond it"
        report(title, plan_rows(options.shape, options.lengths, options.gpu), options.json)


if __name__ == "__main__":
    main()
