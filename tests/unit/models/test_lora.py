"""Adapters in a model on the meta device: which layers, which names, which weights learn."""

import builtins
import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.support.tiny import tiny_config, tiny_model
from verl.config import ModelConfig, as_config
from verl.models.loading import empty_model
from verl.models.lora import Adapters, adapter_parameters

EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}


def adapted(family="qwen2", kind="causal_lm", sizes=None, **keys):
    """The model and its adapters; the model in bfloat16 on the meta device."""
    hf = empty_model(tiny_config(family, **(sizes or {})), kind, torch.bfloat16)
    config = as_config(ModelConfig, {"path": "given", "lora_rank": 4, **keys})
    return hf, Adapters(hf, kind, config)


def layers_of(adapters):
    return set(adapters.layers)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gpt2", "gemma2"])
def test_all_linear_means_what_peft_means_by_it(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules="all-linear"))
    wanted = {name for name, _ in theirs.named_parameters() if "lora_" in name}
    _, adapters = adapted(family)
    assert {adapters.peft_name(name).replace(".weight", ".default.weight") for name in adapters.adapter_names} == wanted


def test_a_model_has_the_same_names_as_without_adapters():
    for family, kind in (("qwen2", "causal_lm"), ("gpt2", "causal_lm"), ("llama", "value")):
        hf, adapters = adapted(family, kind)
        plain = empty_model(hf.config, kind, torch.bfloat16).state_dict()
        assert {name: value.shape for name, value in adapters.plain(hf.state_dict()).items()} == {
            name: value.shape for name, value in plain.items()
        }


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"target_modules": ["q_proj"]}, {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"}),
        ({"target_modules": [r".*\.1\.mlp\.(up|down)_proj"]}, {f"model.layers.1.mlp.{n}_proj" for n in ("up", "down")}),
        (
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.0.self_attn.q_proj", "v_proj"]},
            {"model.layers.1.self_attn.q_proj"},
        ),
        (
            {"target_modules": ["o_proj"], "exclude_modules": [r"model\.layers\.0\..*"]},
            {"model.layers.1.self_attn.o_proj"},
        ),
    ],
)
def test_names_or_one_expression_choose_the_layers(keys, layers):
    assert layers_of(adapted(**keys)[1]) == layers


def test_only_adapters_learn_and_in_float32():
    hf, _ = adapted()
    for name, parameter in hf.named_parameters():
        own = "lora_" in name
        assert parameter.requires_grad == own
        assert parameter.dtype == (torch.float32 if own else torch.bfloat16)


def test_a_value_head_learns_whole():
    hf, _ = adapted(kind="value")
    head = {name: value for name, value in hf.named_parameters() if name.startswith("score")}
    assert set(head) == {"score.weight", "score.bias"}
    assert all(value.requires_grad and value.dtype == torch.float32 for value in head.values())


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_embeddings_and_the_output_head_are_refused(name):
    with pytest.raises(ValueError, match=r"target_modules: .*" + name + r".* \[down_proj,.*v_proj\]"):
        adapted(target_modules=[name])


def test_experts_are_refused_and_left_alone_by_all_linear():
    _, adapters = adapted("mixtral", sizes=EXPERTS)
    assert {name.rpartition(".")[2] for name in layers_of(adapters)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ValueError, match=r"target_modules: .*\bexperts\b"):
        adapted("mixtral", sizes=EXPERTS, target_modules=["q_proj", "w1", "w2", "w3"])


def test_a_name_that_is_nowhere_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"model.target_modules: .*query.*q_proj"):
        adapted(target_modules=["query"])


def test_the_first_values_are_those_of_peft_and_depend_on_the_name_alone():
    values, again = [], []
    for found in (values, again):
        torch.rand(1)
        adapted()[1].initialize(lambda _, whole, found=found: found.append(whole))
    assert all(torch.equal(a, b) for a, b in zip(values, again, strict=True))
    downs, ups = values[::2], values[1::2]
    assert all(not up.any() for up in ups)
    for down in downs:
        bound = down.shape[1] ** -0.5
        assert down.abs().max() <= bound
        assert down.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    assert not torch.equal(downs[0], downs[4])


def test_without_peft_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "peft":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"lora_rank: .*pip install -e \.\[lora\]"):
        adapted()


@pytest.mark.parametrize("kind", ["causal_lm", "value"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"target_modules": ["q_proj", "self_attn.v_proj"]},
        {"target_modules": [r".*\.(q|up)_proj"]},
        {"exclude_modules": ["q_proj"]},
    ],
)
def test_the_number_of_trained_parameters_needs_no_peft(kind, keys):
    hf, _ = adapted(kind=kind, **keys)
    trained = sum(value.numel() for value in hf.parameters() if value.requires_grad)
    plain = empty_model(tiny_config("qwen2"), kind, torch.bfloat16)
    config = as_config(ModelConfig, {"path": "given", "lora_rank": 4, **keys})
    assert adapter_parameters(plain, kind, config) == trained


def test_a_plan_with_unknown_target_modules_names_those_of_the_model():
    config = as_config(ModelConfig, {"path": "given", "lora_rank": 4, "target_modules": ["query"]})
    with pytest.raises(ValueError, match=r"target_modules: .*\['query'\].*q_proj"):
        adapter_parameters(empty_model(tiny_config("qwen2"), "causal_lm", torch.bfloat16), "causal_lm", config)
