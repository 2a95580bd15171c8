"""LoRA on one rank: peft's numbers, a reference for free, merged weights that say what training says."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.support.engine_cases import (
    assert_close,
    engine_gradients,
    make_batch,
    make_engine,
    model_of_kind,
    plain_fields,
    token_loss,
    whole_weights,
)
from tests.support.lora_cases import adapter_values, lora_engine, peft_gradients, perturb_lora_b, train_steps
from tests.support.tiny import save_tiny_model, tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.models.loading import ValueModel
from verl.types.request import Request, SamplingParams
from verl.types.weights import TensorSpec
from verl.workers.engine.base import MicroBatching
from verl.workers.engine.common.sharded_checkpoint import stored_tensors
from verl.workers.rollout import get_rollout_class
from verl.workers.sharding_manager import InProcessTransfer

BOTH = ["log_probs", "entropy"]
DATA = make_batch()


def log_probs(engine):
    return engine.infer(DATA, ["log_probs"]).batch["log_probs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def trained(folder):
    """An engine after three steps."""
    engine = lora_engine(str(folder))
    train_steps(engine, DATA, 3)
    return engine


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {"enable_gradient_checkpointing": True}), ("gpt2", {"enable_gradient_checkpointing": False})],
)
def test_gradients_of_both_matrices_equal_those_of_peft(family, changes):
    engine = lora_engine(tiny_model(family), **changes)
    perturb_lora_b(engine)
    engine.forward_backward(DATA, token_loss, BOTH, 0.7, MicroBatching(size=4))
    gradients = peft_gradients(adapter_values(engine), DATA, 0.7, family)
    assert len(gradients) > 8
    assert all(value.abs().max() > 0 for value in gradients.values())
    assert_close(engine_gradients(engine), gradients)


def test_before_training_a_model_with_adapters_is_the_base_bit_for_bit(folder):
    frozen = make_engine(str(folder), train=False)
    assert torch.equal(log_probs(lora_engine(str(folder))), log_probs(frozen))


@pytest.mark.parametrize("rank", [0, 4])
def test_passes_on_one_rank_read_frozen_weights_in_place(folder, rank):
    """Without a copy in memory, which FSDP would make for every pass."""
    engine = lora_engine(str(folder)) if rank else make_engine(str(folder), train=False)
    used = {}
    linears = {name: layer for name, layer in engine.model.hf.named_modules() if isinstance(layer, torch.nn.Linear)}
    frozen = {name: layer for name, layer in linears.items() if "lora_" not in name}
    for name, layer in frozen.items():
        layer.register_forward_hook(lambda layer, *_, name=name: used.update({name: layer.weight.data_ptr()}))
    log_probs(engine)
    stored = dict(engine.model.hf.named_parameters(remove_duplicate=False))
    assert len(used) >= 14
    assert used == {name: stored[f"{name}.weight"].data_ptr() for name in used}
    assert stored["lm_head.weight"] is stored["model.embed_tokens.weight"], "tied weights stay tied"


@pytest.mark.parametrize("kind", ["value", "sequence_classification"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_frozen_head_computes_in_float32_in_half_precision(kind, precision):
    """The head is stored in half precision, but its inputs and weights are cast."""
    model = model_of_kind(kind)
    engine = make_engine(model, kind, train=False, mixed_precision=precision)
    field = "values" if kind == "value" else "scores"
    result = engine.infer(DATA, [field]).batch[field]
    assert result.dtype == torch.float32
    assert result.isfinite().all()


def test_the_reference_is_the_base_bit_for_bit_and_costs_no_weights(folder, trained):
    frozen, learned = make_engine(str(folder), train=False), log_probs(trained)
    with trained.base_weights():
        reference = log_probs(trained)
    assert torch.equal(reference, log_probs(frozen))
    assert not torch.equal(learned, reference)
    assert torch.equal(log_probs(trained), learned), "the adapters are on again"


def test_a_reference_pass_before_the_first_update_takes_no_gradient_away(folder):
    engine = lora_engine(str(folder))
    with engine.base_weights():
        log_probs(engine)
    perturb_lora_b(engine)
    engine.forward_backward(DATA, token_loss, BOTH)
    assert len(engine_gradients(engine)) == len(adapter_values(engine))


def test_only_adapters_change_and_have_moments(folder, trained):
    base = tiny_model(tie_word_embeddings=True).state_dict()
    for name, value in trained.adapters.plain(trained.model.hf.state_dict()).items():
        assert torch.equal(value.cpu(), base[name]), name
    moments = {name.partition("/")[0] for name in trained.optimizer.tensors()}
    assert moments == set(adapter_values(trained))
    assert all("lora_" in name for name in moments)


def test_weights_that_leave_are_merged_under_the_names_of_the_plain_model(trained):
    plain = tiny_model(tie_word_embeddings=True)
    assert trained.manifest() == {
        name: TensorSpec(tuple(value.shape), value.dtype) for name, value in plain.state_dict().items()
    }
    plain.load_state_dict(whole_weights(trained))
    with torch.no_grad():
        wanted = plain_fields(plain, DATA)["log_probs"]
    torch.testing.assert_close(log_probs(trained), wanted, atol=1e-5, rtol=1e-5)


def test_small_buckets_hold_the_same_weights(trained):
    wanted = whole_weights(trained)
    found = [bucket for bucket in trained.buckets(None, 20_000)]
    assert len(found) > 5
    assert_close({name: value.cpu() for bucket in found for name, value in bucket.items()}, wanted, 0.0)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_an_engine_that_generates_samples_from_what_training_scores(name, folder, trained):
    model = as_config(ModelConfig, {"path": str(folder)}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": name, "max_new_tokens": 9, "dtype": "float32"})
    rollout = get_rollout_class(name)(str(folder), model, config)
    try:
        InProcessTransfer(trained, rollout).sync(1)  # checks the fingerprint of every tensor
        mask = DATA.batch["attention_mask"].bool()
        prompts = [
            row[keep][: int(keep[:7].sum())].tolist() for row, keep in zip(DATA.batch["input_ids"], mask, strict=True)
        ]
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        outputs = [
            future.result()
            for future in rollout.submit([Request(str(i), ids, params) for i, ids in enumerate(prompts)])
        ]
    finally:
        rollout.close()
    data = make_batch(rows=len(prompts))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        data.batch["attention_mask"][row] = 0
        data.batch["attention_mask"][row, 7 - len(prompt) :] = 1
        data.batch["input_ids"][row, 7 - len(prompt) :] = torch.tensor(prompt + list(output.token_ids))
    data.batch["responses"] = data.batch["input_ids"][:, 7:].clone()
    scored = trained.infer(data, ["log_probs"]).batch["log_probs"]
    sampled = torch.tensor([output.log_probs for output in outputs])
    assert (scored - sampled).abs().max() < 1e-4


def test_micro_batches_do_not_change_gradients(folder):
    found = []
    for micro in (MicroBatching(), MicroBatching(size=1), MicroBatching(max_tokens=20)):
        engine = lora_engine(str(folder))
        perturb_lora_b(engine)
        engine.forward_backward(DATA, token_loss, BOTH, micro=micro)
        found.append(engine_gradients(engine))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(folder, tmp_path):
    whole = lora_engine(str(folder))
    train_steps(whole, DATA, 2)
    whole.save(tmp_path / "state")
    train_steps(whole, DATA, 2)
    again = lora_engine(str(folder))
    again.load(tmp_path / "state")
    train_steps(again, DATA, 2)
    wanted = adapter_values(whole)
    assert all(torch.equal(value, wanted[name]) for name, value in adapter_values(again).items())
    assert stored_tensors(tmp_path / "state" / "model").keys() == set(wanted), "the base is not in it"


def test_the_adapter_and_the_merged_model_load_and_agree(folder, trained, tmp_path):
    trained.save(tmp_path)
    trained.export_hf(tmp_path / "huggingface")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "lora_adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    ids = DATA.batch["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)
    loaded = {name: value for name, value in adapted.named_parameters() if "lora_" in name}
    for name, value in adapter_values(trained).items():
        assert torch.equal(loaded[f"base_model.model.{name}"], value)
    config = json.loads((tmp_path / "lora_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 16, str(folder))
    assert set(json.loads((tmp_path / "huggingface" / "config.json").read_text())) == set(
        json.loads((folder / "config.json").read_text())
    )


def test_a_checkpoint_of_another_kind_of_training_is_refused(folder, trained, tmp_path):
    full = make_engine(str(folder))
    full.save(tmp_path / "full", ["model"])
    trained.save(tmp_path / "lora", ["model"])
    with pytest.raises(ValueError, match=r"/lora .*lora_rank is 0 .*\b4\b.*; \d+ tensors .*lora_A\.default\.weight"):
        full.load(tmp_path / "lora", ["model"])
    with pytest.raises(
        ValueError, match=r"/full .*lora_rank is 4 .*\b0\b.*; \d+ tensors .*model\.embed_tokens\.weight"
    ):
        lora_engine(str(folder)).load(tmp_path / "full", ["model"])


def test_a_critic_learns_its_head_and_its_adapters(tmp_path):
    engine = lora_engine(ValueModel(tiny_model().base_model), "value")
    train_steps(engine, DATA, 3, ("values",))
    learned = adapter_values(engine)
    assert learned["score.weight"].any()
    assert any(value.any() for name, value in learned.items() if "lora_B" in name)
    engine.save(tmp_path)
    engine.export_hf(tmp_path / "huggingface")
    stored = load_file(tmp_path / "lora_adapter" / "adapter_model.safetensors")
    assert torch.equal(stored["base_model.model.score.weight"], learned["score.weight"])
    values = engine.infer(DATA, ["values"]).batch["values"]
    again = make_engine(str(tmp_path / "huggingface"), "value", train=False)
    torch.testing.assert_close(again.infer(DATA, ["values"]).batch["values"], values, atol=1e-5, rtol=1e-5)
    tiny_model().save_pretrained(tmp_path / "base")
    classifier = AutoModelForTokenClassification.from_pretrained(tmp_path / "base", num_labels=1)
    adapted = PeftModel.from_pretrained(classifier, tmp_path / "lora_adapter").eval()
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "huggingface").eval()
    ids = DATA.batch["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(adapted(ids).logits, merged(ids).logits, atol=1e-5, rtol=1e-5)


def test_frozen_weights_are_held_in_the_compute_dtype(folder):
    engine = lora_engine(str(folder), mixed_precision="bf16")
    for name, value in engine.model.hf.named_parameters():
        assert value.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
    train_steps(engine, DATA, 1)
    assert all(value.dtype == torch.float32 for value in adapter_values(engine).values())
    assert all(spec.dtype == torch.bfloat16 for spec in engine.manifest().values())
