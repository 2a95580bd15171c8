"""On one rank the engine is plain transformers: same numbers, same gradients, same files."""

import copy
import math

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.support.engine_cases import (
    DEVICE,
    OUTPUTS_OF_KIND,
    assert_close,
    engine_gradients,
    make_batch,
    make_engine,
    model_of_kind,
    plain_fields,
    plain_gradients,
    token_loss,
    whole_weights,
)
from tests.support.tiny import STEADY_EPS, save_tiny_model, tiny_config, tiny_model
from verl.models import forward
from verl.models.loading import ValueModel
from verl.protocol import DataProto
from verl.types.weights import TensorSpec
from verl.workers.engine.base import Counts, MicroBatching
from verl.workers.engine.common import base_engine
from verl.workers.engine.common.base_engine import compiled_pass
from verl.workers.engine.common.groups import ensure_process_group
from verl.workers.engine.fsdp import sharding
from verl.workers.engine.fsdp.weights import ModelWeights

BOTH = ["log_probs", "entropy"]


def train(engine, data, outputs=("log_probs",), steps=1, **arguments):
    metrics = []
    for _ in range(steps):
        engine.forward_backward(data, token_loss, outputs, **arguments)
        metrics.append(engine.optimizer_step())
    return metrics


def random_head(model, seed=3):
    torch.manual_seed(seed)
    value = ValueModel(model.base_model)
    torch.nn.init.normal_(value.score.weight)
    torch.nn.init.normal_(value.score.bias)
    return value


# ---------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma2", {"head_dim": 16, "final_logit_softcapping": 0.5}),
        ("gpt2", {"tie_word_embeddings": True}),
    ],
)
def test_fields_and_gradients_equal_plain_transformers(family, changes, temperature):
    data, model = make_batch(), tiny_model(family, **changes)
    engine = make_engine(model)
    with torch.no_grad():
        wanted = plain_fields(model, data, temperature)
    found = engine.infer(data, BOTH, temperature)
    assert_close({name: found.batch[name] for name in BOTH}, wanted)
    metrics = engine.forward_backward(data, token_loss, BOTH, temperature)
    gradients = plain_gradients(family, data, temperature, **changes)
    assert_close(engine_gradients(engine), gradients)
    tokens = float(data.batch["response_mask"].sum())
    assert metrics["tokens"] == (tokens, tokens)


@pytest.mark.parametrize(
    ("micro", "changes", "batch"),
    [
        (MicroBatching(size=1), {}, {}),
        (MicroBatching(size=4), {}, {}),
        (MicroBatching(max_tokens=20), {}, {}),
        (MicroBatching(), {"enable_gradient_checkpointing": False}, {}),
        (MicroBatching(size=2), {"reshard_after_forward": True}, {}),
        (MicroBatching(size=2), {}, {"extra_prompt": 13}),
        (MicroBatching(size=4), {"use_remove_padding": False}, {}),
    ],
)
def test_gradients_do_not_depend_on_how_the_rows_are_cut_padded_or_recomputed(micro, changes, batch):
    model = tiny_model()
    engine = make_engine(model, **{"enable_gradient_checkpointing": True, **changes})
    engine.forward_backward(make_batch(**batch), token_loss, BOTH, 0.8, micro)
    assert_close(engine_gradients(engine), plain_gradients("qwen2", make_batch(), 0.8))


def test_one_rank_adds_up_micro_batches_and_reduces_them_once(monkeypatch):
    engine, ends, finish = make_engine(tiny_model()), [], sharding.set_last_micro_batch
    monkeypatch.setattr(sharding, "set_last_micro_batch", lambda model, last: (ends.append(last), finish(model, last)))
    engine.forward_backward(make_batch(rows=6), token_loss, BOTH, micro=MicroBatching(size=2))
    assert ends == [False, False, True]
    assert_close(engine_gradients(engine), plain_gradients("qwen2", make_batch(rows=6)))


