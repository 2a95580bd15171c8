"""The house keeps its shape: imports go downward only, faces hold no work, heavy packages are imported where used."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from pathlib import Path

from tests.support.syntax import parsed

ROOT = Path(__file__).parents[2]

# From the roof down; packages on one floor do not import each other.
FLOORS: list[list[str]] = [
    ["verl.cli", "verl.__main__"],
    ["verl.trainer", "verl.model_merger"],
    ["verl.agent"],
    ["verl.tools", "verl.interactions"],
    ["verl.workers.fsdp_workers", "verl.workers.megatron_workers", "verl.workers.roles"],
    ["verl.workers.sharding_manager", "verl.workers.reward_manager", "verl.planning"],
    ["verl.workers.engine", "verl.workers.rollout"],
    ["verl.inference"],
    ["verl.algos", "verl.models", "verl.single_controller", "verl.search"],
    ["verl.protocol", "verl.types"],
    [
        "verl.config",
        "verl.sandbox",
        "verl.utils.reward_score",
        "verl.utils",
        "verl.types.schema",
        "verl.version",
        "verl",
    ],
]
# The roles' faces stand on the roles' own floor and are made of them; utils may read the configuration, and the table
# of columns, which imports nothing. Of utils, only rewards may run code in the sandbox.
ALLOWED = {
    ("verl.workers.fsdp_workers", "verl.workers.roles"),
    ("verl.workers.megatron_workers", "verl.workers.roles"),
    ("verl.utils", "verl.config"),
    ("verl.utils", "verl.utils.reward_score"),
    ("verl.utils.reward_score", "verl.utils"),
    ("verl.utils.reward_score", "verl.config"),
    ("verl.utils.reward_score", "verl.sandbox"),
    ("verl.sandbox", "verl.utils"),
    ("verl.sandbox", "verl.config"),
    ("verl.utils", "verl.types.schema"),
    ("verl", "verl.version"),
    ("verl.__main__", "verl.cli"),
    ("verl.config", "verl.version"),
    ("verl.utils", "verl.version"),
}
# Files whose name users know but whose work lives elsewhere: imports, __all__ and bindings only; exempt from floors.
FACES = {
    "verl/trainer/ppo/core_algos.py",
    "verl/workers/fsdp_workers.py",
    "verl/workers/megatron_workers.py",
    "verl/utils/ulysses.py",
    "verl/utils/dataset/check.py",
    "verl/utils/reward_check.py",
    "verl/utils/sandbox.py",
    "verl/utils/seqlen_balancing.py",
    "verl/single_controller/ray/base.py",
}
FACE_FOLDERS = ("verl/experimental/", "search_r1/")
# Imported only inside functions of the module that needs them, but for a package that is about nothing else.
AT_HOME = {"megatron": "verl/workers/engine/megatron/"}
OPTIONAL = {
    "vllm",
    "sglang",
    "tensorrt_llm",
    "megatron",
    "wandb",
    "mlflow",
    "swanlab",
    "trackio",
    "peft",
    "math_verify",
    "mcp",
    "bm25s",
    "faiss",
    "sentence_transformers",
    "openai",
    "anthropic",
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.is_file())


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """All nodes that a test here looks at, wherever they are in the file: imports and calls."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_face(path: Path) -> bool:
    return relative(path) in FACES or relative(path).startswith(FACE_FOLDERS)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(nodes: Iterable[ast.AST]) -> list[tuple[str, int]]:
    """(module, line) of every import statement among `nodes`."""
    imports = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}: write it whole"
            imports += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return imports


@functools.cache
def room_of(module: str) -> tuple[int, str]:
    """Floor (0 is the roof) and package of a module."""
    rooms = [(len(room), floor, room) for floor, level in enumerate(FLOORS) for room in level]
    for _, floor, room in sorted(rooms, reverse=True):
        if module == room or module.startswith(room + "."):
            return floor, room
    raise AssertionError(f"{module} stands on no floor: add its package to FLOORS")


