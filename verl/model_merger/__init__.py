"""Checkpoints as Hugging Face models: `python -m verl.model_merger merge|test`."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("auto", "bfloat16", "float16", "float32")
BACKENDS = ("fsdp", "megatron")
LORA = ("merge", "adapter")


@dataclass(frozen=True)
class MergeOptions:
    """The command-line options, under the same names."""

    backend: str
    local_dir: str
    target_dir: str | None = None
    test_hf_dir: str | None = None
    hf_upload_path: str | None = None
    private: bool = False
    tie_word_embedding: bool = False
    is_value_model: bool = False
    trust_remote_code: bool = False
    lora: str = "merge"
    lora_alpha: float | None = None
    base_model: str | None = None
    dtype: str = "auto"
    tolerance: float = 0.0
    max_shard_size: str = "5GB"
    overwrite: bool = False