def test_gradients_of_resharded_layers_are_added_in_place(monkeypatch):
    """After the first micro-batch there is nothing to reduce, also in a further pass before the optimizer step."""
    engine, reduced = make_engine(tiny_model(), reshard_after_forward=True), []
    reduce = _fsdp_param_group.foreach_reduce
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", lambda *args: (reduced.append(args), reduce(*args))[1])
    data, micro = make_batch(rows=6), MicroBatching(size=2)
    groups, wanted = len(list(sharding.sharded_modules(engine.model))), plain_gradients("qwen2", data)
    for factor in (1, 2):
        engine.forward_backward(data, token_loss, BOTH, micro=micro)
        assert len(reduced) == groups > 2
        assert_close(engine_gradients(engine), {name: factor * value for name, value in wanted.items()})
    engine.optimizer_step()
    engine.forward_backward(data, token_loss, BOTH, micro=micro)
    assert len(reduced) == 2 * groups


@pytest.mark.parametrize(
    ("kind", "model", "changes"),
    [
        ("causal_lm", {"family": "llama", "tie_word_embeddings": True}, {}),
        ("causal_lm", {}, {"lora_rank": 4}),
        ("causal_lm", {}, {"grad_offload": True}),
        ("value", {}, {"use_remove_padding": False}),
    ],
)
def test_gradients_added_in_place_have_the_bits_of_reductions(kind, model, changes, monkeypatch):
    data, outputs, found = make_batch(), OUTPUTS_OF_KIND[kind], []
    for in_place in (True, False):
        if not in_place:
            monkeypatch.setattr(sharding, "accumulate_in_place", lambda _: None)
        engine = make_engine(model_of_kind(kind, **model), kind, reshard_after_forward=True, **changes)
        for _ in range(2):
            engine.forward_backward(data, token_loss, outputs, micro=MicroBatching(size=2))
        engine.optimizer_step()
        found.append(whole_weights(engine))
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_a_compiler_that_fails_is_explained_with_the_key():
    with (
        pytest.raises(RuntimeError, match=r"use_torch_compile"),
        compiled_pass(True, "Qwen2Model"),
    ):
        raise TorchDynamoException("no compiler\nmore lines")


def test_accumulated_halves_with_global_counts_equal_the_whole():
    data, model = make_batch(rows=6), tiny_model()
    whole, halves = make_engine(model), make_engine(model)
    whole.forward_backward(data, token_loss, BOTH)
    mask = data.batch["response_mask"]
    counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
    for part in data.chunk(2):
        halves.forward_backward(part, token_loss, BOTH, counts=counts)
    assert_close(engine_gradients(halves), engine_gradients(whole))


def moved_padding(data, side):
    """The same tokens with each row's padding moved to one side of its prompt and of its response."""
    batch, width = data.batch, data.batch["responses"].shape[1]
    rows = {"input_ids": [], "attention_mask": []}
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        prompt, response = ids[:-width][mask[:-width]], ids[-width:][mask[-width:]]
        padding = torch.full((len(ids) - width - len(prompt),), 7)
        front = [padding, prompt] if side == "left" else [prompt, padding]
        rows["input_ids"].append(torch.cat([*front, response, torch.full((width - len(response),), 11)]))
        on = [torch.zeros_like(padding), torch.ones_like(prompt)]
        mask_front = on if side == "left" else on[::-1]
        response_mask = (torch.arange(width) < len(response)).long()
        rows["attention_mask"].append(torch.cat([*mask_front, response_mask]))
    tensors = {key: torch.stack(value) for key, value in rows.items()}
    return DataProto.from_dict({**tensors, "responses": tensors["input_ids"][:, -width:]})


def test_neither_the_side_of_padding_nor_the_ids_in_it_change_a_bit():
    data, engine = make_batch(), make_engine(tiny_model())
    wanted = engine.infer(data, BOTH).batch
    for other in (moved_padding(data, "left"), moved_padding(data, "right")):
        found = engine.infer(other, BOTH).batch
        assert all(torch.equal(found[name], wanted[name]) for name in BOTH)


