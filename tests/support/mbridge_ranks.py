"""What ranks do with engines whose weights go through Megatron-Bridge; the processes import it by name."""

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
from tests.support.megatron_weight_ranks import cut_rows, other_model, rows_of, walked, wrong

REFUSED = ("mixtral", "shared", "experts")
BROKEN = (
    ModuleNotFoundError("No module named 'megatron.bridge'", name="megatron.bridge"),
    OSError("libcudnn.so.9: cannot open shared object file"),  # as Transformer Engine has it where a library is missing
)


def filled_both_ways(rank: int, ranks: int, folder: str, cases: list[tuple[str, str]]) -> None:
    """Two engines from the same files, one of them by the bridge; rank r writes `found-r.pt`."""
    found = {}
    for layout, name in cases:
        stored, changes = Path(folder) / f"{layout}-{name}", {} if ranks == 1 else LAYOUTS[layout]
        model = model_of(name)
        if rank == 0:
            (model.model if MODELS[name][0] == "value" else model).save_pretrained(stored)
        dist.barrier()
        with conversions() as ways:
            theirs = make_megatron(str(stored), MODELS[name][0], use_mbridge=True, **changes)
            case = _compared(theirs, stored, MODELS[name][0], changes, ranks)
        if layout != WEIGHTS_ONLY:  # a save looks first at what a pass gives
            case["masters"] = _masters(stored, name, changes)
        found[layout, name] = case | {"used": all(ways.values())}
    torch.save(found, Path(folder) / f"found-{rank}.pt")


@contextmanager
def conversions() -> Iterator[Counter[str]]:
    """How often the bridge converts queries, keys and values each way inside."""
    from megatron.bridge.models.conversion.param_mapping import QKVMapping

    ways = Counter({"hf_to_megatron": 0, "megatron_to_hf": 0})

    def counted(way: str, convert: Any) -> Any:
        def converted(mapping: Any, weights: Any, module: Any) -> Any:
            tensors = weights.values() if isinstance(weights, dict) else [weights]
            ways[way] += not any(tensor.is_meta for tensor in tensors)  # there, names and shapes are tried out
            return convert(mapping, weights, module)

        return converted

    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(patch.object(QKVMapping, way, counted(way, getattr(QKVMapping, way))))
        yield ways


def _compared(theirs: Any, stored: Path, kind: str, changes: dict[str, Any], ranks: int) -> dict[str, list[str]]:
    """By quantity, the names of what is not the same bit for bit."""
    ours = make_megatron(str(stored), kind, **changes)
    shards = [
        {f"{at}.{key}": value for at, part in enumerate(engine.models) for key, value in part.named_parameters()}
        for engine in (theirs, ours)
    ]
    there = whole_weights(ours)
    parts = [rows_of(there, part, ranks) for part in range(ranks)]
    case = {"shards": wrong(*shards)}
    for size in (1 << 30, 40_000, 3_000):
        case[f"whole, {size}"] = wrong(walked(theirs, None, size, None), there)
        own = cut_rows(there, parts[dist.get_rank()])
        case[f"rows, {size}"] = wrong(walked(theirs, None, size, parts), own)
        one = [{"model.layers.1.self_attn.k_proj.weight": range(1, 9), "lm_head.weight": range(200, 260)}] * ranks
        one = [{key: rows for key, rows in each.items() if key in there} for each in one]
        half = {key: value.bfloat16() for key, value in there.items()}
        case[f"few, {size}"] = wrong(walked(theirs, torch.bfloat16, size, one), cut_rows(half, one[0]))
    case["order"] = [] if list(walked(theirs, None, 40_000, None)) == list(there) else ["another"]
    theirs.export_hf(stored / "theirs", torch.float32)
    ours.export_hf(stored / "ours", torch.float32)
    return case


def _masters(stored: Path, name: str, changes: dict[str, Any]) -> list[str]:
    """Names of masters of a model in half precision that are not as the files have them, in float32."""
    half = make_megatron(str(stored), MODELS[name][0], dtype="bf16", background_save=False, use_mbridge=True, **changes)
    half.save(stored / "masters", ("model",))
    again = make_megatron(other_model(name), MODELS[name][0], **changes)
    again.load(stored / "masters", ("model",))
    return wrong(whole_weights(again), whole_weights(make_megatron(str(stored), MODELS[name][0], **changes)))


@contextmanager
def import_raises(error: Exception) -> Iterator[None]:
    """Inside, this is what becomes of importing the package."""

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == "megatron.bridge":
                raise error

    with patch.dict(sys.modules), patch.object(sys, "meta_path", [Finder(), *sys.meta_path]):
        sys.modules.pop("megatron.bridge", None)
        yield


def refused_or_ours(rank: int, ranks: int, folder: str) -> None:
    """Models without a mapping, of which there are no weights to load; and the package away, or broken."""
    found: dict[str, Any] = {}
    for name in REFUSED:
        stored = Path(folder) / name
        model_of(name).config.save_pretrained(stored)
        try:
            make_megatron(str(stored), use_mbridge=True)
        except ValueError as error:
            found[name] = str(error)
    stored = Path(folder) / "tied"
    model = model_of("tied")
    model.save_pretrained(stored)
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    logging.getLogger("verl").addHandler(handler)
    logging.getLogger("verl").setLevel(logging.INFO)  # in this process alone
    found["ours"] = []
    for error in BROKEN:
        with import_raises(error):
            engine = make_megatron(str(stored), use_mbridge=True)
        found["ours"] += wrong(whole_weights(engine), model.state_dict())
    logging.getLogger("verl").removeHandler(handler)
    found["said"] = [record.getMessage() for record in said if "use_mbridge" in record.getMessage()]
    found["no files"] = _without_files(stored)
    torch.save(found, Path(folder) / f"found-{rank}.pt")


def _without_files(stored: Path) -> str:
    (stored / "model.safetensors").unlink()
    try:
        make_megatron(str(stored), use_mbridge=True)
    except ValueError as error:
        return str(error)
    return ""
