"""Decide from the source of a test alone where it is executed: in a checker process, or in the solution's interpreter.

A checker can execute a test that calls functions and methods of a solution and compares plain data. A test that needs
the solution's own operators (`Point(1, 2) == Point(1, 2)`), or its frames, globals or imports, has to share an
interpreter with it, where the solution can make any comparison succeed: such a test is forgeable. The solution has no
influence on the decision.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import operator
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from verl.utils.reward_score.code_tests.driver import PRELUDE
from verl.utils.reward_score.code_tests.proxies import ARRAY_METHODS

# Names that access the interpreter, run text as code, or need objects that cannot be sent to another process.
_INTERPRETER_NAMES = (
    "globals locals vars eval exec compile __import__ inspect gc ctypes dis importlib builtins __builtins__ "
    "pickle marshal shelve dill yaml mock patch monkeypatch threading multiprocessing concurrent asyncio "
    "signal tracemalloc weakref sysconfig timeit runpy"
)
_NEEDS_INTERPRETER = frozenset(_INTERPRETER_NAMES.split())
_ATTRIBUTE_NAMES = (
    "_getframe modules settrace setprofile getrefcount setrecursionlimit stdin seed setstate environ chdir "
    "__globals__ __code__ __closure__ __mro__ __bases__ __subclasses__ __defaults__ __kwdefaults__ __func__"
)
_INTERPRETER_ATTRIBUTES = frozenset(_ATTRIBUTE_NAMES.split())
_STANDARD = frozenset(sys.stdlib_module_names) | {"numpy", "pytest"}
_ALIASES = {"np": "numpy"}
# Names that tests use without importing them, as `module:name`.
_KNOWN_TYPES = {
    name: f"{module}:{name}"
    for module, names in {
        "decimal": ["Decimal"],
        "fractions": ["Fraction"],
        "datetime": ["date", "datetime", "timedelta"],
        "types": ["GeneratorType", "FunctionType"],
        "io": ["StringIO"],
        "math": ["isclose", "fabs"],
        "pytest": ["approx"],
        "numpy": ["allclose", "array_equal"],
        "numpy.testing": ["assert_allclose", "assert_array_equal", "assert_almost_equal"],
    }.items()
    for name in names
}
# Functions that apply operators of their arguments: comparisons, hashes, arithmetic, copies.
_OPERATOR_FUNCTION_NAMES = "sorted min max sum set frozenset hash dict Counter copy deepcopy abs round divmod pow"
_OPERATOR_FUNCTIONS = frozenset(_OPERATOR_FUNCTION_NAMES.split())
_CLASS_NAME = re.compile(r"_?[A-Z]\w*")
# Attributes of plain data.
_PLAIN_ATTRIBUTES = frozenset(
    name for kind in (str, bytes, int, float, complex, list, tuple, dict, set, frozenset) for name in dir(kind)
) | {"shape", "dtype", "popleft", "appendleft", "most_common", "__name__", "__doc__", *ARRAY_METHODS}
# Comparisons that are true for an empty array.
_BROADCASTING = frozenset(
    ["approx", "allclose", "isclose", "all", "assert_allclose", "assert_array_equal", "assert_almost_equal"]
)
# Exceptions that end the interpreter or the test instead of failing it.
_CONTROL_FLOW = frozenset(["SystemExit", "KeyboardInterrupt", "GeneratorExit", "SkipTest"])
_BUILTINS = frozenset(dir(builtins))


def _prelude_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that every test has, and those of them that are type hints only."""
    names: set[str] = set()
    hints: set[str] = set()
    for node in ast.parse(PRELUDE).body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            hints |= set(importlib.import_module(str(node.module)).__all__)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return frozenset(names | hints), frozenset(hints - names)


_PRELUDE, _TYPING = _prelude_names()


@dataclass
class ExecutionPlan:
    """How a checker executes a test. Its fields are sent to the driver."""

    reason: str | None = None
    """Why a checker cannot execute the test; None: it can."""
    names: list[str] = field(default_factory=list)
    """Names that the solution has to provide."""
    returns_instances: list[str] = field(default_factory=list)
    """The `names` of classes, and of functions whose results the test uses as objects of a class."""
    modules: dict[str, str] = field(default_factory=dict)
    """Modules, and types as `module:name`, that the test uses without importing them."""
    definitions: str = ""
    """Imports, functions and classes of the set-up code, which the solution may use."""
    refuse_empty: bool = False
    """Whether an empty array would equal every expected value."""
    prompt: str = ""
    """Imports, functions and classes of the task's prompt; a solution cannot replace the functions."""


