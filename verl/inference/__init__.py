"""The embedded inference engine: continuous batching over a paged KV cache, with weights that change during a run."""
