"""Aliases of names that users' code imports from here."""