def plan_execution(source: str, setup: str = "", entry_point: str | None = None, prompt: str = "") -> ExecutionPlan:
    """Return the plan for a test. `source` includes `setup`; `entry_point`, `prompt`: of a HumanEval task."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ExecutionPlan()  # it fails in the checker as well
    helpers = _definitions(prompt, without=entry_point)
    broadcasts = _broadcasts(tree)
    usage = _NameUsage(tree, entry_point, {node.name for node in helpers if isinstance(node, ast.FunctionDef)})
    return ExecutionPlan(
        reason=_interpreter_use(tree) or usage.problem() or (_empty_array(tree) if broadcasts else None),
        names=sorted(usage.provided),
        returns_instances=sorted(usage.classes | usage.returns_instances),
        modules=usage.modules,
        definitions=_text(_definitions(setup)),
        refuse_empty=broadcasts,
        prompt=_text(helpers),
    )


def _broadcasts(tree: ast.AST) -> bool:
    """Return whether the test compares arrays such that an empty array equals every value.

    `isclose` counts only beside numpy or pytest (math has one, too); the builtin `all` alone does not count.
    """
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in calls}
    numeric = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {"np", "numpy", "pytest"}
    builtin = any(isinstance(node, ast.Name) and node.id == "all" for node in calls)
    methods = {node.attr for node in calls if isinstance(node, ast.Attribute)}
    return (
        bool(names & (_BROADCASTING - {"all", "isclose"}))
        or "all" in methods
        or bool(numeric and (names & _BROADCASTING) and not (names & _BROADCASTING == {"all"} and builtin))
    )


def _empty_array(tree: ast.AST) -> str | None:
    """Return why a checker cannot execute a test that broadcasts, if it contains an empty list or tuple."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple) and not node.elts and isinstance(node.ctx, ast.Load):
            return "it compares empty arrays, which equal every number"
    return None


def _definitions(source: str, without: str | None = None) -> list[ast.stmt]:
    """Return imports, functions and classes at the top level of a source; no constants: they may be expected values.

    `without`: name of a definition that is left out.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    return [node for node in body if isinstance(node, kinds) and getattr(node, "name", None) != without]


def _text(statements: Sequence[ast.stmt]) -> str:
    """Return the source of statements."""
    return "\n".join(map(ast.unparse, statements))


def _interpreter_use(tree: ast.AST) -> str | None:
    """Return why the test has to share an interpreter with the solution, or None."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Name):
            names = [node.id]
            if isinstance(node.ctx, ast.Store) and node.id in _BUILTINS:
                return f"it replaces {node.id}"
        elif isinstance(node, ast.Attribute):
            if node.attr in _INTERPRETER_ATTRIBUTES:
                return f"it uses {node.attr}"
            names = [node.attr] if node.attr in _CONTROL_FLOW else []
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [part for alias in node.names for part in alias.name.split(".")]
            if isinstance(node, ast.ImportFrom):
                names += str(node.module).split(".")
            top = str(node.module or ".") if isinstance(node, ast.ImportFrom) else node.names[0].name
            if top.split(".")[0] not in _STANDARD:
                return f"it imports {top}"
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Global):
            return "it is asynchronous, or assigns globals"
        elif isinstance(node, ast.ClassDef) and not any(_is_test_case(base) for base in node.bases):
            return f"it defines the class {node.name}"
        for name in names:
            if name in _NEEDS_INTERPRETER or name in _CONTROL_FLOW:
                return f"it uses {name}"
    return None


def _is_test_case(base: ast.expr) -> bool:
    return ast.unparse(base).endswith("TestCase")