def test_padding_contributes_nothing_whatever_it_holds():
    data, model = make_batch(), tiny_model()
    attended = data.batch["attention_mask"].bool()
    garbage = DataProto.from_dict(dict(data.batch.items()))
    garbage.batch["input_ids"] = torch.where(attended, data.batch["input_ids"], 263)
    garbage.batch["position_ids"] = torch.where(attended, data.batch["position_ids"], 10**6)
    garbage.batch["weights"] = torch.where(attended[:, -9:], data.batch["weights"], math.nan)
    gradients = []
    for batch in (data, garbage):
        engine = make_engine(model)
        engine.forward_backward(batch, token_loss, BOTH)
        gradients.append(engine_gradients(engine))
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    found = make_engine(model).infer(data, BOTH).batch
    outside = data.batch["attention_mask"][:, -9:] == 0
    assert outside.any()
    assert all((found[name][outside] == 0).all() for name in BOTH)


def test_results_of_inference_keep_the_order_of_the_rows():
    data, engine = make_batch(rows=7), make_engine(tiny_model())
    wanted = engine.infer(data, BOTH).batch
    for micro in (MicroBatching(size=2), MicroBatching(max_tokens=25)):
        found = engine.infer(data, BOTH, micro=micro).batch
        assert_close(dict(found.items()), dict(wanted.items()))
        assert found["log_probs"].dtype == torch.float32
        assert found["log_probs"].device.type == "cpu"


def test_a_batch_of_no_rows_is_answered_with_no_rows():
    data, engine = make_batch()[:0], make_engine(tiny_model())
    assert engine.infer(data, ["log_probs"]).batch["log_probs"].shape == (0, 9)


# ---------------------------------------------------------------- other heads


def test_values_are_those_of_the_state_before_each_token_and_after_the_last():
    data, causal = make_batch(), tiny_model()
    model = random_head(causal)
    engine = make_engine(model, "value")
    found = engine.infer(data, ["values"]).batch["values"]
    both = engine.infer(data, ["last_value", "values"], micro=MicroBatching(size=4)).batch
    torch.testing.assert_close(both["values"], found)
    for row in range(len(data)):
        mask = data.batch["attention_mask"][row].bool()
        length = int(mask[-9:].sum())
        with torch.no_grad():
            hidden = causal.base_model(input_ids=data.batch["input_ids"][row][mask][None]).last_hidden_state[0]
            wanted = model.score(hidden)[:, 0]
        torch.testing.assert_close(found[row, :length], wanted[-length - 1 : -1], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(both["last_value"][row], wanted[-1], atol=1e-5, rtol=1e-4)
        assert (found[row, length:] == 0).all()


def test_a_value_model_from_a_causal_checkpoint_starts_at_zero_and_learns(tmp_path):
    data = make_batch()
    engine = make_engine(str(save_tiny_model(tmp_path)), "value", lr=2e-3)
    assert (engine.infer(data, ["values"]).batch["values"] == 0).all()

    def to_two(outputs, batch, counts):
        loss = ((outputs["values"] - 2.0) ** 2 * batch.batch["response_mask"]).sum() / counts.tokens
        return loss, {"loss": (loss, 1.0)}

    losses = []
    for _ in range(15):
        losses.append(engine.forward_backward(data, to_two, ["values"])["loss"][0])
        engine.optimizer_step()
    assert losses[0] == pytest.approx(4.0)
    assert losses[-1] < 1.0


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "qwen2"])
def test_scores_equal_the_sequence_classifier_on_unpadded_text(family, tmp_path):
    sizes = {"position_biased_input": True} if family == "deberta-v2" else {}
    torch.manual_seed(0)
    config = tiny_config(family, num_labels=1, relative_attention=True, **sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    data = make_batch()
    engine = make_engine(str(tmp_path), "sequence_classification", train=False)
    found = engine.infer(data, ["scores"], micro=MicroBatching(size=4)).batch["scores"]
    rows = zip(data.batch["input_ids"], data.batch["attention_mask"].bool(), strict=True)
    with torch.no_grad():
        wanted = torch.stack([model(input_ids=ids[mask][None]).logits[0, 0] for ids, mask in rows])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert len(set(found.tolist())) == len(data)


# ---------------------------------------------------------------- the optimizer


def test_steps_equal_adamw_on_plain_transformers():
    data, model = make_batch(), tiny_model()
    engine = make_engine(model, lr=1e-2, weight_decay=0.1, grad_clip=0.5)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.9, 0.999), eps=STEADY_EPS, weight_decay=0.1)
    mask = data.batch["response_mask"]
    counts = Counts(float(mask.sum()), float(mask.any(1).sum()))
    for _ in range(3):
        token_loss({"log_probs": plain_fields(reference, data)["log_probs"]}, data, counts)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        (metrics,) = train(engine, data)
        assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert metrics["skipped"] == 0
    assert_close(whole_weights(engine), reference.state_dict())


