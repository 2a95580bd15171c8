"""Attacks on the servers and loaders: generators with stored seeds. `make test-attacks`."""
