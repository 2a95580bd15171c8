"""A trial instead of trust: two short texts, packed into one paged pass, must give the logits the model gives alone."""

from __future__ import annotations

from typing import Any

import torch

from verl.inference.attention.base import AttentionStep
from verl.inference.attention.torch_attention import TorchAttention
from verl.inference.models import InferenceModel
from verl.models.attention import window_lost

__all__ = ["StepLostError", "Trial"]

_LENGTHS = [7, 5]


class StepLostError(Exception):
    """The model does not hand the step on to its attention."""


class _UnevenError(Exception):
    """Keys and values do not fit our cache."""


class Trial:
    """Made while the module still has its own attention; `difference` is asked when it has ours."""

    attention_shape: tuple[int, int, int]
    """Heads, KV heads and head size, as `difference` has found them."""

    @torch.inference_mode()
    def __init__(self, hf: Any, device: torch.device) -> None:
        vocab = hf.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        self._texts = [torch.randint(vocab, (length,), generator=generator).to(device) for length in _LENGTHS]
        self._attention = hf.config._attn_implementation
        alone = [hf(input_ids=text.unsqueeze(0), use_cache=False).logits[0].float() for text in self._texts]
        self._expected = torch.cat(alone)
        self._calls: list[tuple[int, tuple[int, int, int], int | None]] = []

    @torch.inference_mode()
    def difference(self, model: InferenceModel, config: Any) -> str | None:
        """What keeps `model` from running paged, in words; None if nothing does."""
        positions = torch.cat([torch.arange(len(text), device=model.device) for text in self._texts])
        try:
            hidden = model.hidden(torch.cat(self._texts), positions, self._step(model.device))
        except StepLostError:
            return "its layers do not hand arguments on to the attention interface"
        except _UnevenError as error:
            return str(error)
        layers = [layer for layer, _, _ in self._calls]
        if layers != list(range(model.num_layers)):
            return f"{len(set(layers))} of its {model.num_layers} layers attend through the attention interface"
        shapes = [shape for _, shape, _ in self._calls]
        if len(set(shapes)) > 1:
            return "its layers have attention heads of different number or size"
        self.attention_shape = shapes[0]
        return window_lost(config, [window for _, _, window in self._calls]) or self._gap(model, hidden)

    def _gap(self, model: InferenceModel, hidden: torch.Tensor) -> str | None:
        gap = float((model.logits(hidden).float() - self._expected).abs().max() / self._expected.abs().max())
        limit = 1e-3 if model.dtype == torch.float32 else 0.05
        # Weights that are not finite say nothing about the architecture; sampling refuses them.
        if gap < limit or not bool(self._expected.isfinite().all()):
            return None
        return f"its logits differ by {gap:.1%} from those of its own attention ({self._attention})"

    def _step(self, device: torch.device) -> AttentionStep:
        def whole(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        block_size = max(_LENGTHS)
        return AttentionStep(
            kv_cache=[],
            backend=self._record,
            slots=whole(
                [block_size * text + place for text, n in enumerate(_LENGTHS) for place in range(n)], torch.int64
            ),
            num_prefill_tokens=sum(_LENGTHS),
            query_starts=whole([0, _LENGTHS[0], sum(_LENGTHS)]),
            prefill_lengths=whole(_LENGTHS),
            prefill_tables=whole([0, 1]).unsqueeze(1),
            max_query=block_size,
            max_prefill_length=block_size,
            decode_lengths=whole([]),
            decode_tables=whole([]).view(0, 1),
        )

    def _record(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: AttentionStep,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """TorchAttention over a cache of the size that shows; every layer may use the same, as none reads later."""
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise _UnevenError("its queries, keys and values have heads of different size")
        self._calls.append((layer, (query.shape[1], key.shape[1], key.shape[2]), window))
        block = key.new_zeros(len(_LENGTHS), max(_LENGTHS), *key.shape[1:])
        step.kv_cache = [(block, block.clone())]
        return TorchAttention()(0, query, key, value, step, scale, window, softcap)
