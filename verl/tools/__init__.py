"""Tools that a model may call, and what users subclass for their own."""
