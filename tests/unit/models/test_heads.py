"""Heads: logits as each model family makes them, never all at once; the value head."""

import pytest
import torch
from tiny import tiny_model

from verl.models.heads import ValueModel, chunk_rows_for, label_statistics, logit_head


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


def statistics(chunk_rows, grad=True):
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, requires_grad=grad)
    linear = torch.nn.Linear(8, 50)
    labels = torch.randint(0, 50, (11,))
    log_probs, entropy = label_statistics(hidden, labels, linear, 0.5, with_entropy=True, chunk_rows=chunk_rows)
    (log_probs.sum() + (entropy**2).sum()).backward()
    logits = linear(hidden) / 0.5
    return log_probs, entropy, hidden.grad, linear.weight.grad, logits, labels


def test_statistics_are_exact_and_do_not_depend_on_the_chunk():
    log_probs, entropy, _, _, logits, labels = statistics(chunk_rows=11)
    exact = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs, exact.log_prob(labels))
    torch.testing.assert_close(entropy, exact.entropy())
    for rows in (1, 4, 100):
        for found, wanted in zip(statistics(rows)[:4], statistics(11)[:4], strict=True):
            torch.testing.assert_close(found, wanted)


def test_no_logits_are_kept_for_the_backward_pass():
    kept = []
    hidden, linear = torch.randn(12, 8, requires_grad=True), torch.nn.Linear(8, 1000)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        label_statistics(hidden, torch.zeros(12, dtype=torch.long), linear, 1.0, with_entropy=True, chunk_rows=3)
    assert all(1000 not in shape for shape in kept)


def test_no_rows_give_no_statistics_but_a_gradient_of_zero():
    hidden, linear = torch.randn(3, 8, requires_grad=True), torch.nn.Linear(8, 5)
    empty = torch.zeros(0, dtype=torch.long)
    log_probs, _ = label_statistics(hidden[empty], empty, linear, 1.0, with_entropy=False, chunk_rows=2)
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert (linear.weight.grad == 0).all()


def test_a_chunk_holds_at_least_one_row_of_any_vocabulary():
    assert chunk_rows_for(2**30) == 1
    assert chunk_rows_for(2**16) * 2**16 == 2**26


def test_a_value_head_starts_at_zero_or_as_the_checkpoint_has_it():
    base = tiny_model().base_model
    assert not ValueModel(base).score.weight.any()
    weight = torch.randn(1, 64)
    model = ValueModel(base, {"score.weight": weight})
    assert torch.equal(model.score.weight, weight)
    assert model.score.bias.item() == 0
    assert {name.split(".")[0] for name in model.state_dict()} == {"model", "score"}
    with pytest.raises(ValueError, match="one label"):
        ValueModel(base, {"score.weight": torch.randn(2, 64)})
