"""Every code block of a document works: it is executed, or its commands are valid, and the reason is stated.

How a block is tested: tests/support/documents.py.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import re

import pytest
import yaml

from tests.support.commands import ROOT, compose_config, run_script
from tests.support.document_runner import PageRun, with_overrides
from tests.support.documented_commands import INLINE, commands_of, problem_of, sentence_commands, words_of
from tests.support.documents import (
    COMPOSED,
    DOCUMENTS,
    EXECUTED,
    NOT_EXECUTED,
    SHELL,
    SLOW,
    Block,
    all_blocks,
    blocks_of,
    is_site_page,
    matches,
    parse,
    report,
)
from verl.config.problems import Report
from verl.config.unused_keys import check_supported

EXECUTED_IN = {
    mode: sorted({block.document for block in all_blocks() if block.mode == mode}) for mode in (EXECUTED, SLOW)
}


# ---------------------------------------------------------------- executed blocks


@pytest.mark.processes
@pytest.mark.parametrize("document", EXECUTED_IN[EXECUTED])
def test_the_blocks_of_a_document_run(document, tmp_path):
    run_blocks(document, tmp_path, (EXECUTED,))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", EXECUTED_IN[SLOW])
def test_the_slow_blocks_of_a_document_run(document, tmp_path):
    """With the fast ones, whose files they read."""
    run_blocks(document, tmp_path, (EXECUTED, SLOW))


def run_blocks(document, tmp_path, modes):
    page = PageRun(tmp_path / "page")
    for block in blocks_of(document):
        if block.mode in modes:
            problem = page.run(block)
            assert problem is None, problem


def test_every_block_that_is_not_executed_states_a_reason(record_testsuite_property):
    blocks = all_blocks()
    assert [block.location for block in blocks if block.mode in (COMPOSED, NOT_EXECUTED) and not block.reason] == []
    # Training commands are never left out: without a GPU their configuration is composed.
    training = re.compile(r"verl\.trainer\.main_|\bverl (train|sft|rm)\b")
    left_out = [block for block in blocks if block.mode == NOT_EXECUTED and is_site_page(block.document)]
    assert [block.location for block in left_out if training.search(block.text)] == []
    record_testsuite_property("documentation blocks", report())


def test_every_expected_output_can_be_wrong():
    outputs = [block for block in all_blocks() if block.output is not None]
    assert len(outputs) > 30
    assert [block.location for block in outputs if matches(block.output, "")] == []


# ---------------------------------------------------------------- commands that are checked only


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_of_a_document_works(document, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    blocks = [block for block in blocks_of(document) if block.mode != EXECUTED and block.language in SHELL]
    lines = [(line, True, block.mode) for block in blocks for line in commands_of(block.text)]
    lines += [(line, False, COMPOSED) for line in sentence_commands((ROOT / document).read_text())]
    problems = []
    for line, whole, mode in lines:
        for words in words_of(line):
            if mode == SLOW and is_created_file(words):
                continue
            problem = problem_of(words, whole, tmp_path, foreign=mode != COMPOSED)
            if problem is not None:
                problems.append(f"{line}\n    {problem}")
    assert not problems, "\n".join(problems)


def is_created_file(words):
    """Whether a command runs a script that an earlier block of the page creates; the slow tier executes it."""
    return (
        words[0] in ("bash", "python") and re.fullmatch(r"[\w/]+\.(sh|py)", words[1]) and not (ROOT / words[1]).exists()
    )


def test_what_is_wrong_with_a_command_is_noticed(tmp_path):
    wrong = {
        "python3 -m verl.trainer.main_ppo data.train_files=a actor_rollout_ref.model.path=b trainer.nods=2": "nods",
        "python -m verl.trainer.main_pro": "no module",
        "python -m verl.utils.dataset.check a.parquet --modle b": "--modle",
        "python examples/nothing.py": "there is no examples/nothing.py",
        "python examples/data_preprocess/gsm8k.py --lokal_save_dir x": "--lokal_save_dir",
        "bash examples/ppo_trainer/run_gemma.sh trainer.nods=2": "nods",
        "bash examples/nothing.sh": "there is no",
        "verl tarin": "no subcommand tarin",
        "verl train data.train_files=a actor_rollout_ref.model.path=b trainer.nods=2": "nods",
        "verl serve --modle b": "--modle",
        "make tset": "no tset",
        "make train ALGOR=grpo": "no ALGOR",
        "pip install -e .[vlm]": "no extra vlm",
        "verl plan actor_rollout_ref.modle.path=Qwen/Qwen2.5-7B": "modle",
        "frobnicate --now": "no check for",
    }
    for line, why in wrong.items():
        (words,) = words_of(line)
        assert why in (problem_of(words, True, tmp_path) or ""), line
    assert problem_of(["frobnicate"], True, tmp_path, foreign=True) is None
    lines = commands_of("make \\\n  test && FOO=1 make lint   # and more\n# a comment\n")
    lines += sentence_commands("Say `make docs` or `data.path`.\n```text\n`make no`\n```\n")
    assert [words for line in lines for words in words_of(line)] == [
        ["make", "test"],
        ["make", "lint"],
        ["make", "docs"],
    ]


# ---------------------------------------------------------------- the mechanism


PAGE = """
<!-- executed: slow with tiny a.b=1 -->

