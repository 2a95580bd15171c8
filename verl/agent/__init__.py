"""Agents: conversations of several turns with tools, search or a user."""
