"""Alias of `verl.models.ulysses`: sequence-parallel slicing and gathering under the name that users import."""

from verl.models.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

__all__ = ["gather_outputs_and_unpad", "ulysses_pad_and_slice_inputs"]