```bash
verl train a.b=2 trainer.device=cuda   # comment
echo a.b=2
```

```text
step … of 2
…
end
```

<!-- not executed: needs a
cluster -->
```bash
ray start
```

- a list

    ```python
    # my/file.py
    print(1)
    ```

    <!-- output: example -->
    ```text
    2
    ```

```yaml
a: 1
```
"""


def test_modes_overrides_files_and_outputs_are_read_from_a_page():
    slow, left_out, file = parse(PAGE, "docs/start/page.md")
    assert (slow.mode, slow.overrides, slow.line) == (SLOW, ["tiny", "a.b=1"], 4)
    assert slow.output == "step … of 2\n…\nend\n"
    assert (left_out.mode, left_out.reason) == (NOT_EXECUTED, "needs a cluster")
    assert (file.mode, file.file, file.text, file.output) == (EXECUTED, "my/file.py", "# my/file.py\nprint(1)\n", None)
    assert [block.mode for block in parse(PAGE, "examples/README.md")] == [SLOW, NOT_EXECUTED, COMPOSED]
    wrong = {
        "<!-- executed: sometimes -->\n```bash\nls\n```\n": "'<!-- executed: sometimes -->",
        "```bash\nls\n```\n<!-- output: nearly -->\n```text\na\n```\n": "'<!-- output: nearly -->",
        "<!-- composed: why -->\n```bash\nls\n```\n```text\na\n```\n": "^README.md: .*output",
    }
    for text, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            list(parse(text, "README.md"))


def test_overrides_replace_those_of_the_page():
    (block, *_) = parse(PAGE, "docs/start/page.md")
    train, echo = with_overrides(block.text, block.overrides).splitlines()
    assert train.startswith("verl train ")
    assert train.split().count("a.b=1") == train.split().count("trainer.device=cpu") == 1
    assert not {"a.b=2", "trainer.device=cuda", "#"} & set(train.split())
    assert echo == "echo a.b=2"


def test_outputs_are_compared_with_wildcards():
    assert matches("step … of 2\n…\nend\n", "step 1 of 2  \nmore\nmore\nend\n\n")
    assert not matches("step … of 2\n…\nend\n", "step 1 of 3\nend\n")
    assert not matches("a\n", "a\nb\n")


def test_a_failing_block_and_a_wrong_output_are_reported(tmp_path):
    def bash(text, output=None):
        return Block("page.md", 3, "bash", text, EXECUTED, output=output)

    page = PageRun(tmp_path / "page")
    assert page.run(bash("echo text > file; ls examples > /dev/null")) is None
    assert page.run(bash("cat file", "text\n")) is None
    assert "but the output was\ntext" in page.run(bash("cat file", "other\n"))
    assert "page.md:3: exit code 1" in page.run(bash("false | cat; echo not reached"))
    assert page.run(Block("page.md", 9, "python", "# mine.py\nx = 1\n", EXECUTED)) is None
    assert page.run(Block("page.md", 9, "python", "import mine\nprint(mine.x)\n", EXECUTED, output="1\n")) is None


# ---------------------------------------------------------------- what documents say besides


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_in_a_document_parses_and_imports_names_that_exist(document):
    for block in blocks_of(document):
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                module = importlib.import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == [], block.location


@pytest.mark.parametrize("document", DOCUMENTS)
def test_yaml_and_json_in_a_document_parse(document):
    for language, text in re.findall(r"^```(yaml|json)\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S):
        assert (yaml.safe_load if language == "yaml" else json.loads)(text)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "runs today" in (ROOT / name).read_text()])
def test_a_script_runs_after_what_is_said_to_be_needed(document, tmp_path):
    folder = (ROOT / document).parent
    rows = re.findall(r"^\| `(\w[\w.-]*\.sh)` \|.*\| ([^|]*) \|$", (ROOT / document).read_text(), re.MULTILINE)
    assert {script for script, _ in rows} == {path.name for path in folder.glob("*.sh")}
    for script, said in rows:
        report = Report()
        check_supported(compose_config(run_script(str((folder / script).relative_to(ROOT)), tmp_path)), report)
        needed = re.fullmatch(r"yes|after `(make setup-\w+)`", said)
        assert needed, (script, said)
        assert all(needed[1] and needed[1] in problem.fix for problem in report.problems), script


def test_the_names_to_use_instead_exist():
    """Of the page "names in your notes": modules, attributes and paths in the right column."""
    text = (ROOT / "docs/reference/names.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 20
    for left, right in rows:
        for name in INLINE.findall(right):
            if re.fullmatch(r"verl(\.\w+)+", name):
                assert resolves(name), name
            elif name.endswith("/"):
                assert (ROOT / name).is_dir(), name
        if "Old names that still work" in text.split(left)[0].rsplit("## ", 1)[-1]:
            assert all(resolves(name) for name in INLINE.findall(left) if name.startswith("verl.")), left


def resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
            return True
    return False
