"""Generation workloads, the hardware limits of a decode step, and the engines that `inference.py` compares.

Every engine has the settings that its documentation recommends for throughput, and random weights.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from _shapes import copy_bandwidth, matmul_rate, synchronise


@dataclass(frozen=True)
class Case:
    """Requests submitted at the same time: `n` consecutive ones share a prompt, response lengths are forced."""

    name: str
    lengths: tuple[int, ...]
    prompt: int
    n: int = 1
    log_probs: bool = False
    """Whether engines return the log-prob of every sampled token (native always does)."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def has_equal_lengths(self) -> bool:
        """All responses have the same length, so every decode step has the same batch size."""
        return len(set(self.lengths)) == 1

    @property
    def mean_context(self) -> float:
        """Mean number of cached tokens of a sequence over all decode steps."""
        return self.prompt + sum(length * length for length in self.lengths) / (2 * self.tokens)

    def prompts(self, vocab: int, seed: int) -> list[list[int]]:
        """One prompt per `n` requests; they depend on case and seed, so that no prefix cache has them."""
        rng = random.Random(f"{self.name}, {self.tokens} tokens, {seed}")
        return [[rng.randrange(vocab) for _ in range(self.prompt)] for _ in range(len(self.lengths) // self.n)]

    def prefill_only(self) -> Case:
        return replace(self, lengths=(1,) * len(self.lengths))

    def warm_up(self) -> Case:
        """A case that compiles the same kernels and captures the same CUDA graphs: for ragged lengths, this case."""
        if not self.has_equal_lengths:
            return self
        return replace(self, lengths=(min(40, self.lengths[0]),) * len(self.lengths))


def cases_for(device: str, quick: bool) -> list[Case]:
    if device == "cpu":
        rng = random.Random(3)
        count, prompt, longest = (16, 16, 32) if quick else (64, 32, 128)
        # Ragged 8:1: lengths spread evenly, on a log scale, from an eighth of the longest to the longest.
        ragged = tuple(round(longest / 8 ** rng.random()) for _ in range(count))
        even = (longest,) * (count // 4)
        return [Case(f"{count} ragged 8:1", ragged, prompt), Case(f"{count // 4} in groups of 4", even, prompt, n=4)]
    fixed = [Case(f"{count} x 128+256", (256,) * count, 128) for count in (256, 512, 1024)]
    logged = Case("512 x 128+256, log-probs", (256,) * 512, 128, log_probs=True)
    if quick:
        return [*fixed[:2], logged]
    groups = Case("64 prompts x 8, 128+256", (256,) * 512, 128, n=8, log_probs=True)
    rng = random.Random(1)
    ragged = tuple(max(8, min(2048, round(rng.expovariate(1 / 256)))) for _ in range(1024))
    return [*fixed, logged, groups, Case("1024 ragged (mean 256, at most 2048)", ragged, 128, log_probs=True)]


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


class HardwareLimits:
    """Lower bounds for the time of a decode step on this device, from its copy bandwidth and matmul rate."""

    def __init__(self, config: Any, device: str) -> None:
        from transformers import AutoModelForCausalLM

        itemsize = dtype_of(device).itemsize
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        # Of an untied embedding only the rows of the step's tokens are read.
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        self.matmul_parameters = parameters - embedding
        self.weight_bytes = self.matmul_parameters * itemsize
        head = config.hidden_size // config.num_attention_heads
        self.kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * itemsize
        self.bandwidth = copy_bandwidth(device)
        self.rate = matmul_rate(device)

    def read_ms(self, sequences: int, context: float) -> float:
        """Time to read weights and KV once."""
        return (self.weight_bytes + sequences * context * self.kv_bytes) / self.bandwidth * 1e3

    def lower_bound_ms(self, sequences: int, context: float) -> float:
        """The longer of reading the weights and computing the matmuls, plus reading the KV."""
        weights = self.read_ms(sequences, 0)
        return max(weights, self.matmul_ms(sequences)) + self.read_ms(sequences, context) - weights

    def matmul_ms(self, sequences: int) -> float:
        """Time of the matmuls with the weights at the rate of a large matmul."""
        return 2 * self.matmul_parameters * sequences / self.rate * 1e3


class System(Protocol):
    """Interface of an engine; `folder` contains the config of the model."""

    def __init__(self, folder: str, config: Any, device: str, slots: int, max_len: int) -> None: ...

    def generate(self, case: Case, seed: int) -> float:
        """Seconds from the first submit to the last token."""
        ...

    def close(self) -> None: ...


class Native:
    """The native engine, in this process."""

    model_kind = "auto"

    def __init__(self, folder: str, config: Any, device: str, slots: int, max_len: int) -> None:
        from verl.config import ModelConfig, RolloutConfig, as_config
        from verl.workers.rollout.native_rollout import NativeRollout

        keys = {
            "max_num_seqs": slots,
            "max_model_len": max_len,
            "max_num_batched_tokens": 8192 if device == "cuda" else 1024,
            "gpu_memory_utilization": 0.7,
            "load_format": "dummy",
            "engine_kwargs": {"native": {"model": self.model_kind}},
        }
        self._vocab, self._device = config.vocab_size, device
        self.rollout = NativeRollout(
            folder, as_config(ModelConfig, {"path": folder}), as_config(RolloutConfig, keys), torch.device(device)
        )
        self._load_random_weights()

    @torch.no_grad()
    def _load_random_weights(self) -> None:
        from verl.utils.weight_fingerprint import fingerprints

        torch.manual_seed(0)
        weights = self.rollout.weights
        self.rollout.begin_update(1, None)
        for name, tensor in weights.items():
            tensor.fill_(1.0) if "norm" in name else tensor.normal_(0.0, 0.02)
        self.rollout.load_bucket(weights)
        self.rollout.finish_update(fingerprints(weights))

    def generate(self, case: Case, seed: int) -> float:
        from verl.types.request import Request, SamplingParams

        prompts = case.prompts(self._vocab, seed)
        requests = []
        for index, length in enumerate(case.lengths):
            params = SamplingParams(key=index, max_new_tokens=length, ignore_eos=True)
            group = index // case.n
            requests.append(Request(f"{seed}-{index}", prompts[group], params, group=f"{seed}-{group}"))
        synchronise(self._device)
        start = time.perf_counter()
        futures = self.rollout.submit(requests)
        for future, length in zip(futures, case.lengths, strict=True):
            assert len(future.result().token_ids) == length
        return time.perf_counter() - start

    def close(self) -> None:
        self.rollout.close()


class Generic(Native):
    """The native engine with the model's transformers module instead of fused layers."""

    model_kind = "generic"


class Vllm:
    """vLLM in this process: no detokenization, prefix cache, full CUDA graphs for decoding and piecewise otherwise."""

    in_process = True

    def __init__(self, folder: str, config: Any, device: str, slots: int, max_len: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.in_process else "1"
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "max_cudagraph_capture_size": min(slots, 1024)}
        on_gpu = {"gpu_memory_utilization": 0.85, "compilation_config": graphs} if device == "cuda" else {}
        self._vocab = config.vocab_size
        self._llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(dtype_of(device)).removeprefix("torch."),
            max_model_len=max_len,
            max_num_seqs=slots,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            **on_gpu,
        )

    def generate(self, case: Case, seed: int) -> float:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids} for ids in case.prompts(self._vocab, seed)]
        sampling = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "n": case.n}
        if case.log_probs:
            sampling["logprobs"] = 0
        params = [SamplingParams(max_tokens=length, **sampling) for length in case.lengths[:: case.n]]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert sum(len(response.token_ids) for output in outputs for response in output.outputs) == case.tokens
        return seconds

    def close(self) -> None:
        del self._llm


