"""Log-probabilities and entropies straight from hidden states: logits exist for a chunk of rows at a time, never whole.

The backward pass computes each chunk's logits again and turns them into their gradient, so a call keeps only its inputs
and a few numbers per row. On CUDA the passes over logits are Triton kernels, elsewhere plain torch.

Logits are never rounded to half precision: at 32 and above bfloat16 knows only every fourth of a unit, and two engines
that round on their own disagree by 1.5 % about the probability of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from verl.models.heads import LogitAdjustment, wide_product

# One chunk of float32 logits. On CUDA large enough that the matmuls run at full speed and that adding up the weight's
# gradient, a read and a write of float32 [vocab, H] per chunk, stays small beside them. On CPU the same holds from
# 32 MB on, and beyond 64 MB the passes over the chunk get slower.
CHUNK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
# Rows of the tiles that matmul kernels work in.
_TILE_ROWS = 128
# Rows of logits begin at multiples of so many elements, which vector loads and matmul kernels want.
_ROW_MULTIPLE = 16
# exp of it is 0 in every float type, and 0 times it is 0: stands for -inf, which would give NaN.
_LOWEST_LOG_P = -1e4


class RowStatistics(NamedTuple):
    """The softmax of rows of logits, or of a part of their vocabulary; [rows] each, of x = adjusted logit / T."""

    highest: torch.Tensor
    """max x."""
    total: torch.Tensor
    """sum of exp(x - highest)."""
    weighted: torch.Tensor
    """sum of exp(x - highest) (x - highest); unset unless the entropy is wanted."""
    label: torch.Tensor
    """x of the label; -inf when it is not in this part."""

    def log_total(self) -> torch.Tensor:
        """log of the sum of exp(x)."""
        return self.highest + self.total.log()

    def log_probs(self) -> torch.Tensor:
        return (self.label - self.highest) - self.total.log()

    def log_probs_of(self, x: torch.Tensor) -> torch.Tensor:
        """Of others than the label: x [rows, K]."""
        return (x - self.highest[:, None]) - self.total.log()[:, None]

    def entropy(self) -> torch.Tensor:
        return self.total.log() - self.weighted / self.total

    def across(self, group: dist.ProcessGroup) -> RowStatistics:
        """The statistics of the whole vocabulary, of which each rank of `group` has a part; the same on every rank."""
        tops = torch.stack([self.highest, self.label])
        dist.all_reduce(tops, dist.ReduceOp.MAX, group)
        lower = self.highest - tops[0]
        sums = torch.stack([self.total, self.weighted + lower * self.total]) * lower.exp()
        dist.all_reduce(sums, group=group)
        return RowStatistics(tops[0], sums[0], sums[1], tops[1])


def label_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    *,
    bias: torch.Tensor | None = None,
    adjust: LogitAdjustment | None = None,
    chunk_rows: int | None = None,
    shared_by: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of `labels` [N] at `hidden` [N, H] under the head `weight` [vocab, H], and the entropy: [N] each.

    Labels may be [N, K], and their log-probabilities are then; -inf for those that no row of the head stands for.
    The inputs are multiplied in their dtype; logits and all that follows are float32 (float64 for such inputs).
    `adjust` comes before `temperature`. Gradients reach `hidden`, `weight` and `bias`; there are no second derivatives.
    Where the vocabulary is shared by the ranks of a group, `weight` and `bias` are this rank's part (maybe none of it),
    labels count from its beginning, and hidden states are the same on every rank, as are their gradients.
    """
    rows = chunk_rows or rows_per_chunk(len(hidden), len(weight), _wide(hidden.dtype).itemsize, hidden.device.type)
    return _LabelStatistics.apply(
        hidden, weight, bias, labels, temperature, adjust or LogitAdjustment(), with_entropy, rows, shared_by
    )


