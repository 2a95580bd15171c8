"""Partial outputs of requests: join consecutive parts, cut, and prepare them for `Request.resume_from`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verl.types.request import Output, Request, SamplingParams, join_pieces


def join_outputs(parts: Sequence[Output], prompt_length: int | None = None) -> Output:
    """Join consecutive parts of an output, in time linear in its length.

    `prompt_length`: the length of the prompt, if the parts begin with the first token of the output; tokens whose
    experts were not reported then get unknown experts.
    """
    if len(parts) == 1:
        return parts[0]
    joined = Output(
        [token for part in parts for token in part.token_ids],
        [value for part in parts for value in part.log_probs],
        [version for part in parts for version in part.versions],
    )
    for part in parts:
        joined.sampled_log_probs += part.sampled_log_probs
        if part is not parts[-1]:
            joined.sampled_log_probs += [math.nan] * (len(part.token_ids) - len(part.sampled_log_probs))
    joined.routed_experts = _joined_experts(parts, prompt_length)
    return joined


def _joined_experts(parts: Sequence[Output], prompt_length: int | None) -> np.ndarray | None:
    """[tokens, layers, k]; None if no part has any."""
    pieces: list[np.ndarray] = []
    tokens = rows = 0
    for part in parts:
        start = rows
        if prompt_length is not None:
            start = prompt_length + tokens - 1 if tokens else 0
        tokens += len(part.token_ids)
        if part.routed_experts is None:
            continue
        if rows != start:  # experts of earlier tokens are unknown, or reported twice
            known = join_pieces(np.concatenate(pieces) if pieces else None, start, part.routed_experts[:0])
            pieces = [] if known is None else [known]
        pieces.append(part.routed_experts)
        rows = start + len(part.routed_experts)
    return np.concatenate(pieces) if pieces else None


def output_since(output: Output, start: int, prompt_length: int) -> Output:
    """The part of an output from token `start` on."""
    part = Output(output.token_ids[start:], output.log_probs[start:], output.versions[start:])
    part.sampled_log_probs = output.sampled_log_probs[start:]
    if output.routed_experts is not None:
        part.routed_experts = output.routed_experts[0 if start == 0 else prompt_length + start - 1 :]
    return part


def unfinished_part(output: Output, params: SamplingParams) -> Output:
    """The part of a current output that can be resumed: without its last token if that may end the response."""
    ends = output.token_ids[-1] in params.end_token_ids or len(output.token_ids) >= params.max_new_tokens
    return resumable(output) if ends or params.stop or params.grammar is not None else output


def resumable(output: Output) -> Output:
    """A reported partial output without its last token, which is sampled again: it may have ended the response, and a
    finished output cannot be resumed."""
    kept = slice(0, max(0, len(output.token_ids) - 1))
    part = Output(output.token_ids[kept], output.log_probs[kept], output.versions[kept])
    part.sampled_log_probs = output.sampled_log_probs[kept]
    if output.routed_experts is not None and part.token_ids:
        part.routed_experts = output.routed_experts[:-1]
    return part


def output_to_resume(request: Request, reported: Output | None) -> Output:
    """The output from which a lost request resumes: its `resume_from`, then the reported tokens except the last, which
    may have ended the response."""
    parts = [resumable(reported or Output())]
    if request.resume_from is not None:
        parts.insert(0, request.resume_from)
    return join_outputs(parts, len(request.prompt_ids))
