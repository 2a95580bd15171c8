"""Every estimator and policy loss at 16,384 × 4,096: time and memory compared with a loop and the bandwidth limit.

    python benchmarks/algos.py [--rows 16384] [--width 4096] [--device cpu] [--json results.jsonl]

Rows are halved until the tensors fit. The limit is the time to read every input once and write every result once at the
copy bandwidth measured here; peak is the memory allocated in addition to the inputs. Losses run forward and backward.
The loop is a simple implementation over groups and samples (over tokens for gae and reinforce_plus_plus), on at most
`--loop-rows` rows, its time scaled up to all rows; on these rows both results must agree.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _report import report
from _shapes import copy_bandwidth

from verl.algos import estimate_advantages, get_policy_loss_fn, global_share
from verl.config import ActorConfig, AlgorithmConfig, as_config, names

Batch = dict[str, Any]
# Tensors of [rows, width] float32 that must fit at once: inputs, results and what a loss keeps for its gradient.
TENSORS_AT_ONCE = 24
GROUP = 8
GAMMA, LAM = 0.99, 0.95
# Estimators that discount over tokens.
DISCOUNTING_ESTIMATORS = ("gae", "reinforce_plus_plus")
ALGORITHM = as_config(AlgorithmConfig, {"gamma": GAMMA})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=4_096)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--loop-rows", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=None, help="names of estimators or losses")
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    args = parser.parse_args()
    rows = args.rows
    while rows > GROUP and TENSORS_AT_ONCE * 4 * rows * args.width > free_bytes(args.device):
        rows //= 2
    bench = Bench(random_batch(rows, args.width, args.device), args.loop_rows, args.repeats)
    selected = args.only or [*names.ADV_ESTIMATORS, *names.POLICY_LOSSES]
    table = [bench.estimator(name) for name in names.ADV_ESTIMATORS if name in selected]
    table += [bench.loss(name) for name in names.POLICY_LOSSES if name in selected]
    title = f"algorithms, {rows} × {args.width} on {args.device}, copying at {bench.bandwidth / 1e9:.1f} GB/s"
    report(title, table, args.json)


class Bench:
    def __init__(self, batch: Batch, loop_rows: int, repeats: int) -> None:
        self.batch, self.repeats = batch, repeats
        self.small = {k: v[:loop_rows] for k, v in batch.items()}
        self.rows, self.loop_rows = len(batch["index"]), len(self.small["index"])
        self.device = batch["response_mask"].device
        self.bandwidth = copy_bandwidth(self.device.type)

    def estimator(self, name: str) -> dict[str, object]:
        inputs = ["token_level_rewards", "response_mask", "values"][: 3 if name == "gae" else 2]
        results = 2 if name in ("gae", "remax", "reinforce_plus_plus") else 1
        loop = token_loop if name in DISCOUNTING_ESTIMATORS else sample_loop
        run = lambda batch: estimate_advantages(  # noqa: E731
            name, **batch, gamma=GAMMA, lam=LAM, epsilon=1e-6, config=ALGORITHM
        )
        difference = (run(self.small)[0] - loop(name, self.small)).abs().max().item()
        assert difference < 1e-3, f"{name}: loop and implementation differ by {difference}"
        return self.row(name, "advantage", inputs, results, lambda: run(self.batch), lambda: loop(name, self.small))

    def loss(self, name: str) -> dict[str, object]:
        inputs = ["old_log_prob", "log_prob", "advantages", "response_mask"]
        options = {"loss_mode": name, "clip_cov_lb": 0.1}
        config = as_config(ActorConfig, {"clip_ratio": 0.2, "policy_loss": options})

        def run() -> None:
            log_prob = self.batch["log_prob"].detach().requires_grad_()
            tensors = {key: self.batch[key] for key in inputs} | {"log_prob": log_prob}
            get_policy_loss_fn(name)(**tensors, loss_agg_mode="token-mean", config=config)[0].backward()

        def loop() -> None:
            whole = {key: self.small[key] for key in inputs}
            log_prob = whole["log_prob"].detach().requires_grad_()
            tokens = float(whole["response_mask"].sum())
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for i in range(self.loop_rows):
                sample = {key: value[i : i + 1] for key, value in (whole | {"log_prob": log_prob}).items()}
                loss, _ = get_policy_loss_fn(name)(**sample, loss_agg_mode="token-mean", config=config)
                total = total + loss * global_share(sample["response_mask"], "token-mean", tokens, self.loop_rows)
            total.backward()

        return self.row(name, "policy loss", inputs, 1, run, loop)

    def row(
        self, name: str, kind: str, inputs: list[str], results: int, run: Callable[[], Any], loop: Callable[[], Any]
    ) -> dict[str, object]:
        bytes_moved = sum(self.batch[key].nbytes for key in inputs) + results * self.batch["token_level_rewards"].nbytes
        limit = bytes_moved / self.bandwidth
        seconds, cpu_seconds = measure(run, self.repeats, self.device)
        loop_seconds = measure(loop, 1, self.device)[0] * self.rows / self.loop_rows
        return {
            "name": name,
            "kind": kind,
            "seconds": round(seconds, 4),
            "cpu_s": round(cpu_seconds, 3),
            "limit_s": round(limit, 4),
            "x_limit": round(seconds / limit, 1),
            "loop_s": round(loop_seconds, 2),
            "x_loop": round(loop_seconds / seconds, 1),
            "peak_GB": round(peak_bytes(run, self.device) / 1e9, 2),
            "inputs_GB": round(sum(self.batch[key].nbytes for key in inputs) / 1e9, 2),
        }


def random_batch(rows: int, width: int, device: str) -> Batch:
    """Responses of random lengths, in groups of eight; one in eight contains tool output."""
    rng = torch.Generator(device=device).manual_seed(0)
    lengths = torch.randint(1, width + 1, (rows, 1), device=device, generator=rng)
    positions = torch.arange(width, device=device)
    mask = (positions < lengths) & ~(
        (positions >= lengths // 4) & (positions < lengths // 2) & (torch.arange(rows) % 8 == 0)[:, None].to(device)
    )
    mask[:, 0] = True
    rewards = torch.zeros(rows, width, device=device)
    scores = torch.randint(0, 2, (rows, 1), device=device, generator=rng).float()
    rewards.scatter_(1, lengths - 1, scores)
    old = -torch.rand(rows, width, device=device, generator=rng)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask.to(torch.int64),
        "values": torch.rand(rows, width, device=device, generator=rng),
        "index": np.array([f"uid-{i // GROUP}" for i in range(rows)], dtype=object),
        "reward_baselines": torch.rand(rows, device=device, generator=rng),
        "old_log_prob": old,
        "log_prob": old + 0.2 * torch.rand(rows, width, device=device, generator=rng) - 0.1,
        "advantages": torch.randn(rows, 1, device=device, generator=rng).expand(rows, width).contiguous(),
    }


def sample_loop(name: str, batch: Batch) -> torch.Tensor:
    """A simple implementation: group by group and sample by sample."""
    rewards, mask = batch["token_level_rewards"], batch["response_mask"]
    if name == "remax":
        rows = [
            ((rewards[i] * mask[i]).flip(0).cumsum(0).flip(0) - batch["reward_baselines"][i]) * mask[i]
            for i in range(len(mask))
        ]
        return torch.stack(rows)
    members = defaultdict(list)
    for i, uid in enumerate(batch["index"]):
        members[uid].append(i)
    scores = [float((rewards[i] * mask[i]).sum()) for i in range(len(mask))]
    values = [0.0] * len(mask)
    differing_samples = sum(len(group) for group in members.values() if len({scores[i] for i in group}) > 1)
    for group in members.values():
        group_scores = np.array([scores[i] for i in group])
        lengths = np.array([int(mask[i].sum()) for i in group])
        for i, value in zip(
            group, group_values(name, group_scores, lengths, len(mask) / max(differing_samples, 1)), strict=True
        ):
            values[i] = float(value)
    if name == "gdpo":
        mean, std = float(np.mean(values)), float(np.std(values, ddof=1))
        values = [(value - mean) / (std + 1e-6) for value in values]
    advantages = torch.stack([values[i] * mask[i] for i in range(len(mask))])
    return whiten(advantages, mask) if name == "reinforce_plus_plus_baseline" else advantages


def group_values(name: str, scores: np.ndarray, lengths: np.ndarray, alpha: float) -> np.ndarray:
    centred, std = scores - scores.mean(), scores.std(ddof=1) + 1e-6
    if name in ("grpo", "gdpo"):
        return centred / std
    if name == "rloo":
        return np.array([score - np.delete(scores, i).mean() for i, score in enumerate(scores)])
    if name == "opo":
        return scores - (lengths * scores).sum() / lengths.sum()
    if name == "gpg":
        return alpha * centred
    if name == "grpo_passk":
        return np.array([max(score - np.delete(scores, i).max(), 0.0) for i, score in enumerate(scores)]) / std
    return centred


def token_loop(name: str, batch: Batch) -> torch.Tensor:
    """A loop over tokens from the last to the first, on the columns in their memory layout."""
    rewards, mask, values = batch["token_level_rewards"], batch["response_mask"], batch["values"]
    accumulated, next_value = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    columns = []
    for t in reversed(range(rewards.shape[1])):
        on = mask[:, t].bool()
        if name == "gae":
            delta = rewards[:, t] + GAMMA * next_value - values[:, t]
            accumulated = torch.where(on, delta + GAMMA * LAM * accumulated, accumulated)
            next_value = torch.where(on, values[:, t], next_value)
        else:
            accumulated = torch.where(on, rewards[:, t] + GAMMA * accumulated, accumulated)
        columns.append(accumulated)
    return whiten(torch.stack(columns[::-1], dim=1), mask)


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    sampled = values[mask.bool()]
    return torch.where(mask.bool(), (values - sampled.mean()) / sampled.std(), 0.0)


def measure(run: Callable[[], Any], repeats: int, device: torch.device) -> tuple[float, float]:
    """Best wall-clock seconds, and the CPU seconds of that run over all cores (independent of other programs)."""
    best = (float("inf"), 0.0)
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began, time.process_time() - cpu_began))
    return best


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory in addition to the memory allocated before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    # Not the resident size of the process: torch's CPU allocator keeps freed memory.
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as memory:
        return next(int(line.split()[1]) * 1024 for line in memory if line.startswith("MemAvailable"))


if __name__ == "__main__":
    main()
