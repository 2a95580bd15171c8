"""Logits of the output head: adjustments of each model family, softmax statistics, and the most likely tokens.

Logits are computed from hidden states in chunks, and never rounded to half precision: above 32, bfloat16 has a spacing
of 0.25, and rounding logits changes probabilities by up to 1.5 % between engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from verl.utils.buffer_sizes import CHUNK_BYTES

# Rows of a matmul tile.
_TILE_ROWS = 128
# Alignment of rows of logits in elements, for vector loads and matmul kernels.
_ROW_MULTIPLE = 16
# Lower bound of log-probs in p * log p: for p = 0, 0 * -inf would be NaN. exp(-1e4) is 0 in every float type, so the
# product is 0.
MIN_LOG_PROB = -1e4


def head_weights(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight [vocab, H] and bias [vocab] or None of the linear output layer."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"model.path: the output layer is a {type(linear).__name__}, but log-probs need an nn.Linear. Remove it "
            "from model.target_modules (model.exclude_modules), or use another model."
        )
    return linear.weight, linear.bias


def without_padded_rows(weight: torch.Tensor, start: int, vocab: int) -> torch.Tensor:
    """Return `weight`, the part of a head of `vocab` tokens from token `start` on, without its padded rows."""
    rows = max(0, vocab - start)
    return weight if rows >= len(weight) else weight[:rows]  # a slice would copy the gradient


def logit_head(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [N, H] to float32 logits [N, vocab] of the causal LM `model`."""
    weight, bias = head_weights(model)
    adjust = logit_adjustment(model.config)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        values = nn.functional.linear(hidden, weight, bias).float()
        return values if adjust is None else adjust(values)

    return logits


@dataclass(frozen=True)
class LogitAdjustment:
    """Adjustment of float32 logits after the output layer of some models: a scale, then a soft cap."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            values = values * self.scale
        return values if self.softcap is None else torch.tanh(values / self.softcap) * self.softcap


def logit_adjustment(config: Any) -> LogitAdjustment | None:
    """Return the logit adjustment of a model with this config; None if it has none."""
    config = config.get_text_config()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return None if softcap is None and scale == 1.0 else LogitAdjustment(scale, softcap)


def wide_product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return left @ right, multiplied in their dtype, with at least float32 results."""
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == wide:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=wide) if out is None else torch.mm(left, right, wide, out=out)
    return torch.mm(left.to(wide), right.to(wide), out=out)


# ---------------------------------------------------------------- softmax statistics


class RowStatistics(NamedTuple):
    """Softmax statistics of rows of logits, or of a part of the vocabulary; [rows] each; x = adjusted logit / T."""

    max_logit: torch.Tensor
    """max x."""
    sum_exp: torch.Tensor
    """sum of exp(x - max_logit)."""
    sum_exp_x: torch.Tensor
    """sum of exp(x - max_logit) (x - max_logit); not computed if the statistics were computed without entropy."""
    label_logit: torch.Tensor
    """x of the label; -inf if it is not in this part of the vocabulary."""

    def log_sum_exp(self) -> torch.Tensor:
        """log of the sum of exp(x)."""
        return self.max_logit + self.sum_exp.log()

    def log_probs(self) -> torch.Tensor:
        return (self.label_logit - self.max_logit) - self.sum_exp.log()

    def log_probs_of(self, x: torch.Tensor) -> torch.Tensor:
        """Log-probs of other tokens with logits x [rows, K]."""
        return (x - self.max_logit[:, None]) - self.sum_exp.log()[:, None]

    def entropy(self) -> torch.Tensor:
        return self.sum_exp.log() - self.sum_exp_x / self.sum_exp

    def all_reduce(self, group: dist.ProcessGroup) -> RowStatistics:
        """Return the statistics of the whole vocabulary, of which each rank of `group` has a part."""
        maxima = torch.stack([self.max_logit, self.label_logit])
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        max_logit, label_logit = maxima
        shift = self.max_logit - max_logit
        # Sums relative to the common maximum: exp(x - max_logit) is multiplied by exp(shift), and `shift` is added to
        # x - max_logit.
        sums = torch.stack([self.sum_exp, self.sum_exp_x + shift * self.sum_exp]) * shift.exp()
        dist.all_reduce(sums, group=group)
        sum_exp, sum_exp_x = sums
        return RowStatistics(max_logit, sum_exp, sum_exp_x, label_logit)


def rows_per_chunk(rows: int, vocab: int, element_size: int, device_type: str) -> int:
    """Return the rows per chunk: chunks of equal size within `CHUNK_BYTES`, a multiple of the tile size."""
    limit = max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // max(1, vocab * element_size))
    tile = _TILE_ROWS if limit >= _TILE_ROWS else 1
    limit -= limit % tile
    chunks = max(1, _ceil_div(rows, limit))
    return _ceil_div(rows, chunks * tile) * tile or 1


def write_statistics(
    out: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    adjust: LogitAdjustment,
    with_entropy: bool,
) -> None:
    """Write the `RowStatistics` of `logits` [rows, vocab], which may be overwritten, to `out` [4, rows] (see
    `empty_statistics`)."""
    if has_kernels(logits):
        from verl.models.fused_head_kernel import row_statistics

        row_statistics(logits, labels, out, temperature, adjust.scale, adjust.softcap, with_entropy)
    else:
        torch.stack(chunk_statistics(logits, labels, temperature, adjust, with_entropy), out=out)


