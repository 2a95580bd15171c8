"""The commands: what `test` finds, where `merge` writes, and how much memory it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from tests.support.engine_cases import make_engine
from tests.support.merger_cases import assert_holds, merge, tensors
from tests.support.tiny import tiny_config, tiny_model
from verl.model_merger import merging
from verl.model_merger.__main__ import main
from verl.model_merger.lazy_tensors import folder_tensors, read_tensor
from verl.workers.engine.common.hf_export import WeightFiles


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=1)


@pytest.fixture(scope="module")
def actor(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("step") / "actor"
    make_engine(tiny_model(num_hidden_layers=1)).save(folder, ("model",))
    return folder


def test_all_differences_are_listed_at_once(actor, model, tmp_path, capsys):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    compare = ["test", "--backend", "fsdp", "--local_dir", str(actor), "--test_hf_dir", str(tmp_path)]
    save_file(state, tmp_path / "model.safetensors")
    assert main(compare) == 0
    state["lm_head.weight"][3, 5] += 0.5
    state["lm_head.weight"][0, 0] -= 0.25
    state["model.norm.weight"] = state["model.norm.weight"].bfloat16()
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(2, 2)
    state["more"] = state.pop("model.embed_tokens.weight")
    save_file(state, tmp_path / "model.safetensors")
    capsys.readouterr()
    assert main(compare) == 1
    output = capsys.readouterr().err
    for words in (
        "lm_head.weight: 2 of 16896 values differ, by 0.5 at most",
        "model.norm.weight: float32, in --test_hf_dir bfloat16",
        "model.layers.0.mlp.up_proj.weight: [128, 64], in --test_hf_dir [2, 2]",
        "more: only in --test_hf_dir",
        "model.embed_tokens.weight: missing in --test_hf_dir",
    ):
        assert words in output
    assert len(output.strip().splitlines()) == 5
    only = {"lm_head.weight": tensors(tmp_path)["lm_head.weight"]}
    for tolerance, code in (("0.6", 0), ("0.4", 1)):
        (tmp_path / tolerance).mkdir()
        save_file(model.state_dict() | only, tmp_path / tolerance / "model.safetensors")
        assert main([*compare[:-1], str(tmp_path / tolerance), "--tolerance", tolerance]) == code


def test_a_folder_is_there_whole_or_not_at_all(actor, model, tmp_path, capsys, monkeypatch):
    target = tmp_path / "merged"
    with monkeypatch.context() as patch:
        patch.setattr(WeightFiles, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert merge(actor, target) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    left = tmp_path / ".merged.unfinished"  # of one that was killed
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_bytes(b"half")
    target.mkdir()
    assert merge(actor, target) == 0
    assert_holds(target, model.state_dict())
    assert not left.exists()
    (target / "mine").write_text("kept")
    assert merge(actor, target) == 1
    assert "is not empty" in capsys.readouterr().err
    assert (target / "mine").read_text() == "kept"
    assert merge(actor, target, "--overwrite") == 0
    assert not (target / "mine").exists()
    assert_holds(target, model.state_dict())
    assert {path.name for path in tmp_path.iterdir()} == {"merged"}
    assert merge(actor, actor, "--overwrite") == 1
    assert "is or contains the checkpoint itself" in capsys.readouterr().err


def test_a_model_is_restored_if_its_successor_cannot_replace_it(actor, model, tmp_path, capsys, monkeypatch):
    target, rename = tmp_path / "merged", Path.rename

    def failing_rename(path, other):
        if other == target and path.name == ".merged.unfinished":
            raise OSError(5, "Input/output error")
        return rename(path, other)

    assert merge(actor, target) == 0
    (target / "mine").write_text("kept")
    monkeypatch.setattr(Path, "rename", failing_rename)
    assert merge(actor, target, "--overwrite") == 1
    assert "Input/output error" in capsys.readouterr().err
    assert_holds(target, model.state_dict())
    assert (target / "mine").read_text() == "kept"
    assert list(tmp_path.iterdir()) == [target]


def test_a_missing_file_of_a_step_is_named(actor, tmp_path, capsys):
    import shutil

    from verl.utils.checkpoint.manifest import write_manifest

    step = tmp_path / "global_step_3"
    shutil.copytree(actor, step / "actor")
    write_manifest(step, 3, 1)
    (step / "actor" / "model" / "__0_0.distcp").unlink()
    assert merge(step / "actor", tmp_path / "merged") == 1
    assert "actor/model/__0_0.distcp: missing" in capsys.readouterr().err


def test_two_tensors_are_in_memory_at_a_time(actor, tmp_path, monkeypatch):
    made, alive = [], []

    def counted(*arguments):
        value = read_tensor(*arguments)
        made.append(StorageWeakRef(value.untyped_storage()))
        alive.append(sum(not each.expired() for each in made))
        return value

    monkeypatch.setattr(merging, "read_tensor", counted)
    assert merge(actor, tmp_path / "merged") == 0
    assert len(alive) > 10
    assert max(alive) <= 2  # a thread reads the next one while one is written; it may be late


MEASURED = """
import gc, re, sys
from pathlib import Path
from verl.model_merger.__main__ import main

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, target, room = sys.argv[1:]
options = ["merge", "--backend", "fsdp", "--target_dir"]
assert main([*options, target + "-small", "--local_dir", small]) == 0  # everything is imported
gc.collect()
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
assert main([*options, target, "--local_dir", large]) == 0
taken = resident("VmHWM") - before
print(f"took {taken / 1e6:.1f} MB", file=sys.stderr)
assert taken < int(room)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read as Linux tells it")
def test_a_merge_takes_two_of_the_largest_tensors_of_memory(actor, tmp_path):
    config = tiny_config(vocab_size=32768, hidden_size=512, intermediate_size=2048, num_hidden_layers=24)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    sizes = [value.nbytes for value in model.state_dict().values()]
    make_engine(model, background_save=False).save(tmp_path / "actor", ("model",))
    room = 2 * max(sizes) + 64 * 2**20  # allocators keep some of what was freed, each thread for itself
    assert sum(sizes) > 2 * room
    arguments = [str(actor), str(tmp_path / "actor"), str(tmp_path / "merged"), str(room)]
    at_once = {**os.environ, "MIMALLOC_PURGE_DELAY": "0"}
    subprocess.run([sys.executable, "-c", MEASURED, *arguments], check=True, timeout=300, env=at_once)
    assert_holds(tmp_path / "merged", model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("merge",), "merge requires --target_dir"),
        (("merge", "--target_dir", "t", "--private"), "--private requires --hf_upload_path"),
        (("test", "--test_hf_dir", "t", "--hf_upload_path", "a/b"), "test writes nothing"),
    ],
)
def test_options_that_would_do_nothing_are_refused(options, message, capsys):
    with pytest.raises(SystemExit):
        main([*options, "--backend", "fsdp", "--local_dir", "x"])
    assert message in capsys.readouterr().err


def test_a_folder_has_the_tensors_that_its_index_lists(tmp_path):
    """Some models come with the same weights again, under names of their makers."""
    save_file({"a": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"layers.a": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert set(folder_tensors(tmp_path)) == {"a", "layers.a"}
    index = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(folder_tensors(tmp_path)) == {"a"}
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-00001\.safetensors"):
        folder_tensors(tmp_path)
