"""GenericModel: any causal LM of transformers that uses the attention interface, run by its transformers module.

Paged attention is registered as an attention implementation. `_Trial` checks at construction that the model works with
it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from transformers import AttentionInterface

from verl.inference.attention import AttentionStep, TorchAttention
from verl.inference.lora import AdaptedLayer, AdapterGroup, AdapterOptions, ModelAdapters
from verl.inference.memory import Region
from verl.inference.models import InferenceModel
from verl.inference.weights import WeightShard, pack_module
from verl.models.attention import unsupported_layers, window_mismatch
from verl.models.logits import logit_adjustment, wide_product
from verl.models.lora import linear_layers, linear_shape
from verl.models.routing import record_routes, route_dtype, routers, unrouted

__all__ = ["GenericModel"]

_ATTENTION = "verl_paged"
# Rotary embeddings whose angles change for the whole batch once one of its sequences is long.
_BATCH_DEPENDENT_ROTARY = ("dynamic", "longrope")
# Lengths of the trial sequences.
_LENGTHS = [7, 5]


class GenericModel:
    """An InferenceModel over a Hugging Face module. Takes ownership: weights move into one region of `device`."""

    def __init__(
        self,
        hf: Any,
        max_length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        adapters: AdapterOptions | None = None,
    ) -> None:
        config = hf.config.get_text_config(decoder=True)
        _reject(hf, _unsupported_reason(hf, config, max_length))
        self.device, self.dtype = torch.device(device), dtype
        self.region: Region = pack_module(hf, self.device, dtype)
        self._hf = hf.eval().requires_grad_(False)
        self._linear = hf.get_output_embeddings()
        self._adjust_logits = logit_adjustment(config)
        self.vocab_size = len(self._linear.weight)
        self.num_layers = config.num_hidden_layers
        trial = _Trial(hf, self.device)
        AttentionInterface.register(_ATTENTION, _paged_attention)
        hf.set_attn_implementation(_ATTENTION)
        _reject(hf, trial.difference(self, config))
        self.num_heads, self.num_kv_heads, self.head_dim = trial.attention_shape
        self._unused_slots: torch.Tensor | None = None
        self.adapters = None if adapters is None else self._add_adapters(adapters)

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        self._slots, self._unused_slots = step.slots, step.unused_adapters
        output = self._hf.base_model(
            input_ids=token_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attention_step=step
        )
        return output.last_hidden_state[0]

    def _add_adapters(self, options: AdapterOptions) -> ModelAdapters:
        """Let the linear layers add their adapters to their outputs."""
        groups = []
        for name, layer in linear_layers(self._hf).items():
            if options.selects(name):
                outputs, inputs = linear_shape(layer)
                rows = options.slots * options.padded_rank
                down, up = (
                    torch.empty(shape, dtype=self.dtype, device=self.device)
                    for shape in ((rows, inputs), (outputs, rows))
                )
                groups.append(AdapterGroup([AdaptedLayer(name, 0, outputs)], down, up, options))
                layer.register_forward_hook(partial(self._add_adapter, groups[-1]))
        return ModelAdapters(groups, options)

    def _add_adapter(
        self, group: AdapterGroup, _layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        """Forward hook of a linear layer: [..., inputs] → [..., outputs]."""
        x = inputs[0].flatten(0, -2)
        if self._unused_slots is not None and len(x) != len(self._unused_slots):
            raise ValueError(
                f"LoRA: {group.layers[0].name} computes only some of the tokens; this model can have one adapter for"
                " all sequences, not one per request."
            )
        group.product(linear(x, group.down), self._unused_slots).add_to_(output.view(-1, group.outputs))
        return output

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        values = wide_product(hidden, self._linear.weight.t())
        if self._linear.bias is not None:
            values += self._linear.bias
        return values if self._adjust_logits is None else self._adjust_logits(values)

    def record_experts(self, slots: int) -> torch.Tensor:
        routing = list(routers(self._hf).values())
        if not routing:
            raise ValueError(f"return_routed_experts: {type(self._hf).__name__} has no routers. Set it to false.")
        dtype = route_dtype(routing[0].num_experts)
        shape = (slots, self.num_layers, routing[0].top_k)
        table = torch.full(shape, unrouted(dtype), dtype=dtype, device=self.device)

        def record(layer: int, experts: torch.Tensor) -> None:
            table[self._slots, layer] = experts.to(dtype)

        record_routes(self._hf, record)
        return table

    def shards(self) -> dict[str, WeightShard]:
        return {}

    def named_weights(self) -> dict[str, torch.Tensor]:
        return self._hf.state_dict()


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attention_step: AttentionStep | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Called by transformers in every layer: query [1, heads, T, dim] → [1, T, heads, dim]."""
    if attention_step is None:
        raise _StepLostError
    query, key, value = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attention_step.backend(module.layer_idx, query, key, value, attention_step, scale, sliding_window, softcap)
    return out.unsqueeze(0), None


