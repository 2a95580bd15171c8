"""Keys and metrics that the sentences of the site name exist."""

from __future__ import annotations

import re

import pytest

from tests.support.commands import ROOT
from tests.support.documented_commands import FENCE, INLINE
from tests.support.documents import DOCUMENTS, is_site_page
from tests.unit.docs.test_metrics_page import undocumented

CONFIG = (ROOT / "docs/reference/config.md").read_text()
# Pages about names of other releases.
OTHER_NAMES = {"docs/start/migrating.md", "docs/reference/names.md"}
PAGES = [page for page in DOCUMENTS if is_site_page(page) and page not in OTHER_NAMES]
ROOTS = (
    "actor_rollout_ref|algorithm|critic|custom_reward_function|data|distillation|ray_init|retriever|reward_model|"
    "sandbox|sandbox_fusion|trainer"
)
KEY = re.compile(rf"(?:{ROOTS})(?:\.\w+)+")
METRIC_PREFIXES = ("actor", "critic", "reward", "rollout_corr", "timing_s", "perf", "async", "agent_loop", "training")
METRIC = re.compile(rf"(?:{'|'.join(METRIC_PREFIXES)})(?:/[\w@<>]+)+")
# Folders of a checkpoint.
FILES = {"actor/huggingface", "actor/lora_adapter"}


def configured_keys() -> set[str]:
    """Keys of all programs with their blocks, and the blocks themselves, from the generated page."""
    keys, block = set(), ""
    for line in CONFIG.splitlines():
        if heading := re.match(r"#+ (?:[\w ]+: )?([\w.]+)$", line):
            block = heading[1]
            keys.add(block)
        elif row := re.match(r"\| `([\w.]+)` \|", line):
            keys |= {row[1], f"{block}.{row[1]}"}
    return keys


KEYS = configured_keys()


def is_key(name: str) -> bool:
    """Whether it is a key, a block, or an entry of a mapping of keyword arguments."""
    return re.sub(r"(_kwargs)\..*", r"\1", name) in KEYS


def quoted_words(page: str) -> set[str]:
    text = FENCE.sub("", (ROOT / page).read_text())
    return {word.split("=")[0].rstrip(",;…") for quoted in INLINE.findall(text) for word in quoted.split()}


@pytest.mark.parametrize("page", PAGES)
def test_named_keys_and_metrics_exist(page):
    words = {word for word in quoted_words(page) if not word.endswith(".py")}
    assert sorted(word for word in words if KEY.fullmatch(word) and not is_key(word)) == []
    metrics = {word.replace("actor/moe/", "moe/") for word in words if METRIC.fullmatch(word)} - FILES
    assert undocumented(metrics) == []


@pytest.mark.parametrize("name", ["data.val_n", "actor_rollout_ref.rollout", "reward_model.reward_kwargs.timeout"])
def test_keys_blocks_and_entries_of_mappings_are_known(name):
    assert is_key(name)


@pytest.mark.parametrize("name", ["data.train_batch_sise", "actor_rollout_ref.rolout.n", "data.val_n.x"])
def test_an_unknown_key_is_noticed(name):
    assert not is_key(name)
