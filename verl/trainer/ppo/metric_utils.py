"""Metrics of a training step (rewards, lengths, KL, timing, throughput) and of validation (mean, best, maj, pass@k).

Metrics of a step count only sampled tokens (`response_mask`) and rows with sampled tokens: fillers have no weight.
Metrics of responses refer to whole trajectories. Only the columns that are used are fetched from a BatchRef.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.algos.groups import Trajectories
from verl.protocol import DataProto
from verl.utils.metric import reduce_metrics
from verl.utils.torch_functional import masked_mean, masked_sum, masked_var

if TYPE_CHECKING:
    from verl.trainer.common.run_status import Phases

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "pass_at_k",
    "phase_metrics",
    "process_validation_metrics",
    "prompt_intervals",
    "reduce_metrics",
    "reference_metrics",
    "truncated_rows",
    "without_nan",
]

# Phases whose time is reported per response token; that of other phases is reported per token of whole sequences.
_GENERATION_PHASES = frozenset({"gen"})
# Phases that do not process the batch: no time per token.
_PHASES_WITHOUT_BATCH = frozenset({"testing", "save_checkpoint"})
# Bootstrap of validation metrics: number of resamples, 95 % interval, and elements per chunk, which bounds memory.
_RESAMPLES = 1000
_INTERVAL = (0.025, 0.975)
CHUNK_ELEMENTS = 4 * 2**20

# ---------------------------------------------------------------- training step


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Return statistics of rewards, advantages, lengths and KL to the reference of a batch after `compute_advantage`.

    A response is clipped if its `finish_reason` is `length`; without that column, if it has `max_response_length`
    tokens. A prompt is clipped if it has `max_prompt_length` tokens. Both limits are in `meta_info`; the default is the
    width of the columns. The prompt of a trajectory is the prompt of its first row; its response consists of the
    response tokens of all its rows.
    """
    columns, rows, trajectories = batch.batch, _Rows.of(batch), Trajectories.of(batch)
    real = trajectories.mask.bool().any(-1)
    scores = masked_sum(trajectories.join(columns["token_level_scores"]), trajectories.mask.bool(), axis=-1)
    rewards = scores
    if "token_level_rewards" in columns:
        rewards = masked_sum(trajectories.join(columns["token_level_rewards"]), trajectories.mask.bool(), axis=-1)
    metrics = _stats("critic/score", scores, real) | _stats("critic/rewards", rewards, real)
    metrics["reward/mean"] = metrics["critic/rewards/mean"]
    for name in ("advantages", "returns"):
        metrics |= _stats(f"critic/{name}", columns[name], rows.mask)
    if use_critic and "values" in columns:
        metrics |= _value_metrics(columns["values"], columns["returns"], rows.mask)
    metrics |= reference_metrics(batch)
    prompt_limit = batch.meta_info.get("max_prompt_length", rows.prompt_width)
    response_limit = batch.meta_info.get("max_response_length", rows.mask.shape[1])
    prompts, responses = rows.prompt[torch.from_numpy(trajectories.first_rows)], trajectories.sum(rows.response)
    truncated = responses >= response_limit
    if "finish_reason" in batch.non_tensor_batch:
        truncated = trajectories.at_last_row(truncated_rows(batch))
    if "num_turns" in batch.non_tensor_batch:
        turns = torch.tensor([float(count) for count in batch.non_tensor_batch["num_turns"][trajectories.last_rows]])
        metrics |= _stats("num_turns", turns, real)
    metrics |= _length_metrics("prompt_length", prompts, real, prompts >= prompt_limit)
    return metrics | _length_metrics("response_length", responses, real, truncated)


def reference_metrics(batch: DataProto) -> dict[str, float]:
    """Return the mean KL estimate to the reference; {} if the batch lacks the log-probs of policy or reference."""
    columns = batch.batch
    if "old_log_probs" not in columns or "ref_log_prob" not in columns:
        return {}
    difference = columns["old_log_probs"] - columns["ref_log_prob"]
    return {"kl/mean": masked_mean(difference, columns["response_mask"].bool()).item()}


