"""Loading: the config that training uses, and models on the meta device and from disk."""

import pytest
import torch

from tests.support.tiny import save_tiny_model, tiny_config, tiny_model
from verl.models.loading import ValueModel, empty_model, pretrained_model, read_config


def test_dropout_is_off_unless_asked_for(tmp_path):
    save_tiny_model(tmp_path, attention_dropout=0.3)
    assert read_config(str(tmp_path)).attention_dropout == 0.0
    assert read_config(str(tmp_path), override_config={"attention_dropout": 0.1}).attention_dropout == 0.1


def test_an_override_replaces_a_key_and_an_unknown_one_is_refused(tmp_path):
    save_tiny_model(tmp_path)
    assert read_config(str(tmp_path), override_config={"rms_norm_eps": 0.5}).rms_norm_eps == 0.5
    assert read_config(str(tmp_path), override_config={"attn_implementation": "eager"})._attn_implementation == "eager"
    with pytest.raises(ValueError, match=r"'rms_norm_epsi'"):
        read_config(str(tmp_path), override_config={"rms_norm_epsi": 0.5})


def test_soft_capped_attention_is_not_left_to_kernels_that_cannot_do_it(tmp_path):
    save_tiny_model(tmp_path, "gemma2", head_dim=16, attn_logit_softcapping=20.0)
    assert read_config(str(tmp_path))._attn_implementation == "eager"
    chosen = read_config(str(tmp_path), override_config={"attn_implementation": "flex_attention"})
    assert chosen._attn_implementation == "flex_attention"


@pytest.mark.parametrize("kind", ["causal_lm", "value", "sequence_classification"])
def test_an_empty_model_has_all_names_and_no_memory(kind):
    model = empty_model(tiny_config(num_labels=1), kind, torch.bfloat16)
    assert all(value.is_meta for value in [*model.parameters(), *model.buffers()])
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert isinstance(model, ValueModel) == (kind == "value")


def test_a_causal_checkpoint_becomes_a_value_model_with_the_same_body(tmp_path):
    save_tiny_model(tmp_path)
    model = pretrained_model(str(tmp_path), read_config(str(tmp_path)), "value")
    body = tiny_model().base_model.state_dict()
    assert all(torch.equal(value, body[name]) for name, value in model.base_model.state_dict().items())


def test_a_checkpoint_without_the_weights_of_its_kind_is_refused(tmp_path):
    save_tiny_model(tmp_path)
    with pytest.raises(ValueError, match=r"Qwen2ForSequenceClassification: score\.weight"):
        pretrained_model(str(tmp_path), read_config(str(tmp_path)), "sequence_classification")


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match=r"^kind: 'critic' .*causal_lm, value, sequence_classification"):
        empty_model(tiny_config(), "critic", torch.float32)
