"""The whole engine on a GPU against transformers: Triton attention, CUDA graphs, one-pass sampling, no waiting."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import save_tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams

pytestmark = pytest.mark.gpu

MAX_LENGTH, NEW = 96, 12
LENGTHS = (17, 1, 8, 26, 5, 40)
WINDOWS = {"head_dim": 16, "sliding_window": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "qwen2 generic": ("qwen2", {}, {"model": "generic"}),
    "qwen3": ("qwen3", {"head_dim": 16}, {}),
    "mistral": ("mistral", {"sliding_window": 6}, {}),
    "gemma2": (
        "gemma2",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
            "attn_implementation": "eager",
        },
        {},
    ),
    "gemma3": ("gemma3_text", {**WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}, {}),
    "phi3": ("phi3", {"sliding_window": 6}, {}),
    "qwen3 moe": ("qwen3_moe", EXPERTS, {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
}


def engine_of(folder: Path, beside: bool = False, **native: Any) -> BuiltEngine:
    keys = {
        "free_cache_engine": not beside,
        "max_num_seqs": 8,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "engine_kwargs": {"native": {"num_blocks": 64, **native}},
    }
    return build_engine(
        str(folder), as_config(ModelConfig, {"path": str(folder)}), as_config(RolloutConfig, keys), "cuda"
    )


def prompts() -> list[list[int]]:
    dice = random.Random(2)
    return [[dice.randrange(5, 264) for _ in range(length)] for length in LENGTHS]


def answered(built: BuiltEngine, params: SamplingParams, n: int = 1, tag: str = "") -> list[Output]:
    requests = [
        Request(f"{tag}{i}-{k}", p, params, group=f"{tag}{i}") for i, p in enumerate(prompts()) for k in range(n)
    ]
    sequences = [Sequence(request, serial) for serial, request in enumerate(requests)]
    built.engine.add(sequences)
    while built.engine.has_work:
        built.engine.step()
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_transformers(name, tmp_path):
    from transformers import AutoModelForCausalLM

    family, changes, native = CASES[name]
    folder = save_tiny_model(tmp_path / "model", family, **changes)
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **attention).eval()
    built = engine_of(folder, **native)
    for turn in ("first", "again"):  # kernels are compiled and graphs captured, then replayed
        for prompt, output in zip(
            prompts(), answered(built, SamplingParams(do_sample=False, max_new_tokens=NEW), tag=turn), strict=True
        ):
            with torch.no_grad():
                logits = module(torch.tensor([prompt + output.token_ids]), use_cache=False).logits[
                    0, len(prompt) - 1 : -1
                ]
            log_probs = logits.double().log_softmax(-1)
            chosen = log_probs.gather(-1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(torch.tensor(output.raw_log_probs).double(), chosen, atol=2e-4, rtol=0)
            assert (log_probs.max(-1).values - chosen).max() < 1e-3, "greedy"


def test_no_step_waits_for_the_gpu_before_it_is_launched(tmp_path):
    built = engine_of(save_tiny_model(tmp_path / "model"))
    params = SamplingParams(temperature=0.8, max_new_tokens=NEW, ignore_eos=True)
    answered(built, params, n=3, tag="warm-up ")  # compiles and captures
    launch = built.runner.launch

    def strict(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    built.runner.launch = strict  # type: ignore[method-assign]
    outputs = answered(built, params, n=3, tag="watched ")
    assert all(len(output.token_ids) == NEW for output in outputs)


def test_beside_other_work_of_the_device_steps_do_not_wait_for_it_and_answer_the_same(tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    params = SamplingParams(max_new_tokens=NEW, key=3)
    expected = [output.token_ids for output in answered(engine_of(folder), params)]
    built, before = engine_of(folder, beside=True), torch.cuda.current_stream()
    busy, done = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16), torch.cuda.Event()
    product = torch.mm(busy, busy)
    try:
        answered(built, params, tag="warm-up ")
        torch.cuda.synchronize()
        torch.cuda.set_stream(before)
        for _ in range(800):  # a second of work
            torch.mm(busy, busy, out=product)
        done.record()
        found = [output.token_ids for output in answered(built, params)]
        assert not done.query(), "the answers were there before what was queued first"
    finally:
        torch.cuda.set_stream(before)
    assert found == expected
