"""Users' code by path and name: loaded, checked for the expected signature, and sent to other nodes.

A file is read once into a `UserCode` (its path and text). The text is what is sent: a worker on a node without the file
calls `UserCode.load()` and gets the module. Functions and classes of a loaded file may also be pickled directly;
cloudpickle (Ray's and the stand-alone one) then takes them by value, with everything of the module that they use. If
that cannot be pickled (a client, a lock), `reduce_by_source` pickles the file's text and the name instead.

`read_class_list` reads YAML files with lists of users' classes (tools, simulated users).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import linecache
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:  # importing verl.config takes longer than all else that a scorer process imports
    from verl.config.problems import Report

_PACKAGE_PREFIX = "pkg://"
_MODULE_PREFIX = "verl_user_"
# Without this lock, a second thread would find a module that the first one is still executing.
_LOADING = threading.RLock()
# Loaded user files by module name.
_LOADED: dict[str, UserCode] = {}
_CLASS_REMEDY = "Write pkg.module.Class, or file.py:Class"


@dataclass(frozen=True)
class UserCode:
    """A user's Python file by content. `name` is the module's name: same path and text, same module."""

    path: str
    source: str
    name: str

    def load(self) -> ModuleType:
        """Return the module; its code runs once per process."""
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
        # Before executing: dataclasses and typing look up their module by name.
        sys.modules[self.name] = module
        try:
            exec(compile(self.source, self.path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[self.name]
            raise
        return module

    def object_at(self, name: str) -> Any:
        """Return an object of the module; the name may have dots."""
        return attrgetter(name)(self.load())


def read_user_code(path: str | os.PathLike[str]) -> UserCode:
    """Read a Python file (`~` and environment variables expanded) into a `UserCode`."""
    file = Path(os.path.expandvars(os.fspath(path))).expanduser()
    if not file.is_file():
        near = sorted(other.name for other in file.parent.glob("*.py")) if file.parent.is_dir() else []
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
    """A user's module: `a.b.c` or `pkg://a.b.c`, imported where it is used, or a `.py` file by content."""

    path: str
    code: UserCode | None = None

    @classmethod
    def read(cls, path: str) -> UserModule:
        """Read the file, if `path` is one. FileNotFoundError: it does not exist."""
        if not path:
            raise ValueError("module_path: it is empty. Give a .py file, pkg://a.b.c or an importable module a.b.c.")
        is_dotted = not path.endswith(".py") and all(part.isidentifier() for part in path.split("."))
        return cls(path, None if path.startswith(_PACKAGE_PREFIX) or is_dotted else read_user_code(path))

    def load(self) -> ModuleType:
        """Return the module. RuntimeError: importing it fails."""
        if self.code is not None:
            load: Callable[[], ModuleType] = self.code.load
            remedy = (
                "A file given by path is sent to workers alone: it may import installed modules, not files beside it. "
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

    def get(self, name: str) -> Any:
        """Return the object of that name. AttributeError: there is none."""
        module = self.load()
        if not hasattr(module, name):
            defined = ", ".join(_defined_in(module)) or "nothing"
            raise AttributeError(f"{self.path}: it does not define {name!r}. It defines: {defined}.")
        return getattr(module, name)


@dataclass(frozen=True)
class ImportPath:
    """The location of a user's object as one text: `pkg.module.Name` or `file.py:Name`."""

    module: UserModule
    name: str

    @classmethod
    def read(cls, text: str) -> ImportPath:
        """Parse the text. FileNotFoundError: the file does not exist. ValueError: it names no object."""
        module, _, name = text.rpartition(":" if ".py:" in text else ".")
        if not module or not name.isidentifier():
            raise ValueError(f"{text}: it names no object. Write pkg.module.Name or file.py:Name.")
        return cls(UserModule.read(module), name)

    def load(self) -> Any:
        """Return the object, also on a node without the file; errors as of `load_extern_object`."""
        return self.module.get(self.name)

    def __str__(self) -> str:
        return f"{self.module.path}{'.' if self.module.code is None else ':'}{self.name}"


def load_extern_object(module_path: str | None, object_name: str) -> Any:
    """Return the object of a `.py` file, of `pkg://a.b.c`, or of an importable module `a.b.c`; None for None.

    FileNotFoundError: the file does not exist. RuntimeError: importing fails. AttributeError: there is no such object.
    """
    if module_path is None:
        return None
    return UserModule.read(module_path).get(object_name)


def load_user_object(
    path: str | UserModule,
    name: str,
    *,
    key: str,
    required_params: Sequence[str] = (),
    optional_params: Sequence[str] = (),
) -> Callable[..., Any]:
    """Return a user's function or class after a check of its signature.

    It must be callable, accept every name of `required_params` as a keyword, and require no parameter that is in
    neither list (`optional_params` are passed if it accepts them). Without `required_params` the signature is not
    checked. ValueErrors begin with `key`, the config key of the path.
    """
    try:
        module = UserModule.read(path) if isinstance(path, str) else path
        loaded = module.get(name)
    except (ValueError, FileNotFoundError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{key}: {error}") from error
    expected = f"{name}({', '.join([*required_params, *(f'{param}=...' for param in optional_params)])})"
    if not callable(loaded):
        raise ValueError(
            f"{key}: {name!r} in {module.path} is a {type(loaded).__name__}, which is not callable."
            f" Define it as {expected}."
        )
    problems = _signature_problems(loaded, required_params, optional_params) if required_params else []
    if problems:
        raise ValueError(
            f"{key}: {name}{inspect.signature(loaded)} in {module.path} {' and '.join(problems)}. Expected: {expected}."
        )
    return loaded


def register_user_modules_by_value() -> None:
    """Let every cloudpickle imported so far pickle the loaded user files by value.

    Call it again after importing Ray, which has its own cloudpickle (importing it here would cost seconds).
    """
    import cloudpickle

    picklers = [pickler for pickler in (cloudpickle, sys.modules.get("ray.cloudpickle")) if pickler is not None]
    # No iteration over sys.modules: other threads may import meanwhile.
    with _LOADING:
        modules = [sys.modules[name] for name in _LOADED if name in sys.modules]
    for module in modules:
        for pickler in picklers:
            pickler.register_pickle_by_value(module)


def reduce_by_source(value: Any) -> tuple[Callable[..., Any], tuple[UserCode, str]] | None:
    """Return the `__reduce__` value of a function or class of a user's file: the file's text and the name.

    None for other values, and for objects that the file does not have under their own name.
    """
    if not isinstance(value, FunctionType | type):
        return None
    code = _LOADED.get(value.__module__)
    try:
        if code is None or code.object_at(value.__qualname__) is not value:
            return None
    except AttributeError:  # it is inside a function, or the file has deleted the name
        return None
    return UserCode.object_at, (code, value.__qualname__)


@dataclass(frozen=True)
class ClassEntry:
    """One entry of a list of users' classes."""

    location: str
    """File and entry, for messages."""
    path: ImportPath
    config: dict[str, Any]
    options: dict[str, Any]
    """Values of its other keys."""

    def load(self, base: type, report: Report) -> type[Any] | None:
        """Return the class; None, with a problem in the report, if it is no subclass of `base`."""
        try:
            loaded = self.path.load()
        except (FileNotFoundError, AttributeError, RuntimeError, ValueError) as error:
            report.problem(f"{self.location}.class_name", str(self.path), error_text(error), _CLASS_REMEDY)
            return None
        if not isinstance(loaded, type) or not issubclass(loaded, base):
            why = f"it is no {base.__name__}"
            report.problem(f"{self.location}.class_name", str(self.path), why, f"Name a subclass of {base.__name__}")
            return None
        return loaded


def read_class_list(key: str, path: str, top: str, known: Sequence[str], report: Report) -> list[ClassEntry]:
    """Return the entries `{class_name, config, …}` below `top` of a YAML file; `known` are the other allowed keys."""
    entries = []
    for number, entry in enumerate(_read_entries(key, path, top, report)):
        location = f"{path}: {top}[{number}]"
        options = {name: value for name, value in entry.items() if name not in ("class_name", "config")}
        for name in set(options) - set(known):
            allowed = ", ".join(("class_name", "config", *known))
            report.problem(f"{location}.{name}", options[name], "unknown key", f"Known: {allowed}")
        settings = entry.get("config") or {}
        if not isinstance(settings, Mapping):
            report.problem(f"{location}.config", settings, "it is no mapping", "Write config: {…}")
            settings = {}
        class_name = entry.get("class_name")
        if not isinstance(class_name, str):
            report.problem(f"{location}.class_name", class_name, "it is missing", _CLASS_REMEDY)
            continue
        try:
            entries.append(ClassEntry(location, ImportPath.read(class_name), dict(settings), options))
        except (ValueError, FileNotFoundError) as error:
            report.problem(f"{location}.class_name", class_name, error_text(error), _CLASS_REMEDY)
    return entries


def error_text(error: Exception) -> str:
    """Return the message of an error without its final full stop, as part of a sentence."""
    return str(error).rstrip(". ") or type(error).__name__


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error; only the type if the error cannot be converted to text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the classes of errors are user code, too
        return type(error).__name__


def yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Return line, column and cause of an error in a YAML file, in one line."""
    mark = error.problem_mark or error.context_mark
    position = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1} "
    return f"{position}is not valid YAML: {', '.join(filter(None, (error.context, error.problem)))}"


def _read_entries(key: str, path: str, top: str, report: Report) -> list[Mapping[str, Any]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except yaml.MarkedYAMLError as error:
        report.problem(key, path, yaml_problem(error), "Correct the file at that line or the one above")
        return []
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        report.problem(key, path, f"cannot be read: {error_text(error)}", "Correct the file")
        return []
    entries = content.get(top) if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        remedy = f"Begin it with '{top}:' and list '- class_name: …' below"
        report.problem(key, path, f"it has no list {top!r} of mappings", remedy)
        return []
    return entries


def _defined_in(module: ModuleType) -> list[str]:
    """Public names that the module itself defines, for error messages."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, ModuleType)
    ]


def _signature_problems(function: Callable[..., Any], required: Sequence[str], optional: Sequence[str]) -> list[str]:
    params = inspect.signature(function).parameters.values()
    by_keyword = [param for param in params if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)]
    takes_any = any(param.kind is param.VAR_KEYWORD for param in params)
    accepted = {param.name for param in by_keyword}
    missing = [] if takes_any else [name for name in required if name not in accepted]
    passed = {*required, *optional}
    unfilled = [
        param.name
        for param in params
        if param.default is param.empty
        and param.kind not in (param.VAR_POSITIONAL, param.VAR_KEYWORD)
        and (param.name not in passed or param.kind is param.POSITIONAL_ONLY)
    ]
    problems = []
    if missing:
        problems.append(f"does not accept {', '.join(missing)}")
    if unfilled:
        problems.append(f"requires {', '.join(unfilled)}, which will not be passed by keyword")
    return problems
