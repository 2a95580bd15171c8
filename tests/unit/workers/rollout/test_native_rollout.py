"""What only the embedded engine promises: memory it can size and give back, cached prefixes, log-probs as drawn."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.tiny import save_tiny_model, tiny_model
from verl.inference import build
from verl.inference.model_runner import bytes_per_block
from verl.inference.models.fused import FusedModel
from verl.inference.models.generic import GenericModel
from verl.protocol import DataProto
from verl.types.request import Request, SamplingParams
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.native_rollout import NativeRollout

TOKENS = SamplingParams(max_new_tokens=20, key=42)
PROMPT = list(range(10, 50))


@pytest.fixture
def engine_name() -> str:
    return "native"


def native(**options) -> dict:
    return {"engine_kwargs": {"native": options}}


def ask(engine: NativeRollout, name: str = "a", params: SamplingParams = TOKENS, prompt: list[int] = PROMPT):
    return engine.submit([Request(name, prompt, params)])[0].result()


def log_probs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def test_the_default_engine_is_this_one(start):
    assert get_rollout_class("native") is NativeRollout
    assert isinstance(start(), NativeRollout)


def test_families_of_the_llama_shape_run_fused_and_the_others_by_their_own_module(start, tmp_path):
    assert isinstance(start().model, FusedModel)
    assert isinstance(start(**native(model="generic")).model, GenericModel)
    phi = save_tiny_model(tmp_path, "phi")
    assert isinstance(start(phi).model, GenericModel)
    with pytest.raises(ValueError, match=r"native.model"):
        start(phi, **native(model="fused"))


def test_fused_and_generic_give_the_same_answers(start, make_prompts):
    fused, generic = (start(**native(model=kind)).generate_sequences(make_prompts()) for kind in ("fused", "generic"))
    assert torch.equal(fused.batch["responses"], generic.batch["responses"])
    torch.testing.assert_close(fused.batch["rollout_log_probs"], generic.batch["rollout_log_probs"])


@pytest.mark.parametrize("option", ["fused", "generic"])
def test_every_token_has_its_raw_and_its_drawn_log_prob(start, model_path, option):
    engine = start(**native(model=option))
    output = ask(engine, params=SamplingParams(max_new_tokens=20, key=42, temperature=0.5, top_k=3))
    model = tiny_model()
    raw = log_probs(model, PROMPT, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.raw_log_probs), raw.float(), atol=1e-5, rtol=0)
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT + output.token_ids])).logits[0, len(PROMPT) - 1 : -1].double() / 0.5
    kept = scores.masked_fill(scores < scores.topk(3).values[:, -1:], -math.inf)
    drawn = kept.log_softmax(-1).gather(-1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.sampled_log_probs), drawn.float(), atol=1e-5, rtol=0)
    assert (drawn > raw).any()


def test_pairs_of_tokens_follow_the_models_distribution(start, tmp_path):
    path = save_tiny_model(tmp_path, vocab_size=6, seed=3)
    rows, prompt = 4000, [2, 5, 3]
    prompts = DataProto.from_dict(
        {"input_ids": torch.tensor([prompt] * rows), "attention_mask": torch.ones(rows, 3, dtype=torch.int64)},
        {"uid": np.array(["one prompt"] * rows, dtype=object), "sample_index": np.arange(rows).astype(object)},
        {"eos_token_id": []},
    )
    engine = start(path, max_num_batched_tokens=512, max_num_seqs=300)
    pairs = engine.generate_sequences(prompts, max_new_tokens=2, temperature=0.5).batch["responses"]
    model = tiny_model(vocab_size=6, seed=3)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, token] for token in range(6)])).logits[:, -2:].double() / 0.5
    probs = logits[0, 0].softmax(-1).unsqueeze(1) * logits[:, 1].softmax(-1)
    counts = torch.bincount(pairs[:, 0] * 6 + pairs[:, 1], minlength=36).view(6, 6)
    chi_square = ((counts - probs * rows) ** 2 / (probs * rows)).sum()
    assert chi_square < 76.2, "the 99.99 % quantile with 35 degrees of freedom"


def test_an_update_that_fails_here_or_on_another_rank_can_be_repeated(start, monkeypatch):
    engine, weights = start(), tiny_model(seed=1).state_dict()

    def ended_early():
        yield from list(weights.items())[:2]
        raise OSError("the file ends")

    with pytest.raises(OSError, match="the file ends"):
        engine.update_weights(ended_early())
    with pytest.raises(RuntimeError, match=r"version 1 .*: the file ends"):
        ask(engine)
    with monkeypatch.context() as patch:
        peer = SimpleNamespace(exchange_error=lambda error: error or RuntimeError("rank 1: out of memory"))
        patch.setattr(engine._weights, "_parallel", peer)
        with pytest.raises(RuntimeError, match="rank 1: out of memory"):
            engine.update_weights(weights.items())
    engine.update_weights(weights.items())
    expected = log_probs(tiny_model(seed=1), PROMPT, (answer := ask(engine)).token_ids)
    torch.testing.assert_close(torch.tensor(answer.log_probs), expected.float(), atol=1e-5, rtol=0)


def test_cached_prefixes_are_not_used_across_an_update_or_a_release(start):
    engine = start()
    first = ask(engine)
    engine.update_weights(tiny_model(seed=1).state_dict().items())
    second = ask(engine)
    expected = log_probs(tiny_model(seed=1), PROMPT, second.token_ids)
    torch.testing.assert_close(torch.tensor(second.log_probs), expected.float(), atol=1e-5, rtol=0)
    engine.update_weights(tiny_model(seed=0).state_dict().items())
    engine.release(["kv_cache"])
    engine.resume(["kv_cache"])
    for layer in engine.kv.layers:
        layer[0].fill_(torch.nan)
    assert ask(engine).token_ids == first.token_ids


def test_a_release_gives_the_kv_memory_back_and_the_answers_go_on(start):
    engine = start(**native(num_blocks=64))
    whole = ask(engine)
    region = engine.kv.region
    assert region.bytes.untyped_storage().nbytes() == region.size == 65 * bytes_per_block(engine.model, 16)
    weights = engine.model.region.size
    assert engine.held_bytes() == {"weights": weights, "kv_cache": region.size}
    engine.release(["kv_cache"])
    assert region.bytes.untyped_storage().nbytes() == 0
    assert engine.held_bytes() == {"weights": weights, "kv_cache": 0}
    with pytest.raises(RuntimeError, match=r"\['kv_cache'\].*resume\(\)"):
        ask(engine)
    engine.resume(["kv_cache"])
    assert ask(engine).token_ids == whole.token_ids


def test_kv_memory_is_what_all_sequences_can_use(start, caplog):
    with caplog.at_level(logging.INFO, logger="verl"):
        engine = start(max_num_seqs=4, max_model_len=100)
    assert engine.kv.num_blocks == 4 * 7
    assert "28 blocks of 16 tokens (enough for 4 sequences of 100 tokens)" in caplog.text


def test_kv_memory_takes_a_quarter_of_the_host_at_most(start, monkeypatch, caplog):
    block = 16 * 2 * 2 * 2 * 16 * 4
    monkeypatch.setattr(build, "host_memory_available", lambda: 4 * 10 * block)
    with caplog.at_level(logging.INFO, logger="verl"):
        engine = start(max_num_seqs=4, max_model_len=100)
    assert engine.kv.num_blocks == 10
    assert "36% of what 4 sequences of 100 tokens can use" in caplog.text
    monkeypatch.setattr(build, "host_memory_available", lambda: 4 * 6 * block)
    with pytest.raises(ValueError, match=r"max_model_len"):
        start(max_num_seqs=4, max_model_len=100)


def test_a_request_that_can_never_fit_is_refused_at_once_and_the_others_go_on(start):
    engine = start(**native(num_blocks=4, block_size=8), max_model_len=200)
    with pytest.raises(ValueError, match=r"^request 'a': 40\b.*\b20\b.*\b8 KV blocks of 8\b.*\b4\."):
        ask(engine)
    assert len(ask(engine, prompt=PROMPT[:10]).token_ids) == 20


def test_little_memory_changes_no_answer(start, make_prompts):
    prompts = make_prompts(rows=12)
    expected = start().generate_sequences(prompts)
    tight = start(**native(num_blocks=9, block_size=4), max_num_batched_tokens=11).generate_sequences(prompts)
    assert torch.equal(tight.batch["responses"], expected.batch["responses"])
    torch.testing.assert_close(tight.batch["rollout_log_probs"], expected.batch["rollout_log_probs"])


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"blocks": 3}, r"native.blocks: .*block_size"),
        ({"model": "fast"}, r"native.model: 'fast' .*fused"),
        ({"block_size": 0}, r"native: block_size .*'block_size': 0"),
    ],
)
def test_unknown_options_are_refused(start, options, cause):
    with pytest.raises(ValueError, match=rf"^engine_kwargs\.{cause}"):
        start(**native(**options))


def test_dummy_weights_work_for_both_kinds_of_model(start, tmp_path):
    phi = save_tiny_model(tmp_path, "phi")
    engine = start(phi, load_format="dummy")
    engine.update_weights(tiny_model("phi").state_dict().items())
    output = ask(engine)
    expected = log_probs(tiny_model("phi"), PROMPT, output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs), expected.float(), atol=1e-5, rtol=0)
