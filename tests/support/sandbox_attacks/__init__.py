"""Hostile programs for the sandbox: attacks on its isolation, and attempts to exceed its memory and disk limits."""
