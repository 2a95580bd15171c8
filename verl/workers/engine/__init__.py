"""Training engines: forward, backward, optimizer, weights; they know nothing of reinforcement learning."""
