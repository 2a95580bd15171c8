"""FSDP checkpoints of one file for each rank, in the forms that torch's versions of FSDP give them."""

import json
import pickle
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.engine_cases import run_ranks
from tests.support.malicious_files import Hostile
from tests.support.merger_cases import (
    assert_holds,
    fsdp_files,
    merge,
    tensors,
    write_dtensors,
    write_sharded_tensors,
)
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer
from verl.model_merger.__main__ import main
from verl.model_merger.formats import rank_files
from verl.models.loading import ValueModel


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=1)


def described(folder, config):
    """As such checkpoints carry it: the model's config and tokenizer in a folder of their own."""
    config.save_pretrained(folder / "huggingface")
    tiny_tokenizer().save_pretrained(folder / "huggingface")
    return folder


def stderr_of(capsys):
    """Return the output on stderr since the last call."""
    return capsys.readouterr().err


LAYOUTS = {
    "three ranks, uneven": ((3,), None),
    "hybrid": ((2, 2), None),
    "columns": ((2,), [Shard(1)]),
    "tensor parallel": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "whole": ((2,), [Replicate()]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_any_mesh_become_the_model(layout, model, tmp_path):
    mesh, placements = LAYOUTS[layout]
    state = {f"_fsdp_wrapped_module.{name}": value for name, value in model.state_dict().items() if value.dim() > 1}
    write_dtensors(state, tmp_path, mesh, placements)
    small = {name: value for name, value in model.state_dict().items() if value.dim() == 1}
    for file in tmp_path.glob("*.pt"):  # and what is not divided
        torch.save(torch.load(file, weights_only=False) | small, file)
    (tmp_path / "fsdp_config.json").write_text(
        json.dumps({"FSDP_version": 2, "world_size": len(list(tmp_path.glob("*.pt")))})
    )
    assert merge(described(tmp_path, model.config), tmp_path / "merged") == 0
    assert_holds(tmp_path / "merged", model.state_dict())
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_shards_of_the_first_fsdp_become_the_model(model, tmp_path):
    write_sharded_tensors(model.state_dict(), tmp_path)
    assert merge(described(tmp_path, model.config), tmp_path / "merged") == 0
    assert_holds(tmp_path / "merged", model.state_dict())


@pytest.mark.slow
def test_what_real_ranks_of_both_fsdps_save_becomes_the_model(tmp_path):
    run_ranks(fsdp_files, tmp_path)
    for name in ("fsdp1", "fsdp2"):
        assert merge(described(tmp_path / name, tiny_config()), tmp_path / f"{name}-merged") == 0
        assert_holds(tmp_path / f"{name}-merged", tiny_model().state_dict())


@pytest.fixture
def adapted():
    """peft's own model, its names as peft gives them."""
    found = get_peft_model(tiny_model(num_hidden_layers=1), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, value in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return found


def test_adapters_in_shards_are_merged_or_kept(adapted, tmp_path, capsys):
    folder = described(write_dtensors(adapted.state_dict(), tmp_path / "actor"), adapted.config)
    assert merge(folder, tmp_path / "merged") == 1
    assert "Set --lora-alpha." in stderr_of(capsys)
    assert merge(folder, tmp_path / "merged", "--lora-alpha", "8") == 0
    kept = ["--lora", "adapter", "--lora-alpha", "8", "--base-model", str(tmp_path / "merged")]
    assert merge(folder, tmp_path / "kept", *kept) == 0
    adapted.save_pretrained(tmp_path / "peft")
    assert_holds(tmp_path / "kept", tensors(tmp_path / "peft"))
    config = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 8, "CAUSAL_LM")
    found = tensors(tmp_path / "merged")
    for name, value in adapted.merge_and_unload().state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


def test_settings_that_cannot_be_merged_are_kept_with_adapters(adapted, tmp_path, capsys):
    folder = described(write_dtensors(adapted.state_dict(), tmp_path / "actor"), adapted.config)
    (folder / "adapter_config.json").write_text('{"rank_pattern": {"q_proj": 4}}')
    kept = ["--lora", "adapter", "--base-model", str(folder / "huggingface")]
    assert merge(folder, tmp_path / "kept", *kept) == 1
    assert "--lora-alpha" in (message := stderr_of(capsys))
    assert "--lora adapter" not in message
    assert merge(folder, tmp_path / "kept", *kept, "--lora-alpha", "8") == 0
    config = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["lora_alpha"]) == ({"q_proj": 4}, 8)


def test_the_tokenizer_of_the_base_model_is_copied_if_the_checkpoint_has_none(model, tmp_path, capsys):
    folder = write_dtensors(model.state_dict(), tmp_path / "actor")
    model.config.save_pretrained(folder / "huggingface")
    assert merge(folder, tmp_path / "without") == 0
    assert "no tokenizer" in stderr_of(capsys)
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    assert merge(folder, tmp_path / "merged", "--base-model", str(tmp_path / "base")) == 0
    assert "no tokenizer" not in stderr_of(capsys)
    names = ("tokenizer.json", "tokenizer_config.json")
    assert all((tmp_path / "merged" / name).read_bytes() == (tmp_path / "base" / name).read_bytes() for name in names)


def test_the_tokenizer_is_a_unit_and_preprocessing_files_are_chosen_one_by_one(model, tmp_path):
    folder = described(write_dtensors(model.state_dict(), tmp_path / "actor"), model.config)
    own, base = folder / "huggingface", tmp_path / "base"
    tiny_tokenizer().save_pretrained(base)
    names = ["preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"]
    for name in [*names, "special_tokens_map.json", "chat_template.jinja", "tokenizer_config.json"]:
        (base / name).write_text('{"of": "base"}')
    for name in ("special_tokens_map.json", "chat_template.jinja"):
        (own / name).unlink(missing_ok=True)
    for name in ("processor_config.json", "tokenizer_config.json"):
        (own / name).write_text('{"of": "checkpoint"}')

    def sources(target):
        assert merge(folder, target, "--base-model", str(base)) == 0
        contents = {path.name: path.read_bytes()[:24] for path in target.iterdir()}
        return {name: content.split(b'"')[3] for name, content in contents.items() if content.startswith(b'{"of": ')}

    # Special tokens and a template of the base model would replace those in the checkpoint's tokenizer_config.json.
    expected = dict.fromkeys(names, b"base")
    expected |= dict.fromkeys(["processor_config.json", "tokenizer_config.json"], b"checkpoint")
    assert sources(tmp_path / "merged") == expected


def test_the_help_says_that_the_base_model_provides_the_tokenizer(capsys):
    with pytest.raises(SystemExit):
        main(["merge", "--help"])
    assert re.search(r"--base-model.*?\btokenizer\b.*?--dtype", capsys.readouterr().out, re.DOTALL)


def test_a_value_model_and_a_head_without_bias(model, tmp_path):
    critic = ValueModel(model.model, {"score.weight": torch.randn(1, 64)})
    state = {name: value for name, value in critic.state_dict().items() if name != "score.bias"}
    folder = described(write_dtensors(state, tmp_path / "critic"), model.config)
    assert merge(folder, tmp_path / "as a language model") == 1
    assert merge(folder, tmp_path / "merged", "--is-value-model") == 0
    assert_holds(tmp_path / "merged", critic.state_dict())
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [
        "Qwen2ForTokenClassification"
    ]


def test_tied_heads_and_padded_vocabularies(model, tmp_path, capsys):
    state = model.state_dict()
    embedding = state["model.embed_tokens.weight"]
    padded = state | {"model.embed_tokens.weight": torch.cat([embedding, torch.ones(8, 64)])}
    folder = described(write_dtensors(padded, tmp_path / "padded"), model.config)
    assert merge(folder, tmp_path / "cut") == 0
    assert_holds(tmp_path / "cut", state)
    assert merge(folder, tmp_path / "not tied", "--tie-word-embedding") == 1
    assert "lm_head.weight" in stderr_of(capsys)
    alone = {name: value for name, value in state.items() if name != "lm_head.weight"}
    folder = described(write_dtensors(alone, tmp_path / "alone"), model.config)
    assert merge(folder, tmp_path / "no head") == 1
    assert "lm_head.weight" in stderr_of(capsys)
    assert merge(folder, tmp_path / "tied", "--tie-word-embedding") == 0
    assert_holds(tmp_path / "tied", alone)
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True


def test_nothing_that_a_file_names_is_run(model, tmp_path):
    trace = tmp_path / "trace"
    pickle.loads(pickle.dumps(Hostile(trace)))
    trace.rmdir()
    folder = described(tmp_path / "actor", model.config)
    torch.save({**model.state_dict(), "extra": Hostile(trace)}, folder / "model_world_size_1_rank_0.pt")
    assert merge(folder, tmp_path / "merged") == 0
    assert_holds(tmp_path / "merged", model.state_dict())
    assert not trace.exists()


def test_a_wrong_world_size_in_the_config_is_named(tmp_path):
    for world_size in (2, 4):
        (tmp_path / f"model_world_size_{world_size}_rank_0.pt").touch()
    with pytest.raises(ValueError, match=r": files .*\(2, 4\)"):
        rank_files(tmp_path)
    for config in ({"world_size": 8}, {}):
        (tmp_path / "fsdp_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=rf"fsdp_config\.json: world_size is {config.get('world_size')}\b.* 2, 4"):
            rank_files(tmp_path)


def test_what_is_missing_or_damaged_is_named(model, tmp_path, capsys):
    folder = described(write_dtensors(model.state_dict(), tmp_path / "actor"), model.config)
    file = folder / "model_world_size_2_rank_1.pt"
    content = file.read_bytes()
    cases = [(None, "model_world_size_2_rank_1.pt missing"), (content[: len(content) // 2], "torch.save")]
    for change, words in cases:
        file.unlink(missing_ok=True)
        if change is not None:
            file.write_bytes(change)
        assert merge(folder, tmp_path / "merged") == 1
        output = stderr_of(capsys)
        assert words in output
        assert file.name in output
    file.write_bytes(content)
    wrong = tiny_model(num_hidden_layers=2, intermediate_size=96).config
    assert merge(described(folder, wrong), tmp_path / "merged") == 1
    output = stderr_of(capsys)
    assert "only in the model: model.layers.1" in output
    assert "is [96, 64] in the model and [128, 64] in the checkpoint" in output
    assert merge(folder, tmp_path / "merged", backend="megatron") == 1
    assert "Set --backend fsdp" in stderr_of(capsys)
    assert merge(folder.parent, tmp_path / "merged") == 1
    assert "Use one of its folders actor" in stderr_of(capsys)
    assert not (tmp_path / "merged").exists()
