"""LoRA adapters in the engine on a GPU: Triton kernels with strided rows and CUDA graphs, against peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.adapters import engine_tensors, peft_model
from tests.support.tiny import save_tiny_model, tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.build import BuiltEngine, build_engine
from verl.inference.lora import AdapterOptions
from verl.inference.sequence import NO_ADAPTER, Adapter, Sequence
from verl.types.request import Request, SamplingParams

pytestmark = pytest.mark.gpu

RANK, NEW = 8, 12
FAMILIES: dict[str, dict[str, Any]] = {"qwen2": {}, "qwen3": {"head_dim": 16}, "gemma": {"head_dim": 16}}
PROMPTS = [list(range(30, 30 + length)) for length in (17, 1, 8, 26, 5, 40)]


def engine_of(folder: Path, options: AdapterOptions, eager: bool) -> BuiltEngine:
    keys = {
        "max_num_seqs": 24, "max_model_len": 96, "max_num_batched_tokens": 64, "dtype": "float32",
        "enforce_eager": eager, "engine_kwargs": {"native": {"num_blocks": 256}},
    }  # fmt: skip
    model = as_config(ModelConfig, {"path": str(folder)})
    return build_engine(str(folder), model, as_config(RolloutConfig, keys), "cuda", adapters=options)


def load(built: BuiltEngine, slot: int, adapter: Any) -> None:
    assert built.model.adapters is not None
    places = built.model.adapters.weights(slot, RANK)
    for name, tensor in engine_tensors(adapter).items():
        places[name].copy_(tensor)


def assert_follows(sequence: Sequence, reference: Any) -> None:
    prompt, answer = sequence.prompt_ids, sequence.output.token_ids
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected = logits.double().log_softmax(-1).gather(-1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(sequence.output.log_probs).double(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_follow_their_adapters(tmp_path, family, shared, eager):
    changes = FAMILIES[family]
    save_tiny_model(tmp_path, family, **changes)
    references = {seed: peft_model(family, seed, RANK, **changes) for seed in (1, 2)}
    built = engine_of(tmp_path, AdapterOptions(RANK, 1 if shared else 2, shared=shared), eager)
    for slot, adapter in enumerate(references.values()):
        if slot == 0 or not shared:
            load(built, slot, adapter)
    references[0] = tiny_model(family, **changes)
    sequences = []
    for prompt in PROMPTS:
        for seed in (1,) if shared else (0, 1, 2):
            params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, key=len(sequences))
            sequences.append(Sequence(Request(str(len(sequences)), prompt, params, group="g"), len(sequences)))
            sequences[-1].adapter = Adapter(seed, seed - 1) if seed and not shared else NO_ADAPTER
    built.engine.add(sequences)
    while built.engine.has_work:
        built.engine.step()
    for sequence in sequences:
        assert_follows(sequence, references[1 if shared else sequence.adapter.id])