def _unsupported_reason(hf: Any, config: Any, max_length: int) -> str | None:
    """Why the class or the config of a model is not supported; None if it is."""
    if getattr(hf, "_is_stateful", False):
        return "its state is not a KV cache"
    if hf.config.is_encoder_decoder:
        return "it has an encoder"
    reason = unsupported_layers(hf, config)
    if reason is not None:
        return reason
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in [rotary, *(value for value in rotary.values() if isinstance(value, dict))]:
        kind = settings.get("rope_type")
        limit = settings.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _BATCH_DEPENDENT_ROTARY and max_length > limit:
            return (
                f"beyond {limit} tokens its {kind} rotary embedding depends on the other sequences of the batch"
                f" (max_model_len is {max_length})"
            )
    return None


def _reject(hf: Any, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"name: the native engine cannot run {type(hf).__name__}: {reason}. Set name=hf.")


class _StepLostError(Exception):
    """The model does not pass the AttentionStep to its attention."""


class _HeadSizeError(Exception):
    """Queries, keys and values have heads of different sizes, which the KV cache does not support."""


class _Trial:
    """Checks that two short sequences, packed into one paged pass, have the logits of separate passes.

    Created while the module has its original attention; `difference` is called once it has the paged one.
    """

    attention_shape: tuple[int, int, int]
    """Heads, KV heads and head size; set by `difference`."""

    @torch.inference_mode()
    def __init__(self, hf: Any, device: torch.device) -> None:
        vocab = hf.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        self._sequences = [torch.randint(vocab, (length,), generator=generator).to(device) for length in _LENGTHS]
        self._attention = hf.config._attn_implementation
        separate = [hf(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float() for ids in self._sequences]
        self._expected = torch.cat(separate)
        self._calls: list[tuple[int, tuple[int, int, int], int | None]] = []

    @torch.inference_mode()
    def difference(self, model: InferenceModel, config: Any) -> str | None:
        """Why `model` cannot run with paged attention; None if it can."""
        positions = torch.cat([torch.arange(len(ids), device=model.device) for ids in self._sequences])
        try:
            hidden = model.hidden(torch.cat(self._sequences), positions, self._step(model.device))
        except _StepLostError:
            return "its layers do not pass arguments on to the attention interface"
        except _HeadSizeError as error:
            return str(error)
        layers = [layer for layer, _, _ in self._calls]
        if layers != list(range(model.num_layers)):
            return f"{len(set(layers))} of its {model.num_layers} layers attend through the attention interface"
        shapes = [shape for _, shape, _ in self._calls]
        if len(set(shapes)) > 1:
            return "its layers have attention heads of different number or size"
        self.attention_shape = shapes[0]
        return window_mismatch(config, [window for _, _, window in self._calls]) or self._gap(model, hidden)

    def _gap(self, model: InferenceModel, hidden: torch.Tensor) -> str | None:
        gap = float((model.logits(hidden).float() - self._expected).abs().max() / self._expected.abs().max())
        limit = 1e-3 if model.dtype == torch.float32 else 0.05
        # With non-finite weights nothing can be compared; sampling rejects them.
        if gap < limit or not bool(self._expected.isfinite().all()):
            return None
        return f"its logits differ by {gap:.1%} from those of its own attention ({self._attention})"

    def _step(self, device: torch.device) -> AttentionStep:
        def tensor(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        block_size = max(_LENGTHS)
        return AttentionStep(
            kv_cache=[],
            backend=self._record,
            slots=tensor(
                [block_size * block + offset for block, n in enumerate(_LENGTHS) for offset in range(n)], torch.int64
            ),
            num_prefill_tokens=sum(_LENGTHS),
            query_starts=tensor([0, _LENGTHS[0], sum(_LENGTHS)]),
            prefill_lengths=tensor(_LENGTHS),
            prefill_tables=tensor([0, 1]).unsqueeze(1),
            decode_lengths=tensor([]),
            decode_tables=tensor([]).view(0, 1),
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
        """Record the call and attend with a temporary cache, which no later step reads."""
        if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            raise _HeadSizeError("its queries, keys and values have heads of different sizes")
        self._calls.append((layer, (query.shape[1], key.shape[1], key.shape[2]), window))
        block = key.new_zeros(len(_LENGTHS), max(_LENGTHS), *key.shape[1:])
        step.kv_cache = [(block, block.clone())]
        return TorchAttention()(0, query, key, value, step, scale, window, softcap)
