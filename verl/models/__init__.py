"""Hugging Face models as training sees them: loading, the forward pass without padding, heads."""
