"""Shared parts of the attack suite: servers, generators, attackers, regular clients, probes."""
