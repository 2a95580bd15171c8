"""Attention backends over paged KV, behind one interface."""

from verl.inference.attention.base import AttentionBackend, AttentionStep, KVCache

__all__ = ["AttentionBackend", "AttentionStep", "KVCache"]
