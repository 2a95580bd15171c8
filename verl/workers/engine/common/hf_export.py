"""Export a model in Hugging Face format: safetensors files and config, written tensor by tensor."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.loading import ValueModel
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups

GatherWeight = Callable[[str], "torch.Tensor | None"]
"""Returns the full weight of this name on rank 0, None on other ranks. A collective operation."""
# Ways to group weights for conversion, as functions from a weight's name to the key of its group: one weight, the
# weights of one layer, all weights.
_GROUP_KEYS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: layer[0] if (layer := re.match(r".*?\.\d+\.", name)) else name,
    lambda name: "",
)


class HFExport:
    """Writes a model's Hugging Face files.

    Weights may have other names in the files than in the model, and weights that are fused in the model are separate
    in the files. They are gathered and written group by group, so that no rank holds the whole model. A value model is
    written as a token classifier with one label.
    """

    def __init__(
        self, skeleton: nn.Module, dtype: torch.dtype, source: str = "", max_shard_size: int | str = "5GB"
    ) -> None:
        """`skeleton`: the model on the meta device. `dtype`: of the weights in the files. `source`: the folder that the
        model was loaded from, whose generation config is copied. `max_shard_size`: maximum size of one weight file."""
        self._model: Any = skeleton
        self.dtype, self._source, self._max_shard_size = dtype, source, max_shard_size

    def write(self, gather: GatherWeight, folder: Path, group: dist.ProcessGroup | None) -> None:
        """Write all files on rank 0; `gather` returns weights in `dtype`. A collective operation of `group`."""
        tensors = self._tensors(gather)
        with groups.raise_on_all_ranks(group):
            try:
                if dist.get_rank() == 0:
                    self.write_configs(folder)
                    self.files.write(tensors, folder)
            finally:
                for _ in tensors:  # after an error too: gathering the remaining weights is a collective
                    pass

    @cached_property
    def files(self) -> WeightFiles:
        """The weight files and their tensors."""
        return WeightFiles.from_tensors({name: meta for name, (meta, _) in self.exported.items()}, self._max_shard_size)

    def _tensors(self, gather: GatherWeight) -> Iterator[Any]:
        """Yield the tensors in the order of `files`; None on other ranks than 0. Each iteration is a collective
        operation."""
        converted: dict[str, Any] = {}
        sources: tuple[str, ...] = ()
        for name in self.files.order:
            if self.exported[name][1] != sources:
                converted, sources = {}, self.exported[name][1]  # free the last group before the next is gathered
                weights = {source: gather(source) for source in sources}
                converted = self.convert(weights) if dist.get_rank() == 0 else {}
            yield converted.pop(name, None)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """Meta tensors of the model's weights in `dtype`, by name in the model."""
        return {
            name: torch.empty(
                value.shape, dtype=self.dtype if value.is_floating_point() else value.dtype, device="meta"
            )
            for name, value in self._state_dict().items()
        }

    @cached_property
    def exported(self) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """By name in the files: a meta tensor, and the names in the model of the weights it is converted from.

        Weights are converted in the smallest groups that give the same files as a conversion of all weights at once. A
        tensor that is not converted is the same object as in `weights`.
        """
        weights = self.weights
        expected = {name: value.shape for name, value in self.convert(weights).items()}
        for group_key in _GROUP_KEYS:
            grouped: dict[str, list[str]] = {}
            for name in weights:
                grouped.setdefault(group_key(name), []).append(name)
            exported = {
                name: (value, tuple(sources))
                for sources in grouped.values()
                for name, value in self.convert({source: weights[source] for source in sources}).items()
            }
            if {name: value.shape for name, (value, _) in exported.items()} == expected:
                return exported
        raise AssertionError("unreachable: the last way of grouping is the expected conversion of all weights at once")

    def _state_dict(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors of the model that are saved; tied tensors once."""
        if isinstance(self._model, ValueModel):
            return self._model.state_dict()
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        ignored = set(self._model._keys_to_ignore_on_save or ())
        state = {name: value for name, value in self._model.state_dict().items() if name not in ignored}
        return remove_tied_weights_from_state_dict(state, self._model)

    def convert(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors as `save_pretrained` stores them, by name in the files: fused tensors are split."""
        if isinstance(self._model, ValueModel):
            return state
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, state))

    def write_configs(self, folder: Path) -> None:
        """Write config files and, for models with remote code, their code."""
        model = self._model
        if isinstance(model, ValueModel):
            _write_classifier_config(model, folder)
            return
        generation = _generation_config(self._source)
        if generation is not None and model.can_generate():
            model.generation_config = generation
        with _no_progress_bar():
            model.save_pretrained(folder, state_dict={})  # configs only


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of `save_pretrained`, which writes no weights here."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_classifier_config(model: ValueModel, folder: Path) -> None:
    """Write the config of a value model as that of a token classifier with one label."""
    from transformers import AutoModelForTokenClassification

    config = type(model.config).from_dict(model.config.to_dict())  # a copy
    config.num_labels = 1
    classifier = AutoModelForTokenClassification._model_mapping.get(type(config), None)
    config.architectures = [classifier.__name__] if classifier is not None else None
    config.save_pretrained(folder)