def rows_per_chunk(rows: int, vocab: int, element_size: int, device_type: str) -> int:
    """How many of `rows` rows of logits to hold at once: chunks of one size, within the budget, whole tiles."""
    most = max(1, CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // max(1, vocab * element_size))
    tile = _TILE_ROWS if most >= _TILE_ROWS else 1
    most -= most % tile
    chunks = max(1, -(-rows // most))
    return -(-rows // (chunks * tile)) * tile or 1


def chunk_bytes(rows: int, vocab: int, element_size: int, device_type: str) -> int:
    """The most that a chunk of the logits of up to `rows` rows takes; `element_size` is that of what the head
    multiplies."""
    return min(rows * vocab * max(4, element_size), CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]))


def statistics_into(
    planes: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
    adjust: LogitAdjustment,
    with_entropy: bool,
) -> None:
    """`RowStatistics` of `logits` [rows, vocab], which may be overwritten, into its planes [4, rows]."""
    if _has_kernels(logits):
        from verl.models.kernels.label_statistics import row_statistics

        row_statistics(logits, labels, planes, temperature, adjust.scale, adjust.softcap, with_entropy)
    else:
        torch.stack(chunk_statistics(logits, labels, temperature, adjust, with_entropy), out=planes)


def chunk_statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, adjust: LogitAdjustment, with_entropy: bool
) -> RowStatistics:
    """The statistics of `logits` [rows, vocab], which are overwritten; labels may lie outside this vocabulary."""
    x = scaled_(logits, temperature, adjust)
    inside = (labels >= 0) & (labels < x.shape[1])
    label = x.gather(1, torch.where(inside, labels, 0)[:, None])[:, 0]
    label = torch.where(inside, label, -torch.inf)
    highest = x.amax(dim=1)
    x.sub_(highest[:, None])
    if not with_entropy:
        return RowStatistics(highest, x.exp_().sum(dim=1), torch.zeros_like(highest), label)
    share = x.clamp_(min=_LOWEST_LOG_P).exp()
    weighted = torch.bmm(share[:, None], x[:, :, None])[:, 0, 0]
    return RowStatistics(highest, share.sum(dim=1), weighted, label)


def at_labels(logits: torch.Tensor, labels: torch.Tensor, temperature: float, adjust: LogitAdjustment) -> torch.Tensor:
    """Adjusted logits / temperature of `labels` [rows, K]; -inf where they lie outside this vocabulary."""
    inside = (labels >= 0) & (labels < logits.shape[1])
    found = scaled_(logits.gather(1, torch.where(inside, labels, 0)), temperature, adjust)
    return torch.where(inside, found, -torch.inf)


def chunk_gradients_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> torch.Tensor:
    """The gradient with respect to `logits` [rows, vocab], which are float32 or float64, in their place; labels and
    their gradients [rows] or [rows, K], all others [rows].

    With p the softmax: d_log_prob (1[label] - p) - d_entropy p (log p + entropy), times what adjustment and
    temperature do to a small change. Log-totals and entropies are those of the whole vocabulary.
    """
    x = scaled_(logits, temperature, adjust)
    slope = None
    if adjust.softcap is not None:
        slope = (x * (temperature / adjust.softcap)).square_().neg_().add_(1.0)
    d_log_probs = d_log_probs.reshape(len(x), -1) * (adjust.scale / temperature)
    x.sub_(log_total[:, None])
    if d_entropy is None or entropy is None:
        x.exp_().mul_(-d_log_probs.sum(dim=1, keepdim=True))
    else:
        d_entropy = d_entropy * (adjust.scale / temperature)
        p = x.clamp_(min=_LOWEST_LOG_P).exp()
        x.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_log_probs.sum(dim=1, keepdim=True)).mul_(p).neg_()
    _add_at_(x, labels, d_log_probs)
    return x if slope is None else x.mul_(slope)


