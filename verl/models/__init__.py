"""Hugging Face models for training: loading, LoRA, packed forward pass, output heads, sequence parallelism."""