def _generation_config(source: str) -> Any:
    """Return the generation config of a model folder; None if it has none."""
    from transformers import GenerationConfig

    if not (Path(source) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(source)


# Names of dtypes in the header of safetensors files.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# The header of a safetensors file is padded to a multiple of this, so that tensors are aligned.
_ALIGNMENT = 8


@dataclass(frozen=True)
class WeightFiles:
    """Names and tensors of safetensors files, in writing order."""

    files: Mapping[str, Mapping[str, torch.Tensor]]
    """By file name and tensor name: tensors that define shape and dtype; they may be on the meta device."""
    index: Mapping[str, Any] | None
    """Contents of model.safetensors.index.json; None for a single file."""

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = "5GB") -> WeightFiles:
        """Return `model.safetensors`, or several files and their index if it would be larger than the limit.

        `tensors` must contain tied tensors once.
        """
        from huggingface_hub import split_torch_state_dict_into_shards

        plan = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename} if plan.is_sharded else None
        files = {}
        for file, names in plan.filename_to_tensors.items():
            # Wide elements first, so that every tensor starts at a multiple of its element size.
            ordered = sorted(names, key=lambda name: -tensors[name].element_size())
            files[file] = {name: tensors[name] for name in ordered}
        return cls(files, index)

    @property
    def order(self) -> list[str]:
        """All tensor names in writing order."""
        return [name for names in self.files.values() for name in names]

    def write(self, tensors: Iterator[torch.Tensor], folder: Path) -> None:
        """Write all files; `tensors` are consumed one at a time, in `order`."""
        with ChecksumRecorder(folder) as recorder:
            for file, specs in self.files.items():
                with recorder.open(file) as stream:
                    write_safetensors(specs, tensors, stream)
            if self.index is not None:
                with recorder.open("model.safetensors.index.json") as stream:
                    stream.write(json.dumps(self.index, indent=2, sort_keys=True).encode())


def write_safetensors(
    specs: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor], stream: io.BufferedIOBase
) -> None:
    """Write a safetensors file: length of the header, header, and the tensors without gaps.

    `specs`: shape and dtype by name, wide elements first. Consumes one tensor of `tensors` per spec.
    """
    unsupported = next((name for name, value in specs.items() if value.dtype not in DTYPE_NAMES), None)
    if unsupported is not None:
        dtype = specs[unsupported].dtype
        raise ValueError(f"{unsupported}: safetensors files do not support the dtype {dtype}. Convert this weight.")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in specs.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    iterator = iter(tensors)
    for _ in specs:
        # The tensor is not bound to a name: it is freed before the next one is created.
        stream.write(_tensor_bytes(next(iterator)))


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
