"""What several answers per prompt say about a model: mean, best, worst, majority and pass@k, with their uncertainty."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 1000
_INTERVAL = (0.025, 0.975)
_CHUNK_ELEMENTS = 4 * 2**20


def process_validation_metrics(
    data_sources: Sequence[str], sample_uids: Sequence[str], infos_dict: Mapping[str, Sequence[Any]], seed: int = 42
) -> dict[str, dict[str, dict[str, float]]]:
    """data source → variable → metric, averaged over prompts. One entry per sample in every argument.

    Of a prompt with n samples: `mean@n`, and for n > 1 `std@n` and, for k = 2, 4, 8, … n, `best@k/mean`, `worst@k/mean`
    and (with a `pred` variable) `maj@k/mean`, each with its `/std`: what k samples would give, by bootstrap. For n > 1
    and a variable that is nowhere above 1, `pass@k` (k = 1 too): the chance that k samples hold one with the value 1,
    without bias. Each has `/low` and `/high`, the 95 % interval of other prompts of the same kind (bootstrap over
    prompts). Variables that are not numbers are left out, and so is a sample whose value is None or NaN: its prompt
    counts in `mean@n` with the others, and in what k samples give where k of them are left.
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


def pass_at_k(passed: np.ndarray, k: int) -> np.ndarray:
    """The chance that one of `k` samples passes, per prompt: [prompts, n] of true or false → [prompts].

    1 - C(n - c, k) / C(n, k) where c of n passed: without bias (arXiv 2107.03374).
    """
    n = passed.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k}: {n} samples per prompt. k must be from 1 to {n}.")
    by_count = np.array([1.0 - math.comb(n - count, k) / math.comb(n, k) for count in range(n + 1)])
    return by_count[np.count_nonzero(passed, axis=1)]


def prompt_intervals(values_UM: np.ndarray, seed: int = 42) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of each column's mean over prompts: [prompts, metrics] → low, high [metrics]."""
    prompts = len(values_UM)
    rng = np.random.default_rng(seed)
    size = max(1, _CHUNK_ELEMENTS // prompts)
    means = []
    for start in range(0, _RESAMPLES, size):
        draws_BU = rng.integers(0, prompts, size=(min(size, _RESAMPLES - start), prompts))
        offsets = np.arange(len(draws_BU))[:, None] * prompts
        # How often each prompt was drawn: the mean over a resample is then one row of a matrix product.
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
    """Metrics of one variable over prompts, given the sample rows of each."""
    # Those with as many samples, of which as many have a value, are worked on together.
    alike: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    for rows in map(np.asarray, prompts):
        measured = rows[~np.isnan(numbers[rows])]
        if len(measured):
            alike[len(rows), len(measured)].append(measured)
    if not alike:
        return {}
    are_scores = max(numbers[rows].max() for groups in alike.values() for rows in groups) <= 1.0
    found: dict[str, dict[tuple[int, int], np.ndarray]] = defaultdict(dict)
    for counts, groups in sorted(alike.items()):
        rows_UN = np.stack(groups)
        votes_UN = None if votes is None else votes[rows_UN]
        for name, values_U in _per_prompt(numbers[rows_UN], votes_UN, counts[0], are_scores, seed).items():
            found[name][counts] = values_U
    joined = {name: np.concatenate(list(parts.values())) for name, parts in found.items()}
    spreads = {name: float(values_U.mean()) for name, values_U in joined.items() if _is_spread(name)}
    return spreads | _with_intervals(found, {n: v for n, v in joined.items() if not _is_spread(n)}, seed)


def _per_prompt(
    values_UN: np.ndarray, votes_UN: np.ndarray | None, n: int, are_scores: bool, seed: int
) -> dict[str, np.ndarray]:
    """Metric → its value for each of U prompts. Of `n` samples each, N have a value.

    The mean is over those; what k samples would give can only be told of prompts with k of them.
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
    found: Mapping[str, Mapping[tuple[int, int], np.ndarray]], joined: Mapping[str, np.ndarray], seed: int
) -> dict[str, float]:
    """The mean of each metric over its prompts, and the interval of that; metrics of the same prompts at once."""
    by_prompts: dict[tuple[tuple[int, int], ...], list[str]] = defaultdict(list)
    for name in joined:
        by_prompts[tuple(found[name])].append(name)
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
    """best, worst and maj: (mean, std) over draws, per prompt. U prompts, N samples, B draws of K."""
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
    joined = {name: np.concatenate(parts, axis=1) for name, parts in per_prompt.items()}
    return {name: (means_U, stds_U) for name, (means_U, stds_U) in joined.items()}


def _majority(votes_UN: np.ndarray, draws_BK: np.ndarray) -> np.ndarray:
    """[U, B] place in each draw of the first sample with the most frequent vote."""
    prompts, n = votes_UN.shape
    # Votes of a prompt renamed to the place of their first occurrence, so that counting needs n bins.
    local_UN = (votes_UN[:, :, None] == votes_UN[:, None, :]).argmax(axis=-1)
    drawn_UBK = local_UN[:, draws_BK]
    bins = np.arange(prompts * len(draws_BK)).reshape(prompts, -1, 1) * n + drawn_UBK
    counts = np.bincount(bins.ravel(), minlength=prompts * len(draws_BK) * n)
    return counts[bins].argmax(axis=-1)
