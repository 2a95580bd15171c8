"""A model as transformers loads it, written tensor by tensor: no rank holds it whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.heads import ValueModel
from verl.workers.engine.common import groups
from verl.workers.engine.common.safetensors_files import WeightFiles

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
