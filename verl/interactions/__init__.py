"""Simulated users that answer the model, and what users subclass for their own."""