class VllmProcess(Vllm):
    """vLLM with its engine in a separate process."""

    in_process = False


class Sglang:
    """SGLang's offline engine, which starts a scheduler process."""

    def __init__(self, folder: str, config: Any, device: str, slots: int, max_len: int) -> None:
        import sglang

        self._vocab = config.vocab_size
        keys: dict[str, Any] = {"cuda_graph_max_bs_decode": min(slots, 1024), "mem_fraction_static": 0.8}
        if importlib.util.find_spec("sgl_kernel.flash_ops") is None:  # required by SGLang's default backend
            keys["attention_backend"] = "triton"
        if device == "cpu":
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            keys = {
                "device": "cpu",
                "attention_backend": "torch_native",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
            }
        self._engine = sglang.Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(dtype_of(device)).removeprefix("torch."),
            context_length=max_len,
            max_running_requests=slots,
            sampling_backend="pytorch",
            grammar_backend="none",
            log_level="error",
            **keys,
        )

    def generate(self, case: Case, seed: int) -> float:
        prompts = case.prompts(self._vocab, seed)
        params = [
            {"temperature": 1.0, "ignore_eos": True, "n": case.n, "max_new_tokens": length}
            for length in case.lengths[:: case.n]
        ]
        start = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=params, return_logprob=case.log_probs)
        return time.perf_counter() - start

    def close(self) -> None:
        self._engine.shutdown()


class HuggingFace:
    """transformers' `generate`: batches of `slots` sequences, each decoded to the longest length of its batch."""

    def __init__(self, folder: str, config: Any, device: str, slots: int, max_len: int) -> None:
        from transformers import AutoModelForCausalLM

        self._vocab, self._device, self._slots = config.vocab_size, device, slots
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype_of(device), attn_implementation="sdpa")
        self._model = model.eval()

    def generate(self, case: Case, seed: int) -> float:
        prompts = [ids for ids in case.prompts(self._vocab, seed) for _ in range(case.n)]
        synchronise(self._device)
        start = time.perf_counter()
        for first in range(0, len(prompts), self._slots):
            ids = torch.tensor(prompts[first : first + self._slots], device=self._device)
            longest = max(case.lengths[first : first + self._slots])
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0,
            )  # fmt: skip
        synchronise(self._device)
        return time.perf_counter() - start

    def close(self) -> None:
        del self._model


SYSTEMS: dict[str, type[System]] = {
    "native": Native,
    "generic": Generic,
    "vllm": Vllm,
    "vllm-process": VllmProcess,
    "sglang": Sglang,
    "hf": HuggingFace,
}
