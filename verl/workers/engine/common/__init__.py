"""Stateless helpers that every training engine shares."""