def _kernel_gradients(
    logits: torch.Tensor,
    d_logits: torch.Tensor,
    labels: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> None:
    """The same into `d_logits`, which may be `logits`, by a kernel that knows of one label per row: of several it is
    told none, and what it wrote at their places is written anew."""
    from verl.models.kernels.label_statistics import logit_gradients

    statistics = (labels, log_total, entropy, d_log_probs, d_entropy)
    at_several = None
    if labels.dim() > 1:
        at_several = gradients_at_labels(logits, *statistics, temperature, adjust)
        nowhere = labels.new_full((len(labels),), -1)
        statistics = (nowhere, log_total, entropy, d_log_probs.sum(dim=1), d_entropy)
    logit_gradients(logits, d_logits, *statistics, temperature, adjust.scale, adjust.softcap)
    if at_several is not None:
        columns, found = at_several
        d_logits.scatter_(1, columns, found.to(d_logits.dtype))


def gradients_at_labels(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor | None,
    d_log_probs: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
    adjust: LogitAdjustment,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of `logits` [rows, vocab], among them those of all `labels` [rows, K], and `chunk_gradients_` there:
    [rows, K] each. At a token that is nearly certain -p and the label's part all but cancel: rounding comes after the
    sum."""
    inside = (labels >= 0) & (labels < logits.shape[1])
    # A column that comes several times has its sum at the first of its places, and every place says the same.
    columns, order = torch.where(inside, labels, 0).sort(dim=1)
    first = torch.searchsorted(columns, columns)
    places = torch.where(inside.gather(1, order), first, -1)
    found, pulls = logits.gather(1, columns), d_log_probs.gather(1, order)
    found = chunk_gradients_(found, places, log_total, entropy, pulls, d_entropy, temperature, adjust)
    return columns, found.gather(1, first)


def _add_at_(x: torch.Tensor, labels: torch.Tensor, values: torch.Tensor) -> None:
    """x[row, label] += value, of `labels` [rows] or [rows, K] that lie inside, `values` [rows, K]."""
    labels = labels.reshape(len(x), -1)
    inside = (labels >= 0) & (labels < x.shape[1])
    x.scatter_add_(1, torch.where(inside, labels, 0), torch.where(inside, values, 0.0).to(x.dtype))


class _LabelStatistics(torch.autograd.Function):
    """hidden, weight, bias -> log_probs, entropy (None when not wanted)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        adjust: LogitAdjustment,
        with_entropy: bool,
        chunk_rows: int,
        shared_by: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, labels = hidden.contiguous(), labels.contiguous()
        planes = empty_statistics(hidden, weight)
        several = planes.new_full(labels.shape, -torch.inf) if labels.dim() > 1 else None
        for rows, logits in logit_chunks(hidden, weight, bias, chunk_rows):
            one = labels[rows]
            if several is not None:
                several[rows] = at_labels(logits, one, temperature, adjust)
                one = one.new_full((len(one),), -1)
            statistics_into(planes[:, rows], logits, one, temperature, adjust, with_entropy)
        statistics = RowStatistics(*planes)
        if shared_by is not None:
            statistics = statistics.across(shared_by)
            if several is not None:
                dist.all_reduce(several, dist.ReduceOp.MAX, shared_by)
        entropy = statistics.entropy() if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, labels, statistics.log_total(), entropy)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.adjust, ctx.chunk_rows, ctx.shared_by = temperature, adjust, chunk_rows, shared_by
        return statistics.log_probs() if several is None else statistics.log_probs_of(several), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_probs: torch.Tensor | None, d_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, labels, log_total, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        totals = _Totals(hidden, weight, bias, wanted, one_chunk=len(hidden) <= ctx.chunk_rows)
        d_log_probs = log_total.new_zeros(labels.shape) if d_log_probs is None else d_log_probs.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        for rows, logits in logit_chunks(hidden, weight, bias, ctx.chunk_rows):
            statistics = (
                labels[rows],
                log_total[rows],
                None if entropy is None else entropy[rows],
                d_log_probs[rows],
                None if d_entropy is None else d_entropy[rows],
                ctx.temperature,
                ctx.adjust,
            )
            if _has_kernels(logits):
                d_logits = totals.place(logits)
                _kernel_gradients(logits, d_logits, *statistics)
            else:
                d_logits = chunk_gradients_(logits, *statistics).to(hidden.dtype)
            totals.add(rows, d_logits)
        d_hidden, d_weight, d_bias = totals.gradients()
        if ctx.shared_by is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=ctx.shared_by)
        return (d_hidden, d_weight, d_bias, None, None, None, None, None, None)


