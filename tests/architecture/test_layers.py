"""Layers: imports go downward only, alias modules contain no code, optional packages are imported where used, and
required packages are declared."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.syntax import parsed

ROOT = Path(__file__).parents[2]

# From the top layer down. Packages of one layer do not import each other.
LAYERS: list[list[str]] = [
    ["verl.cli", "verl.__main__"],
    ["verl.trainer", "verl.viewer", "verl.model_merger"],
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
        "verl.recording",
        "verl.sandbox",
        "verl.utils.reward_score",
        "verl.utils",
        "verl.types.schema",
        "verl.version",
        "verl",
    ],
]
# Exceptions inside a layer: aliases of the roles import the roles; utils read the configuration and the table of
# columns, which imports nothing; of utils, only rewards run code in the sandbox.
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
    ("verl.recording", "verl.config"),
    ("verl.recording", "verl.utils"),
    ("verl.recording", "verl.version"),
    ("verl", "verl.version"),
    ("verl.__main__", "verl.cli"),
    ("verl.config", "verl.version"),
    ("verl.utils", "verl.version"),
}
# Public module names whose code is elsewhere: imports, __all__ and assignments only; exempt from layers.
ALIASES = {
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
ALIAS_FOLDERS = ("verl/experimental/", "search_r1/")
# Imported only inside functions, except in the files that require them.
REQUIRED_BY: dict[str, tuple[str, ...]] = {
    "megatron": ("verl/workers/engine/megatron/",),
    "triton": (
        "verl/inference/kernels/",
        "verl/models/fused_head_kernel.py",
        "verl/utils/weight_fingerprint_kernel.py",
        "verl/workers/engine/fsdp/gradient_kernel.py",
    ),
}
OPTIONAL = {
    "vllm",
    "sglang",
    "tensorrt_llm",
    "megatron",
    "triton",
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
    """All imports and calls of a file, including those inside functions."""
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_alias(path: Path) -> bool:
    return relative(path) in ALIASES or relative(path).startswith(ALIAS_FOLDERS)


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
            assert node.level == 0, f"relative import in line {node.lineno}: use an absolute import"
            imports += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return imports


@functools.cache
def layer_of(module: str) -> tuple[int, str]:
    """Layer (0 is the top) and package of a module."""
    packages = [(len(package), layer, package) for layer, names in enumerate(LAYERS) for package in names]
    for _, layer, package in sorted(packages, reverse=True):
        if module == package or module.startswith(package + "."):
            return layer, package
    raise AssertionError(f"{module} is in no layer: add its package to LAYERS")


def test_imports_go_downward_only():
    wrong = []
    for path in python_files("verl"):
        # verl/__init__ names what it loads lazily; test_light_imports proves that it loads nothing early.
        if is_alias(path) or relative(path) == "verl/__init__.py":
            continue
        layer, package = layer_of(module_name(path))
        for target, line in imported_modules(nodes_of(path)):
            if not target.startswith("verl"):
                continue
            target_layer, target_package = layer_of(target)
            is_sibling = target_layer == layer and target_package != package
            if target_layer < layer or (is_sibling and (package, target_package) not in ALLOWED):
                wrong.append(f"{relative(path)}:{line} imports {target} ({target_package}) from {package}")
    assert not wrong, "\n".join(wrong)


def import_graph(modules: dict[str, Iterable[ast.AST]]) -> dict[str, set[str]]:
    """Module name → modules it imports, including imports in functions and under TYPE_CHECKING."""
    graph: dict[str, set[str]] = {}
    for name, nodes in modules.items():
        targets = [target for target, _ in imported_modules(nodes)]
        # `from a.b import c` imports a.b.c if that is a module, otherwise a.b.
        imported = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[name] = (imported & modules.keys()) - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, directly or indirectly: those that remain when modules without imports and
    modules that are not imported are removed repeatedly."""
    remaining = {name: set(targets) for name, targets in graph.items()}
    while True:
        imported = {target for targets in remaining.values() for target in targets}
        removed = {name for name, targets in remaining.items() if not targets or name not in imported}
        if not removed:
            return [[name, *sorted(targets)] for name, targets in sorted(remaining.items())]
        remaining = {name: targets - removed for name, targets in remaining.items() if name not in removed}


