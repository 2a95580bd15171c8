"""Which layers each stage of a pipeline has, as Megatron-Core deals them out."""

from __future__ import annotations

from itertools import accumulate, pairwise

_KEYS = "override_transformer_config.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"


def stage_layers(
    layers: int,
    pp: int,
    vpp: int | None = None,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> list[list[range]]:
    """The layers of each stage, chunk by chunk: `[stage][chunk]`.

    `vpp` chunks of a stage take turns with those of other stages. `first` and `last`: layers of the first and the last
    stage, where they are not as many as the others'; or the embedding and the loss count as a layer each.
    """
    chunks = vpp or 1
    if chunks > 1 and pp == 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size: {vpp} chunks take turns with other stages, and "
            "pipeline_model_parallel_size is 1. Leave it out, or use more stages."
        )
    if pp > 1 and (first is not None or last is not None):
        if embedding_counts or loss_counts:
            raise ValueError(f"{_KEYS}: not beside account_for_embedding_in_pipeline_split or that of the loss.")
        counts = _uneven(layers, pp, first, last)
    else:
        counts = [_divided(layers + embedding_counts + loss_counts, pp)] * pp
    sizes = [[_of_chunk(count, chunks)] * chunks for count in counts]
    sizes[0][0] -= embedding_counts
    sizes[-1][-1] -= loss_counts
    if min(map(min, sizes)) < 0:
        raise ValueError(
            f"pipeline_model_parallel_size: {layers} layers are too few for {pp} stages of {chunks} chunks."
        )
    ends = accumulate((sizes[stage][chunk] for chunk in range(chunks) for stage in range(pp)), initial=0)
    dealt = [range(start, stop) for start, stop in pairwise(ends)]
    return [[dealt[chunk * pp + stage] for chunk in range(chunks)] for stage in range(pp)]


def _uneven(layers: int, pp: int, first: int | None, last: int | None) -> list[int]:
    others = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (rest % others if others else rest):
        raise ValueError(
            f"{_KEYS}: {first} and {last} leave {rest} of {layers} layers, which {others} other stages cannot share "
            "evenly."
        )
    middle = [rest // others] * others if others else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def _divided(layers: int, pp: int) -> int:
    if layers % pp:
        fitting = [size for size in range(1, layers + 1) if layers % size == 0]
        raise ValueError(
            f"pipeline_model_parallel_size: {pp} stages cannot share {layers} layers evenly. Use one of {fitting}, "
            f"or set {_KEYS}."
        )
    return layers // pp


def _of_chunk(layers: int, chunks: int) -> int:
    if layers % chunks:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size: {chunks} chunks cannot share the {layers} layers of a stage evenly."
        )
    return layers // chunks