class _Totals:
    """The gradients of hidden, weight and bias while chunks of the logits' gradient come in; unwanted ones are None."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
        one_chunk: bool,
    ) -> None:
        self._hidden, self._weight = hidden, weight
        # Sums over chunks are float32 and rounded once; what is no sum needs no wider place.
        wide = weight.dtype if one_chunk else torch.promote_types(weight.dtype, torch.float32)
        self._d_hidden = torch.empty_like(hidden) if wanted[0] else None
        self._d_weight = torch.empty_like(weight, dtype=wide) if wanted[1] else None
        self._d_bias = torch.zeros_like(bias, dtype=torch.promote_types(wide, torch.float32)) if wanted[2] else None
        self._begun = False
        self._place: torch.Tensor | None = None

    def place(self, logits: torch.Tensor) -> torch.Tensor:
        """Where a kernel writes the gradient of these logits, in the dtype it is multiplied in."""
        if logits.dtype == self._hidden.dtype:
            return logits
        if self._place is None:  # the first chunk is the largest
            self._place = self._hidden.new_empty(len(logits), logits.stride(0))
        return self._place[: len(logits), : logits.shape[1]]

    def add(self, rows: slice, d_logits: torch.Tensor) -> None:
        if self._d_hidden is not None:
            torch.mm(d_logits, self._weight, out=self._d_hidden[rows])
        if self._d_weight is not None:
            _add_product(self._d_weight, d_logits.t(), self._hidden[rows], beta=1.0 if self._begun else 0.0)
        if self._d_bias is not None:
            self._d_bias.add_(d_logits.sum(dim=0, dtype=self._d_bias.dtype))
        self._begun = True

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        for total in (self._d_hidden, self._d_weight):
            if total is not None and not self._begun:
                total.zero_()
        dtype = self._weight.dtype
        sums = (None if total is None else total.to(dtype) for total in (self._d_weight, self._d_bias))
        return (self._d_hidden, *sums)


def empty_statistics(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The planes of `RowStatistics` for `hidden` [N, H]: [4, N], to be filled; of an empty vocabulary, its own."""
    planes = torch.empty(len(RowStatistics._fields), len(hidden), dtype=_wide(hidden.dtype), device=hidden.device)
    if not len(weight):  # padding of the vocabulary, all of it
        planes.copy_(planes.new_tensor([torch.finfo(planes.dtype).min, 0.0, 0.0, -torch.inf])[:, None])
    return planes


def logit_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their logits, at least float32; each chunk is written over the one before."""
    vocab = len(weight)
    if not vocab:
        return
    width = -(-vocab // _ROW_MULTIPLE) * _ROW_MULTIPLE
    place = hidden.new_empty(min(chunk_rows, len(hidden)), width, dtype=_wide(hidden.dtype))[:, :vocab]
    for begin in range(0, len(hidden), chunk_rows):
        rows = slice(begin, min(begin + chunk_rows, len(hidden)))
        logits = place[: rows.stop - begin]
        wide_product(hidden[rows], weight.t(), out=logits)
        if bias is not None:
            logits.add_(bias)
        yield rows, logits


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, beta: float) -> None:
    """total = beta total + left @ right, multiplied in the factors' dtype and added in the total's."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def scaled_(logits: torch.Tensor, temperature: float, adjust: LogitAdjustment) -> torch.Tensor:
    """Adjusted logits / temperature, at least float32; in place when `logits` are."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if adjust.scale != 1.0:
        x.mul_(adjust.scale)
    if adjust.softcap is not None:
        x.div_(adjust.softcap).tanh_().mul_(adjust.softcap)
    return x if temperature == 1.0 else x.div_(temperature)


def _has_kernels(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)
