"""Users' own code by path and name: found, checked against what will be called, and able to travel to other nodes.

A file is read once into a `UserCode` (its path and text). The text travels: a worker on a node that lacks the file
calls `UserCode.load()` and gets the whole module. Functions and classes of a loaded file may also be pickled directly;
cloudpickle (Ray's and the stand-alone one) then takes them by value, with whatever of the module they use. Where that
cannot be pickled (a client, a lock), `by_text` names them by the file's text instead.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

_PACKAGE_PREFIX = "pkg://"
_MODULE_PREFIX = "verl_user_"
# Without it a second thread would find the module of a first one that is still running it.
_LOADING = threading.RLock()
# By the module's name.
_LOADED: dict[str, UserCode] = {}


@dataclass(frozen=True)
class UserCode:
    """One Python file of a user, by content. `name` is the module's name: same path and text, same module."""

    path: str
    source: str
    name: str

    def load(self) -> ModuleType:
        """The module; its code runs on the first load in a process only."""
        with _LOADING:
            module = sys.modules.get(self.name)
            if module is None:
                module = self._execute()
        register_user_modules_by_value()
        return module

    def _execute(self) -> ModuleType:
        module = ModuleType(self.name)
        module.__file__ = self.path
        _LOADED[self.name] = self
        # Tracebacks and inspect.getsource show the text also where the file does not exist.
        linecache.cache[self.path] = (len(self.source), None, self.source.splitlines(keepends=True), self.path)
        # Before running: dataclasses and typing look their module up by name.
        sys.modules[self.name] = module
        try:
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[self.name]
            raise
        return module

    def object_at(self, name: str) -> Any:
        """What the module has under a name, which may have dots."""
        return attrgetter(name)(self.load())


