"""Check users' Python code without running it: syntax errors, missing modules, undefined names.

Nothing is imported, so a check takes milliseconds and has no side effects.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import symtable
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import verl
from verl.utils.import_utils import UserModule

# Text of code that may define names at run time.
_DYNAMIC = (
    "globals(", "locals(", "vars(", "exec(", "setattr(", "__getattr__", "__dict__", "sys.modules", "import *",
)  # fmt: skip
# Text of code that may change which modules can be imported, or from where.
_IMPORT_CHANGES = re.compile(
    r"\bsys\s*\.\s*(path|modules|meta_path)|\bfrom\s+sys\s+import|\b(addsitedir|importlib|__import__|__path__|pip)\b"
)
_DECORATOR = "function_tool"
_TOOL_MODULES = ("verl.tools", "verl.tools.function_tool")
_SHOWN_NAMES = 12


@dataclass(frozen=True)
class Source:
    """Path and text of a Python file."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def names(self) -> dict[str, bool]:
        """Public names at the top level of the module: True if the module defines the name, False if it imports it."""
        symbols = symtable.symtable(self.text, self.path, "exec").get_symbols()
        bound = {
            symbol.get_name(): not symbol.is_imported()
            for symbol in symbols
            if symbol.is_assigned() or symbol.is_imported()
        }
        # Functions may assign names of the module.
        bound |= {name: True for node in ast.walk(self.tree) if isinstance(node, ast.Global) for name in node.names}
        return {name: own for name, own in bound.items() if not name.startswith("_")}

    @property
    def functions(self) -> list[str]:
        return [node.name for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @property
    def is_dynamic(self) -> bool:
        return any(word in self.text for word in _DYNAMIC)

    @property
    def changes_imports(self) -> bool:
        return _IMPORT_CHANGES.search(self.text) is not None


def find_code_problem(module: UserModule, name: str | None = None) -> str | None:
    """Return why `name` cannot be loaded from a user's module, with file, line and remedy; None: no known problem."""
    source = source_of(module)
    if isinstance(source, str):
        return source
    if source is None:
        return None
    files: dict[str, Source] = {}
    syntax_error = next(_syntax_errors(source, files), None)
    if syntax_error is not None:
        return syntax_error
    is_certain = not any(file.changes_imports for file in files.values())
    missing = next(_missing_modules(source), None) if is_certain else None
    if missing is not None:
        remedy = "Install it, or put its folder on PYTHONPATH, on every node."
        if module.code is not None:
            remedy = "Install it. If it is a file beside this one, put its folder on PYTHONPATH, on every node."
        return f"{source.path} line {missing.line}: there is no module {missing.name!r}. {remedy}"
    if name is None or source.is_dynamic or name.partition(".")[0] in source.names or name.startswith("_"):
        return None
    own = [known for known, is_own in source.names.items() if is_own]
    return f"{source.path}: it does not define {name!r}. Correct the name. It defines: {_listed(own)}."


def find_tool_problem(module: UserModule) -> str | None:
    """Return why a file of function tools cannot be used: a problem of its code, or no decorated function; else None.

    A file without a decorated function is accepted if it imports other modules: an imported function may be a tool.
    """
    problem = find_code_problem(module)
    source = source_of(module)
    if problem is not None or not isinstance(source, Source) or source.is_dynamic:
        return problem
    if not source.functions or _uses_decorator(source) or _may_import_tools(source):
        return None
    return (
        f"{source.path}: no function is decorated with @function_tool. Write `from verl.tools.function_tool import"
        " function_tool`, and @function_tool above each function that is a tool. Functions:"
        f" {_listed(source.functions)}."
    )


def source_of(module: UserModule) -> Source | str | None:
    """Return the source of a module; a str with the reason if it cannot be found; None if it has no Python source."""
    if module.code is not None:
        return Source(module.code.path, module.code.source)
    name = module.path.removeprefix("pkg://")
    if name.partition(".")[0] in sys.builtin_module_names:
        return None
    file = locate(name)
    if file is None:
        return f"there is no module {name!r}. Correct the name, or put its folder on PYTHONPATH, on every node."
    return _read(file)


def locate(name: str) -> str | None:
    """Return the file of a module, or the folder of a namespace package; None: not found. Imports nothing."""
    first, *submodules = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except ValueError:  # a module that was loaded without a spec, such as __main__
        return getattr(sys.modules[first], "__file__", first)
    if spec is None:
        return None
    folders, file = list(spec.submodule_search_locations or ()), spec.origin or first
    for part in submodules:
        if not folders:  # a module may register submodules itself, as os does with os.path
            return file if name in sys.modules else None
        files = [path for folder in folders for path in _candidates(Path(folder), part) if path.exists()]
        if not files:
            return file if _is_lazy(file) else None
        file, folder = str(files[0]), files[0].parent if files[0].name == "__init__.py" else files[0]
        folders = [str(folder)] if folder.is_dir() else []
    return file


@dataclass(frozen=True)
class _Import:
    name: str
    line: int


def _candidates(folder: Path, name: str) -> list[Path]:
    extensions = [path for path in folder.glob(f"{name}.*.so")] + [folder / f"{name}.so", folder / f"{name}.pyd"]
    return [folder / name / "__init__.py", folder / f"{name}.py", *extensions, folder / name]


def _is_lazy(package: str) -> bool:
    """Return whether a package may create submodules that are not files."""
    source = _read(package)
    return source is None or source.is_dynamic


def _read(file: str) -> Source | None:
    if not file.endswith(".py") or not os.path.isfile(file):
        return None
    try:
        with tokenize.open(file) as text:  # handles a byte order mark and `# coding:` lines
            return Source(file, text.read())
    except (SyntaxError, UnicodeDecodeError):  # the import itself reports an encoding that is not valid
        return None


def _syntax_errors(source: Source, files: dict[str, Source]) -> Iterator[str]:
    """Yield the syntax errors of a file and of the users' files that it imports, with file and line.

    Checked files are added to `files`, by path.
    """
    files[source.path] = source
    try:
        # Unlike ast.parse, compile also finds a `return` outside of a function.
        compile(source.text, source.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        text = f"\n   {error.text.strip()}" if isinstance(error, SyntaxError) and error.text else ""
        yield f"{source.path} line {line}: not valid Python: {getattr(error, 'msg', error)}. Correct it there.{text}"
        return
    if source.changes_imports:  # its imports cannot be located without running it
        return
    for imported in _imported_sources(source):
        if imported.path not in files:
            yield from _syntax_errors(imported, files)


def _imported_sources(source: Source) -> Iterator[Source]:
    """Yield the users' files that a file imports at its top level, without installed packages."""
    for imported in _imports(source):
        file = locate(imported.name)
        if file is not None and not _is_installed(file):
            imported_source = _read(file)
            if imported_source is not None:
                yield imported_source


def _missing_modules(source: Source) -> Iterator[_Import]:
    return (module for module in _imports(source) if locate(module.name.partition(".")[0]) is None)


def _imports(source: Source) -> Iterator[_Import]:
    """Yield the imports at the top level of the file: not in functions, conditions or try blocks."""
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            yield from (_Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield _Import(node.module, node.lineno)


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to verl."""
    folders = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(verl.__file__).parent))
    path = Path(file).resolve()
    return any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _may_import_tools(source: Source) -> bool:
    """Return whether the file imports anything besides the standard library and the decorator."""
    for node in ast.walk(source.tree):
        modules: Sequence[str] = ()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
        for module in modules:
            if module not in _TOOL_MODULES and module.partition(".")[0] not in sys.stdlib_module_names:
                return True
    return False


def _uses_decorator(source: Source) -> bool:
    """Return whether the file uses the decorator, under its own name or an alias."""
    aliases = {_DECORATOR}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == _DECORATOR}
    return any(
        (isinstance(node, ast.Name) and node.id in aliases)
        or (isinstance(node, ast.Attribute) and node.attr == _DECORATOR)
        or (isinstance(node, ast.Constant) and node.value == _DECORATOR)
        for node in ast.walk(source.tree)
    )


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _SHOWN_NAMES} more"] if len(names) > _SHOWN_NAMES else []
    return ", ".join([*names[:_SHOWN_NAMES], *more]) or "nothing"
