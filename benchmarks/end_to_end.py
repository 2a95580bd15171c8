"""A few steps of PPO and GRPO through `main_ppo` on Ray: seconds per phase, tokens per second, peak memory.

The model is built from a config with random weights (throughput does not need trained ones): Qwen2.5-0.5B's shape on a
GPU, a tiny one on a CPU. A random model never stops by itself, so every answer has the full length. The limits beside
our figures: the device's matmul rate for the update, and reading the weights once per token for decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _report import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny import tiny_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
}
PHASES = [
    "update_weights",
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "step",
]


def make_inputs(folder: Path, shape: dict[str, Any], prompts: int, prompt_length: int) -> int:
    """Model, tokenizer, prompts of equal length, a reward; returns the number of parameters."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen2", **shape, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "random",
            "prompt": [{"role": "user", "content": f"{i:08d}" + "x" * (prompt_length - 11)}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
            "extra_info": {"index": i},
        }
        for i in range(prompts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(hash(solution_str) % 1000) / 1000\n"
    )
    return sum(p.numel() for p in model.parameters())


def run(folder: Path, name: str, args: argparse.Namespace, *more: str) -> list[dict[str, float]]:
    """One training run; its metrics by step."""
    cuda = torch.cuda.is_available()
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.train_batch_size={args.prompts}",
        f"data.max_prompt_length={args.prompt_length + 16}",
        f"data.max_response_length={args.response_length}",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"actor_rollout_ref.rollout.name={args.rollout}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={args.prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={args.micro}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        f"critic.ppo_mini_batch_size={args.prompts}",
        f"critic.ppo_micro_batch_size_per_gpu={args.micro}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={'cuda' if cuda else 'cpu'}",
        "trainer.logger=[file]",
        "trainer.project_name=end_to_end",
        f"trainer.experiment_name={name}",
        f"trainer.default_local_dir={folder / name}",
        "trainer.resume_mode=disable",
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[extra]",
        "critic.checkpoint.save_contents=[extra]",
        *more,
    ]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    files = sorted((folder / "runs").rglob("*.jsonl"))
    rows = [json.loads(line) for file in files if name in str(file) for line in file.read_text().splitlines()]
    return [row.get("data", row) for row in rows]


def summarise(name: str, steps: list[dict[str, float]], tokens: int, parameters: int) -> list[dict[str, Any]]:
    """Means over the steps after the first."""
    steady = [row for row in steps if "timing_s/step" in row][1:] or steps[-1:]
    table = []
    for phase in PHASES:
        seconds = [row[f"timing_s/{phase}"] for row in steady if f"timing_s/{phase}" in row]
        if not seconds:
            continue
        mean = sum(seconds) / len(seconds)
        peak = [row[f"memory_gb/{phase}"] for row in steady if f"memory_gb/{phase}" in row]
        flops = {"old_log_prob": 2, "ref": 2, "values": 2, "update_actor": 6, "update_critic": 6}.get(phase)
        table.append(
            {
                "run": name,
                "phase": phase,
                "s": mean,
                "tokens/s": tokens / mean,
                "TFLOP/s": flops * parameters * tokens / mean / 1e12 if flops else None,
                "peak GB": max(peak) if peak else None,
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b" if cuda else "tiny")
    parser.add_argument("--prompts", type=int, default=32 if cuda else 4)
    parser.add_argument("--n", type=int, default=8 if cuda else 4)
    parser.add_argument("--prompt-length", type=int, default=128 if cuda else 32)
    parser.add_argument("--response-length", type=int, default=256 if cuda else 16)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rollout", default="native")
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parameters = make_inputs(folder, SHAPES[args.shape], args.prompts * args.steps, args.prompt_length)
        samples = args.prompts * args.n
        tokens = samples * (args.prompt_length + args.response_length)
        rows: list[dict[str, Any]] = []
        n = f"actor_rollout_ref.rollout.n={args.n}"
        for name, more in {
            "grpo": ["algorithm.adv_estimator=grpo", n],
            "ppo": ["algorithm.adv_estimator=gae", n, "actor_rollout_ref.actor.use_kl_loss=True"],
        }.items():
            rows += summarise(name, run(folder, name, args, *more), tokens, parameters)
    title = f"{args.shape}, {args.prompts} × {args.n} samples of {args.prompt_length} + {args.response_length} tokens"
    report(title, rows, args.json)


if __name__ == "__main__":
    main()
