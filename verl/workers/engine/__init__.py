"""Training engines: forward, backward, optimizer and weights, independent of the learning algorithm."""
