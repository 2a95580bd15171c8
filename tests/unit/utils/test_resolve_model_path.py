"""A checkpoint of ours stands for the model exported into it; anything else is what copy_to_local makes of it."""

import fsspec
import pytest

from verl.utils.fs import resolve_model_path


def put(folder, *files):
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("{}")
    return folder


@pytest.mark.parametrize("export", ["huggingface", "actor/huggingface"])
def test_a_step_stands_for_its_export(tmp_path, export):
    step = put(tmp_path / "global_step_7", "manifest.json", "config.json", f"{export}/config.json")
    assert resolve_model_path(step) == str(step / export)
    assert resolve_model_path(f"{step}/") == str(step / export)


def test_a_run_stands_for_its_newest_step(tmp_path):
    for step in ("global_step_7", "global_step_9"):
        put(tmp_path / step, "manifest.json", "config.json", "huggingface/config.json")
    (tmp_path / "latest").write_text("global_step_9\n")
    assert resolve_model_path(tmp_path) == str(tmp_path / "global_step_9" / "huggingface")


def test_a_plain_model_folder_stays_itself_also_under_the_name_of_a_step(tmp_path):
    for name in ("mine", "global_step_372"):
        folder = put(tmp_path / name, "config.json")
        assert resolve_model_path(folder) == str(folder)


def test_a_step_without_an_export_says_how_to_get_one(tmp_path):
    step = put(tmp_path / "global_step_7", "manifest.json", "config.json")
    with pytest.raises(ValueError, match=r"^actor\.path: .*global_step_7 .*hf_model"):
        resolve_model_path(step, key="actor.path")


def test_of_a_step_at_a_url_only_the_export_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    with fsspec.open("memory://run/global_step_7/actor/huggingface/config.json", "w") as file:
        file.write("{}")
    with fsspec.open("memory://run/global_step_7/actor/model/huge.distcp", "w") as file:
        file.write("x")
    found = resolve_model_path("memory://run/global_step_7")
    assert found.endswith("/huggingface")
    assert not list((tmp_path / "cache").rglob("huge.distcp"))
