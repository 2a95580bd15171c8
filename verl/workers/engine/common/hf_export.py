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

from verl.models.heads import ValueModel
from verl.utils.checkpoint.manifest import ChecksumRecorder
from verl.workers.engine.common import groups

Whole = Callable[[str], "torch.Tensor | None"]
# Which weights are brought together: each alone, those of a layer, or all of them.
_CUTS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    lambda name: found[0] if (found := re.match(r".*?\.\d+\.", name)) else name,
    lambda name: "",
)


class HFExport:
    """How an empty model's weights are stored: under which names, from which tensors in memory, in which files.

    A value model is written as a token classifier with one label.
    """

    def __init__(
        self, skeleton: nn.Module, dtype: torch.dtype, source: str = "", max_shard_size: int | str = "5GB"
    ) -> None:
        """`dtype` is that of the files, `source` where the model was loaded from."""
        self._model: Any = skeleton
        self.dtype, self._source, self._max_shard_size = dtype, source, max_shard_size

    def write(self, whole: Whole, folder: Path, group: dist.ProcessGroup | None) -> None:
        """`whole` gives a weight by the name it has in memory, in `dtype`, on rank 0; a collective of `group`."""
        tensors = self._tensors(whole)
        with groups.failing_together(group):
            try:
                if dist.get_rank() == 0:
                    self.write_configs(folder)
                    self.files.write(tensors, folder)
            finally:
                for _ in tensors:  # rank 0 is still sent what it cannot write
                    pass

    @cached_property
    def files(self) -> WeightFiles:
        """What is written, known beforehand."""
        return WeightFiles.of({name: like for name, (like, _) in self.stored.items()}, self._max_shard_size)

    def _tensors(self, whole: Whole) -> Iterator[Any]:
        """In the order of the files; on other ranks nothing, at the same pace."""
        made: dict[str, Any] = {}
        sources: tuple[str, ...] = ()
        for name in self.files.order:
            if self.stored[name][1] != sources:
                made, sources = {}, self.stored[name][1]
                found = {each: whole(each) for each in sources}
                made = self.converted(found) if dist.get_rank() == 0 else {}
            yield made.pop(name, None)

    @cached_property
    def memory(self) -> dict[str, torch.Tensor]:
        """By name in memory: what it is like in `dtype`."""
        return {
            name: torch.empty(
                value.shape, dtype=self.dtype if value.is_floating_point() else value.dtype, device="meta"
            )
            for name, value in self._in_memory().items()
        }

    @cached_property
    def stored(self) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """By name in the files: what it is like, and the tensors in memory it is made of.

        Weights are cut as finely as gives the same files as all of them at once. What is the same in memory is the
        same object there.
        """
        memory = self.memory
        wanted = {name: value.shape for name, value in self.converted(memory).items()}
        for cut in _CUTS:
            parts: dict[str, list[str]] = {}
            for name in memory:
                parts.setdefault(cut(name), []).append(name)
            found = {
                name: (value, tuple(names))
                for names in parts.values()
                for name, value in self.converted({each: memory[each] for each in names}).items()
            }
            if {name: value.shape for name, (value, _) in found.items()} == wanted:
                return found
        raise AssertionError("all of them at once give what all of them at once give")

    def _in_memory(self) -> Mapping[str, torch.Tensor]:
        """What is stored of the model's own tensors: tied ones once."""
        if isinstance(self._model, ValueModel):
            return self._model.state_dict()
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        ignored = set(self._model._keys_to_ignore_on_save or ())
        state = {name: value for name, value in self._model.state_dict().items() if name not in ignored}
        return remove_tied_weights_from_state_dict(state, self._model)

    def converted(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `save_pretrained` would store them: what is fused in memory is taken apart."""
        if isinstance(self._model, ValueModel):
            return state
        from transformers.core_model_loading import revert_weight_conversion

        return dict(revert_weight_conversion(self._model, state))

    def write_configs(self, folder: Path) -> None:
        """And the code of a model that brings its own."""
        model = self._model
        if isinstance(model, ValueModel):
            _write_classifier_config(model, folder)
            return
        generation = _generation_config(self._source)
        if generation is not None and model.can_generate():
            model.generation_config = generation
        with _no_bars():
            model.save_pretrained(folder, state_dict={})


@contextmanager
def _no_bars() -> Iterator[None]:
    """transformers would show one of no weights at all."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _write_classifier_config(model: ValueModel, folder: Path) -> None:
    from transformers import AutoModelForTokenClassification

    config = type(model.config).from_dict(model.config.to_dict())
    config.num_labels = 1
    classifier = AutoModelForTokenClassification._model_mapping.get(type(config), None)
    config.architectures = [classifier.__name__] if classifier is not None else None
    config.save_pretrained(folder)


def _generation_config(source: str) -> Any:
    from transformers import GenerationConfig

    if not (Path(source) / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(source)


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
_ALIGNMENT = 8


@dataclass(frozen=True)
class WeightFiles:
    """Which file holds which tensors, in the order in which they are written."""

    files: Mapping[str, Mapping[str, torch.Tensor]]
    """By file, and by name what each tensor is like; they may be on the meta device."""
    index: Mapping[str, Any] | None
    """Where there are several."""

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], max_shard_size: int | str = "5GB") -> WeightFiles:
        """`model.safetensors`, or several of them and their index where one would be larger than the limit.

        Tensors that share memory must have been reduced to one of them: a file has no second names.
        """
        from huggingface_hub import split_torch_state_dict_into_shards

        plan = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
        )
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename} if plan.is_sharded else None
        # Wide elements first, so that every tensor begins at a multiple of its element size.
        width = lambda name: -tensors[name].element_size()  # noqa: E731
        split = plan.filename_to_tensors.items()
        return cls({file: {name: tensors[name] for name in sorted(names, key=width)} for file, names in split}, index)

    @property
    def order(self) -> list[str]:
        """All names as they are written."""
        return [name for names in self.files.values() for name in names]

    def write(self, tensors: Iterator[torch.Tensor], folder: Path) -> None:
        """`tensors` come in `order`, one at a time."""
        with ChecksumRecorder(folder) as recorder:
            for file, like in self.files.items():
                with recorder.open(file) as stream:
                    write_safetensors(like, tensors, stream)
            if self.index is not None:
                with recorder.open("model.safetensors.index.json") as stream:
                    stream.write(json.dumps(self.index, indent=2, sort_keys=True).encode())


def write_safetensors(
    like: Mapping[str, torch.Tensor], tensors: Iterable[torch.Tensor], stream: io.BufferedIOBase
) -> None:
    """The safetensors format: length of the header, header, and the tensors one after another without gaps.

    `like` says what each will be; those with wide elements come first. `tensors` may hold more than these.
    """
    unknown = sorted({str(value.dtype) for value in like.values() if value.dtype not in DTYPE_NAMES})
    if unknown:
        raise ValueError(f"safetensors: no name is known for the dtype {', '.join(unknown)}. Convert these weights.")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in like.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    given = iter(tensors)
    for _ in like:
        stream.write(_bytes_of(next(given)))  # and no name for it: it goes before the next is made


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
