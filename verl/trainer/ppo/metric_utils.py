"""Numbers about a training step and a validation: rewards, lengths, divergences, timing, throughput, best-of-n.

Only sampled tokens count (`response_mask`), and only rows that have any: fillers weigh nothing. Of a batch by reference
only the named columns are fetched.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.metric import reduce_metrics
from verl.utils.torch_functional import masked_mean, masked_sum, masked_var

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "process_validation_metrics",
    "reduce_metrics",
]

# Generation makes response tokens; every other phase works on whole sequences; these two work on other data.
_GENERATION_PHASES = frozenset({"gen"})
_PHASES_OFF_BATCH = frozenset({"testing", "save_checkpoint"})
_MAX_LOG_RATIO = 20.0
_CHUNK_ELEMENTS = 4 * 2**20


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Rewards, advantages, lengths and divergences of a batch after `compute_advantage`.

    A row is clipped at `meta_info`'s `max_response_length` (`max_prompt_length`); without it, at the columns' width.
    """
    columns, rows = batch.batch, _Rows.of(batch)
    scores = masked_sum(columns["token_level_scores"], rows.mask, axis=-1)
    rewards = scores
    if "token_level_rewards" in columns:
        rewards = masked_sum(columns["token_level_rewards"], rows.mask, axis=-1)
    metrics = _stats("critic/score", scores, rows.real) | _stats("critic/rewards", rewards, rows.real)
    metrics["reward/mean"] = metrics["critic/rewards/mean"]
    for name in ("advantages", "returns"):
        metrics |= _stats(f"critic/{name}", columns[name], rows.mask)
    if use_critic and "values" in columns:
        metrics |= _value_metrics(columns["values"], columns["returns"], rows.mask)
    if "ref_log_prob" in columns:
        metrics["kl/mean"] = masked_mean(columns["old_log_probs"] - columns["ref_log_prob"], rows.mask).item()
    if "rollout_log_probs" in columns and "old_log_probs" in columns:
        metrics |= _rollout_metrics(columns["rollout_log_probs"], columns["old_log_probs"], rows.mask)
    prompt_limit = batch.meta_info.get("max_prompt_length", rows.prompt_width)
    response_limit = batch.meta_info.get("max_response_length", rows.mask.shape[1])
    metrics |= _length_metrics("prompt_length", rows.prompt, rows.real, prompt_limit)
    return metrics | _length_metrics("response_length", rows.response, rows.real, response_limit)


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/<phase>` and `timing_per_token_ms/<phase>`: over response tokens for generation, all tokens else."""
    rows = _Rows.of(batch)
    response_tokens = int(rows.response[rows.real].sum())
    metrics = {f"timing_s/{phase}": float(seconds) for phase, seconds in timing_raw.items()}
    for phase, seconds in timing_raw.items():
        tokens = response_tokens if phase in _GENERATION_PHASES else rows.tokens
        if tokens and phase not in _PHASES_OFF_BATCH:
            metrics[f"timing_per_token_ms/{phase}"] = 1000.0 * seconds / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds (`timing_raw["step"]`), and tokens per second and device."""
    if n_gpus < 1:
        raise ValueError(f"n_gpus: {n_gpus} devices cannot have done the step. Give the number of worker processes.")
    tokens, seconds = _Rows.of(batch).tokens, float(timing_raw["step"])
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / (seconds * n_gpus) if seconds > 0 else 0.0,
    }


def bootstrap_metric(
    data: Sequence[Any],
    subset_size: int,
    reduce_fns: Sequence[Callable[[Any], Any]],
    n_bootstrap: int = 1000,
    seed: int = 42,
) -> list[tuple[float, float]]:
    """Mean and standard deviation of each `reduce_fn` over random subsets of `data`, drawn with replacement."""
    draws = _draws(len(data), subset_size, n_bootstrap, seed)
    results = []
    for reduce_fn in reduce_fns:
        along_rows = _ALONG_ROWS.get(reduce_fn)
        if along_rows is not None:
            values = along_rows(np.asarray(data)[draws], axis=1)
        else:
            values = np.array([reduce_fn([data[i] for i in draw]) for draw in draws.tolist()])
        results.append((float(np.mean(values)), float(np.std(values))))
    return results


def calc_maj_val(data: Sequence[Mapping[str, Any]], vote_key: str, val_key: str) -> float:
    """The value of the answer that most samples agree on: `val_key` of the first sample with that `vote_key`.

    Of answers with equally many votes the one that came first wins.
    """
    winner = Counter(item[vote_key] for item in data).most_common(1)[0][0]
    return float(next(item[val_key] for item in data if item[vote_key] == winner))


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """data source → variable → metric, averaged over prompts. One entry per sample in every argument.

    Of a prompt with n samples: `mean@n`, and for n > 1 `std@n` and, for k = 2, 4, 8, … n, `best@k/mean`, `worst@k/mean`
    and (with a `pred` variable) `maj@k/mean`, each with its `/std`: what k samples would give, by bootstrap. Variables
    that are not numbers are left out, and so is a sample whose value is None or NaN.
    """
    for name, values in {"sample_uids": sample_uids, **infos_dict}.items():
        if len(values) != len(data_sources):
            raise ValueError(f"{name}: {len(values)} entries for {len(data_sources)} samples. Give one per sample.")
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


@dataclass(frozen=True)
class _Rows:
    """Which tokens and rows of a batch count, and how long the rows are."""

    mask: torch.Tensor
    """[batch, response], bool: tokens that the model sampled."""
    real: torch.Tensor
    """[batch], bool: rows that have any."""
    prompt: torch.Tensor
    """[batch]: prompt tokens."""
    response: torch.Tensor
    """[batch]: response tokens, those of tools and environments included."""
    prompt_width: int

    @classmethod
    def of(cls, batch: DataProto) -> _Rows:
        mask = batch.batch["response_mask"].bool()
        lengths = getattr(batch, "lengths", None)
        if lengths is not None:  # a batch by reference knows them without its attention mask
            prompt, response = torch.tensor(lengths.prompt), torch.tensor(lengths.response)
            return cls(mask, mask.any(-1), prompt, response, lengths.widths[0])
        attention = batch.batch["attention_mask"]
        width = attention.shape[1] - mask.shape[1]
        return cls(mask, mask.any(-1), attention[:, :width].sum(-1), attention[:, width:].sum(-1), width)

    @property
    def tokens(self) -> int:
        return int((self.prompt + self.response)[self.real].sum())


def _stats(name: str, values: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Mean, max and min of `values` where `mask` (bool, same shape) is on; zeros where it is nowhere on."""
    chosen = values[mask].double()
    if not chosen.numel():
        chosen = torch.zeros(1)
    return {
        f"{name}/mean": chosen.mean().item(),
        f"{name}/max": chosen.max().item(),
        f"{name}/min": chosen.min().item(),
    }


def _value_metrics(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    unexplained = masked_var(returns - values, mask) / (masked_var(returns, mask) + 1e-5)
    explained = 1.0 - unexplained.item() if mask.any() else 0.0
    return _stats("critic/values", values, mask) | {"critic/vf_explained_var": explained}


def _rollout_metrics(rollout: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far the engine that sampled is from the one that trains; both [batch, response].

    KL(rollout ‖ training) by the estimator e^d - 1 - d with d = training - rollout: never negative, small variance.
    """
    log_ratio = old - rollout
    bounded = log_ratio.clamp(max=_MAX_LOG_RATIO)
    differences = _stats("rollout/log_prob_diff", log_ratio.abs(), mask)
    return {
        "rollout/log_prob_diff_mean": differences["rollout/log_prob_diff/mean"],
        "rollout/log_prob_diff_max": differences["rollout/log_prob_diff/max"],
        "rollout/mismatch_kl": masked_mean(torch.expm1(bounded) - bounded, mask).item(),
    }


def _length_metrics(name: str, lengths: torch.Tensor, real: torch.Tensor, limit: int) -> dict[str, float]:
    clipped = masked_mean((lengths >= limit).float(), real).item()
    return _stats(name, lengths, real) | {f"{name}/clip_ratio": clipped}


# Reductions that numpy does for all subsets at once.
_ALONG_ROWS: dict[Any, Callable[..., Any]] = {
    max: np.max,
    min: np.min,
    sum: np.sum,
    **{reduction: reduction for reduction in (np.max, np.min, np.sum, np.mean, np.median, np.std)},
}


def _draws(n: int, subset_size: int, n_bootstrap: int, seed: int) -> np.ndarray:
    """[n_bootstrap, subset_size] indices below `n`."""
    if n < 1 or subset_size < 1 or n_bootstrap < 1:
        raise ValueError(
            f"bootstrap: {n_bootstrap} subsets of {subset_size} out of {n} samples cannot be drawn. "
            "All three must be at least 1."
        )
    return np.random.default_rng(seed).integers(0, n, size=(n_bootstrap, subset_size))


def _numbers(values: Sequence[Any]) -> np.ndarray | None:
    """The values as float64, NaN for None; None when they are something other than numbers."""
    kinds = set(map(type, values)) - {type(None)}
    if not kinds or not all(issubclass(kind, bool | int | float | np.number | np.bool_) for kind in kinds):
        return None
    return np.array(values, dtype=np.float64)


def _vote_codes(votes: Sequence[Any]) -> np.ndarray:
    """Equal votes get equal numbers."""
    codes: dict[str, int] = {}
    return np.array([codes.setdefault(repr(vote), len(codes)) for vote in votes], dtype=np.int64)


def _prompt_metrics(
    prompts: Sequence[Sequence[int]], numbers: np.ndarray, votes: np.ndarray | None, seed: int
) -> dict[str, float]:
    """Metrics of one variable over prompts, given the sample rows of each; prompts of equal n are taken together."""
    by_count: dict[int, list[np.ndarray]] = defaultdict(list)
    for rows in map(np.asarray, prompts):
        measured = rows[~np.isnan(numbers[rows])]
        by_count[len(measured)].append(measured)
    by_count.pop(0, None)
    metrics: dict[str, float] = {}
    for n, groups in sorted(by_count.items()):
        rows_UN = np.stack(groups)
        values_UN = numbers[rows_UN]
        metrics[f"mean@{n}"] = float(values_UN.mean())
        if n > 1:
            metrics[f"std@{n}"] = float(values_UN.std(axis=1).mean())
        for k in _subset_sizes(n):
            draws_BK = _draws(n, k, 1000, seed)
            found = _bootstrap_prompts(values_UN, None if votes is None else votes[rows_UN], draws_BK)
            for name, (mean, std) in found.items():
                metrics |= {f"{name}@{k}/mean": mean, f"{name}@{k}/std": std}
    return metrics


def _subset_sizes(n: int) -> list[int]:
    powers = [2**exponent for exponent in range(1, n.bit_length()) if 2**exponent < n]
    return [*powers, n] if n > 1 else []


def _bootstrap_prompts(
    values_UN: np.ndarray, votes_UN: np.ndarray | None, draws_BK: np.ndarray
) -> dict[str, tuple[float, float]]:
    """best, worst and maj: (mean, std) over draws, averaged over prompts. U prompts, N samples, B draws of K."""
    per_prompt: dict[str, list[np.ndarray]] = defaultdict(list)
    size = max(1, _CHUNK_ELEMENTS // (draws_BK.shape[0] * max(draws_BK.shape[1], values_UN.shape[1])))
    for start in range(0, len(values_UN), size):
        chunk = slice(start, start + size)
        drawn_UBK = values_UN[chunk][:, draws_BK]
        results = {"best": drawn_UBK.max(axis=-1), "worst": drawn_UBK.min(axis=-1)}
        if votes_UN is not None:
            winner_UB1 = _majority(votes_UN[chunk], draws_BK)[..., None]
            results["maj"] = np.take_along_axis(drawn_UBK, winner_UB1, axis=-1)[..., 0]
        for name, result_UB in results.items():
            per_prompt[name].append(np.stack([result_UB.mean(axis=1), result_UB.std(axis=1)]))
    averaged = {name: np.concatenate(parts, axis=1).mean(axis=1) for name, parts in per_prompt.items()}
    return {name: (float(mean), float(std)) for name, (mean, std) in averaged.items()}


def _majority(votes_UN: np.ndarray, draws_BK: np.ndarray) -> np.ndarray:
    """[U, B] place in each draw of the first sample with the most frequent vote."""
    prompts, n = votes_UN.shape
    # Votes of a prompt renamed to the place of their first occurrence, so that counting needs n bins.
    local_UN = (votes_UN[:, :, None] == votes_UN[:, None, :]).argmax(axis=-1)
    drawn_UBK = local_UN[:, draws_BK]
    bins = np.arange(prompts * len(draws_BK)).reshape(prompts, -1, 1) * n + drawn_UBK
    counts = np.bincount(bins.ravel(), minlength=prompts * len(draws_BK) * n)
    return counts[bins].argmax(axis=-1)
