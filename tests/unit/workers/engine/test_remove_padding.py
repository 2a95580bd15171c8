"""`use_remove_padding` changes how the engine computes and nothing that it computes."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.engine_cases import (
    OUTPUTS_OF_KIND,
    assert_close,
    engine_gradients,
    make_batch,
    make_engine,
    model_of_kind,
    token_loss,
)
from tests.support.tiny import tiny_config, tiny_model
from verl.workers.engine.base import MicroBatching


def row_loss(outputs, batch, counts):
    loss = (outputs["scores"] ** 2).sum() / counts.sequences
    return loss, {"loss": (loss, 1.0)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", OUTPUTS_OF_KIND)
def test_every_kind_of_model_computes_and_learns_the_same_packed_and_padded(kind, checkpointing):
    data, model = make_batch(rows=7), model_of_kind(kind)
    loss = row_loss if kind == "sequence_classification" else token_loss
    found = {}
    for packed in (True, False):
        engine = make_engine(model, kind, use_remove_padding=packed, enable_gradient_checkpointing=checkpointing)
        assert (engine.model.hf.config._attn_implementation == "verl_packed") == packed
        fields = dict(engine.infer(data, OUTPUTS_OF_KIND[kind], micro=MicroBatching(size=3)).batch.items())
        metrics = engine.forward_backward(data, loss, OUTPUTS_OF_KIND[kind], micro=MicroBatching(size=3))
        found[packed] = {"loss": torch.tensor(metrics["loss"][0]), **fields, **engine_gradients(engine)}
    assert_close(found[True], found[False])


def test_rows_of_padding_only_change_nothing():
    data, engine = make_batch(rows=4), make_engine(tiny_model())
    wanted = engine.infer(data, ["log_probs"]).batch["log_probs"]
    for key in ("attention_mask", "response_mask"):
        data.batch[key][1] = 0
    found = engine.infer(data, ["log_probs"]).batch["log_probs"]
    assert (found[1] == 0).all()
    torch.testing.assert_close(found[[0, 2, 3]], wanted[[0, 2, 3]])
    engine.forward_backward(data, token_loss, ["log_probs"])
    without = make_engine(tiny_model())
    without.forward_backward(data.select_idxs([0, 2, 3]), token_loss, ["log_probs"])
    assert_close(engine_gradients(engine), engine_gradients(without))


def test_a_model_that_cannot_is_run_with_padding_and_says_so(caplog):
    model = AutoModelForSequenceClassification.from_config(tiny_config("bert", num_labels=1))
    with caplog.at_level(logging.WARNING):
        engine = make_engine(model, "sequence_classification", train=False, use_remove_padding=True)
    assert "BertForSequenceClassification runs with padding: it has an encoder" in caplog.text
    assert engine.infer(make_batch(), ["scores"]).batch["scores"].shape == (6,)
