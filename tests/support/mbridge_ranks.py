"""Worker functions of the tests of Megatron-Bridge weight conversion (imported by name in the rank processes)."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.engine_cases import whole_weights
from tests.support.megatron_cases import make_megatron
from tests.support.megatron_ranks import LAYOUTS, MODELS, WEIGHTS_ONLY, model_of
from tests.support.megatron_weight_ranks import collect_buckets, cut_rows, mismatched, other_model, shard_rows

UNSUPPORTED_MODELS = ("mixtral", "shared", "experts")
IMPORT_ERRORS = (
    ModuleNotFoundError("No module named 'megatron.bridge'", name="megatron.bridge"),
    OSError("libcudnn.so.9: cannot open shared object file"),  # raised by Transformer Engine if a library is missing
)


def compare_with_bridge(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Load two engines from the same files, one of them by the bridge; rank r writes `results-r.pt`."""
    results = {}
    for layout, name in cases:
        model_folder, changes = Path(folder) / f"{layout}-{name}", {} if ranks == 1 else LAYOUTS[layout]
        model = model_of(name)
        if rank == 0:
            (model.model if MODELS[name][0] == "value" else model).save_pretrained(model_folder)
        dist.barrier()
        with count_conversions() as conversions:
            bridge = make_megatron(str(model_folder), MODELS[name][0], use_mbridge=True, **changes)
            case = _compare(bridge, model_folder, MODELS[name][0], changes, ranks)
        if layout != WEIGHTS_ONLY:  # a save first checks the outputs of a forward pass
            case["masters"] = _masters(model_folder, name, changes)
        results[layout, name] = case | {"used": all(conversions.values())}
    torch.save(results, Path(folder) / f"results-{rank}.pt")


@contextmanager
def count_conversions() -> Iterator[Counter[str]]:
    """Count the bridge's conversions of QKV weights in each direction."""
    from megatron.bridge.models.conversion.param_mapping import QKVMapping

    counts = Counter({"hf_to_megatron": 0, "megatron_to_hf": 0})

    def counting(direction: str, convert: Any) -> Any:
        def wrapper(mapping: Any, weights: Any, module: Any) -> Any:
            tensors = weights.values() if isinstance(weights, dict) else [weights]
            counts[direction] += not any(tensor.is_meta for tensor in tensors)  # meta tensors: only names and shapes
            return convert(mapping, weights, module)

        return wrapper

    with ExitStack() as stack:
        for direction in counts:
            convert = getattr(QKVMapping, direction)
            stack.enter_context(patch.object(QKVMapping, direction, counting(direction, convert)))
        yield counts


def _compare(bridge: Any, model_folder: Path, kind: str, changes: dict[str, Any], ranks: int) -> dict[str, list[str]]:
    """By quantity, the names of weights that are not bit-identical to those of our own mapping."""
    ours = make_megatron(str(model_folder), kind, **changes)
    shards = [
        {f"{at}.{key}": value for at, part in enumerate(engine.models) for key, value in part.named_parameters()}
        for engine in (bridge, ours)
    ]
    expected = whole_weights(ours)
    parts = [shard_rows(expected, part, ranks) for part in range(ranks)]
    case = {"shards": mismatched(*shards)}
    for size in (1 << 30, 40_000, 3_000):
        case[f"whole, {size}"] = mismatched(collect_buckets(bridge, None, size, None), expected)
        own_rows = cut_rows(expected, parts[dist.get_rank()])
        case[f"rows, {size}"] = mismatched(collect_buckets(bridge, None, size, parts), own_rows)
        few_rows = [{"model.layers.1.self_attn.k_proj.weight": range(1, 9), "lm_head.weight": range(200, 260)}] * ranks
        few_rows = [{key: rows for key, rows in ranges.items() if key in expected} for ranges in few_rows]
        half = {key: value.bfloat16() for key, value in expected.items()}
        case[f"few, {size}"] = mismatched(
            collect_buckets(bridge, torch.bfloat16, size, few_rows), cut_rows(half, few_rows[0])
        )
    case["order"] = [] if list(collect_buckets(bridge, None, 40_000, None)) == list(expected) else ["another"]
    bridge.export_hf(model_folder / "bridge", torch.float32)
    ours.export_hf(model_folder / "ours", torch.float32)
    return case


def _masters(model_folder: Path, name: str, changes: dict[str, Any]) -> list[str]:
    """Names of float32 master weights of a bfloat16 model that differ from the files."""
    half = make_megatron(
        str(model_folder), MODELS[name][0], dtype="bf16", background_save=False, use_mbridge=True, **changes
    )
    half.save(model_folder / "masters", ("model",))
    loaded = make_megatron(other_model(name), MODELS[name][0], **changes)
    loaded.load(model_folder / "masters", ("model",))
    return mismatched(
        whole_weights(loaded), whole_weights(make_megatron(str(model_folder), MODELS[name][0], **changes))
    )


@contextmanager
def import_raises(error: Exception) -> Iterator[None]:
    """Make the import of megatron.bridge raise this error."""

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "megatron.bridge":
                raise error

    with patch.dict(sys.modules), patch.object(sys, "meta_path", [Finder(), *sys.meta_path]):
        sys.modules.pop("megatron.bridge", None)
        yield


def check_fallbacks(rank: int, ranks: int, folder: str) -> None:
    """Errors for models that the bridge cannot map, and the fallback to our own mapping if its import fails."""
    results: dict[str, Any] = {}
    for name in UNSUPPORTED_MODELS:
        model_folder = Path(folder) / name
        model_of(name).config.save_pretrained(model_folder)
        try:
            make_megatron(str(model_folder), use_mbridge=True)
        except ValueError as error:
            results[name] = str(error)
    model_folder = Path(folder) / "tied"
    model = model_of("tied")
    model.save_pretrained(model_folder)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("verl").addHandler(handler)
    logging.getLogger("verl").setLevel(logging.INFO)  # in this process alone
    results["ours"] = []
    for error in IMPORT_ERRORS:
        with import_raises(error):
            engine = make_megatron(str(model_folder), use_mbridge=True)
        results["ours"] += mismatched(whole_weights(engine), model.state_dict())
    logging.getLogger("verl").removeHandler(handler)
    results["messages"] = [record.getMessage() for record in records if "use_mbridge" in record.getMessage()]
    results["no files"] = _without_files(model_folder)
    torch.save(results, Path(folder) / f"results-{rank}.pt")


def _without_files(model_folder: Path) -> str:
    (model_folder / "model.safetensors").unlink()
    try:
        make_megatron(str(model_folder), use_mbridge=True)
    except ValueError as error:
        return str(error)
    return ""
