"""The installed torchvision, after the operators were declared that its build for another torch cannot register."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_library = torch.library.Library("torchvision", "DEF")
for _operator in ("nms", "qnms"):
    _library.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_shims = Path(__file__).resolve().parent.parent
_installed = PathFinder.find_spec("torchvision", [path for path in sys.path if Path(path).resolve() != _shims])
assert _installed is not None
assert _installed.origin is not None
assert _installed.submodule_search_locations is not None
__path__ = list(_installed.submodule_search_locations)
__file__ = _installed.origin
exec(compile(Path(__file__).read_text(), __file__, "exec"))
