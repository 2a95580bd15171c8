"""VllmStepEngine: the steps of vLLM's synchronous engine, as the rollout's thread drives them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from verl.inference.sequence import Sequence
from verl.types.request import Request, TopLogProbs, check_request
from verl.utils.progress import pulse
from verl.workers.rollout.log_prob_probe import PROBE_PROMPT, PROBED_TOKENS, require_log_probs_as_drawn
from verl.workers.rollout.reported_tokens import accept_reported
from verl.workers.rollout.vllm_rollout.sampling import sampling_arguments

__all__ = ["VllmStepEngine"]


class VllmStepEngine:
    """vLLM schedules, computes and samples; what a token ends, and which version it is of, is decided here."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        """`engine` is an `LLMEngine` whose core runs in this process."""
        from vllm import SamplingParams, __version__
        from vllm.sampling_params import RequestOutputKind

        self.version = 0
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._device = device
        model_config = engine.vllm_config.model_config
        self._max_length = model_config.max_model_len
        self._max_top = model_config.max_logprobs
        self._vocab = model_config.get_vocab_size()
        self._vllm_version = __version__
        self._probed = False
        self._sampling_params = SamplingParams
        self._always = {"output_kind": RequestOutputKind.DELTA, "detokenize": False, "flat_logprobs": True}
        self._joining: list[Sequence] = []
        self._running: dict[str, Sequence] = {}
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
        names = [name for name, sequence in self._running.items() if sequence in gone]
        for name in names:
            del self._running[name]
        self._engine.abort_request(names)

    def step(self) -> list[Sequence]:
        """Launch a step, and take the tokens of this one or of the one before."""
        pulse()
        self._enter_thread()
        if not self._probed:
            self._probed = self._probe()
        refused = self._join() if self._joining else []
        return refused + self._accept(self._engine.step())

    def _join(self) -> list[Sequence]:
        """vLLM gets who has come; returns whom it refuses."""
        joining, self._joining, refused = self._joining, [], []
        for sequence in joining:
            params = self._sampling_params(**sampling_arguments(sequence), **self._always)
            prompt = {"prompt_token_ids": list(sequence.token_ids), "cache_salt": str(self._epoch)}
            try:
                self._engine.add_request(sequence.request.id, prompt, params)
            except ValueError as error:
                sequence.done, sequence.error = True, error
                refused.append(sequence)
            else:
                self._running[sequence.request.id] = sequence
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

        return require_log_probs_as_drawn(f"vLLM {self._vllm_version}", top, self._vocab, after_truncation=True)

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
            while self.in_flight:
                finished += self._accept(self._engine.step())
            self._engine.wake_up(tags=["scheduling"])
        return finished

    def requeue_all(self) -> None:
        """vLLM preempts what runs, and computes it again from its tokens."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def forget_prefixes(self) -> None:
        """Whoever runs keeps its KV, and vLLM resets nothing that is in use: newcomers look under another name."""
        self._epoch += 1

    def clear(self) -> None:
        self.remove([*self._running.values(), *self._joining])

    def _accept(self, outputs: list[Any]) -> list[Sequence]:
        finished, ended_here = [], []
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is None:
                continue
            answer = output.outputs[0]
            found = answer.logprobs
            sampled = [found.logprobs[start] for start in found.start_indices]
            if sequence.params.top_log_probs or sequence.params.prompt_log_probs:
                self._accept_details(sequence, found, output.prompt_logprobs)
            if not sequence.output.token_ids:
                sequence.output.cached_tokens = output.num_cached_tokens or 0
            if accept_reported(sequence, answer.token_ids, sampled, self.version, after_truncation=True):
                finished.append(sequence)
                if not output.finished:
                    ended_here.append(output.request_id)
            elif output.finished:
                sequence.done = True
                sequence.error = RuntimeError(
                    f"rollout: vLLM ended request {output.request_id!r} ({answer.finish_reason}) after"
                    f" {len(sequence.output.token_ids)} tokens; none of them ends an answer."
                )
                finished.append(sequence)
        self._engine.abort_request(ended_here)
        for sequence in finished:
            del self._running[sequence.request.id]
        return finished

    def _accept_details(self, sequence: Sequence, sampled: Any, prompt: Any) -> None:
        """The likeliest tokens, and the log-probs of the prompt, which vLLM tells with its first token."""
        count, output = sequence.params.top_log_probs, sequence.output
        if count:
            output.top_log_probs += [_likeliest(sampled, position, count) for position in range(len(sampled))]
        if sequence.params.prompt_log_probs and prompt:
            known = 1 + len(output.prompt_log_probs)
            for position in range(known, len(sequence.prompt_ids)):
                output.prompt_log_probs.append(prompt.logprobs[prompt.start_indices[position]])
                output.prompt_top_log_probs.append(_likeliest(prompt, position, count))

    def _enter_thread(self) -> None:
        """What a thread has for itself: the device that it launches on, or how many threads help it."""
        if self._thread == threading.get_ident():
            return
        self._thread = threading.get_ident()
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:  # vLLM plans with torch's number and computes with the thread's own: they have to be the same
            torch.set_num_threads(torch.get_num_threads())


def _likeliest(found: Any, position: int, count: int) -> TopLogProbs:
    """(token, log-prob) of one position, behind the token that stands there."""
    start = found.start_indices[position] + 1
    return list(zip(found.token_ids[start : start + count], found.logprobs[start : start + count], strict=True))
