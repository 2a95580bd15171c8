"""Attention backends over paged KV, behind one interface."""