def test_imports_go_downward_only():
    wrong = []
    for path in python_files("verl"):
        # verl/__init__ names what it loads lazily; test_light_imports proves that it loads nothing early.
        if is_face(path) or relative(path) == "verl/__init__.py":
            continue
        floor, room = room_of(module_name(path))
        for target, line in imported_modules(nodes_of(path)):
            if not target.startswith("verl"):
                continue
            target_floor, target_room = room_of(target)
            sideways = target_floor == floor and target_room != room and (room, target_room) not in ALLOWED
            if target_floor < floor or sideways:
                wrong.append(f"{relative(path)}:{line} imports {target} ({target_room}) from {room}")
    assert not wrong, "\n".join(wrong)


def import_graph(modules: dict[str, Iterable[ast.AST]]) -> dict[str, set[str]]:
    """Module name → modules it imports, wherever the import stands: in functions and under TYPE_CHECKING too."""
    graph: dict[str, set[str]] = {}
    for name, nodes in modules.items():
        targets = [target for target, _ in imported_modules(nodes)]
        # `from a.b import c` is of a.b.c where that is a module, else of a.b.
        found = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[name] = (found & modules.keys()) - {name}
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or not; what is left when leaves and roots are taken off, again and
    again, is on a circle or between two of them."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        imported = {target for targets in left.values() for target in targets}
        off = {name for name, targets in left.items() if not targets or name not in imported}
        if not off:
            return [[name, *sorted(targets)] for name, targets in sorted(left.items())]
        left = {name: targets - off for name, targets in left.items() if name not in off}


def test_no_import_circles_not_even_for_types_or_inside_functions():
    modules = {module_name(path): nodes_of(path) for path in python_files("verl")}
    assert not circles(import_graph(modules))


def test_a_circle_through_a_function_and_a_type_is_found():
    sources = {
        "a": "from b import x",
        "b": "def f():\n    import c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import T",
        "d": "import a",
        "e": "",
    }
    modules = {name: list(ast.walk(ast.parse(source))) for name, source in sources.items()}
    assert [names[0] for names in circles(import_graph(modules))] == ["a", "b", "c"]


def test_the_collaborators_do_not_know_the_trainer():
    """The async trainer composes the same ones."""
    for name in ("worker_groups", "generator", "validator", "weight_sync", "state", "dynamic_sampling", "prompts"):
        source = (ROOT / f"verl/trainer/ppo/{name}.py").read_text()
        assert "RayPPOTrainer" not in source, name
        assert "ray_trainer" not in source, name


def test_every_module_stands_on_a_floor():
    for path in python_files("verl"):
        if not is_face(path):
            room_of(module_name(path))


def test_faces_hold_no_work():
    for path in python_files("verl", "search_r1"):
        if not is_face(path):
            continue
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            binding = isinstance(node, ast.Assign | ast.AnnAssign)
            empty_class = isinstance(node, ast.ClassDef) and all(
                isinstance(n, ast.Assign | ast.AnnAssign | ast.Pass | ast.Expr) for n in node.body
            )
            main_guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            allowed = isinstance(node, ast.Import | ast.ImportFrom) or docstring or binding or empty_class or main_guard
            assert allowed, f"{relative(path)}:{node.lineno}: a face holds imports, __all__ and bindings only"


def test_optional_packages_are_imported_only_where_used():
    for path in python_files("verl"):
        for target, line in imported_modules(parsed(path).body):
            package = target.split(".")[0]
            allowed = package not in OPTIONAL or relative(path).startswith(AT_HOME.get(package, "nowhere"))
            assert allowed, f"{relative(path)}:{line}: import {target} inside the function"


def test_every_file_says_what_it_is_for():
    for path in python_files("verl", "benchmarks", "examples", "recipe"):
        assert ast.get_docstring(parsed(path)), f"{relative(path)}: the first line says which one idea it is"


def test_config_values_are_read_from_dataclasses_not_looked_up_with_defaults():
    for path in python_files("verl"):
        if relative(path).startswith("verl/config/"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                owner = ast.unparse(node.func.value)
                assert not owner.split(".")[-1].endswith("config"), (
                    f"{relative(path)}:{node.lineno}: {ast.unparse(node)}: declare the key in verl.config"
                )