def chunk_statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, adjust: LogitAdjustment, with_entropy: bool
) -> RowStatistics:
    """Return the statistics of `logits` [rows, vocab], which are overwritten; labels may be outside the vocabulary."""
    x = scale_logits_(logits, temperature, adjust)
    inside = (labels >= 0) & (labels < x.shape[1])
    label_logit = x.gather(1, torch.where(inside, labels, 0)[:, None])[:, 0]
    label_logit = torch.where(inside, label_logit, -torch.inf)
    max_logit = x.amax(dim=1)
    x.sub_(max_logit[:, None])
    if not with_entropy:
        return RowStatistics(max_logit, x.exp_().sum(dim=1), torch.zeros_like(max_logit), label_logit)
    exp_x = x.clamp_(min=MIN_LOG_PROB).exp()
    sum_exp_x = torch.bmm(exp_x[:, None], x[:, :, None])[:, 0, 0]
    return RowStatistics(max_logit, exp_x.sum(dim=1), sum_exp_x, label_logit)


def logits_at_labels(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, adjust: LogitAdjustment
) -> torch.Tensor:
    """Return adjusted logits / temperature of `labels` [rows, K]; -inf for labels outside the vocabulary."""
    inside = (labels >= 0) & (labels < logits.shape[1])
    x = scale_logits_(logits.gather(1, torch.where(inside, labels, 0)), temperature, adjust)
    return torch.where(inside, x, -torch.inf)


def empty_statistics(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a buffer [4, N] for the `RowStatistics` of `hidden` [N, H], one row per field.

    It is uninitialized, unless this rank's part of the vocabulary is empty (only padding), for which `logit_chunks`
    yields no chunks: then it contains the statistics of an empty vocabulary.
    """
    out = torch.empty(len(RowStatistics._fields), len(hidden), dtype=wide_dtype(hidden.dtype), device=hidden.device)
    if not len(weight):
        out.copy_(out.new_tensor([torch.finfo(out.dtype).min, 0.0, 0.0, -torch.inf])[:, None])
    return out


def logit_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (rows, logits [rows, vocab]), with logits of at least float32.

    All chunks share one buffer: the logits are valid until the next iteration. Its rows are padded to a multiple of
    `_ROW_MULTIPLE` elements.
    """
    vocab = len(weight)
    if not vocab:
        return
    width = _ceil_div(vocab, _ROW_MULTIPLE) * _ROW_MULTIPLE
    buffer = hidden.new_empty(min(chunk_rows, len(hidden)), width, dtype=wide_dtype(hidden.dtype))[:, :vocab]
    for begin in range(0, len(hidden), chunk_rows):
        rows = slice(begin, min(begin + chunk_rows, len(hidden)))
        logits = buffer[: rows.stop - begin]
        wide_product(hidden[rows], weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias)
        yield rows, logits


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def scale_logits_(logits: torch.Tensor, temperature: float, adjust: LogitAdjustment) -> torch.Tensor:
    """Return x = adjusted logits / temperature in float32 or float64. Logits of these dtypes are changed in place;
    others are copied."""
    x = logits.to(wide_dtype(logits.dtype))
    if adjust.scale != 1.0:
        x.mul_(adjust.scale)
    if adjust.softcap is not None:
        x.div_(adjust.softcap).tanh_().mul_(adjust.softcap)
    return x if temperature == 1.0 else x.div_(temperature)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def has_kernels(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


# ---------------------------------------------------------------- most likely tokens


class TopTokens(NamedTuple):
    """The most likely tokens at N positions."""

    log_probs: torch.Tensor
    """[N]: log-probs of the labels."""
    ids: torch.Tensor
    """[N, K] int64: the most likely tokens in descending order."""
    top_log_probs: torch.Tensor
    """[N, K]: their log-probs."""


@torch.no_grad()
def top_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    adjust: LogitAdjustment | None = None,
    chunk_rows: int | None = None,
    vocab_group: dist.ProcessGroup | None = None,
    first: int = 0,
) -> TopTokens:
    """Like `label_statistics` without gradients, and the K = `k` most likely tokens (all, if the head has fewer).

    `first`: with `vocab_group`, the first token id of this rank's part of the vocabulary.
    """
    adjust, width = adjust or LogitAdjustment(), min(k, len(weight))
    out = empty_statistics(hidden, weight)
    top, ids = out.new_empty(len(hidden), width), labels.new_empty(len(hidden), width)
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight), out.itemsize, hidden.device.type)
    for part, logits in logit_chunks(hidden.contiguous(), weight, bias, rows):
        top[part], ids[part] = logits.topk(width)  # the adjustment is monotonic
        write_statistics(out[:, part], logits, labels[part].contiguous(), temperature, adjust, with_entropy=False)
    top, statistics = scale_logits_(top, temperature, adjust), RowStatistics(*out)
    if vocab_group is not None:
        statistics = statistics.all_reduce(vocab_group)
        top, ids = _gather_top(top, ids + first, k, vocab_group)
    return TopTokens(statistics.log_probs(), ids, statistics.log_probs_of(top))


def _gather_top(
    top: torch.Tensor, ids: torch.Tensor, k: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top k over all ranks' parts of the vocabulary; a part may have fewer than `k` tokens."""
    missing = k - top.shape[1]
    top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
    ids = torch.nn.functional.pad(ids, (0, missing))
    tops = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
    all_ids = [torch.empty_like(ids) for _ in tops]
    dist.all_gather(tops, top.contiguous(), group=group)
    dist.all_gather(all_ids, ids.contiguous(), group=group)
    best, index = torch.cat(tops, dim=1).topk(k)
    return best, torch.cat(all_ids, dim=1).gather(1, index)
