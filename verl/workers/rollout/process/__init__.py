"""A rollout engine in its own process: the proxy (`process_rollout`), the program of the process (`host`), their
messages and shared memory."""
