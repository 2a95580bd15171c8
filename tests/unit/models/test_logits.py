"""Heads: logits as each model family makes them; the value head."""

import pytest
import torch

from tests.support.tiny import tiny_model
from verl.models.loading import ValueModel
from verl.models.logits import head_weights, logit_head


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.3}),
        ("cohere", {"logit_scale": 4.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("gpt2", {}),
    ],
)
def test_logits_are_those_of_the_models_own_forward_pass(family, changes):
    model = tiny_model(family, **changes)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = logit_head(model)(model.base_model(input_ids=ids).last_hidden_state)
        torch.testing.assert_close(found, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_an_output_layer_that_is_more_than_linear_is_refused():
    model = tiny_model()
    model.set_output_embeddings(torch.nn.Sequential(model.lm_head))
    with pytest.raises(ValueError, match="target_modules"):
        head_weights(model)


def test_a_value_head_starts_at_zero_or_as_the_checkpoint_has_it():
    base = tiny_model().base_model
    assert not ValueModel(base).score.weight.any()
    weight = torch.randn(1, 64)
    model = ValueModel(base, {"score.weight": weight})
    assert torch.equal(model.score.weight, weight)
    assert model.score.bias.item() == 0
    assert {name.split(".")[0] for name in model.state_dict()} == {"model", "score"}
    with pytest.raises(ValueError, match=r"^model\.path: score\.weight .*\(2, 64\).*\(1, 64\)"):
        ValueModel(base, {"score.weight": torch.randn(2, 64)})
