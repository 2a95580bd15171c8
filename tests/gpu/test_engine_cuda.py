"""The whole engine on a GPU against transformers: Triton attention, CUDA graphs, one-pass sampling, no waiting."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import save_tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams
from verl.utils.device import capture_gate

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


def engine_of(
    folder: Path, beside: bool = False, limits: dict[str, Any] | None = None, device: str = "cuda", **native: Any
) -> BuiltEngine:
    keys = {
        "free_cache_engine": not beside,
        "free_weights": False,
        "max_num_seqs": 8,
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "engine_kwargs": {"native": {"num_blocks": 64, **native}},
    }
    model, rollout = as_config(ModelConfig, {"path": str(folder)}), as_config(RolloutConfig, keys | (limits or {}))
    return build_engine(str(folder), model, rollout, device)


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
        for turn in range(2):  # captures; the second time with cached prefixes, as below
            answered(built, params, tag=f"warm-up {turn} ")
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


def test_beside_training_graphs_are_captured_between_its_calls(tmp_path):
    """Training calls what fails during a capture, or breaks it: it synchronises, frees memory and draws numbers."""
    folder = save_tiny_model(tmp_path / "model")
    params = SamplingParams(max_new_tokens=NEW, key=3)
    expected = [output.token_ids for output in answered(engine_of(folder), params)]
    built, before = engine_of(folder, beside=True), torch.cuda.current_stream()
    largest = built.runner.captured_graphs
    ended, calls, errors = threading.Event(), [0], []

    def train() -> None:
        try:
            while not ended.is_set():
                with capture_gate.work():
                    noise = torch.randn(512, 512, device="cuda")
                    (noise @ noise).sum().item()
                    torch.cuda.empty_cache()
                    torch.cuda.synchronize()
                    calls[0] += 1
        except Exception as error:
            errors.append(error)

    try:
        with capture_gate.work():
            assert [output.token_ids for output in answered(built, params, tag="in a call ")] == expected
        assert built.runner.captured_graphs == largest
        trainer = threading.Thread(target=train)
        trainer.start()
        for turn in range(30):
            assert [output.token_ids for output in answered(built, params, tag=f"{turn} ")] == expected
        ended.set()
        trainer.join()
        assert not errors
        assert calls[0] > 0
        assert [output.token_ids for output in answered(built, params, tag="captures ")] == expected
        assert built.runner.captured_graphs > largest
        assert [output.token_ids for output in answered(built, params, tag="replays ")] == expected
    finally:
        ended.set()
        torch.cuda.set_stream(before)


def test_graphs_use_the_memory_that_was_allocated_for_them(tmp_path):
    """Captures in ascending order, the worst for a pool that grows."""
    wide = {"hidden_size": 256, "intermediate_size": 8192, "max_position_embeddings": 4096}
    limits = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "dtype": "bfloat16"}
    built = engine_of(save_tiny_model(tmp_path / "model", **wide), limits=limits, num_blocks=512)
    used = []
    for number, tokens in enumerate((100, 600, 1400, 3000, 4000)):
        request = Request(str(tokens), [7 + number] * tokens, SamplingParams(max_new_tokens=2, ignore_eos=True))
        built.engine.add([Sequence(request, 0)])
        while built.engine.has_work:
            built.engine.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert built.runner.captured_graphs == 7, "a prefill of every length, decodes of one and of most sequences"
    assert used[-1] - used[0] < 32 * 2**20, "a step of 4096 tokens needs 200 MB"


@pytest.mark.parametrize("beside", [False, True])
def test_graphs_stay_valid_when_memory_is_released(beside, tmp_path):
    built, before = engine_of(save_tiny_model(tmp_path / "model"), beside=beside), torch.cuda.current_stream()
    params = SamplingParams(max_new_tokens=NEW, key=3)
    try:
        expected = [output.token_ids for output in answered(built, params)]
        captured = built.runner.captured_graphs
        assert captured > 0
        for turn in range(2):
            built.engine.preempt_all()
            built.kv.release()
            built.weights.offload()
            torch.cuda.empty_cache()
            built.weights.onload()
            built.kv.restore()
            torch.cuda.synchronize()
            assert [output.token_ids for output in answered(built, params, tag=f"{turn} ")] == expected
        assert built.runner.captured_graphs == captured
    finally:
        torch.cuda.set_stream(before)
