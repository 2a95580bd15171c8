"""The engine on Megatron-Core; only modules of this package import it."""
