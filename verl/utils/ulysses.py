"""Face: sequence-parallel slicing and gathering under the name users import; the work is `verl.models.ulysses`."""

from verl.models.ulysses import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs

__all__ = ["gather_outputs_and_unpad", "ulysses_pad_and_slice_inputs"]
