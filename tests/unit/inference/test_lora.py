"""LoRA adapters in the inference engine: equal to peft and to merged weights, per row of a batch."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.adapters import engine_tensors, peft_model
from tests.support.tiny import tiny_model
from verl.inference.attention import TorchAttention
from verl.inference.block_manager import BlockManager
from verl.inference.engine import Engine
from verl.inference.lora import AdapterOptions
from verl.inference.model_runner import KVCache, ModelRunner
from verl.inference.models.fused import FusedModel
from verl.inference.models.generic import GenericModel
from verl.inference.scheduler import Scheduler
from verl.inference.sequence import NO_ADAPTER, Adapter, Sequence
from verl.types.request import Request, SamplingParams

MAX_LENGTH, NEW, RANK = 64, 10, 4
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-fused": ("qwen2", {}),
    "qwen2": ("qwen2", {}),
    "qwen3-fused": ("qwen3", {"head_dim": 16}),
    "llama-fused": ("llama", {"attention_bias": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}


def prompts(count: int = 6) -> list[list[int]]:
    dice = random.Random(4)
    return [[dice.randrange(5, 264) for _ in range(length)] for length in (17, 3, 8, 26, 5, 11)[:count]]


def make_model(name: str, options: AdapterOptions | None, dtype: torch.dtype = torch.float64) -> Any:
    family, changes = CASES[name]
    module = tiny_model(family, **changes).to(dtype)
    if not name.endswith("-fused"):
        return GenericModel(module, MAX_LENGTH, dtype=dtype, adapters=options)
    model = FusedModel(module.config, MAX_LENGTH, dtype, "cpu", adapters=options)
    for weight, tensor in model.named_weights().items():
        tensor.copy_(module.state_dict()[weight])
    return model


def load(model: Any, slot: int, adapter: Any) -> None:
    model.adapters.clear(slot)
    places = model.adapters.weights(slot, adapter.peft_config["default"].r)
    for name, tensor in engine_tensors(adapter).items():
        places[name].copy_(tensor)


def make_engine(model: Any, **changes: Any) -> Engine:
    kv = KVCache(model, 80, 4)
    runner = ModelRunner(model, TorchAttention(), kv, 8, MAX_LENGTH)
    selects = model.adapters is not None and not model.adapters.options.shared
    keys = {"chunked_prefill": True, "max_num_batched_tokens": 24, **changes}
    scheduler = Scheduler(BlockManager(80, 4), 8, max_model_len=MAX_LENGTH, selects_adapters=selects, **keys)
    return Engine(scheduler, runner)


def generate(engine: Engine, rows: list[tuple[list[int], Adapter]], group: str = "") -> list[Sequence]:
    params = SamplingParams(do_sample=False, max_new_tokens=NEW)
    sequences = []
    for index, (prompt, adapter) in enumerate(rows):
        sequences.append(Sequence(Request(str(index), prompt, params, group), index))
        sequences[-1].adapter = adapter
    engine.add(sequences)
    while engine.has_work:
        engine.step()
    return sequences


def expected(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probs of the answer by transformers and peft."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).gather(-1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def assert_follows(sequence: Sequence, reference: Any) -> None:
    """The sequence is the reference's greedy answer, with its log-probs."""
    prompt, answer = sequence.prompt_ids, sequence.output.token_ids
    assert sequence.error is None
    assert len(answer) == NEW
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == answer
    torch.testing.assert_close(
        torch.tensor(sequence.output.log_probs).double(), expected(reference, prompt, answer), atol=2e-6, rtol=0
    )


@pytest.mark.parametrize("name", CASES)
def test_one_adapter_for_all_rows_equals_peft_and_merged_weights(name):
    family, changes = CASES[name]
    adapter = peft_model(family, 1, RANK, **changes).double()
    model = make_model(name, AdapterOptions(RANK))
    assert model.adapters.weights(0).keys() == engine_tensors(adapter).keys()
    load(model, 0, adapter)
    answers = generate(make_engine(model), [(prompt, NO_ADAPTER) for prompt in prompts()])
    merged = copy.deepcopy(adapter).merge_and_unload()
    for sequence in answers:
        assert_follows(sequence, adapter)
        assert_follows(sequence, merged)