def truncated_rows(data: DataProto) -> torch.Tensor:
    """Return the rows of trajectories that ended at a length limit (`finish_reason` of the last row): bool [batch]."""
    trajectories = Trajectories.of(data)
    if "finish_reason" not in data.non_tensor_batch:
        raise ValueError(
            "algorithm.truncated_responses: the batch has no column finish_reason, which marks truncated responses."
            " Set the key to keep, or return this column from the rollout."
        )
    ends = np.array([reason == "length" for reason in data.non_tensor_batch["finish_reason"]], dtype=bool)
    return torch.from_numpy(ends[trajectories.last_rows][trajectories.of_row])


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """Return `timing_s/<phase>` and `timing_per_token_ms/<phase>` (generation: per response token)."""
    rows = _Rows.of(batch)
    response_tokens = int(rows.response[rows.real].sum())
    metrics = {f"timing_s/{phase}": float(seconds) for phase, seconds in timing_raw.items()}
    for phase, seconds in timing_raw.items():
        tokens = response_tokens if phase in _GENERATION_PHASES else rows.tokens
        if tokens and phase not in _PHASES_WITHOUT_BATCH:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * seconds / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Return the tokens of the step, its seconds (`timing_raw["step"]`), and tokens per second and device."""
    if n_gpus < 1:
        raise ValueError(f"n_gpus: {n_gpus}, but a step needs at least 1. Pass the number of worker processes.")
    tokens, seconds = _Rows.of(batch).tokens, float(timing_raw["step"])
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus) if seconds > 0 else 0.0,
    }


def phase_metrics(batch: DataProto, phases: Phases, n_gpus: int) -> dict[str, float]:
    """Return time, memory and throughput of the phases of a step; `batch` is its final batch."""
    metrics = compute_timing_metrics(batch, phases.seconds)
    metrics |= {f"memory_gb/{name}": value for name, value in phases.memory_gb.items()}
    return metrics | compute_throughout_metrics(batch, phases.seconds, n_gpus)


def without_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics without NaN values."""
    return {name: value for name, value in metrics.items() if not (isinstance(value, float) and math.isnan(value))}


@dataclass(frozen=True)
class _Rows:
    """Masks and lengths of the rows of a batch."""

    mask: torch.Tensor
    """[batch, response], bool: tokens that the model sampled."""
    real: torch.Tensor
    """[batch], bool: rows with sampled tokens."""
    prompt: torch.Tensor
    """[batch]: number of prompt tokens."""
    response: torch.Tensor
    """[batch]: number of response tokens, including those of tools and environments."""
    prompt_width: int

    @classmethod
    def of(cls, batch: DataProto) -> _Rows:
        mask = batch.batch["response_mask"].bool()
        lengths = getattr(batch, "lengths", None)
        if lengths is not None:  # of a BatchRef: avoids fetching the attention mask
            prompt, response = torch.tensor(lengths.prompt), torch.tensor(lengths.response)
            return cls(mask, mask.any(-1), prompt, response, lengths.widths[0])
        attention = batch.batch["attention_mask"]
        width = attention.shape[1] - mask.shape[1]
        return cls(mask, mask.any(-1), attention[:, :width].sum(-1), attention[:, width:].sum(-1), width)

    @property
    def tokens(self) -> int:
        """Number of tokens of all real rows."""
        return int((self.prompt + self.response)[self.real].sum())


def _stats(name: str, values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return mean, max and min of `values` where `mask` (bool, same shape) is True; zeros if it is True nowhere."""
    selected = values[mask].double() if mask.any() else torch.zeros(1)
    return {
        f"{name}/mean": selected.mean().item(),
        f"{name}/max": selected.max().item(),
        f"{name}/min": selected.min().item(),
    }


def _value_metrics(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    unexplained = masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
    explained = 1.0 - unexplained.item() if mask.any() else 0.0
    return _stats("critic/values", values, mask) | {"critic/vf_explained_var": explained}


def _length_metrics(name: str, lengths: torch.Tensor, real: torch.Tensor, truncated: torch.Tensor) -> dict[str, float]:
    clipped = masked_mean(truncated.float(), real).item()
    return _stats(name, lengths, real) | {f"{name}/clip_ratio": clipped}


# ---------------------------------------------------------------- validation


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """Return data source → variable → metric → mean over prompts. Every argument has one entry per sample.

    Metrics of a prompt with n samples:

    - `mean@n`, and for n > 1 `std@n`;
    - for k = 2, 4, 8, … n: `best@k/mean`, `worst@k/mean` and, if there is a variable `pred`, `maj@k/mean`, each also
      with `/std`: bootstrap estimates for k samples;
    - for n > 1 and a variable that never exceeds 1: `pass@k` (including k = 1), the unbiased estimate of the
      probability that one of k samples has the value 1.

    Metrics except `std` also have `/low` and `/high`, the 95 % interval of a bootstrap over prompts. Variables that are
    not numbers are left out. Samples whose value is None or NaN are left out, too: `mean@n` is the mean over the other
    samples of the prompt, and metrics over k samples need k samples with a value.
    """
    for name, values in {"sample_uids": sample_uids, **infos_dict}.items():
        if len(values) != len(data_sources):
            raise ValueError(f"{name}: {len(values)} entries for {len(data_sources)} samples. Pass one per sample.")
    prompts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        prompts[source][uid].append(row)
    variables = {name: numbers for name, values in infos_dict.items() if (numbers := _numbers(values)) is not None}
    votes = _vote_codes(infos_dict["pred"]) if "pred" in infos_dict else None
    return {
        source: {
            name: metrics
            for name, numbers in variables.items()
            if (metrics := _prompt_metrics(list(by_uid.values()), numbers, None if name == "pred" else votes, seed))
        }
        for source, by_uid in prompts.items()
    }


def pass_at_k(passed: np.ndarray, k: int) -> np.ndarray:
    """Return the probability that at least one of `k` samples passes, per prompt: bool [prompts, n] → [prompts].

    Unbiased estimate 1 - C(n - c, k) / C(n, k) for c of n passed samples (arXiv 2107.03374).
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k}: {n} samples per prompt. k must be from 1 to {n}.")
    by_count = np.array([1.0 - math.comb(n - count, k) / math.comb(n, k) for count in range(n + 1)])
    return by_count[np.count_nonzero(passed, axis=1)]


