"""LoRA adapters in the server: load, select by model name, unload; over HTTP, with wrong requests."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from safetensors.torch import load_file, save_file

from tests.support.adapters import peft_model, save_adapter
from tests.support.tiny import save_tiny_model, tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.async_engine import AsyncEngine
from verl.inference.build import build_engine
from verl.inference.lora_files import read_adapter
from verl.inference.lora_registry import LoraRegistry
from verl.inference.models.adapters import AdapterOptions
from verl.inference.server import load_app, options_parser
from verl.types.request import Request, SamplingParams

RANK = 4
PROMPT = list(range(30, 60))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """The base model and four adapters of it."""
    root = tmp_path_factory.mktemp("lora")
    folders = {"base": str(save_tiny_model(root / "base"))}
    for seed in range(1, 5):
        folders[f"a{seed}"] = save_adapter(root / f"a{seed}", peft_model("qwen2", seed, RANK))
    return folders


@pytest.fixture
def registry(folders) -> Iterator[tuple[AsyncEngine, LoraRegistry]]:
    model = as_config(ModelConfig, {"path": folders["base"]}, at="actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 8})
    built = build_engine(folders["base"], model, config, adapters=AdapterOptions(RANK, slots=2, shared=False))
    with contextlib.closing(AsyncEngine(built.engine)) as engine:
        yield engine, LoraRegistry(engine, built.model.adapters, built.device)


def submit(engine: AsyncEngine, adapter: str | None, new: int = 8, name: str = "r") -> Any:
    params = SamplingParams(do_sample=False, max_new_tokens=new)
    return engine.submit([Request(f"{name}-{adapter}", PROMPT, params, adapter=adapter)])[0]


def greedy(model: Any, new: int = 8) -> list[int]:
    ids = torch.tensor([PROMPT])
    answer = model.generate(input_ids=ids, do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    return answer[0, len(PROMPT) :].tolist()


def adapted(seed: int) -> Any:
    return peft_model("qwen2", seed, RANK)


def test_requests_select_adapters_and_share_no_prefix_of_another_one(folders, registry):
    engine, loras = registry
    loras.load("one", folders["a1"])
    loras.load("two", folders["a2"])
    for _ in range(2):  # the second time from the prefix cache
        outputs = {name: submit(engine, name).result(60) for name in (None, "one", "two")}
        assert outputs[None].token_ids == greedy(tiny_model("qwen2"))
        assert outputs["one"].token_ids == greedy(adapted(1))
        assert outputs["two"].token_ids == greedy(adapted(2))
    assert [output.cached_tokens for output in outputs.values()] == [16] * 3
    assert loras.names() == ("one", "two")


def test_a_slot_is_reused_after_unloading_and_its_prefixes_are_not(folders, registry):
    engine, loras = registry
    loras.load("one", folders["a1"])
    loras.load("two", folders["a2"])
    with pytest.raises(ValueError, match="all 2 slots are in use"):
        loras.load("three", folders["a3"])
    submit(engine, "one").result(60)
    loras.unload("one")
    with pytest.raises(ValueError, match="'one' is not loaded"):
        submit(engine, "one")
    loras.load("one", folders["a3"])
    output = submit(engine, "one").result(60)
    assert (output.token_ids, output.cached_tokens) == (greedy(adapted(3)), 0)
    assert submit(engine, "two").result(60).token_ids == greedy(adapted(2))


def test_running_requests_of_an_unloaded_adapter_finish_before_its_slot_is_reused(folders, registry):
    engine, loras = registry
    loras.load("one", folders["a1"])
    loras.load("two", folders["a2"])
    engine.halt("test")
    future = submit(engine, "one")
    loras.unload("one")
    with pytest.raises(ValueError, match="in use"):
        loras.load("three", folders["a3"])
    engine.resume("test")
    assert future.result(60).token_ids == greedy(adapted(1))
    loras.load("three", folders["a3"])


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors), path)


LM_HEAD = {
    "base_model.model.lm_head.lora_A.weight": torch.zeros(RANK, 64),
    "base_model.model.lm_head.lora_B.weight": torch.zeros(264, RANK),
}
WRONG: dict[str, tuple[Any, str]] = {
    "rank": (lambda folder: save_adapter(folder, peft_model("qwen2", 1, RANK + 1)), "rank 5, more than"),
    "config rank": (lambda folder: change_config(folder, r=3), "r = 3"),
    "dora": (lambda folder: change_config(folder, use_dora=True), "use_dora"),
    "kind": (lambda folder: change_config(folder, peft_type="IA3"), "peft_type"),
    "saved modules": (lambda folder: change_config(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "no json": (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "other formats"),
    "broken file": (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"), "cannot be read"),
    "output head": (lambda folder: change_tensors(folder, lambda tensors: {**tensors, **LM_HEAD}), "lm_head"),
    "unknown layer": (
        lambda folder: change_tensors(folder, lambda t: {name.replace("q_proj", "qq"): t[name] for name in t}),
        "qq",
    ),
    "half": (lambda folder: change_tensors(folder, lambda t: dict(list(t.items())[1:])), "is missing"),
    "nan": (lambda folder: change_tensors(folder, lambda t: {n: v / 0 for n, v in t.items()}), "not finite"),
    "no folder": (lambda folder: (folder / "adapter_config.json").unlink(), "is not a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_do_not_fit_are_rejected_and_change_nothing(case, tmp_path, registry):
    engine, loras = registry
    save_adapter(tmp_path, adapted(1))
    change, message = WRONG[case]
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        loras.load("wrong", str(tmp_path))
    assert loras.names() == ()
    assert submit(engine, None).result(60).token_ids == greedy(tiny_model("qwen2"))


def test_adapters_of_another_model_are_rejected(tmp_path, registry):
    _, loras = registry
    folder = save_adapter(tmp_path, peft_model("qwen2", 1, RANK, intermediate_size=160))
    with pytest.raises(ValueError, match="this model needs"):
        loras.load("wrong", folder)


def test_the_adapter_of_a_checkpoint_is_found_and_scaled_like_peft(tmp_path):
    save_adapter(tmp_path / "actor" / "lora_adapter", adapted(1))
    change_config(tmp_path / "actor" / "lora_adapter", use_rslora=True, lora_alpha=6)
    plain = load_file(tmp_path / "actor" / "lora_adapter" / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj.lora_B.weight"
    torch.testing.assert_close(
        read_adapter(str(tmp_path)).tensors[name], plain[f"base_model.model.{name}"] * 6 / RANK**0.5
    )


@pytest.fixture(scope="module")
def url(folders) -> Iterator[str]:
    """A server with one adapter loaded at its start."""
    arguments = ["--model", folders["base"], "--served-model-name", "base", "--device", "cpu", "--dtype", "float32"]
    arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "4", "--max-model-len", "128"]
    options = options_parser().parse_args([*arguments, "--lora-modules", f"first={folders['a1']}"])
    with contextlib.ExitStack() as resources:
        app = load_app(options, resources).app
        bound = resources.enter_context(socket.socket())
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def post(url: str, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=fields, timeout=60)


def complete(url: str, model: str) -> httpx.Response:
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True}
    return post(url, "completions", model=model, **fields)


def names(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]


def test_adapters_over_http(url, folders):
    assert names(url) == ["base", "first"]
    loaded = post(url, "load_lora_adapter", lora_name="second", lora_path=folders["a2"])
    assert (loaded.status_code, names(url)) == (200, ["base", "first", "second"])
    answers = {name: complete(url, name).json() for name in names(url)}
    assert [answer["model"] for answer in answers.values()] == list(answers)
    assert len({answer["choices"][0]["text"] for answer in answers.values()}) == 3
    assert post(url, "unload_lora_adapter", lora_name="second").status_code == 200
    assert complete(url, "second").status_code == 404
    assert names(url) == ["base", "first"]


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("load_lora_adapter", {"lora_name": "first", "lora_path": "/tmp"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "base", "lora_path": "/tmp"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "new", "lora_path": "/nowhere"}, 400, "lora_path"),
        ("load_lora_adapter", {"lora_name": "new"}, 400, "lora_path"),
        ("load_lora_adapter", {"lora_name": 3, "lora_path": "/tmp"}, 400, "lora_name"),
        ("load_lora_adapter", {"lora_name": "new", "lora_path": "/tmp", "other": 1}, 400, "other"),
        ("unload_lora_adapter", {"lora_name": "unknown"}, 404, "lora_name"),
        ("unload_lora_adapter", {}, 400, "lora_name"),
    ],
)
def test_wrong_requests(url, path, fields, status, param):
    response = post(url, path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert names(url) == ["base", "first"]
