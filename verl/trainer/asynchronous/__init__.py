"""Training that does not wait for generation: the trainer takes scored groups from a stream of answers."""
