"""docs/reference/config.md says what the declarations say."""

from pathlib import Path

from tests.support.doc_scripts import load_script
from verl.config import PPOConfig
from verl.config.schema import walk

PAGE = Path(__file__).parents[3] / "docs/reference/config.md"
render = load_script("config_page.py").render


def test_page_is_up_to_date():
    assert PAGE.read_text() == render(), "run: python docs/scripts/config_page.py > docs/reference/config.md"


def test_page_has_every_key():
    lines = render().splitlines()
    blocks = {line.lstrip("# ") for line in lines if line.startswith("#")}
    for path, entry in walk(PPOConfig):
        if entry.block is not None:
            assert path in blocks
        else:
            assert any(line.startswith(f"| `{path.rpartition('.')[2]}` |") for line in lines), path
