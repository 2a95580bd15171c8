"""What engines write: checksums are taken on the way, exports are what transformers itself would write."""

import json
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.engine_cases import make_batch, make_engine, token_loss
from tests.support.reads import files_read
from tests.support.tiny import tiny_config, tiny_model
from verl.utils.checkpoint.checkpoint_manager import CheckpointManager, resolve_resume
from verl.utils.checkpoint.manifest import ChecksumRecorder, read_manifest
from verl.workers.engine.common.hf_export import HFExport, WeightFiles, write_safetensors


@pytest.fixture(scope="module")
def trained():
    engine = make_engine(tiny_model())
    engine.forward_backward(make_batch(), token_loss, ["log_probs"])
    engine.optimizer_step()
    return engine


def save(engine, root, step):
    """What a trainer does; the step, and the files that committing it read."""
    manager = CheckpointManager(root)
    folder = manager.begin(step)
    engine.save(folder / "actor")
    engine.export_hf(folder / "actor" / "huggingface")
    (folder / "trainer.pt").write_bytes(b"not streamed")
    with files_read(root) as read:
        return manager.commit(step), read


def test_committing_reads_no_file_that_an_engine_streamed(trained, tmp_path):
    path, read = save(trained, tmp_path, 1)
    ours = {file.name for file in read if ".checksums" not in file.parts and file.name != "manifest.json"}
    assert ours == {"trainer.pt", "config.json", "generation_config.json"}
    listed = read_manifest(path).files
    large = {"model/__0_0.distcp", "model/.metadata", "optimizer/__0_0.distcp", "optimizer/.metadata", "extra.pt"}
    large |= {"huggingface/model.safetensors"}
    assert {f"actor/{name}" for name in large} <= set(listed)
    for name, record in listed.items():
        content = (path / name).read_bytes()
        assert (record.size, record.crc32) == (len(content), zlib.crc32(content)), name


def test_one_flipped_byte_in_any_file_is_found_when_resuming(trained, tmp_path):
    whole, _ = save(trained, tmp_path, 1)
    newest, _ = save(trained, tmp_path, 2)
    for name in read_manifest(newest).files:
        content = bytearray((newest / name).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / name).write_bytes(content)
        assert CheckpointManager.verify(newest) == [f"{name}: damaged, its content does not match its checksum"]
        assert resolve_resume("auto", tmp_path) == whole
        content[len(content) // 2] ^= 1
        (newest / name).write_bytes(content)
    assert resolve_resume("auto", tmp_path) == newest


def test_a_folder_of_its_own_has_no_trace_of_checksums(trained, tmp_path):
    trained.save(tmp_path / "state")
    trained.export_hf(tmp_path / "model")
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"model", "model.json", "optimizer", "extra.pt"}
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


# ---------------------------------------------------------------- exports

MIXTURE = {"num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}), ("mixtral", MIXTURE)],
)
def test_an_export_has_the_names_and_weights_that_transformers_would_write(family, changes, tmp_path):
    model = tiny_model(family, **changes)
    model.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    HFExport(skeleton, torch.float32).write(model.state_dict().__getitem__, tmp_path / "ours", None)
    assert_same_folder(tmp_path / "ours", tmp_path / "theirs")


def test_an_exported_classifier_too(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    config = tiny_config("bert", num_labels=1, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        skeleton = AutoModelForSequenceClassification.from_config(config)
    HFExport(skeleton, torch.float32).write(model.state_dict().__getitem__, tmp_path / "ours", None)
    assert_same_folder(tmp_path / "ours", tmp_path / "theirs")


def assert_same_folder(ours, theirs):
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    found, wanted = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    with safe_open(ours / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_large_model_becomes_several_files_that_transformers_loads(tmp_path):
    model = tiny_model()
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    files = WeightFiles.from_tensors(state, max_shard_size=100_000)
    files.write((state[name] for name in files.order), tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


@settings(max_examples=40)
@given(
    shapes=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=5),
    transposed=st.booleans(),
)
def test_safetensors_reads_back_what_is_written(tmp_path_factory, shapes, transposed):
    tensors = {f"w.{i}ß": torch.randint(0, 2, shape).to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    if transposed:
        tensors = {name: value.T if value.dim() == 2 else value for name, value in tensors.items()}
    folder = tmp_path_factory.mktemp("file")
    with ChecksumRecorder(folder) as recorder, recorder.open("file") as stream:
        wide_first = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
        write_safetensors(wide_first, wide_first.values(), stream)
    found = load((folder / "file").read_bytes())
    assert set(found) == set(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with ChecksumRecorder(tmp_path).open("file") as stream, pytest.raises(ValueError, match=r"torch.complex64"):
        write_safetensors({"w": torch.zeros(1, dtype=torch.complex64)}, [], stream)
