"""Simulated users that reply to the model: the base class and included ones."""
