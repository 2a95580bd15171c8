"""What Megatron-Core would make of a Hugging Face model, as tables: shapes, names and slices. Imports no Megatron."""
