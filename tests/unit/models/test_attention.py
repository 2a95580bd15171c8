"""Packed attention is attention of each sequence alone, in every model that hands the packing on."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.support.engine_cases import assert_close, make_batch, plain_fields, token_loss
from tests.support.tiny import tiny_config, tiny_model
from verl.models.attention import grouped_attention, packed_attention, use_packed_attention
from verl.models.forward import ResponseModel, enable_packed_attention
from verl.models.packing import Packing, packed_rows, right_padded_rows
from verl.workers.engine.base import Counts

CPU = torch.device("cpu")
BOTH = ("log_probs", "entropy")
FAMILIES = {
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 16}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 6, "attn_implementation": "eager"},
    ),
    "phi3": ("phi3", {"sliding_window": 7}),
}


def sharp_model(family, **changes):
    """Weights large enough for attention to matter."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4.0)
    return model


def counts_of(data):
    mask = data.batch["response_mask"]
    return Counts(float(mask.sum()), float(mask.any(1).sum()))


def loss_and_gradients(model, fields, data):
    loss, _ = token_loss(fields, data, counts_of(data))
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **{name: value.detach() for name, value in fields.items()}, **gradients}


# ---------------------------------------------------------------- the function


@pytest.mark.parametrize("lengths", [(5, 5, 5), (3, 50, 1, 17, 49)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (None, 1.5), (4, 1.5), (60, None)])
def test_values_and_gradients_are_those_of_each_sequence_alone(lengths, window, softcap):
    torch.manual_seed(0)
    total = sum(lengths)
    packed = [torch.randn(total, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    weight = torch.randn(total, 6, 8, dtype=torch.float64)
    out = grouped_attention(*packed, Packing.from_lengths(lengths), 0.3, window, softcap)
    found = torch.autograd.grad((out * weight).sum(), packed)
    alone = torch.cat(
        [one_sequence(*parts, 0.3, window, softcap) for parts in zip(*(x.split(lengths) for x in packed), strict=True)]
    )
    wanted = torch.autograd.grad((alone * weight).sum(), packed)
    torch.testing.assert_close(out, alone, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def one_sequence(query, key, value, scale, window, softcap):
    """Written out: query [n, heads, dim], key and value [n, kv heads, dim]."""
    count, heads, _ = query.shape
    key, value = (part.repeat_interleave(heads // part.shape[1], dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(count)
    seen = at[None] <= at[:, None]
    if window is not None:
        seen &= at[None] > at[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def test_attention_without_packing_or_with_dropout_is_refused():
    model = tiny_model()
    use_packed_attention(model)
    with pytest.raises(ValueError, match=r"^packing: Qwen2Attention"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
    x = torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match="use_remove_padding=False"):
        packed_attention(model, x, x, x, None, dropout=0.1, packing=Packing.from_lengths([3]))


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_padded_and_plain_passes_agree_in_fields_loss_and_every_gradient(name):
    family, changes = FAMILIES[name]
    data = make_batch(rows=4, prompt=9, response=16)
    hf = sharp_model(family, **changes)
    wanted = loss_and_gradients(hf, plain_fields(hf, data, 0.7), data)
    model = ResponseModel(hf, "causal_lm").eval()
    shape = tuple(data.batch["responses"].shape)
    arguments = (data.batch["input_ids"], data.batch["attention_mask"], shape[1])
    padded = loss_and_gradients(hf, model(right_padded_rows(*arguments), BOTH, shape, 0.7), data)
    assert_close(padded, wanted)
    with torch.no_grad():
        assert enable_packed_attention(model, CPU)
    packed = loss_and_gradients(hf, model(packed_rows(*arguments), BOTH, shape, 0.7), data)
    assert_close(packed, wanted)


def why_padded(model, caplog, kind="causal_lm"):
    own = model.config._attn_implementation
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        assert not enable_packed_attention(ResponseModel(model, kind).eval(), CPU)
    assert model.config._attn_implementation == own, "it attends as before"
    return caplog.text


@pytest.mark.parametrize("family", ["bert", "deberta-v2"])
def test_encoders_run_with_padding(family, caplog):
    model = AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=1))
    assert "it has an encoder" in why_padded(model, caplog, "sequence_classification")


def test_a_model_with_an_attention_of_its_own_runs_with_padding(caplog):
    sizes = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}
    assert "hidden states differ" in why_padded(sharp_model("gpt_oss", **sizes), caplog)


class DeafLayer(Qwen2DecoderLayer):
    def forward(self, hidden_states, packing=None, **arguments):
        return super().forward(hidden_states, **arguments)


@pytest.mark.parametrize(("deaf", "reason"), [([0, 1], "do not pass arguments"), ([1], "1 of its 2 layers use")])
def test_a_model_that_loses_the_packing_on_the_way_runs_with_padding(deaf, reason, caplog):
    model = tiny_model()
    for layer in deaf:
        model.model.layers[layer].__class__ = DeafLayer
    assert reason in why_padded(model, caplog)


def test_a_model_that_looks_ahead_or_hides_its_window_runs_with_padding(caplog):
    model = tiny_model()
    model.model.layers[1].self_attn.is_causal = False
    assert "Qwen2Attention attends to later tokens" in why_padded(model, caplog)
    model = tiny_model("mistral", sliding_window=5, head_dim=16)
    for layer in model.model.layers:
        layer.self_attn.forward = hidden_window(layer.self_attn.forward, model.config)
    assert "sliding_window=None" in why_padded(model, caplog)


def hidden_window(forward, config):
    def without(*positional, **named):
        window, config.sliding_window = config.sliding_window, None
        try:
            return forward(*positional, **named)
        finally:
            config.sliding_window = window

    return without
