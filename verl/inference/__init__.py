"""The embedded inference engine: continuous batching on paged KV memory, built for weights that change."""
