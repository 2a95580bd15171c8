"""What our engines wrote, merged: bit for bit what they export themselves, and what transformers and peft load."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.support.engine_cases import make_batch, make_engine
from tests.support.lora_cases import lora_engine, train_steps
from tests.support.tiny import save_tiny_model, tiny_config, tiny_model, tiny_tokenizer
from verl.model_merger.__main__ import main
from verl.models.loading import ValueModel

DATA = make_batch()


def merged(local: Path, target: Path, *more: str, backend: str = "fsdp") -> Path:
    arguments = ["merge", "--backend", backend, "--local_dir", str(local), "--target_dir", str(target), *more]
    assert main(arguments) == 0
    return target


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(found: Path, wanted: Path) -> None:
    ours, theirs = tensors(found), tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def saved(engine, folder: Path) -> Path:
    """A role's folder, and beside it what the engine exports."""
    engine.save(folder / "actor", ("model",))
    engine.export_hf(folder / "exported")
    return folder / "actor"


def classifier():
    torch.manual_seed(3)
    return AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).float()


CASES = {
    "causal": (tiny_model, "causal_lm", AutoModelForCausalLM),
    "tied": (lambda: tiny_model(tie_word_embeddings=True), "causal_lm", AutoModelForCausalLM),
    "experts": (
        lambda: tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
        "causal_lm",
        AutoModelForCausalLM,
    ),
    "value": (lambda: ValueModel(tiny_model().model), "value", AutoModelForTokenClassification),
    "classifier": (classifier, "sequence_classification", AutoModelForSequenceClassification),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_any_kind_becomes_what_its_engine_exports(case, tmp_path):
    model, kind, auto = CASES[case]
    local = saved(make_engine(model(), kind, train=kind != "sequence_classification"), tmp_path)
    compared = ("--test_hf_dir", str(tmp_path / "exported"))
    found = merged(local, tmp_path / "merged", "--max-shard-size", "100KB", *compared)
    assert len(list(found.glob("*.safetensors"))) > 1
    assert_same(found, tmp_path / "exported")
    _, loading = auto.from_pretrained(found, output_loading_info=True)
    assert not any(loading.values()), loading
    configs = [json.loads((folder / "config.json").read_text()) for folder in (found, tmp_path / "exported")]
    assert configs[0] == configs[1]
    assert main(["test", "--backend", "fsdp", "--local_dir", str(local), "--test_hf_dir", str(found)]) == 0


def test_tokenizer_and_dtype_are_those_of_the_model(tmp_path):
    engine = make_engine(tiny_model())
    engine.save(tmp_path / "actor", ("model", "hf_model"))
    tiny_tokenizer().save_pretrained(tmp_path / "actor" / "huggingface")
    found = merged(tmp_path / "actor", tmp_path / "half", "--dtype", "bfloat16")
    assert {value.dtype for value in tensors(found).values()} == {torch.bfloat16}
    assert json.loads((found / "config.json").read_text())["dtype"] == "bfloat16"
    whole = tensors(tmp_path / "actor" / "huggingface")
    assert all(torch.equal(value, whole[name].bfloat16()) for name, value in tensors(found).items())
    names = {path.name for path in (tmp_path / "actor" / "huggingface").iterdir()}
    assert {path.name for path in found.iterdir()} == names


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapted")
    base = save_tiny_model(folder / "base", tie_word_embeddings=True)
    engine = lora_engine(str(base))
    train_steps(engine, DATA, 2)
    saved(engine, folder)
    return folder


def test_adapters_are_merged_as_the_engine_merges_them(adapted, tmp_path):
    found = merged(adapted / "actor", tmp_path / "merged")
    ours, theirs, base = (tensors(folder) for folder in (found, adapted / "exported", adapted / "base"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
    changed = {name.split(".")[-2] for name, value in ours.items() if not torch.equal(value, base[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert (found / "tokenizer.json").is_file()


def test_adapters_are_kept_as_peft_loads_them(adapted, tmp_path):
    found = merged(adapted / "actor", tmp_path / "kept", "--lora", "adapter")
    assert_same(found, adapted / "actor" / "lora_adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(adapted / "base"), found)
    wanted = tensors(adapted / "exported")
    for name, value in model.merge_and_unload().state_dict().items():
        if name in wanted:
            torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-7)


def test_a_critic_with_adapters_keeps_its_head(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    engine = lora_engine(str(base), "value")
    train_steps(engine, DATA, 1, ("values",))
    local = saved(engine, tmp_path)
    found = tensors(merged(local, tmp_path / "merged", "--is-value-model"))
    for name, value in tensors(tmp_path / "exported").items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert_same(merged(local, tmp_path / "kept", "--lora", "adapter"), local / "lora_adapter")
