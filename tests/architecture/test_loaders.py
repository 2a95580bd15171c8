"""Functions that may execute code of a file, or of a peer, are used where this list says and for the reason it gives.

A new loader reads JSON, safetensors, parquet or arrow, or files of torch through `verl.utils.torch_archive`, and joins
`tests/support/file_loaders.py`, so that `tests/attacks/files` calls it with malicious files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.syntax import parsed

ROOT = Path(__file__).parents[2]
PACKAGES = ("verl", "search_r1", "recipe", "examples")
# The last two parts of a dotted name, or all of a shorter one.
WATCHED = {
    *("torch.load", "jit.load", "package.PackageImporter", "hub.load", "dcp.load", "checkpoint.load"),
    *(
        "dcp.FileSystemReader",
        "FileSystemReader",
        "dist_checkpointing.load",
        "dist_checkpointing.load_common_state_dict",
    ),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "cloudpickle.load", "cloudpickle.loads"),
    *("dill.load", "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "jsonpickle.decode"),
    *("np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle", "format.read_array"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("faiss.read_index", "BM25.load", "SentenceTransformer", "datasets.load_dataset", "datasets.load_from_disk"),
    *("datasets.load_dataset_builder", "runpy.run_path", "hydra.utils.instantiate", "utils.instantiate"),
    *("connection.Listener", "connection.Client", "Listener", "Client"),
}
MODULES = ("pickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "jsonpickle", "runpy")
"""Importing single functions of these would hide them from the names above."""

FILES = {
    # Files
    ("verl/utils/safe_pickle.py", "pickle.Unpickler"): "find_class imports nothing; opcodes are checked before",
    ("verl/workers/engine/common/sharded_checkpoint.py", "dcp.FileSystemReader"): "its read methods are replaced",
    ("verl/workers/engine/common/sharded_checkpoint.py", "dcp.load"): "with TensorsOnlyReader and TensorsOnlyPlanner",
    ("verl/search/corpus.py", "np.load"): "allow_pickle=False",
    ("verl/search/bm25.py", "np.load"): "memory-mapped, files of this build; allow_pickle is False by default",
    ("verl/search/bm25.py", "BM25.load"): "allow_pickle=False",
    ("verl/search/dense.py", "faiss.read_index"): "no code in the format; vectors are limited to the file's size",
    ("verl/search/dense.py", "SentenceTransformer"): "after _refuse_code, with trust_remote_code=False",
    ("verl/utils/dataset/rows.py", "datasets.load_dataset_builder"): "datasets >= 4 runs no scripts; reads the card",
    ("verl/config/compose.py", "yaml.load"): "a subclass of SafeLoader; only files of this package",
    ("examples/data_preprocess/raw_data.py", "datasets.load_dataset"): "datasets >= 4 runs no scripts",
    ("examples/notebooks/agent_with_a_tool.py", "torch.load"): "weights_only=True; a file of the same run",
}
CHANNELS = {
    # Between processes of one run: (file, name): why no one else can write to it
    ("verl/single_controller/local.py", "pickle.loads"): "connections below",
    ("verl/single_controller/local.py", "Listener"): "authkey of 32 random bytes; no pickle before it",
    ("verl/single_controller/local.py", "Client"): "the same key, which rank 0 broadcasts",
    (
        "verl/single_controller/base/worker_group.py",
        "pickle.loads",
    ): "an exception of a worker, by Ray or those connections",
    ("verl/workers/rollout/process/transport.py", "pickle.loads"): "a socketpair that the child inherits",
    ("verl/utils/reward_score/calls.py", "pickle.loads"): "a socket in a folder of mode 0700",
    ("verl/utils/process_pool/pool.py", "pickle.loads"): "a socketpair that the child inherits",
    ("verl/utils/process_pool/fork_server.py", "pickle.loads"): "a socketpair that the child inherits",
}


def _uses(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            yield f"{name}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _files() -> list[tuple[str, ast.Module]]:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    return [(file.relative_to(ROOT).as_posix(), parsed(file)) for file in files]


def test_functions_that_may_execute_code_are_used_where_it_is_listed() -> None:
    used = {(file, name) for file, tree in _files() for name in _uses(tree) if name in WATCHED}
    assert used - FILES.keys() - CHANNELS.keys() == set(), "a loader that may execute code; see the first lines here"
    assert (FILES.keys() | CHANNELS.keys()) - used == set(), "listed, and not used any more"


def test_no_call_allows_pickles_or_code_of_models() -> None:
    refused = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False}
    calls = [
        f"{file}:{node.value.lineno} {node.arg}"
        for file, tree in _files()
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg in refused
        if isinstance(node.value, ast.Constant) and node.value.value is refused[node.arg]
    ]
    assert calls == []


def test_caches_of_compiled_code_are_not_in_a_run_folder() -> None:
    """They are executable: they are where the user's own settings say, or in a private folder of the user's cache."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "load_cache_artifacts", "TORCH_COMPILE_CACHE")
    calls = {file for file, _ in _files() for name in names if name in (ROOT / file).read_text()}
    assert calls == {"verl/utils/compile_cache.py"}
