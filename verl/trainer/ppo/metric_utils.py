"""Numbers about a training step: rewards, lengths, KL, timing, throughput. (Validation: validation_metrics.)

Only sampled tokens count (`response_mask`), and only rows that have any: fillers weigh nothing. What is said of answers
is said of whole trajectories. Of a batch by reference only the named columns are fetched.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from verl.algos.trajectories import Trajectories
from verl.protocol import DataProto
from verl.trainer.ppo.advantage import cut_answers
from verl.trainer.ppo.validation_metrics import bootstrap_metric, calc_maj_val, process_validation_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.torch_functional import masked_mean, masked_sum, masked_var

if TYPE_CHECKING:
    from verl.trainer.common.phases import Phases

__all__ = [
    "bootstrap_metric",
    "calc_maj_val",
    "compute_data_metrics",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "phase_metrics",
    "process_validation_metrics",
    "reduce_metrics",
    "reference_metrics",
    "without_nan",
]

# Generation makes response tokens; every other phase works on whole sequences; these two work on other data.
_GENERATION_PHASES = frozenset({"gen"})
_PHASES_OFF_BATCH = frozenset({"testing", "save_checkpoint"})


def compute_data_metrics(batch: DataProto, use_critic: bool = True) -> dict[str, float]:
    """Rewards, advantages, lengths and the KL to the reference of a batch after `compute_advantage`.

    An answer is clipped where its `finish_reason` says so: wherever the limit was that cut it. Without that column, and
    for prompts, one is clipped at `meta_info`'s `max_response_length` (`max_prompt_length`), or at the columns' width.
    The prompt of a trajectory is that of its first row, its answer the tokens of all its rows, ended as the last one.
    """
    columns, rows, whole = batch.batch, _Rows.of(batch), Trajectories.of(batch)
    real = whole.mask.bool().any(-1)
    scores = masked_sum(whole.join(columns["token_level_scores"]), whole.mask.bool(), axis=-1)
    rewards = scores
    if "token_level_rewards" in columns:
        rewards = masked_sum(whole.join(columns["token_level_rewards"]), whole.mask.bool(), axis=-1)
    metrics = _stats("critic/score", scores, real) | _stats("critic/rewards", rewards, real)
    metrics["reward/mean"] = metrics["critic/rewards/mean"]
    for name in ("advantages", "returns"):
        metrics |= _stats(f"critic/{name}", columns[name], rows.mask)
    if use_critic and "values" in columns:
        metrics |= _value_metrics(columns["values"], columns["returns"], rows.mask)
    metrics |= reference_metrics(batch)
    prompt_limit = batch.meta_info.get("max_prompt_length", rows.prompt_width)
    response_limit = batch.meta_info.get("max_response_length", rows.mask.shape[1])
    prompts, answers = rows.prompt[torch.from_numpy(whole.first_rows)], whole.sum(rows.response)
    cut = answers >= response_limit
    if "finish_reason" in batch.non_tensor_batch:
        cut = whole.at_end(cut_answers(batch))
    if "num_turns" in batch.non_tensor_batch:
        turns = torch.tensor([float(count) for count in batch.non_tensor_batch["num_turns"][whole.last_rows]])
        metrics |= _stats("num_turns", turns, real)
    metrics |= _length_metrics("prompt_length", prompts, real, prompts >= prompt_limit)
    return metrics | _length_metrics("response_length", answers, real, cut)


def reference_metrics(batch: DataProto) -> dict[str, float]:
    """How far the policy is from its reference; nothing without both log-probs."""
    columns = batch.batch
    if "old_log_probs" not in columns or "ref_log_prob" not in columns:
        return {}
    difference = columns["old_log_probs"] - columns["ref_log_prob"]
    return {"kl/mean": masked_mean(difference, columns["response_mask"].bool()).item()}


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


def phase_metrics(batch: DataProto, phases: Phases, n_gpus: int) -> dict[str, float]:
    """Time, memory and throughput of a step's phases, on the batch that it ended with."""
    metrics = compute_timing_metrics(batch, phases.seconds)
    metrics |= {f"memory_gb/{name}": value for name, value in phases.memory_gb.items()}
    return metrics | compute_throughout_metrics(batch, phases.seconds, n_gpus)


def without_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics without those that are not a number."""
    return {name: value for name, value in metrics.items() if not (isinstance(value, float) and math.isnan(value))}


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


def _length_metrics(name: str, lengths: torch.Tensor, real: torch.Tensor, cut: torch.Tensor) -> dict[str, float]:
    clipped = masked_mean(cut.float(), real).item()
    return _stats(name, lengths, real) | {f"{name}/clip_ratio": clipped}
