"""The driver of code tests and the modules that it imports as one source, for interpreters without this package."""

from __future__ import annotations

import functools
from pathlib import Path

NAME = "verl_code_driver"
"""Name of the module in the local sandbox, where it is preloaded."""
_PACKAGE = "verl.utils.reward_score.code_tests"
_MODULES = ("values", "channel", "candidate", "proxies", "judge", "isolation", "driver")
_LOADER = """
import sys, types
def _load(package, sources):
    parts = package.split(".")
    existing = [name for name in sys.modules if name.split(".")[0] == parts[0]]
    replaced = {name: sys.modules.pop(name) for name in existing}
    parents = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for name in parents:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    loaded = []
    for name, source in sources:
        module = types.ModuleType(package + "." + name)
        sys.modules[module.__name__] = module
        loaded.append(module.__name__)
        exec(compile(source, name + ".py", "exec"), module.__dict__)
    for name in parents + loaded:
        del sys.modules[name]
    sys.modules.update(replaced)
    return module.main
"""


@functools.cache
def driver_source() -> str:
    """Return the source of a module that defines `main`."""
    folder = Path(__file__).parent
    sources = [(name, (folder / f"{name}.py").read_text()) for name in _MODULES]
    return f"{_LOADER}main = _load({_PACKAGE!r}, {sources!r})\n"


def driver_program(preloaded: bool) -> str:
    """Return a program that runs the driver. `preloaded`: the module `NAME` can be imported."""
    return f"from {NAME} import main\nmain()\n" if preloaded else driver_source() + "main()\n"