def read_user_code(path: str | os.PathLike[str]) -> UserCode:
    """Read a Python file (`~` and environment variables expanded) into a `UserCode`."""
    file = Path(os.path.expandvars(os.fspath(path))).expanduser()
    if not file.is_file():
        near = sorted(found.name for found in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise FileNotFoundError(
            f"{path}: there is no such file (looked at {file.absolute()}). "
            + (f"Python files beside it: {', '.join(near)}." if near else "Check the path.")
        )
    absolute = str(file.resolve())
    source = file.read_text(encoding="utf-8")
    digest = hashlib.sha256(f"{absolute}\0{source}".encode()).hexdigest()[:12]
    stem = "".join(char if char.isalnum() else "_" for char in file.stem)
    return UserCode(path=absolute, source=source, name=f"{_MODULE_PREFIX}{stem}_{digest}")


@dataclass(frozen=True)
class UserModule:
    """A module of a user: `a.b.c` or `pkg://a.b.c` to import where it is used, or a `.py` file by content."""

    path: str
    code: UserCode | None = None

    @classmethod
    def read(cls, path: str) -> UserModule:
        """FileNotFoundError: there is no such file."""
        if not path:
            raise ValueError("module_path: it is empty. Give a .py file, pkg://a.b.c or an importable module a.b.c.")
        is_dotted = not path.endswith(".py") and all(part.isidentifier() for part in path.split("."))
        return cls(path, None if path.startswith(_PACKAGE_PREFIX) or is_dotted else read_user_code(path))

    def load(self) -> ModuleType:
        """RuntimeError: it does not import."""
        if self.code is not None:
            load: Callable[[], ModuleType] = self.code.load
            remedy = (
                "A file given by path travels alone: it may import installed modules, not its neighbours. "
                "Put both into a package and use pkg://."
            )
        else:
            load = partial(importlib.import_module, self.path.removeprefix(_PACKAGE_PREFIX))
            remedy = "Install it, or put its folder on PYTHONPATH, on every node."
        try:
            return load()
        except ModuleNotFoundError as error:
            raise RuntimeError(f"{self.path}: cannot import it: {error}. {remedy}") from error
        except SyntaxError as error:  # of this file, or of one that it imports
            raise RuntimeError(
                f"{error.filename or self.path}: line {error.lineno} is not valid Python: {error.msg}."
            ) from error
        except Exception as error:
            raise RuntimeError(f"{self.path}: it raised {type(error).__name__} when imported: {error}") from error

    def find(self, name: str) -> Any:
        """The object of that name. AttributeError: there is none."""
        module = self.load()
        if not hasattr(module, name):
            defined = ", ".join(_defined_in(module)) or "nothing"
            raise AttributeError(f"{self.path}: it does not define {name!r}. It defines: {defined}.")
        return getattr(module, name)


@dataclass(frozen=True)
class ImportPath:
    """Where an object of a user is, as one text: `pkg.module.Name` or `file.py:Name`."""

    module: UserModule
    name: str

    @classmethod
    def read(cls, text: str) -> ImportPath:
        """FileNotFoundError: there is no such file. ValueError: it names nothing."""
        module, _, name = text.rpartition(":" if ".py:" in text else ".")
        if not module or not name.isidentifier():
            raise ValueError(f"{text}: it names no object. Write pkg.module.Name or file.py:Name.")
        return cls(UserModule.read(module), name)

    def load(self) -> Any:
        """The object, also on a node that lacks the file; errors as of `load_extern_object`."""
        return self.module.find(self.name)

    def __str__(self) -> str:
        return f"{self.module.path}{'.' if self.module.code is None else ':'}{self.name}"


def load_extern_object(module_path: str | None, object_name: str) -> Any:
    """The object `object_name` of a `.py` file, of `pkg://a.b.c`, or of an importable module `a.b.c`; of None, None.

    FileNotFoundError: there is no such file. RuntimeError: it does not import. AttributeError: it has no such object.
    """
    if module_path is None:
        return None
    return UserModule.read(module_path).find(object_name)


def load_user_object(
    path: str | UserModule,
    name: str,
    *,
    key: str,
    required_params: Sequence[str] = (),
    optional_params: Sequence[str] = (),
) -> Callable[..., Any]:
    """A user's function or class, checked now instead of failing hours later.

    It must be callable, accept every name of `required_params` as a keyword, and need nothing that is in neither list
    (`optional_params` are given to those who accept them). Without `required_params` the signature is not looked at.
    Errors begin with `key`, the config key the path came from.
    """
    try:
        module = UserModule.read(path) if isinstance(path, str) else path
        found = module.find(name)
    except (ValueError, FileNotFoundError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{key}: {error}") from error
    expected = f"{name}({', '.join([*required_params, *(f'{param}=...' for param in optional_params)])})"
    if not callable(found):
        raise ValueError(
            f"{key}: {name!r} in {module.path} is a {type(found).__name__}, not something to call."
            f" Define it as {expected}."
        )
    problems = _signature_problems(found, required_params, optional_params) if required_params else []
    if problems:
        raise ValueError(
            f"{key}: {name}{inspect.signature(found)} in {module.path} {' and '.join(problems)}. Expected: {expected}."
        )
    return found


def register_user_modules_by_value() -> None:
    """Have every cloudpickle imported so far take the loaded user files by value; call it again after importing Ray,
    which has a copy of its own (importing it only to load a file would cost seconds).
    """
    import cloudpickle

    picklers = [pickler for pickler in (cloudpickle, sys.modules.get("ray.cloudpickle")) if pickler is not None]
    # Never a walk over sys.modules: other threads import while this one looks.
    with _LOADING:
        modules = [sys.modules[name] for name in _LOADED if name in sys.modules]
    for module in modules:
        for pickler in picklers:
            pickler.register_pickle_by_value(module)


def by_text(found: Any) -> tuple[Callable[..., Any], tuple[UserCode, str]] | None:
    """How another process gets a function or class of a user's file: as pickle's `__reduce__` says it.

    None: it is something else, or not what the file has under its name.
    """
    if not isinstance(found, FunctionType | type):
        return None
    code = _LOADED.get(found.__module__)
    try:
        if code is None or code.object_at(found.__qualname__) is not found:
            return None
    except AttributeError:  # it is inside a function, or the file has taken the name back
        return None
    return UserCode.object_at, (code, found.__qualname__)


def _defined_in(module: ModuleType) -> list[str]:
    """Public names the module defines itself, for error messages."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, ModuleType)
    ]


def _signature_problems(found: Callable[..., Any], required: Sequence[str], optional: Sequence[str]) -> list[str]:
    params = inspect.signature(found).parameters.values()
    by_keyword = [param for param in params if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)]
    takes_any = any(param.kind is param.VAR_KEYWORD for param in params)
    accepted = {param.name for param in by_keyword}
    missing = [] if takes_any else [name for name in required if name not in accepted]
    given = {*required, *optional}
    unfilled = [
        param.name
        for param in params
        if param.default is param.empty
        and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
        and (param.name not in given or param.kind is param.POSITIONAL_ONLY)
    ]
    problems = []
    if missing:
        problems.append(f"does not accept {', '.join(missing)}")
    if unfilled:
        problems.append(f"requires {', '.join(unfilled)}, which will not be passed by keyword")
    return problems