def test_there_are_no_import_cycles():
    modules = {module_name(path): nodes_of(path) for path in python_files("verl")}
    assert not cycles(import_graph(modules))


def test_cycles_through_a_function_and_a_type_are_detected():
    sources = {
        "a": "from b import x",
        "b": "def f():\n    import c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import T",
        "d": "import a",
        "e": "",
    }
    modules = {name: list(ast.walk(ast.parse(source))) for name, source in sources.items()}
    assert [names[0] for names in cycles(import_graph(modules))] == ["a", "b", "c"]


def test_components_do_not_import_the_trainer():
    """The async trainer uses the same components."""
    for name in ("worker_groups", "generator", "validator", "weight_sync", "state", "dynamic_sampling", "prompts"):
        source = (ROOT / f"verl/trainer/ppo/{name}.py").read_text()
        assert "RayPPOTrainer" not in source, name
        assert "ray_trainer" not in source, name


def test_every_module_is_in_a_layer():
    for path in python_files("verl"):
        if not is_alias(path):
            layer_of(module_name(path))


def test_alias_modules_contain_no_code():
    for path in python_files("verl", "search_r1"):
        if not is_alias(path):
            continue
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            binding = isinstance(node, ast.Assign | ast.AnnAssign)
            empty_class = isinstance(node, ast.ClassDef) and all(
                isinstance(n, ast.Assign | ast.AnnAssign | ast.Pass | ast.Expr) for n in node.body
            )
            main_guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            allowed = isinstance(node, ast.Import | ast.ImportFrom) or docstring or binding or empty_class or main_guard
            assert allowed, (
                f"{relative(path)}:{node.lineno}: an alias module contains imports, __all__ and assignments only"
            )


def test_optional_packages_are_imported_only_where_used():
    for path in python_files("verl"):
        for target, line in imported_modules(parsed(path).body):
            package = target.split(".")[0]
            allowed = package not in OPTIONAL or relative(path).startswith(REQUIRED_BY.get(package, ()))
            assert allowed, f"{relative(path)}:{line}: import {target} inside the function"


def required_distributions(pyproject: str) -> set[str]:
    """Names of the packages that a pyproject.toml requires, without those of extras."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest requires tomli
    return {canonicalize_name(Requirement(text).name) for text in tomllib.loads(pyproject)["project"]["dependencies"]}


def test_packages_of_extras_are_not_required():
    pyproject = """
        [project]
        dependencies = ["a", "B_c~=1.0", "d[x]>=2; python_version > '3'", "e @ https://e.example/e.whl"]
        [project.optional-dependencies]
        test = ["f>=1"]
    """
    assert required_distributions(pyproject) == {"a", "b-c", "d", "e"}


def test_packages_that_modules_import_are_declared():
    """A package that is installed only because another one requires it may disappear with an update of that one."""
    required = required_distributions((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    distributions = importlib.metadata.packages_distributions()
    # flash_attn is used if it is installed; trackio requires pandas.
    exempt = {"verl", *OPTIONAL, "flash_attn", "pandas", *sys.stdlib_module_names}
    undeclared = []
    for path in python_files("verl"):
        if relative(path).startswith("verl/cli/starter/"):  # belongs to the user
            continue
        for target, line in imported_modules(nodes_of(path)):
            package = target.split(".")[0]
            names = {canonicalize_name(name) for name in distributions.get(package, [package])}
            if package not in exempt and not names & required:
                undeclared.append(f"{relative(path)}:{line}: {package}")
    assert not undeclared, "add these to dependencies"


def test_every_file_has_a_docstring():
    for path in python_files("verl", "benchmarks", "examples", "recipe"):
        assert ast.get_docstring(parsed(path)), f"{relative(path)}: the docstring states the purpose of the file"


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
