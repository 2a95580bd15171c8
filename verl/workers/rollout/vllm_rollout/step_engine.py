"""VllmStepEngine: the steps of vLLM's synchronous engine, as the rollout's thread drives them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from verl.inference.sequence import Sequence
from verl.models.routing import route_dtype
from verl.types.request import Request, TopLogProbs, check_request
from verl.utils.progress import pulse
from verl.workers.rollout.base import EngineBrokenError
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS, require_log_probs_as_drawn
from verl.workers.rollout.reported_tokens import Factors, accept_reported_experts, accept_scaled, column_factors
from verl.workers.rollout.vllm_rollout.sampling import sampling_arguments

__all__ = ["VllmStepEngine"]


class VllmStepEngine:
    """vLLM schedules, computes and samples; what a token ends, and which version it is of, is decided here."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        """`engine` is an `LLMEngine` whose core runs in this process."""
        from vllm import SamplingParams, __version__

        self.version = 0
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._device = device
        model_config = engine.vllm_config.model_config
        self._max_length = model_config.max_model_len
        self._max_top = model_config.max_logprobs
        self._vocab, self._dtype = model_config.get_vocab_size(), model_config.dtype
        self._vllm_version = __version__
        self._probed = False
        self._sampling_params = SamplingParams
        self._joining: list[Sequence] = []
        self._running: dict[str, tuple[Sequence, Factors]] = {}  # by vLLM's id
        self._experts: dict[str, list[np.ndarray]] = {}  # of those that run, where vLLM tells them
        self._expert_dtype = str(route_dtype(model_config.get_num_experts())).removeprefix("torch.")
        self._epoch = 0
        self._thread: int | None = None

    def check(self, request: Request) -> None:
        check_request(request, self._max_length)
        asked, earlier = request.params, request.resume_from
        if asked.top_log_probs > self._max_top:
            raise ValueError(
                f"request {request.id!r}: top_log_probs={asked.top_log_probs} is more than this engine tells. Ask for"
                f" {self._max_top}, or raise engine_kwargs.vllm.max_logprobs."
            )
        if asked.top_log_probs and (asked.truncated or asked.temperature not in (0, 1)):
            raise ValueError(
                f"request {request.id!r}: top_log_probs are at temperature 1, and vLLM tells them as it samples. Set"
                " temperature to 0 or 1 without top_k, top_p and min_p, or use rollout.name=native."
            )
        if earlier and earlier.token_ids and (asked.presence_penalty or asked.frequency_penalty):
            raise ValueError(
                f"request {request.id!r}: vLLM counts what resume_from has generated as prompt, where"
                " presence_penalty and frequency_penalty do not look. Leave them out, or use rollout.name=native."
            )

    def add(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sequence.max_length = min(sequence.max_length, self._max_length)
            self._joining.append(sequence)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        gone = set(sequences)
        for sequence in gone:
            sequence.done = True
        self._joining = [sequence for sequence in self._joining if sequence not in gone]
        self._forget([name for name, (sequence, _) in self._running.items() if sequence in gone])

    def step(self) -> list[Sequence]:
        """Launch a step, and take the tokens of this one or of the one before."""
        self._enter_thread()
        if not self._probed and not self._running:  # what the probe takes must be nobody's
            self._probed = self._probe()
        refused = self._join() if self._joining else []
        return refused + self._take()

    def _join(self) -> list[Sequence]:
        """vLLM gets who has come; returns whom it refuses."""
        joining, self._joining, refused = self._joining, [], []
        for sequence in joining:
            params = self._sampling_params(**sampling_arguments(sequence), detokenize=False)
            prompt = {"prompt_token_ids": list(sequence.token_ids), "cache_salt": str(self._epoch)}
            try:
                name = self._engine.add_request(sequence.request.id, prompt, params)
            except ValueError as error:
                sequence.done, sequence.error = True, error
                refused.append(sequence)
            else:
                self._running[name] = sequence, column_factors(sequence.params, after_truncation=True)
        return refused

    def _probe(self) -> bool:
        """Raise if vLLM's log-probs are not what is trained with; False if this model's weights cannot tell."""

        def top(temperature: float, top_k: int) -> dict[int, float]:
            params = self._sampling_params(
                temperature=temperature, top_k=max(0, top_k), logprobs=PROBED_TOKENS, max_tokens=1, detokenize=False
            )
            prompt = {"prompt_token_ids": list(PROBE_PROMPT), "cache_salt": str(self._epoch)}
            self._engine.add_request("verl-probe", prompt, params)
            outputs: list[Any] = []
            while not outputs or self.in_flight:
                outputs += self._engine.step()
            (found,) = outputs[0].outputs[0].logprobs
            return {token: told.logprob for token, told in found.items()}

        engine = f"vLLM {self._vllm_version}"
        return require_log_probs_as_drawn(engine, top, self._vocab, after_truncation=True, dtype=self._dtype)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._joining) or self.in_flight

    @property
    def in_flight(self) -> bool:
        """With asynchronous scheduling vLLM launches a step before it reads the one before."""
        return bool(self._core.batch_queue)

    def drain(self) -> list[Sequence]:
        """Take what was launched; vLLM's scheduler is paused meanwhile."""
        self._enter_thread()
        finished: list[Sequence] = []
        if self.in_flight:
            self._engine.sleep(level=0, mode="keep")
            try:
                while self.in_flight:
                    finished += self._take()
            finally:
                self._engine.wake_up(tags=["scheduling"])
        return finished

    def requeue_all(self) -> None:
        """vLLM preempts what runs, and computes it again from its tokens."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def forget_prefixes(self) -> None:
        """Whoever runs keeps its KV, and vLLM resets nothing that is in use: newcomers look under another name."""
        self._epoch += 1

    def clear(self) -> None:
        self.remove([*(sequence for sequence, _ in self._running.values()), *self._joining])

    def _take(self) -> list[Sequence]:
        """Make a step and accept what comes of it.

        Straight from the engine's core: what vLLM's engine makes of it for its own callers is a sixth of the time.
        """
        finished, ended = [], []
        try:
            outputs = self._engine.engine_core.get_output().outputs
        except Exception as error:  # whatever it is: of what vLLM had scheduled nothing will ever come
            raise EngineBrokenError(f"rollout: vLLM failed in a step: {type(error).__name__}: {error}") from error
        if outputs:
            pulse()
        for output in outputs:
            name = output.request_id
            if name not in self._running:
                continue
            (sequence, factors), told = self._running[name], output.new_logprobs
            if not sequence.output.token_ids and output.prefill_stats is not None:
                sequence.output.cached_tokens = output.prefill_stats.num_cached_tokens
            if sequence.params.top_log_probs or sequence.params.prompt_log_probs:
                _accept_details(sequence, told, output.new_prompt_logprobs_tensors)
            sampled = [] if told is None else told.logprobs[:, 0].tolist()
            if getattr(output, "routed_experts", None) is not None:
                self._experts.setdefault(name, []).append(output.routed_experts)
            over = accept_scaled(sequence, output.new_token_ids, sampled, self.version, factors)
            if output.finished and not over:
                sequence.done = over = True
                sequence.error = RuntimeError(
                    f"rollout: vLLM ended request {sequence.request.id!r} ({output.finish_reason}) after"
                    f" {len(sequence.output.token_ids)} tokens; none of them ends an answer."
                )
            if over:
                if name in self._experts:
                    experts = np.concatenate(self._experts[name]).astype(self._expert_dtype)
                    accept_reported_experts(sequence, experts, self.version)
                finished.append(sequence)
                ended.append(name)
        self._forget(ended)
        return finished

    def _forget(self, names: list[str]) -> None:
        """Those that have ended, or are to end now."""
        for name in names:
            del self._running[name]
            self._experts.pop(name, None)
        self._engine.abort_request(names, internal=True)

    def _enter_thread(self) -> None:
        """What a thread has for itself: the device that it launches on, or how many threads help it."""
        if self._thread == threading.get_ident():
            return
        self._thread = threading.get_ident()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:  # vLLM plans with torch's number and computes with the thread's own: they have to be the same
            torch.set_num_threads(torch.get_num_threads())


def _accept_details(sequence: Sequence, sampled: Any, prompt: Any) -> None:
    """The likeliest tokens, and the log-probs of the prompt, which vLLM tells when it has computed it."""
    count, output = sequence.params.top_log_probs, sequence.output
    if count and sampled is not None:
        output.top_log_probs += _likeliest(sampled, count)
    if prompt is not None and not output.prompt_log_probs:
        last = len(sequence.prompt_ids) - 1  # what was resumed from is part of vLLM's prompt
        output.prompt_log_probs = prompt.logprobs[:last, 0].tolist()
        output.prompt_top_log_probs = _likeliest(prompt, count)[:last]


def _likeliest(told: Any, count: int) -> list[TopLogProbs]:
    """(token, log-prob) of each position, behind the token that stands there."""
    tokens, values = (each[:, 1 : 1 + count].tolist() for each in (told.logprob_token_ids, told.logprobs))
    return [list(zip(*pair, strict=True)) for pair in zip(tokens, values, strict=True)]
