"""Extensions: functions and classes that are chosen by name, with traits that the configuration reads.

An extension (estimator, policy loss, reward manager, tracker, agent loop, rollout engine) is one file. A decorator
declares its name and traits:

    @register_adv_est("grpo", uses_groups=True, reads=("norm_adv_by_std_in_grpo",))
    def compute_grpo_outcome_advantage(...): ...

The configuration is validated before torch is imported, so this module parses the files instead of importing them:
names and traits have to be literals. Modules of `external_libs` are read in the same way.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

_VERL = Path(__file__).parents[1]


@dataclass(frozen=True)
class Traits:
    """Properties of an extension that the configuration reads. Subclasses have a field per trait, with a default."""

    import_path: str
    """`module:attribute` of the function or class."""


T = TypeVar("T", bound=Traits)
_TABLES: list[ExtensionTable[Any]] = []


class ExtensionTable(dict[str, T], Generic[T]):
    """Traits of verl's built-in extensions by name.

    `get_traits` also looks up extensions declared in users' modules.
    """

    def __init__(self, package: str, decorator: str, traits: type[T]) -> None:
        """Read the extensions that `decorator` declares in the files of `package` (relative to verl)."""
        self._decorator, self._traits = decorator, traits
        self._user_traits: dict[str, T] = {}
        for file in sorted((_VERL / package.replace(".", "/")).rglob("*.py")):
            module = ".".join(file.relative_to(_VERL.parent).with_suffix("").parts)
            self.update(self._read_declarations(file, module))
        _TABLES.append(self)

    def get_traits(self, name: str, default: T) -> T:
        """Return the traits of an extension; `default` if it is not built in and no user module declares traits."""
        return self.get(name) or self._user_traits.get(name, default)

    def add_user_module(self, file: Path, module: str) -> None:
        """Read the traits that a user's module declares."""
        for name, traits in self._read_declarations(file, module).items():
            # Skip declarations with default traits only: `get_traits` returns the caller's default for them.
            if traits != self._traits(traits.import_path):
                self._user_traits[name] = traits

    def _read_declarations(self, file: Path, module: str) -> dict[str, T]:
        """Return the traits of the extensions that a file declares, by name."""
        source = file.read_text(encoding="utf-8")
        if f"{self._decorator}(" not in source:
            return {}
        known = [field.name for field in fields(self._traits) if field.name != "import_path"]
        extensions = {}
        for name, attribute, traits in _declarations(source, file, self._decorator):
            if unknown := sorted(traits.keys() - set(known)):
                raise ValueError(
                    f"{file}: @{self._decorator}({name!r}): {unknown[0]!r} is not a trait."
                    f" Known traits: {', '.join(known)}."
                )
            extensions[name] = self._traits(f"{module}:{attribute}", **traits)
        return extensions


def read_user_declarations(modules: Iterable[str]) -> None:
    """Read the traits that users' modules declare, without importing them. Modules that do not exist are skipped."""
    for module in modules:
        file = _source_file(module)
        if file is not None:
            for table in _TABLES:
                table.add_user_module(file, module)


def _source_file(module: str) -> Path | None:
    """Return the source file of a module, or None. The module and its parent packages are not imported."""
    package, *submodules = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    module_paths = [Path(folder).joinpath(*submodules) for folder in spec.submodule_search_locations or ()]
    candidates = [file for path in module_paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    if not submodules and spec.origin is not None:
        candidates = [Path(spec.origin)]
    return next((file for file in candidates if file.suffix == ".py" and file.is_file()), None)


def _declarations(source: str, file: Path, decorator: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (name, attribute, traits) of every decorated function and class at the top level of a file."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return  # reported with its line where the module is imported
    for node in statements:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        for call in node.decorator_list:
            if not isinstance(call, ast.Call) or not call.args:
                continue
            function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if function != decorator:
                continue
            try:
                name = ast.literal_eval(call.args[0])
                traits = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
            except ValueError as error:
                raise ValueError(
                    f"{file}: line {call.lineno}: name and traits of @{decorator} must be literals, because they are "
                    "read without importing the file."
                ) from error
            yield name, node.name, traits
