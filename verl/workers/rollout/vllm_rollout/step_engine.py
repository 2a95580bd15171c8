"""VllmStepEngine: adapts vLLM's synchronous engine to the `StepEngine` interface."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from verl.inference.sequence import Sequence
from verl.models.routing import route_dtype
from verl.types.request import EngineBrokenError, Request, TopLogProbs, check_request
from verl.utils.counter_noise import engine_seed
from verl.utils.progress import pulse
from verl.workers.rollout.third_party import (
    PROBE_PROMPT,
    PROBE_TOP_TOKENS,
    LogProbFactors,
    accept_reported_experts,
    accept_scaled,
    check_reported_log_probs,
    log_prob_factors,
)
from verl.workers.rollout.weights import dtype_name


class VllmStepEngine:
    """vLLM schedules, computes and samples. End tokens, stop conditions and versions are handled here."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        """`engine`: an `LLMEngine` whose core runs in this process."""
        from vllm import SamplingParams, __version__

        self.version = 0
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._device = device
        model_config = engine.vllm_config.model_config
        self._max_length = model_config.max_model_len
        self._max_top = model_config.max_logprobs
        self._vocab_size, self._dtype = model_config.get_vocab_size(), model_config.dtype
        self._vllm_version = __version__
        self._log_probs_checked = False
        self._sampling_params = SamplingParams
        self._waiting: list[Sequence] = []
        self._running: dict[str, tuple[Sequence, LogProbFactors]] = {}
        """By vLLM's request id."""
        self._experts: dict[str, list[np.ndarray]] = {}
        """Reported experts of running requests, by vLLM's request id."""
        self._expert_dtype = dtype_name(route_dtype(model_config.get_num_experts()))
        self._cache_salt = 0
        """Namespace of the prefix cache."""
        self._thread: int | None = None

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        params, earlier = request.params, request.resume_from
        if params.top_log_probs > self._max_top:
            raise ValueError(
                f"request {request.id!r}: top_log_probs={params.top_log_probs} exceeds this engine's limit. Request at"
                f" most {self._max_top}, or raise engine_kwargs.vllm.max_logprobs."
            )
        if params.top_log_probs and (params.truncated or params.temperature not in (0, 1)):
            raise ValueError(
                f"request {request.id!r}: top_log_probs are at temperature 1 without truncation, but vLLM reports those"
                " of the distribution that it samples from. Set temperature to 0 or 1 without top_k, top_p and min_p,"
                " or use rollout.name=native."
            )
        if earlier and earlier.token_ids and (params.presence_penalty or params.frequency_penalty):
            raise ValueError(
                f"request {request.id!r}: vLLM treats the tokens of resume_from as prompt, to which presence_penalty"
                " and frequency_penalty do not apply. Leave them out, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._waiting.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        removed = set(sequences)
        for sequence in removed:
            sequence.done = True
        self._waiting = [sequence for sequence in self._waiting if sequence not in removed]
        self._abort([name for name, (sequence, _) in self._running.items() if sequence in removed])

    def step(self) -> list[Sequence]:
        """Launch a step, and take the tokens of this step or of the previous one."""
        self._enter_thread()
        if not self._log_probs_checked and not self._running:  # the check must not take tokens of requests
            self._log_probs_checked = self._check_log_probs()
        rejected = self._start_waiting() if self._waiting else []
        return rejected + self._take_outputs()

    def _start_waiting(self) -> list[Sequence]:
        """Pass waiting sequences to vLLM; return the rejected sequences."""
        waiting, self._waiting, rejected = self._waiting, [], []
        for sequence in waiting:
            params = self._sampling_params(**sampling_arguments(sequence), detokenize=False)
            prompt = {"prompt_token_ids": list(sequence.token_ids), "cache_salt": str(self._cache_salt)}
            try:
                name = self._engine.add_request(sequence.request.id, prompt, params)
            except ValueError as error:
                sequence.done, sequence.error = True, error
                rejected.append(sequence)
            else:
                self._running[name] = sequence, log_prob_factors(sequence.params, log_probs_after_filtering=True)
        return rejected

    def _check_log_probs(self) -> bool:
        """See `check_reported_log_probs`."""

        def top_log_probs(temperature: float, top_k: int) -> dict[int, float]:
            params = self._sampling_params(
                temperature=temperature, top_k=max(0, top_k), logprobs=PROBE_TOP_TOKENS, max_tokens=1, detokenize=False
            )
            prompt = {"prompt_token_ids": list(PROBE_PROMPT), "cache_salt": str(self._cache_salt)}
            self._engine.add_request("verl-probe", prompt, params)
            outputs: list[Any] = []
            while not outputs or self.in_flight:
                outputs += self._engine.step()
            (log_probs,) = outputs[0].outputs[0].logprobs
            return {token: entry.logprob for token, entry in log_probs.items()}

        engine = f"vLLM {self._vllm_version}"
        return check_reported_log_probs(
            engine, top_log_probs, self._vocab_size, log_probs_after_filtering=True, dtype=self._dtype
        )

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting) or self.in_flight

    @property
    def in_flight(self) -> bool:
        """Whether launched steps have uncollected tokens. With asynchronous scheduling, vLLM launches a step before it
        reads the previous one."""
        return bool(self._core.batch_queue)

    def drain(self) -> list[Sequence]:
        """Take the tokens of launched steps; vLLM's scheduler is paused meanwhile."""
        self._enter_thread()
        finished: list[Sequence] = []
        if self.in_flight:
            self._engine.sleep(level=0, mode="keep")
            try:
                while self.in_flight:
                    finished += self._take_outputs()
            finally:
                self._engine.wake_up(tags=["scheduling"])
        return finished

    def preempt_all(self) -> None:
        """Let vLLM preempt running requests and recompute them from their tokens."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def reset_prefix_cache(self) -> None:
        """vLLM cannot reset its cache while requests run: later requests use another cache salt."""
        self._cache_salt += 1

    def clear(self) -> None:
        self.remove([*(sequence for sequence, _ in self._running.values()), *self._waiting])

    def _take_outputs(self) -> list[Sequence]:
        """Run a step and accept its tokens; return finished sequences.

        Reads from the engine's core: the conversions of vLLM's `LLMEngine.step` would take a sixth of the time.
        """
        try:
            outputs = self._engine.engine_core.get_output().outputs
        except Exception as error:  # after any error, the scheduled requests would never finish
            raise EngineBrokenError(f"rollout: vLLM failed in a step: {type(error).__name__}: {error}") from error
        if outputs:
            pulse()
        finished = {}
        for output in outputs:
            if output.request_id in self._running and self._accept_output(output):
                finished[output.request_id] = self._running[output.request_id][0]
        self._abort(list(finished))
        return list(finished.values())

    def _accept_output(self, output: Any) -> bool:
        """Append the tokens of an `EngineCoreOutput`; return whether its sequence has finished or failed."""
        name, log_probs = output.request_id, output.new_logprobs
        sequence, factors = self._running[name]
        if not sequence.output.token_ids and output.prefill_stats is not None:
            sequence.output.cached_tokens = output.prefill_stats.num_cached_tokens
        if sequence.params.top_log_probs or sequence.params.prompt_log_probs:
            _accept_details(sequence, log_probs, output.new_prompt_logprobs_tensors)
        sampled = [] if log_probs is None else log_probs.logprobs[:, 0].tolist()
        if getattr(output, "routed_experts", None) is not None:
            self._experts.setdefault(name, []).append(output.routed_experts)
        ended = accept_scaled(sequence, output.new_token_ids, sampled, self.version, factors)
        if output.finished and not ended:
            sequence.done = ended = True
            sequence.error = RuntimeError(
                f"rollout: vLLM ended request {sequence.request.id!r} ({output.finish_reason}) after"
                f" {len(sequence.output.token_ids)} tokens, without an end token."
            )
        if ended and name in self._experts:
            experts = np.concatenate(self._experts[name]).astype(self._expert_dtype)
            accept_reported_experts(sequence, experts, self.version)
        return ended

    def _abort(self, names: list[str]) -> None:
        """Remove requests, finished or not, from vLLM."""
        for name in names:
            del self._running[name]
            self._experts.pop(name, None)
        self._engine.abort_request(names, internal=True)

    def _enter_thread(self) -> None:
        """Set thread-local state at the first call of a thread: the current device, or the number of OpenMP threads."""
        if self._thread == threading.get_ident():
            return
        self._thread = threading.get_ident()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:  # vLLM plans with torch's number of threads and computes with that of the calling thread
            torch.set_num_threads(torch.get_num_threads())


def sampling_arguments(sequence: Sequence) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` that continue a sequence from its tokens to its end."""
    params, generated = sequence.params, len(sequence.output.token_ids)
    if params.greedy:
        sampling: dict[str, Any] = {"temperature": 0.0}
    else:
        sampling = {
            "temperature": params.temperature,
            "top_k": max(0, params.top_k),
            "top_p": params.top_p,
            "min_p": params.min_p,
            # vLLM draws noise from the first token of a request on, so a resumed request needs another seed.
            "seed": engine_seed(params.key, generated),
        }
    return sampling | {
        "max_tokens": sequence.max_length - len(sequence.token_ids),
        "min_tokens": max(0, min(sequence.min_length, sequence.max_length) - len(sequence.token_ids)),
        "stop_token_ids": sorted(params.end_token_ids),
        # `stop_token_ids` has all end tokens.
        "ignore_eos": True,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        # 0: report the log-prob of the sampled token only.
        "logprobs": params.top_log_probs,
        "prompt_logprobs": params.top_log_probs if params.prompt_log_probs else None,
    }


def _accept_details(sequence: Sequence, sampled: Any, prompt: Any) -> None:
    """Store the top log-probs, and the log-probs of the prompt, which vLLM reports after its prefill."""
    count, output = sequence.params.top_log_probs, sequence.output
    if count and sampled is not None:
        output.top_log_probs += _top_log_probs(sampled, count)
    if prompt is not None and not output.prompt_log_probs:
        last = len(sequence.prompt_ids) - 1  # vLLM's prompt includes the tokens of `resume_from`
        output.prompt_log_probs = prompt.logprobs[:last, 0].tolist()
        output.prompt_top_log_probs = _top_log_probs(prompt, count)[:last]


def _top_log_probs(log_probs: Any, count: int) -> list[TopLogProbs]:
    """(token, log-prob) pairs of each position; column 0, the actual token, is left out."""
    tokens = log_probs.logprob_token_ids[:, 1 : 1 + count].tolist()
    values = log_probs.logprobs[:, 1 : 1 + count].tolist()
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