def prompt_intervals(values_UM: np.ndarray, seed: int = 42) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % bootstrap interval of each column's mean: [prompts, metrics] → low [metrics], high [metrics]."""
    prompts = len(values_UM)
    rng = np.random.default_rng(seed)
    size = max(1, CHUNK_ELEMENTS // prompts)
    means = []
    for start in range(0, _RESAMPLES, size):
        draws_BU = rng.integers(0, prompts, size=(min(size, _RESAMPLES - start), prompts))
        offsets = np.arange(len(draws_BU))[:, None] * prompts
        # Count how often each prompt was drawn: the means of all resamples are then one matrix product.
        times_BU = np.bincount((draws_BU + offsets).ravel(), minlength=draws_BU.size).reshape(draws_BU.shape)
        means.append(times_BU @ values_UM / prompts)
    low, high = np.quantile(np.concatenate(means), _INTERVAL, axis=0)
    return low, high


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], Any]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Return mean and standard deviation of each `reduce_fn` over random subsets of `data`, sampled with
    replacement."""
    draws = _draws(len(data), subset_size, n_bootstrap, seed)
    subsets = [[data[index] for index in draw] for draw in draws.tolist()]
    results = [np.array([reduce_fn(subset) for subset in subsets]) for reduce_fn in reduce_fns]
    return [(float(values.mean()), float(values.std())) for values in results]


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """Return the value of the majority answer: `val_key` of the first sample with the most frequent `vote_key`.

    Among answers with equally many votes, the first one wins.
    """
    winner = Counter(item[vote_key] for item in data).most_common(1)[0][0]
    return float(next(item[val_key] for item in data if item[vote_key] == winner))


def _draws(n: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """Return random indices below `n`: [n_bootstrap, subset_size]."""
    if n < 1 or subset_size < 1 or n_bootstrap < 1:
        raise ValueError(
            f"bootstrap: {n_bootstrap} subsets of {subset_size} out of {n} samples; all three must be at least 1."
        )
    return np.random.default_rng(seed).integers(0, n, size=(n_bootstrap, subset_size))


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """Return the values as float64, with NaN for None; None if a value is not a number."""
    types = set(map(type, values)) - {type(None)}
    if not types or not all(issubclass(cls, bool | int | float | np.number | np.bool_) for cls in types):
        return None
    return np.array(values, dtype=np.float64)


def _vote_codes(votes: Sequence[Any]) -> np.ndarray:
    """Map equal votes to equal numbers."""
    codes: dict[str, int] = {}
    return np.array([codes.setdefault(repr(vote), len(codes)) for vote in votes], dtype=np.int64)


def _prompt_metrics(
    prompts: Sequence[Sequence[int]], numbers: np.ndarray, votes: np.ndarray | None, seed: int
) -> dict[str, float]:
    """Return the metrics of one variable, averaged over prompts. `prompts`: sample indices of each prompt."""
    # Prompts with equal numbers of samples, and of samples with a value, are processed together.
    by_counts: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    for rows in map(np.asarray, prompts):
        measured = rows[~np.isnan(numbers[rows])]
        if len(measured):
            by_counts[len(rows), len(measured)].append(measured)
    if not by_counts:
        return {}
    are_scores = max(numbers[rows].max() for groups in by_counts.values() for rows in groups) <= 1.0
    values: dict[str, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
    for counts, groups in sorted(by_counts.items()):
        rows_UN = np.stack(groups)
        votes_UN = None if votes is None else votes[rows_UN]
        for name, values_U in _per_prompt(numbers[rows_UN], votes_UN, counts[0], are_scores, seed).items():
            values[name][counts] = values_U
    joined = {name: np.concatenate(list(parts.values())) for name, parts in values.items()}
    spreads = {name: float(values_U.mean()) for name, values_U in joined.items() if _is_spread(name)}
    return spreads | _with_intervals(values, {n: v for n, v in joined.items() if not _is_spread(n)}, seed)


def _per_prompt(
    values_UN: np.ndarray, votes_UN: np.ndarray | None, n: int, are_scores: bool, seed: int
) -> dict[str, np.ndarray]:
    """Return the value of each metric for each of U prompts. Each prompt has `n` samples, N of them with a value.

    Means are over the N samples; metrics over k samples are left out if k > N.
    """
    measured = values_UN.shape[1]
    per_prompt = {f"mean@{n}": values_UN.mean(axis=1)}
    sizes = [k for k in _subset_sizes(n) if k <= measured]
    if measured > 1:
        per_prompt[f"std@{n}"] = values_UN.std(axis=1)
    if n > 1 and are_scores:
        per_prompt |= {f"pass@{k}": pass_at_k(values_UN >= 1.0, k) for k in (1, *sizes)}
    for k in sizes:
        drawn = _bootstrap_samples(values_UN, votes_UN, _draws(measured, k, _RESAMPLES, seed))
        for name, (means_U, stds_U) in drawn.items():
            per_prompt |= {f"{name}@{k}/mean": means_U, f"{name}@{k}/std": stds_U}
    return per_prompt


def _with_intervals(
    values: Mapping[str, Mapping[tuple[int, int], np.ndarray]], joined: Mapping[str, np.ndarray], seed: int
) -> dict[str, float]:
    """Return the mean of each metric over its prompts, and the interval. Metrics with the same prompts share a
    bootstrap. `values`: values per prompt, by metric and group of prompts; `joined`: the same, concatenated."""
    by_prompts: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for name in joined:
        by_prompts[tuple(values[name])].append(name)
    metrics: dict[str, float] = {}
    for names in by_prompts.values():
        lows, highs = prompt_intervals(np.stack([joined[name] for name in names], axis=1), seed)
        for name, low, high in zip(names, lows, highs, strict=True):
            base = name.removesuffix("/mean")
            metrics |= {name: float(joined[name].mean()), f"{base}/low": float(low), f"{base}/high": float(high)}
    return metrics


def _is_spread(name: str) -> bool:
    return name.startswith("std@") or name.endswith("/std")


def _subset_sizes(n: int) -> list[int]:
    powers = [2**exponent for exponent in range(1, n.bit_length()) if 2**exponent < n]
    return [*powers, n] if n > 1 else []


def _bootstrap_samples(
    values_UN: np.ndarray, votes_UN: np.ndarray | None, draws_BK: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, per prompt, (mean, std) of best, worst and maj over the draws. U prompts, N samples, B draws of K."""
    per_prompt: dict[str, list[np.ndarray]] = defaultdict(list)
    size = max(1, CHUNK_ELEMENTS // (draws_BK.shape[0] * max(draws_BK.shape[1], values_UN.shape[1])))
    for start in range(0, len(values_UN), size):
        chunk = slice(start, start + size)
        drawn_UBK = values_UN[chunk][:, draws_BK]
        results = {"best": drawn_UBK.max(axis=-1), "worst": drawn_UBK.min(axis=-1)}
        if votes_UN is not None:
            winner_UB1 = _majority(votes_UN[chunk], draws_BK)[..., None]
            results["maj"] = np.take_along_axis(drawn_UBK, winner_UB1, axis=-1)[..., 0]
        for name, result_UB in results.items():
            per_prompt[name].append(np.stack([result_UB.mean(axis=1), result_UB.std(axis=1)]))
    joined = {name: np.concatenate(parts, axis=1) for name, parts in per_prompt.items()}
    return {name: (means_U, stds_U) for name, (means_U, stds_U) in joined.items()}


def _majority(votes_UN: np.ndarray, draws_BK: np.ndarray) -> np.ndarray:
    """Return [U, B]: index in each draw of the first sample with the most frequent vote."""
    prompts, n = votes_UN.shape
    # Votes of a prompt are mapped to the index of their first occurrence, so that counting needs n bins.
    local_UN = (votes_UN[:, :, None] == votes_UN[:, None, :]).argmax(axis=-1)
    drawn_UBK = local_UN[:, draws_BK]
    bins = np.arange(prompts * len(draws_BK)).reshape(prompts, -1, 1) * n + drawn_UBK
    counts = np.bincount(bins.ravel(), minlength=prompts * len(draws_BK) * n)
    return counts[bins].argmax(axis=-1)
