"""Folders of models, encoders and datasets, tool lists and configs: code that comes with them is not executed."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.malicious_files import hostile_arrow_schema, yaml_tags
from tests.support.tiny import tiny_model, tiny_tokenizer

CODE = "import os\nos.mkdir({canary!r})\n"
CLASSES = "class Config: pass\nclass Model: pass\nclass Tokenizer: pass\nclass Processor: pass\n"


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def model(tmp_path: Path, canary: Path) -> Path:
    """A model whose config, tokenizer and processor name classes of a file in the folder."""
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "code.py").write_text(CODE.format(canary=str(canary)) + CLASSES)
    generate = folder / "custom_generate"
    generate.mkdir()
    (generate / "generate.py").write_text(CODE.format(canary=str(canary)) + "def generate(model, **kwargs): pass\n")
    autos = {"AutoConfig": "code.Config", "AutoModel": "code.Model", "AutoModelForCausalLM": "code.Model"}
    autos |= {"AutoTokenizer": ["code.Tokenizer", None], "AutoProcessor": "code.Processor"}
    for name, more in (
        ("config.json", {"model_type": "of_this_folder"}),
        ("tokenizer_config.json", {"tokenizer_class": "Tokenizer"}),
        ("processor_config.json", {"processor_class": "Processor"}),
        ("preprocessor_config.json", {"image_processor_type": "Processor"}),
    ):
        file = folder / name
        content = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(content | more | {"auto_map": autos}))
    return folder


def _config(folder: Path) -> Any:
    from verl.models.loading import read_config

    return read_config(str(folder))


def _weights(folder: Path) -> Any:
    from verl.models.loading import pretrained_model

    return pretrained_model(str(folder), tiny_model().config, "causal_lm")


def _tokenizer(folder: Path) -> Any:
    from verl.utils.tokenizer import hf_tokenizer

    return hf_tokenizer(folder)


def _tokenizer_if_any(folder: Path) -> Any:
    from verl.utils.tokenizer import tokenizer_if_any

    return tokenizer_if_any(folder)


def _processor(folder: Path) -> Any:
    from verl.utils.tokenizer import hf_processor

    return hf_processor(folder)


def _end_tokens(folder: Path) -> Any:
    from verl.utils.end_tokens import find_end_tokens

    return find_end_tokens(str(folder), tiny_model().config, None)


def _merger(folder: Path) -> Any:
    from verl.model_merger import MergeOptions
    from verl.model_merger.checkpoint import merged_config

    return merged_config(folder, {}, MergeOptions(backend="fsdp", local_dir=str(folder)))


@pytest.mark.parametrize(
    "load",
    [_config, _weights, _tokenizer, _tokenizer_if_any, _processor, _end_tokens, _merger],
    ids=lambda f: f.__name__,
)
def test_code_of_a_model_folder_is_not_executed(
    load: Callable[[Path], Any], model: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    with contextlib.suppress(ValueError, OSError, KeyError, ImportError):
        load(model)
    assert not canary.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_config_cannot_name_kernels_of_a_hub(key: str, tmp_path: Path) -> None:
    tiny_model().config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "someone/kernel"}))
    with pytest.raises(
        ValueError, match=r"config\.json: \w+_implementation .*'someone/kernel'.*trust_remote_code=True"
    ):
        _config(tmp_path)


@pytest.mark.parametrize("place", ["module", "activation"])
def test_code_of_an_encoder_folder_is_not_executed(
    place: str, tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.search.dense import TextEncoder

    (tmp_path / "evil_module.py").write_text(CODE.format(canary=str(canary)) + "class Act: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dense = "sentence_transformers.models.Dense" if place == "activation" else "evil_module.Act"
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "part", "type": dense}]))
    (tmp_path / "part").mkdir()
    config = {"in_features": 2, "out_features": 2, "bias": True, "activation_function": "evil_module.Act"}
    (tmp_path / "part" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"(?s)retriever_model.*evil_module.Act"):
        TextEncoder(str(tmp_path))
    assert not canary.exists()
    assert "evil_module" not in sys.modules


@pytest.mark.parametrize("card", [True, False])
def test_a_loading_script_is_not_executed(card: bool, tmp_path: Path, canary: Path) -> None:
    from verl.utils.dataset.rows import find_files

    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(pa.table({"prompt": ["a"]}), folder / "train.parquet")
    for name in ("data.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(CODE.format(canary=str(canary)))
    if card:
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: train.parquet\n---\n"
        )
        with pytest.raises(ValueError, match=r"/data: .*scripts .*data\.py"):
            find_files(str(folder), "train")
    else:
        assert find_files(str(folder), "train") == [str(folder / "train.parquet")]
    assert not canary.exists()


@pytest.mark.parametrize("path", ["../secret.jsonl", "{absolute}"])
def test_a_card_that_names_files_outside_of_its_folder_is_refused(path: str, tmp_path: Path) -> None:
    from verl.utils.dataset.rows import find_files

    folder, secret = tmp_path / "data", tmp_path / "secret.jsonl"
    folder.mkdir()
    secret.write_text('{"prompt": "secret"}\n')
    entry = path.format(absolute=secret)
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {entry}\n---\n"
    )
    with pytest.raises(ValueError, match=r"/data: .*/secret\.jsonl, "):
        find_files(str(folder), "train")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_pickled_type_of_a_column_is_not_executed(suffix: str, tmp_path: Path, canary: Path) -> None:
    from verl.utils.dataset.rows import Rows

    file, schema = tmp_path / f"data.{suffix}", hostile_arrow_schema(canary)
    table = pa.table({"prompt": pa.array([b"a"])}, schema=schema)
    if suffix == "parquet":
        pq.write_table(table, file)
    else:
        with pa.ipc.new_file(str(file), schema) as writer:
            writer.write_table(table)
    assert Rows([str(file)])[0] == {"prompt": b"a"}
    assert not canary.exists()


def _class_list(path: Path) -> Any:
    from verl.config.problems import Report
    from verl.utils.import_utils import read_class_list

    report = Report()
    entries = read_class_list("tool_config_path", str(path), "tools", (), report)
    assert not report.problems or str(path) in str(report.problems)
    return entries


def _loops(path: Path) -> Any:
    from verl.agent.loop import read_loop_file

    return read_loop_file(str(path))


def _compose(path: Path) -> Any:
    from verl.config.compose import read_yaml

    return read_yaml(path)


@pytest.mark.parametrize("load", [_class_list, _loops, _compose], ids=lambda f: f.__name__)
def test_tags_of_yaml_are_not_executed(load: Callable[[Path], Any], tmp_path: Path, canary: Path) -> None:
    for technique, text in yaml_tags(canary).items():
        file = tmp_path / "tools.yaml"
        file.write_text(text + "\n")
        with contextlib.suppress(ValueError, yaml.YAMLError):
            load(file)
        assert not canary.exists(), technique
        assert "antigravity" not in sys.modules


def test_a_tool_list_cannot_name_any_callable(tmp_path: Path, canary: Path) -> None:
    from verl.config.problems import Report
    from verl.tools.base_tool import BaseTool

    file = tmp_path / "tools.yaml"
    file.write_text(f"tools:\n- class_name: os.mkdir\n  config: {{path: {canary}}}\n- class_name: subprocess.Popen\n")
    report = Report()
    assert [entry.load(BaseTool, report) for entry in _class_list(file)] == [None, None]
    assert not canary.exists()


def test_rows_cannot_name_code(tmp_path: Path, canary: Path) -> None:
    from verl.agent.loop import find_loop, listed_loops

    file = tmp_path / "own.py"
    file.write_text(CODE.format(canary=str(canary)))
    agent: Any = SimpleNamespace(agent_loop_config_path=None, default_agent_loop="single_turn_agent")
    for name in (f"{file}:Own", "antigravity.Own"):
        with pytest.raises(ValueError, match=rf"^agent_name: .*{re.escape(name)}"):
            find_loop(name, listed_loops(agent))
    assert not canary.exists()
    assert "antigravity" not in sys.modules