class _NameUsage:
    """Which names of a test belong to the solution, and which values of the test are objects of its classes."""

    def __init__(self, tree: ast.Module, entry_point: str | None, helpers: set[str]) -> None:
        self._tree = tree
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        defined = helpers | set(_bound_names(tree))
        loaded = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        free = [node for node in loaded if node.id not in defined]
        self.modules = self._used_modules(free)
        used = {node.id for node in free} - set(self.modules)
        called = {node.id for node in free if getattr(self._parents[node], "func", None) is node}
        reserved = _PRELUDE - (called & _TYPING)  # a class may be named as a type hint: `Container()`
        self.provided = {name for name in used if name not in _BUILTINS and name not in reserved}
        if entry_point is not None:
            self.provided.add(entry_point)
        elif not self.provided:  # a solution may be named as a builtin function: `assert sum(10, 15) == 6`
            self.provided = self._innermost_calls(used)
        self._free = [node for node in free if node.id in self.provided]
        self.classes = {name for name in self.provided if self._is_class(name)}
        self._aliases = self._aliases_of(entry_point)
        if entry_point in self.classes:
            self.classes |= self._aliases
        self._instances: set[str] = set()
        self._find_instances()
        # By variable: the function whose result it holds.
        self._results: dict[str, str] = {
            target.id: value.func.id
            for target, value in _assignments(tree)
            if isinstance(target, ast.Name) and isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
        }
        self.returns_instances = self._functions_returning_instances()

    def problem(self) -> str | None:
        """Return why the values of this test cannot be compared as plain data, or None."""
        for node in ast.walk(self._tree):
            operands = _operands(node)
            if any(map(self._is_instance, operands)):
                return f"it applies an operator to an object of a class: {ast.unparse(node)[:80]}"
            if isinstance(node, ast.Compare) and sum(map(self._is_from_instance, operands)) > 1:
                return f"it compares two values of a class: {ast.unparse(node)[:80]}"
            if self._combines_solution_results(node):
                return f"it applies an operator to two results: {ast.unparse(node)[:80]}"
            if self._compared_by_solution(node):
                return f"a function of the solution takes another's result: {ast.unparse(node)[:80]}"
            if self._ambiguous_method(node):
                return f"it uses a method that values and objects have: {ast.unparse(node)[:80]}"
            if isinstance(node, ast.withitem) and self._solution_name(node.context_expr):
                return f"the solution handles exceptions: {ast.unparse(node)[:80]}"
        for node in self._free:
            parent = self._parents[node]
            used = isinstance(
                parent, ast.Call | ast.Attribute | ast.ExceptHandler | ast.keyword | ast.Tuple | ast.withitem
            )
            if not used and not isinstance(parent, ast.Assign | ast.FunctionDef):
                return f"it takes the value of {node.id} from the solution"
        return None

    def _solution_name(self, node: ast.AST) -> str | None:
        """Return the function or class of the solution whose result the expression is, or None."""
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
        else:
            name = self._results.get(node.id) if isinstance(node, ast.Name) else None
        return name if name in self.provided or name in self._aliases else None

    def _combines_solution_results(self, node: ast.AST) -> bool:
        """Return whether an operator is applied to two results of the solution, which may be objects that define it."""
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                return False
            results = [any(map(self._solution_name, _parts(side))) for side in sides]
            return any(map(operator.and_, results, results[1:]))
        return sum(self._solution_name(operand) is not None for operand in _operands(node)) > 1

    def _compared_by_solution(self, node: ast.AST) -> bool:
        """Return whether a function of the solution can decide the comparison of another function's result:
        `is_equal(f(2), 4)`, but not `decode(encode(x)) == x`."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id in self.classes:
            return False
        provider = self._solution_name(node)
        if provider is None:
            return False
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        inner = [part for argument in arguments for part in ast.walk(argument)]
        others = [part for part in inner if self._solution_name(part) not in (None, provider, *self.classes)]
        if not others:
            return False
        parent = self._parents[node]
        compared = isinstance(parent, ast.Compare) and not any(
            isinstance(side, ast.Constant) and isinstance(side.value, bool)
            for side in (parent.left, *parent.comparators)
        )
        return not (compared and all(part in arguments for part in others))

    def _ambiguous_method(self, node: ast.AST) -> bool:
        """Return whether a method of plain data is called on a value that may be an object.

        Such values are results on which the test also uses methods that plain data does not have, and attributes and
        results of methods of objects.
        """
        if not isinstance(node, ast.Attribute) or node.attr not in _PLAIN_ATTRIBUTES or node.attr.startswith("__"):
            return False
        owner = self._solution_name(node.value)
        if owner is not None:
            call = self._parents[node]
            statement = isinstance(call, ast.Call) and isinstance(self._parents[call], ast.Expr)
            return owner in self.returns_instances and owner not in self.classes and not statement
        value = node.value
        derived = isinstance(value, ast.Attribute | ast.Call) and not self._is_instance(value)
        return derived and self._is_from_instance(value)

    def _used_modules(self, free: list[ast.Name]) -> dict[str, str]:
        """Return the modules and known types that the test uses without importing them: see `ExecutionPlan.modules`."""
        modules = {}
        others = {node.id for node in free if node.id not in _BUILTINS and node.id not in _PRELUDE}
        for node in free:
            parent = self._parents.get(node)
            name, used = node.id, parent.attr if isinstance(parent, ast.Attribute) else None
            if name in _KNOWN_TYPES and used not in _KNOWN_TYPES and len(others) > 1:
                modules[name] = _KNOWN_TYPES[name]
            elif used is not None and name not in _PRELUDE and (name in _STANDARD or name in _ALIASES):
                modules[name] = _ALIASES.get(name, name)
        return modules

    def _innermost_calls(self, names: set[str]) -> set[str]:
        """Return the first of `names` that is called without another one in its arguments, as a set."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        called = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]
        inner = [call for call in called if not any(other in ast.walk(call) for other in called if other is not call)]
        return {call.func.id for call in inner[:1] if isinstance(call.func, ast.Name)}

    def _is_class(self, name: str) -> bool:
        """Return whether the test uses a name of the solution like a class, or it is written in CamelCase."""
        for node in self._free:
            parent = self._parents[node]
            if node.id == name and (
                isinstance(parent, ast.ExceptHandler)
                or (isinstance(parent, ast.Call) and parent.func is node and _CLASS_NAME.fullmatch(name))
                or (isinstance(parent, ast.Attribute) and _CLASS_NAME.fullmatch(name))
                or (isinstance(parent, ast.Call) and ast.unparse(parent.func) in ("isinstance", "issubclass"))
            ):
                return True
        return bool(_CLASS_NAME.fullmatch(name)) and name.lower() != name and any(char.islower() for char in name)

    def _aliases_of(self, entry_point: str | None) -> set[str]:
        """Return the parameters of the test's functions that the entry point is passed as."""
        functions = {node.name: node for node in self._tree.body if isinstance(node, ast.FunctionDef)}
        parameters = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                for argument, parameter in zip(node.args, functions[node.func.id].args.args, strict=False):
                    if isinstance(argument, ast.Name) and argument.id == entry_point:
                        parameters.add(parameter.arg)
        return parameters

    def _find_instances(self) -> None:
        """Find the variables that hold objects of the solution's classes, or containers of them."""
        while True:
            before = set(self._instances)
            for target, value in _assignments(self._tree):
                if any(map(self._is_instance, _parts(value))):
                    self._instances |= {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
            if self._instances == before:
                return

    def _is_instance(self, node: ast.expr) -> bool:
        """Return whether an expression is a class of the solution, an object of it, or an attribute of the class."""
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else None
            return name in self.classes and name not in _OPERATOR_FUNCTIONS
        if isinstance(node, ast.Attribute):
            return isinstance(node.value, ast.Name) and node.value.id in self.classes
        return isinstance(node, ast.Name) and (node.id in self._instances or node.id in self.classes)

    def _is_from_instance(self, node: ast.expr) -> bool:
        """Return whether an expression consists of attributes, calls and items of an object."""
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
            if self._is_instance(node):
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return self._is_instance(node)

    def _functions_returning_instances(self) -> set[str]:
        """Return the functions (also classes with lower-case names) on whose results the test uses methods that plain
        data does not have."""
        functions = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and node.attr not in _PLAIN_ATTRIBUTES:
                if isinstance(node.value, ast.Name):
                    functions.add(self._results.get(node.value.id, node.value.id))
                elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
                    functions.add(node.value.func.id)
        return functions & self.provided


def _bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a source binds itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name).split(".")[0]


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield (target, value); for loops and comprehensions, the value is the iterable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                # `a, b = value` takes the items of a value, which are not objects of its class.
                if isinstance(target, ast.Name | ast.Attribute) or isinstance(node.value, ast.Tuple | ast.List):
                    yield target, node.value
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def _parts(value: ast.expr) -> Iterator[ast.expr]:
    """Yield a value and, recursively, the values that it contains (list, tuple, set, dict, comprehension, `a if b else
    c`)."""
    yield value
    if isinstance(value, ast.List | ast.Tuple | ast.Set):
        for item in value.elts:
            yield from _parts(item)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from _parts(item)
    elif isinstance(value, ast.ListComp | ast.SetComp | ast.GeneratorExp):
        yield from _parts(value.elt)
    elif isinstance(value, ast.IfExp):
        yield from (value.body, value.orelse)


def _operands(node: ast.AST) -> list[ast.expr]:
    """Return the values that an operator, or one of `_OPERATOR_FUNCTIONS`, is applied to."""
    if isinstance(node, ast.Compare):
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return []
        return [part for operand in (node.left, *node.comparators) for part in _parts(operand)]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.AugAssign):
        return [ast.Name(node.target.id) if isinstance(node.target, ast.Name) else node.target, node.value]
    if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
        return [node.operand]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        if name in _OPERATOR_FUNCTIONS and (isinstance(node.func, ast.Name) or name in ("copy", "deepcopy")):
            return [part for argument in node.args for part in _parts(argument)]
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Set):
        return node.elts
    return []
