"""The program of a code reward: the driver and the modules that it imports, for one run of the sandbox."""

from __future__ import annotations

import functools
import marshal
from pathlib import Path
from types import CodeType

_PACKAGE = "verl.utils.reward_score"
_MODULES = ("code_values", "code_channel", "code_candidate", "code_judge", "code_isolation", "code_driver")
_FILE = "driver.bin"
_LOADER = """
import marshal, os, sys, types
def _load(modules):
    parts = {package!r}.split(".")
    packages = [".".join(parts[: count + 1]) for count in range(len(parts))]
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, code in modules:
        module = types.ModuleType(packages[-1] + "." + name)
        sys.modules[module.__name__] = module
        exec(code, module.__dict__)
    for name in [name for name in sys.modules if name == parts[0] or name.startswith(parts[0] + ".")]:
        del sys.modules[name]
    return module.main
"""
_COMPILED = """
with open({file!r}, "rb") as file:
    _modules = marshal.loads(file.read())
os.remove({file!r})
_load(_modules)()
"""
_SOURCE = """
_modules = {modules}
_load(_modules)()
"""


@functools.cache
def program(compiled: bool) -> tuple[str, dict[str, bytes]]:
    """The text of the program and its files. `compiled`: for this version of Python, which starts 20 ms earlier."""
    folder = Path(__file__).parent
    sources = {name: (folder / f"{name}.py").read_text() for name in _MODULES}
    loader = _LOADER.lstrip().format(package=_PACKAGE)
    if not compiled:
        return loader + _SOURCE.format(modules=repr(list(sources.items()))), {}
    codes = [(name, _small(compile(source, f"{name}.py", "exec", optimize=2))) for name, source in sources.items()]
    return loader + _COMPILED.format(file=_FILE), {_FILE: marshal.dumps(codes)}


def _small(code: CodeType) -> CodeType:
    """Without line numbers, a quarter of the size: pages of memory are most of what loading costs."""
    constants = tuple(_small(value) if isinstance(value, CodeType) else value for value in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=constants)