def test_rounding_of_gradients_stays_rounding_in_the_weights_that_tests_compare():
    """Other machines sum in another order: their gradients differ by this much, and so must their weights."""
    model, weights = random_head(tiny_model()), {}
    for eps in (STEADY_EPS, 1e-8):
        for noise in (0.0, 3e-7):
            draw = torch.Generator().manual_seed(1)
            engine = make_engine(model, "value", eps=eps)
            for _ in range(2):
                engine.forward_backward(make_batch(), token_loss, ["values"])
                for gradient in engine.optimizer.gradients():
                    gradient += noise * gradient.abs().max() * torch.randn(gradient.shape, generator=draw)
                engine.optimizer_step()
            weights[eps, noise] = torch.cat([value.flatten() for value in whole_weights(engine).values()])
    gaps = {eps: (weights[eps, 0.0] - weights[eps, 3e-7]).abs().max() for eps in (STEADY_EPS, 1e-8)}
    assert gaps[STEADY_EPS] < 2e-6
    assert gaps[1e-8] > 1e-4, "which is why the tests take another"


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ({"lr_warmup_steps": 2}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"lr_warmup_steps_ratio": 0.4, "total_training_steps": 5}, [0.0, 0.5, 1.0, 1.0, 1.0]),
        ({"lr_scheduler": "cosine", "min_lr_ratio": 0.2}, [1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_the_learning_rate_follows_the_schedule(schedule, wanted):
    engine = make_engine(tiny_model(), lr=1e-3, total_steps=4, **schedule)
    rates = [metrics["lr"] for metrics in train(engine, make_batch(rows=2), steps=5)]
    assert rates == pytest.approx([1e-3 * factor for factor in wanted])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, tmp_path):
    data, engine = make_batch(), make_engine(tiny_model())
    train(engine, data, steps=2)
    weights, state = whole_weights(engine), {key: value.clone() for key, value in engine.optimizer.tensors().items()}

    def broken(outputs, batch, counts):
        loss, metrics = token_loss(outputs, batch, counts)
        return loss * bad, metrics

    engine.forward_backward(data, broken, ["log_probs"])
    metrics = engine.optimizer_step()
    assert metrics["skipped"] == 1
    assert not math.isfinite(metrics["grad_norm"])
    after = whole_weights(engine)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    after = engine.optimizer.tensors()
    assert set(after) == set(state)
    assert all(torch.equal(_whole(after[name]), _whole(state[name])) for name in state)
    assert train(engine, data)[0]["skipped"] == 0


def test_a_step_without_a_token_that_counts_moves_neither_weights_nor_moments_nor_schedule():
    """Momentum and weight decay alone would move them."""
    data, engine = make_batch(), make_engine(tiny_model(), weight_decay=0.1, lr_scheduler="cosine", total_steps=9)
    train(engine, data, steps=2)
    weights, state = whole_weights(engine), {key: value.clone() for key, value in engine.optimizer.tensors().items()}
    masked = make_batch()
    masked.batch["response_mask"] = torch.zeros_like(masked.batch["response_mask"])
    first, second = train(engine, masked, steps=2)
    assert (first["empty"], first["skipped"], first["grad_norm"]) == (1, 0, 0)
    assert second["lr"] == first["lr"]
    after = whole_weights(engine)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    after = engine.optimizer.tensors()
    assert all(torch.equal(_whole(after[name]), _whole(state[name])) for name in state)
    assert train(engine, data)[0]["empty"] == 0
    # Only the whole of an optimizer step decides: micro-batches without a token are part of one that has some.
    engine.forward_backward(masked, token_loss, ["log_probs"])
    engine.forward_backward(data, token_loss, ["log_probs"])
    engine.forward_backward(masked, token_loss, ["log_probs"])
    assert engine.optimizer_step()["empty"] == 0


def test_the_search_for_a_loss_scale_is_no_broken_gradient():
    """float16 and a loss that sums over the tokens: the scale comes down until the gradients fit, also below 1."""
    data, engine = make_batch(rows=1), make_engine(tiny_model(num_hidden_layers=1), mixed_precision="fp16")

    def summed(outputs, batch, counts):
        return 1e6 * (outputs["log_probs"] * batch.batch["response_mask"]).sum(), {}

    weights, found = whole_weights(engine), []
    while not found or (found[-1]["loss_scale_search"] and len(found) < 40):
        assert all(torch.equal(value, weights[name]) for name, value in whole_weights(engine).items())
        engine.forward_backward(data, summed, ["log_probs"])
        found.append(engine.optimizer_step())
    assert len(found) > 17
    assert [metrics["skipped"] for metrics in found] == [0.0] * len(found)
    assert math.isfinite(found[-1]["grad_norm"])


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def test_inference_sees_the_weights_of_the_last_step():
    data, engine = make_batch(), make_engine(tiny_model())
    before = engine.infer(data, ["log_probs"]).batch["log_probs"]
    train(engine, data)
    after = engine.infer(data, ["log_probs"]).batch["log_probs"]
    reference = tiny_model()
    reference.load_state_dict(whole_weights(engine))
    with torch.no_grad():
        torch.testing.assert_close(after, plain_fields(reference, data)["log_probs"], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(before, after)


# ---------------------------------------------------------------- weights in and out


@pytest.mark.parametrize("tied", [False, True])
def test_buckets_are_the_state_dict_of_transformers(tied):
    model = tiny_model(tie_word_embeddings=tied)
    engine = make_engine(model)
    wanted = model.state_dict()
    assert engine.manifest() == {name: TensorSpec(tuple(v.shape), v.dtype) for name, v in wanted.items()}
    limit = 40_000
    parts = [{k: v.cpu().clone() for k, v in bucket.items()} for bucket in engine.buckets(None, limit)]
    assert len(parts) > 2
    for part in parts:
        assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= limit
    found = {name: value for part in parts for name, value in part.items()}
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    half = {k: v.cpu() for bucket in engine.buckets(torch.bfloat16, 2**20) for k, v in bucket.items()}
    assert all(torch.equal(half[name], wanted[name].bfloat16()) for name in wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_the_export_loads_in_transformers_with_equal_logits(tied, tmp_path):
    source = save_tiny_model(tmp_path / "source", tie_word_embeddings=tied)
    data, engine = make_batch(), make_engine(str(source))
    train(engine, data, steps=2)
    engine.export_hf(tmp_path / "export")
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    weights = whole_weights(engine)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        wanted = plain_fields(model.eval(), data)["log_probs"]
    torch.testing.assert_close(engine.infer(data, ["log_probs"]).batch["log_probs"], wanted, atol=2e-5, rtol=1e-4)
    again = make_engine(str(tmp_path / "export"))
    assert_close(whole_weights(again), weights, tolerance=0)


def test_an_exported_critic_is_a_token_classifier_and_loads_as_critic_again(tmp_path):
    data, engine = make_batch(), make_engine(random_head(tiny_model()), "value")
    engine.export_hf(tmp_path)
    values = engine.infer(data, ["values"]).batch["values"]
    again = make_engine(str(tmp_path), "value").infer(data, ["values"]).batch["values"]
    assert torch.equal(values, again)
    model, found = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not found["missing_keys"]
    assert model.config.num_labels == 1
    mask = data.batch["attention_mask"][0].bool()
    length = int(mask[-9:].sum())
    with torch.no_grad():
        logits = model.eval()(input_ids=data.batch["input_ids"][0][mask][None]).logits[0, :, 0]
    torch.testing.assert_close(values[0, :length], logits[-length - 1 : -1], atol=1e-5, rtol=1e-4)


def test_a_saved_engine_continues_bit_for_bit(tmp_path):
    data, other = make_batch(), make_batch(seed=1)
    changes = {"lr_scheduler": "cosine", "lr_warmup_steps": 2}
    first = make_engine(tiny_model(), **changes)
    train(first, data, steps=2)
    first.save(tmp_path, ["model", "optimizer", "extra"])
    noise = torch.rand(4)
    rates = train(first, other, steps=2)
    second = make_engine(tiny_model(seed=5), **changes)
    second.load(tmp_path, ["model", "optimizer", "extra"])
    assert torch.equal(torch.rand(4), noise)
    assert train(second, other, steps=2) == rates
    wanted, found = whole_weights(first), whole_weights(second)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_an_engine_saved_before_its_first_step_continues_bit_for_bit(tmp_path):
    data = make_batch()
    first = make_engine(tiny_model())
    first.save(tmp_path)
    second = make_engine(tiny_model(seed=5))
    train(second, data)
    second.load(tmp_path)
    train(first, data)
    train(second, data)
    wanted, found = whole_weights(first), whole_weights(second)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_only_the_named_contents_are_loaded(tmp_path):
    data, first = make_batch(), make_engine(tiny_model())
    train(first, data)
    first.save(tmp_path, ["model"])
    frozen = make_engine(tiny_model(seed=4), train=False)
    frozen.load(tmp_path, ["model"])
    wanted = first.infer(data, ["log_probs"]).batch["log_probs"]
    assert torch.equal(frozen.infer(data, ["log_probs"]).batch["log_probs"], wanted)
    with pytest.raises(ValueError, match=r": optimizer \(checkpoint\.save_contents\)"):
        first.load(tmp_path, ["optimizer"])
    with pytest.raises(ValueError, match=r"^checkpoint contents: \['everything'\].*model, optimizer, extra, hf_model"):
        first.save(tmp_path, ["everything"])


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_engine(tiny_model()).save(tmp_path, ["model"])
    with pytest.raises(ValueError, match=r"num_hidden_layers"):
        make_engine(tiny_model(num_hidden_layers=3)).load(tmp_path, ["model"])


def test_offloading_and_coming_back_changes_no_result(tmp_path):
    data = make_batch()
    engines = [make_engine(tiny_model(tie_word_embeddings=True)) for _ in range(2)]
    for moved, engine in enumerate(engines):
        for _ in range(2):
            if moved:
                engine.to("device")
            engine.forward_backward(data, token_loss, BOTH)
            if moved:
                engine.to("cpu")
                engine.to("device")
            engine.optimizer_step()
            if moved:
                engine.to("cpu")
    engines[1].save(tmp_path)
    wanted, found = whole_weights(engines[0]), whole_weights(engines[1])
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    engines[1].to("device", optimizer=False)
    wanted, found = (engine.infer(data, BOTH).batch for engine in engines)
    assert all(torch.equal(found[name], wanted[name]) for name in BOTH)


@pytest.mark.gpu
def test_offloading_frees_the_memory_of_the_device():
    data, engine = make_batch(), make_engine(tiny_model(hidden_size=512, intermediate_size=2048))
    train(engine, data)
    full = torch.cuda.memory_allocated()
    engine.to("cpu", model=False)
    without_moments = torch.cuda.memory_allocated()
    engine.to("cpu")
    empty = torch.cuda.memory_allocated()
    weights = sum(spec.dtype.itemsize * math.prod(spec.shape) for spec in engine.manifest().values())
    assert full - without_moments >= 2 * weights
    assert without_moments - empty >= weights
    engine.to("device")
    assert train(engine, data)[0]["skipped"] == 0


# ---------------------------------------------------------------- loading and refusing


@pytest.mark.parametrize("mixed_precision", ["bf16", "fp16"])
def test_half_precision_computes_near_float32_and_keeps_float32_masters(mixed_precision):
    data, model = make_batch(rows=2), tiny_model(num_hidden_layers=1)
    exact, half = make_engine(model), make_engine(model, mixed_precision=mixed_precision)
    gap = exact.infer(data, ["log_probs"]).batch["log_probs"] - half.infer(data, ["log_probs"]).batch["log_probs"]
    assert 0 < gap.abs().max() < 0.05
    wanted = train(exact, data)[0]["grad_norm"]
    # float16 overflows until its loss scale has come down; the weights wait for it.
    taken = next(metrics for metrics in train(half, data, steps=8) if not metrics["loss_scale_search"])
    assert taken["grad_norm"] == pytest.approx(wanted, rel=0.05)
    assert all(spec.dtype == torch.float32 for spec in half.manifest().values())


def test_a_checkpoint_in_bfloat16_is_trained_in_float32(tmp_path):
    model = tiny_model().bfloat16()
    model.save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))
    found = whole_weights(engine)
    assert all(torch.equal(found[name], value.float()) for name, value in model.state_dict().items())
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_frozen_engine_equals_the_initial_actor_and_does_not_train():
    data, model = make_batch(), tiny_model()
    actor, reference = make_engine(model), make_engine(model, train=False)
    wanted, found = (engine.infer(data, ["log_probs"]).batch["log_probs"] for engine in (actor, reference))
    assert torch.equal(wanted, found)
    with pytest.raises(ValueError, match=r"^optim: "):
        reference.forward_backward(data, token_loss, ["log_probs"])


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused(monkeypatch):
    known = forward.logit_head
    monkeypatch.setattr(forward, "logit_head", lambda model: lambda hidden: known(model)(hidden) * 1.5)
    with pytest.raises(ValueError, match=r"^model\.path: Qwen2ForCausalLM .*\d%.*verl\.models\.logits"):
        make_engine(tiny_model())


def test_what_a_model_cannot_give_is_said(tmp_path):
    data, engine = make_batch(), make_engine(tiny_model())
    with pytest.raises(ValueError, match=r"^outputs: \['values'\] .*log_probs, entropy"):
        engine.infer(data, ["values"])
    with pytest.raises(ValueError, match=r"^temperature: 0\.0 "):
        engine.infer(data, ["log_probs"], temperature=0.0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("bert", num_labels=2))
    with pytest.raises(ValueError, match="num_labels=1"):
        make_engine(model, "sequence_classification", train=False)
    with pytest.raises(ValueError, match=r"^model\.path: .*Qwen2ForSequenceClassification: score\.weight"):
        make_engine(str(save_tiny_model(tmp_path)), "sequence_classification", train=False)
    with pytest.raises(RuntimeError, match=r"^optimizer_step: .*forward_backward"):
        engine.optimizer_step()


def test_the_engine_runs_where_it_was_told():
    engine = make_engine(tiny_model(), train=False)
    assert engine.device.type == DEVICE
    assert (engine.dp_rank, engine.dp_size) == (0, 1)


def test_compiled_layers_report_the_graphs_since_the_last_step(monkeypatch):
    engine, data = make_engine(tiny_model()), make_batch()
    assert "recompiles" not in train(engine, data)[0]
    engine.compiled = True
    counts = iter([3, 3, 4])
    monkeypatch.setattr(base_engine, "compiled_graphs", lambda: next(counts))
    assert [step["recompiles"] for step in train(engine, data, steps=3)] == [3, 0, 1]


def test_compiled_graphs_are_counted():
    before = base_engine.compiled_graphs()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=True)
    for size in (3, 4, 5):
        double(torch.ones(size))
    assert base_engine.compiled_graphs() == before + 1


def test_a_requested_weight_without_elements_is_sent():
    ensure_process_group(torch.device("cpu"))
    weights = ModelWeights(torch.nn.Embedding(0, 4), None, torch.device("cpu"))
    (bucket,) = weights.buckets(torch.float32, max_bytes=1024, requested=[{"weight": range(0)}])
    assert {name: tensor.shape for name, tensor in bucket.items()} == {"weight": (0, 4)}