@pytest.mark.parametrize("name", ["qwen2-fused", "gemma"])
@pytest.mark.parametrize("order", [0, 1])
def test_rows_of_a_batch_have_their_own_adapters_in_any_order(name, order):
    family, changes = CASES[name]
    references = {
        Adapter(1, 0): peft_model(family, 1, RANK, **changes).double(),
        Adapter(2, 2): peft_model(family, 2, 3, alpha=1.0, **changes).double(),
        Adapter(3, 1): peft_model(family, 3, 8, targets=["q_proj", "down_proj"], **changes).double(),
        NO_ADAPTER: tiny_model(family, **changes).double(),
    }
    model = make_model(name, AdapterOptions(8, slots=3, shared=False))
    for adapter, reference in references.items():
        if adapter is not NO_ADAPTER:
            load(model, adapter.slot, reference)
    rows = [(prompt, adapter) for prompt in prompts(4) for adapter in references]
    random.Random(order).shuffle(rows)
    # One group: rows with equal prompts and different adapters must not share their prefill.
    for sequence in generate(make_engine(model), rows, group="g"):
        assert_follows(sequence, references[sequence.adapter])


@pytest.mark.parametrize("name", ["qwen2-fused", "qwen2"])
def test_an_adapter_whose_products_overflow_does_not_affect_other_rows(name):
    model = make_model(name, AdapterOptions(RANK, slots=2, shared=False))
    huge = peft_model("qwen2", 1, RANK).double()
    for parameter, value in huge.named_parameters():
        if "lora_A" in parameter:
            value.data.mul_(1e308)
    load(model, 0, huge)
    load(model, 1, peft_model("qwen2", 2, RANK).double())
    references = {NO_ADAPTER: tiny_model("qwen2").double(), Adapter(2, 1): peft_model("qwen2", 2, RANK).double()}
    rows = [(prompt, adapter) for prompt in prompts(2) for adapter in (Adapter(1, 0), *references)]
    for sequence in generate(make_engine(model), rows):
        if sequence.adapter in references:
            assert_follows(sequence, references[sequence.adapter])
        else:
            assert isinstance(sequence.error, FloatingPointError)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = st.fixed_dictionaries(
    {
        "rank": st.integers(1, 9),
        "alpha": st.sampled_from([0.5, 4.0, 16.0]),
        "targets": st.lists(st.sampled_from(PROJECTIONS), min_size=1, max_size=7, unique=True),
        "layers": st.sampled_from([None, [0], [1]]),
        "use_rslora": st.booleans(),
    }
)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(["qwen2-fused", "qwen3-fused", "gemma"]),
    adapters=st.lists(ADAPTER, min_size=1, max_size=3),
    rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=10),
    chunked=st.booleans(),
    group=st.sampled_from(["", "g"]),
)
def test_any_batch_of_any_adapters_equals_peft_and_merged_weights(name, adapters, rows, chunked, group):
    """`rows`: (prompt, adapter), the last adapters being none. An adapter only covers some projections and layers."""
    family, changes = CASES[name]
    model = make_model(name, AdapterOptions(9, slots=3, shared=False))
    references = [peft_model(family, seed, **keys, **changes) for seed, keys in enumerate(adapters)]
    for slot, reference in enumerate(references):
        load(model, slot, reference.double())
    places = [Adapter(1 + slot, slot) for slot in range(len(references))] + [NO_ADAPTER] * (4 - len(references))
    merged = [copy.deepcopy(reference).merge_and_unload() for reference in references]
    plain = tiny_model(family, **changes).double()
    texts = prompts()
    batch = [(texts[prompt], places[adapter]) for prompt, adapter in rows]
    for sequence in generate(make_engine(model, chunked_prefill=chunked), batch, group):
        slot = sequence.adapter.slot
        for reference in (plain,) if slot < 0 else (references[slot], merged[slot]):
            assert_follows(sequence, reference)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_the_policys_adapter_may_cover_one_projection(projection):
    adapter = peft_model("qwen2", 1, RANK, targets=[projection]).double()
    layers = frozenset(name.rpartition(".lora_")[0] for name in engine_tensors(adapter))
    model = make_model("qwen2-fused", AdapterOptions(RANK, layers=layers))
    assert model.adapters.weights().keys() == engine_tensors(adapter).keys()
    load(model, 0, adapter)
    for sequence in generate(make_engine(model), [(prompt, NO_ADAPTER) for prompt in prompts(3)]):
        assert_follows(sequence, adapter)
