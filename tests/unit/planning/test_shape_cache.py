"""Shapes of models: cached by content, and those of known models by formula."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from tests.support.tiny import tiny_config
from verl.config import load_config
from verl.planning import catalog
from verl.planning.catalog import known_name, known_shape, model_shape
from verl.planning.shapes import ModelShape


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shapes"


@pytest.fixture
def folder(tmp_path):
    tiny_config().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def model_config(*overrides):
    base = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    return load_config(None, [*base, *overrides], check_files=False).actor_rollout_ref.model


def test_a_shape_is_computed_once_for_a_content(folder, cache, monkeypatch):
    first = model_shape(folder, model_config())
    assert first == ModelShape.from_folder(folder, model_config())
    monkeypatch.setattr(ModelShape, "from_folder", None)  # it would fail if it were called
    assert model_shape(folder, model_config()) == first
    assert len(list(cache.iterdir())) == 1


def test_another_content_kind_or_adapter_is_another_shape(folder, cache):
    plain = model_shape(folder, model_config())
    lora = model_shape(folder, model_config("actor_rollout_ref.model.lora_rank=4"))
    assert lora == replace(plain, adapter_parameters=lora.adapter_parameters)
    assert lora.adapter_parameters
    assert model_shape(folder, model_config(), "value").parameters < plain.parameters
    wider = model_shape(folder, model_config("+actor_rollout_ref.model.override_config.intermediate_size=256"))
    assert wider.intermediate == 256
    tiny_config(num_hidden_layers=3).save_pretrained(folder)
    assert model_shape(folder, model_config()).layers == 3
    assert len(list(cache.iterdir())) == 5


def test_damaged_entries_and_unusable_caches_only_cost_time(folder, cache, monkeypatch, tmp_path):
    shape = model_shape(folder, model_config())
    (entry,) = cache.iterdir()
    for content in ("", "{", json.dumps({"layers": 1}), "[]"):
        entry.write_text(content)
        assert model_shape(folder, model_config()) == shape
    assert json.loads(entry.read_text())["layers"] == shape.layers
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "file"))
    assert model_shape(folder, model_config()) == shape


def test_models_with_their_own_code_are_not_cached(folder, cache):
    model_shape(folder, model_config("actor_rollout_ref.model.trust_remote_code=True"))
    assert not cache.exists()
    assert catalog.cache_key(folder + "/missing", model_config(), "causal_lm") is None


@pytest.mark.parametrize("kind", ["causal_lm", "value", "sequence_classification"])
@pytest.mark.parametrize(
    ("name", "sizes"), [("Qwen2.5-0.5B", (896, 24, 14, 2, 4864)), ("Qwen2.5-7B", (3584, 28, 28, 4, 18944))]
)
def test_known_shapes_are_those_of_the_models(name, sizes, kind):
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    vocab, tied = (151936, True) if name == "Qwen2.5-0.5B" else (152064, False)
    config = AutoConfig.for_model(
        "qwen2", **dict(zip(keys, sizes, strict=True)), vocab_size=vocab, tie_word_embeddings=tied, num_labels=1
    )
    expected = ModelShape.from_config(config, kind)
    assert known_shape(name, kind) == replace(expected, positions=32768)


def test_known_adapters_are_those_of_all_linear_layers(tmp_path):
    config = AutoConfig.for_model(
        "qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    expected = ModelShape.from_folder(str(tmp_path), model_config("actor_rollout_ref.model.lora_rank=8"))
    assert known_shape("Qwen2.5-0.5B", lora_rank=8).adapter_parameters == expected.adapter_parameters


def test_names_of_known_models():
    assert known_name("Qwen/Qwen2.5-7B-Instruct") == "Qwen2.5-7B"
    assert known_name("qwen2.5-1.5b") == "Qwen2.5-1.5B"
    assert known_name("Qwen/Qwen2.5-Math-7B") == "Qwen2.5-7B"
    for name in ("Qwen/Qwen3-8B", "other/Qwen2.5-7B", "Qwen/Qwen2.5-8B", "Qwen2.5-7B-GPTQ"):
        assert known_name(name) is None
