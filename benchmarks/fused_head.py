"""Log-probs and entropies from hidden states: the fused head compared with full logits and checkpointed chunks.

    python benchmarks/fused_head.py [--tokens 8192] [--more-tokens 32768] [--sizes 896 1536] [--vocab 151936] [--json F]

Three implementations: `fused` (verl.models.fused_head), `full logits` (linear, float32, log_softmax) and `checkpointed`
(the same on chunks of rows under torch.utils.checkpoint). Peak is the memory allocated in addition to the inputs.
`of_matmul` is the time of the matmuls alone (one for the forward pass, three with the backward pass, at the rate
measured here) as a share of the measured time; an implementation that does not store logits computes them twice and can
reach 75 % with the backward pass. `rounding` is the relative difference of the weight's gradient from float64 on
512 rows. On CUDA a second table compares the bandwidth of the two kernels with that of a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _report import report
from _shapes import copy_bandwidth
from algos import measure, peak_bytes
from torch.utils.checkpoint import checkpoint

from verl.models.fused_head import label_statistics
from verl.models.logits import rows_per_chunk

Statistics = tuple[torch.Tensor, torch.Tensor]
TEMPERATURE = 0.8
PRECISION_ROWS = 512


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 256)
    parser.add_argument("--more-tokens", type=int, default=32_768 if cuda else 1024, help="for the fused head alone")
    parser.add_argument("--sizes", type=int, nargs="+", default=[896, 1536] if cuda else [128])
    parser.add_argument("--vocab", type=int, default=151_936 if cuda else 32_000)
    parser.add_argument("--chunk-mb", type=int, nargs="+", default=[], help="also the fused head with these chunks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default=None, help="append the JSON line to this file")
    args = parser.parse_args()
    table = []
    for size in args.sizes:
        case = Case(args.tokens, size, args.vocab, args.repeats)
        table += [row for name, implementation in IMPLEMENTATIONS.items() for row in case.rows(name, implementation)]
        for megabytes in args.chunk_mb:
            rows = max(1, megabytes * 2**20 // (args.vocab * 4))
            implementation = lambda *inputs, rows=rows: fused(*inputs, chunk_rows=rows)  # noqa: E731
            table += case.rows(f"fused, {megabytes} MB chunks", implementation)
        table += Case(args.more_tokens, size, args.vocab, args.repeats).rows("fused", fused)
    dtype = "bfloat16 on cuda" if cuda else "float32 on cpu"
    report(f"head over {args.vocab} tokens, {dtype}", table, args.json)
    if cuda:
        report("passes over one chunk of logits", kernel_rows(args.vocab, args.repeats), args.json)


def fused(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_rows: int | None = None
) -> Statistics:
    log_probs, entropy = label_statistics(hidden, weight, labels, TEMPERATURE, True, chunk_rows=chunk_rows)
    assert entropy is not None
    return log_probs, entropy


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Statistics:
    logits = torch.nn.functional.linear(hidden, weight)
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / TEMPERATURE, dim=-1)
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def checkpointed(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Statistics:
    rows = rows_per_chunk(len(hidden), len(weight), hidden.element_size(), hidden.device.type)
    parts = [
        checkpoint(full_logits, chunk, weight, targets, use_reentrant=False, preserve_rng_state=False)
        for chunk, targets in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs, entropy


IMPLEMENTATIONS: dict[str, Callable[..., Statistics]] = {
    "fused": fused,
    "full logits": full_logits,
    "checkpointed": checkpointed,
}


class Case:
    """Hidden states and a head of one shape, and the time that its matmul takes."""

    def __init__(self, tokens: int, size: int, vocab: int, repeats: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        self.tokens, self.repeats = tokens, repeats
        self.hidden = torch.randn(tokens, size, device=self.device).to(dtype).requires_grad_()
        self.weight = (torch.randn(vocab, size, device=self.device) * 3 * size**-0.5).to(dtype).requires_grad_()
        self.labels = torch.randint(0, vocab, (tokens,), device=self.device)
        rows = rows_per_chunk(tokens, vocab, self.hidden.element_size(), self.device.type)
        chunk, output = self.hidden.detach()[:rows], self.hidden.new_empty(min(rows, tokens), vocab)
        matmul = lambda: torch.mm(chunk, self.weight.detach().t(), out=output)  # noqa: E731
        matmul()
        self.matmul_s = measure(matmul, 2 * repeats, self.device)[0] * tokens / len(chunk)

    def rows(self, name: str, implementation: Callable[..., Statistics]) -> list[dict[str, object]]:
        inputs = (self.hidden, self.weight, self.labels)

        @torch.no_grad()
        def forward() -> None:
            implementation(*inputs)

        def forward_backward() -> None:
            log_probs, entropy = implementation(*inputs)
            (log_probs + 0.01 * entropy).mean().backward()
            self.hidden.grad = self.weight.grad = None

        table = []
        for mode, run, matmuls in (("forward", forward, 1), ("+ backward", forward_backward, 3)):
            run()
            seconds, _ = measure(run, self.repeats, self.device)
            row: dict[str, object] = {
                "implementation": name,
                "pass": mode,
                "tokens": self.tokens,
                "hidden": self.hidden.shape[1],
                "ms": round(seconds * 1e3, 2),
                "tokens_per_s": round(self.tokens / seconds),
                "of_matmul": round(matmuls * self.matmul_s / seconds, 3),
                "peak_GB": round(peak_bytes(run, self.device) / 1e9, 3),
            }
            if matmuls > 1:
                row["rounding"] = f"{self.rounding(implementation):.1e}"
            table.append(row)
        return table

    def rounding(self, implementation: Callable[..., Statistics]) -> float:
        rows = min(PRECISION_ROWS, self.tokens)

        def gradient(implementation: Callable[..., Statistics], dtype: torch.dtype) -> torch.Tensor:
            hidden, weight = (value.detach().to(dtype).requires_grad_() for value in (self.hidden[:rows], self.weight))
            log_probs, entropy = implementation(hidden, weight, self.labels[:rows])
            # Advantages of both signs, as in training.
            signs = torch.linspace(-1.0, 1.0, rows, device=self.device)
            return torch.autograd.grad((log_probs * signs + 0.01 * entropy).sum(), weight)[0].double()

        # The reference in float64 comes from the fused head itself in chunks: full logits would not fit.
        reference = gradient(lambda *inputs: fused(*inputs, chunk_rows=64), torch.float64)
        return float((gradient(implementation, self.hidden.dtype) - reference).norm() / reference.norm())


def kernel_rows(vocab: int, repeats: int) -> list[dict[str, object]]:
    from verl.models.fused_head_kernel import logit_gradients, row_statistics

    device = torch.device("cuda")
    rows = rows_per_chunk(10**6, vocab, 4, "cuda")
    logits = torch.randn(rows, vocab, device=device)
    d_logits = logits.bfloat16()
    labels = torch.randint(0, vocab, (rows,), device=device)
    planes = torch.empty(4, rows, device=device)
    ones = torch.ones(rows, device=device)
    bandwidth = copy_bandwidth(device.type)
    table = []
    for with_entropy in (False, True):
        d_entropy = ones if with_entropy else None
        passes = {
            "statistics": (1, lambda w=with_entropy: row_statistics(logits, labels, planes, 1.0, 1.0, None, w)),
            "gradients": (
                1.5,
                lambda d=d_entropy: logit_gradients(logits, d_logits, labels, 12 * ones, ones, ones, d, 1.0, 1.0, None),
            ),
        }
        for name, (times, run) in passes.items():
            run()
            seconds, _ = measure(run, 4 * repeats, device)
            rate = times * logits.nbytes / seconds
            table.append(
                {
                    "pass": name,
                    "entropy": with_entropy,
                    "ms": round(seconds * 1e3, 3),
                    "GB_per_s": round(rate / 1e9),
                    "of_copy": round(rate / bandwidth, 2),
                }
            )
    return table


if __name__ == "__main__":
    main()
