"""LoRA adapters in the server: load, select by model name, unload; over HTTP, with wrong requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
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
from transformers import AutoModelForCausalLM

from tests.support.adapters import peft_model, save_adapter
from tests.support.engine_cases import make_batch
from tests.support.lora_cases import lora_engine, train_steps
from tests.support.tiny import save_tiny_model, tiny_model
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.async_engine import AsyncEngine
from verl.inference.build import build_engine
from verl.inference.lora import AdapterOptions, LoraError, LoraRegistry, UnknownAdapterError, read_adapter
from verl.inference.serving import options_parser
from verl.inference.serving.api import openai_error
from verl.inference.serving.app import lora_routes
from verl.inference.serving.model import ModelLoader
from verl.inference.serving.program import load_app
from verl.types.request import Request, SamplingParams
from verl.utils.http_server.app import create_app

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


@contextlib.contextmanager
def build_registry(folders) -> Iterator[tuple[AsyncEngine, LoraRegistry]]:
    model = as_config(ModelConfig, {"path": folders["base"]}, at="actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 8})
    built = build_engine(folders["base"], model, config, adapters=AdapterOptions(RANK, slots=2, shared=False))
    with contextlib.closing(AsyncEngine(built.engine)) as engine:
        yield engine, LoraRegistry(engine, built.model.adapters, ["base"])


@pytest.fixture
def registry(folders) -> Iterator[tuple[AsyncEngine, LoraRegistry]]:
    with build_registry(folders) as built:
        yield built


@pytest.fixture(scope="module")
def unchanged_registry(folders) -> Iterator[tuple[AsyncEngine, LoraRegistry, list[int]]]:
    """Without adapters, and the base model's answer: of tests that check that nothing has changed."""
    with build_registry(folders) as (engine, loras):
        yield engine, loras, greedy(tiny_model("qwen2"))


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
    with pytest.raises(ValueError, match=r"lora_name: .*--max-loras"):
        loras.load("three", folders["a3"])
    submit(engine, "one").result(60)
    loras.unload("one")
    with pytest.raises(ValueError, match=r"'r-one': .*'one'"):
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
    with pytest.raises(ValueError, match=r"lora_name: .*--max-loras"):
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


def huge_file(folder: Path) -> None:
    """A file of 16 GB (sparse) whose first matrix has another shape."""
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    size = 2**34
    header = json.dumps({name: {"dtype": "F32", "shape": [RANK, size // 4 // RANK], "data_offsets": [0, size]}})
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + size)


LM_HEAD = {
    "base_model.model.lm_head.lora_A.weight": torch.zeros(RANK, 64),
    "base_model.model.lm_head.lora_B.weight": torch.zeros(264, RANK),
}
UNREADABLE = r"adapter_config\.json' .* read:"
WRONG: dict[str, tuple[Any, str]] = {
    "rank": (lambda folder: save_adapter(folder, peft_model("qwen2", 1, RANK + 1)), "rank 5.*--max-lora-rank 4"),
    "config rank": (lambda folder: change_config(folder, r=3), r"down_proj.*\[4, 128\].*\[3, 128\]"),
    "dora": (lambda folder: change_config(folder, use_dora=True), "use_dora"),
    "huge rank": (lambda folder: change_config(folder, r=10**400), "rank 1000.*--max-lora-rank 4"),
    "rank true": (lambda folder: change_config(folder, r=True), r"config\.json' .* r\.$"),
    "huge alpha": (lambda folder: change_config(folder, lora_alpha=10**400), "lora_alpha"),
    "no alpha": (lambda folder: change_config(folder, lora_alpha=None), "lora_alpha"),
    "activated adapter": (lambda folder: change_config(folder, alora_invocation_tokens=[1]), "alora_invocation"),
    "changed base weights": (lambda folder: change_config(folder, init_lora_weights="pissa_niter_4"), "pissa"),
    "quantised groups": (lambda folder: change_config(folder, use_qalora=True), "use_qalora"),
    "block diagonal": (lambda folder: change_config(folder, use_bdlora={"a": 1}), "use_bdlora"),
    "singular values": (lambda folder: change_config(folder, kasa_config={"a": 1}), "kasa_config"),
    "deep json": (lambda folder: (folder / "adapter_config.json").write_text("[" * 200_000), UNREADABLE),
    "long number": (lambda folder: (folder / "adapter_config.json").write_text("1" * 5000), UNREADABLE),
    "long json": (
        lambda folder: (folder / "adapter_config.json").write_text(" " * 2**21),
        rf"adapter_config\.json' .*\b{2**20} bytes",
    ),
    "not utf-8": (lambda folder: (folder / "adapter_config.json").write_bytes(b"\xff\xfe{}"), UNREADABLE),
    "kind": (lambda folder: change_config(folder, peft_type="IA3"), "peft_type"),
    "saved modules": (lambda folder: change_config(folder, modules_to_save=["lm_head"]), "modules_to_save"),
    "no json": (lambda folder: (folder / "adapter_config.json").write_text("{"), UNREADABLE),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), r"adapter_model\.safetensors;"),
    "broken file": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678"),
        "safetensors' .* read",
    ),
    "output head": (
        lambda folder: change_tensors(folder, lambda tensors: {**tensors, **LM_HEAD}),
        r"'lm_head\.lora_A\.weight'",
    ),
    "unknown layer": (
        lambda folder: change_tensors(folder, lambda t: {name.replace("q_proj", "qq"): t[name] for name in t}),
        "qq",
    ),
    "half": (
        lambda folder: change_tensors(folder, lambda t: dict(list(t.items())[1:])),
        "down_proj.lora_A.weight' .*both",
    ),
    "nan": (
        lambda folder: change_tensors(folder, lambda t: {n: v / 0 for n, v in t.items()}),
        "lora_A.weight' .*float32",
    ),
    "overflow by the scale": (
        lambda folder: (
            change_config(folder, lora_alpha=1e38),
            change_tensors(folder, lambda t: {n: v * 100 for n, v in t.items()}),
        ),
        "lora_B.weight' .*float32",
    ),
    "integers": (
        lambda folder: change_tensors(folder, lambda t: {n: v.int() for n, v in t.items()}),
        r"lora_A.weight' .*\bI32\b",
    ),
    "8-bit floats": (
        lambda folder: change_tensors(folder, lambda t: {n: v.to(torch.float8_e4m3fn) for n, v in t.items()}),
        r"lora_A.weight' .*\bF8_E4M3\b",
    ),
    "huge file": (huge_file, r"\[4, 1073741824\].*\[4, 64\]"),
    "no folder": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        r"lora_path: .*folder .*adapter_config\.json",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_adapters_that_do_not_fit_are_rejected_and_change_nothing(case, tmp_path, folders, unchanged_registry):
    engine, loras, answer = unchanged_registry
    shutil.copytree(folders["a1"], tmp_path, dirs_exist_ok=True)
    change, message = WRONG[case]
    change(tmp_path)
    with pytest.raises(ValueError, match=message):
        loras.load("wrong", str(tmp_path))
    assert loras.names() == ()
    assert submit(engine, None).result(60).token_ids == answer


def test_adapters_of_another_model_are_rejected(tmp_path, registry):
    _, loras = registry
    folder = save_adapter(tmp_path, peft_model("qwen2", 1, RANK, intermediate_size=160))
    with pytest.raises(ValueError, match=r"\[4, 160\].*\[4, 128\]"):
        loras.load("wrong", folder)


def test_the_adapter_of_a_checkpoint_is_found_and_scaled_like_peft(tmp_path, registry):
    save_adapter(tmp_path / "actor" / "lora_adapter", adapted(1))
    change_config(tmp_path / "actor" / "lora_adapter", use_rslora=True, lora_alpha=6)
    plain = load_file(tmp_path / "actor" / "lora_adapter" / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj.lora_B.weight"
    torch.testing.assert_close(
        read_adapter(str(tmp_path), registry[1]._adapters).tensors[name],
        plain[f"base_model.model.{name}"] * 6 / RANK**0.5,
    )


def test_the_adapter_that_training_saves_equals_its_merged_model(tmp_path, folders, registry):
    engine, loras = registry
    trainer = lora_engine(folders["base"], target_modules=["q_proj", "up_proj"])
    train_steps(trainer, make_batch(), 3)
    trainer.save(tmp_path / "actor")
    trainer.export_hf(tmp_path / "merged")
    loras.load("trained", str(tmp_path))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert submit(engine, "trained").result(60).token_ids == greedy(merged) != greedy(tiny_model("qwen2"))


@pytest.mark.parametrize("path", ["~no-such-user/a", "a" * 5000, "a/" * 5000, "nul\0", "\ud800", "", "/proc/self/mem"])
def test_paths_that_are_not_folders_are_rejected(path, registry):
    with pytest.raises(LoraError) as raised:
        registry[1].load("new", path)
    assert raised.value.field == "lora_path"


def test_adapters_cannot_have_a_name_of_the_model(folders, registry):
    with pytest.raises(LoraError, match="lora_name: 'base'"):
        registry[1].load("base", folders["a1"])


def test_only_folders_below_the_root_are_loaded(tmp_path, folders, registry):
    loras, root, outside = registry[1], tmp_path / "root", Path(folders["a1"])
    inside = root / "inside"
    shutil.copytree(outside, inside)
    (root / "link").symlink_to(outside)
    (root / "files").mkdir()
    for file in outside.iterdir():
        (root / "files" / file.name).symlink_to(file)
    for folder in (outside, root / "link", root / "files", root / ".." / ".." / outside.relative_to(tmp_path.parent)):
        with pytest.raises(LoraError, match="--lora-root"):
            loras.load("new", str(folder), root)
    loras.load("new", str(root / "inside" / ".." / "inside"), root)
    assert loras.names() == ("new",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-modules", "a=b"], "--enable-lora"),
        (["--lora-root", "/tmp"], "--enable-lora"),
        (["--enable-lora", "--lora-modules", "a"], "NAME=PATH"),
        (["--enable-lora", "--lora-modules", "base={a1}"], "lora_name: 'base'"),
        (["--enable-lora", "--lora-modules", "a={a1}", "a={a2}"], "lora_name: 'a'"),
    ],
)
def test_wrong_options_are_rejected(options, message, folders):
    model = ["--model", folders["base"], "--served-model-name", "base", "--device", "cpu", "--max-model-len", "128"]
    parsed = options_parser().parse_args([*model, *(option.format(**folders) for option in options)])
    with contextlib.ExitStack() as resources, pytest.raises(ValueError, match=message):
        resources.enter_context(ModelLoader(parsed).load_engine(1, False))


def test_waiting_loads_do_not_occupy_threads(folders):
    """Loads are executed one at a time; the second of two unloads of one adapter is a 404."""
    running, most = 0, 0

    class Slow:
        def __init__(self) -> None:
            self.loaded = {"a"}

        def load(self, name: str, folder: str, root: Path | None) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            time.sleep(0.05)
            running -= 1

        def unload(self, name: str) -> None:
            if name not in self.loaded:
                raise UnknownAdapterError(name)
            self.loaded.discard(name)

    async def run() -> list[int]:
        app = create_app(lora_routes(Slow(), None), health=dict, max_body_bytes=2**20, error_content=openai_error)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            load = {"lora_name": "b", "lora_path": "c"}
            requests = [client.post("/v1/load_lora_adapter", json=load) for _ in range(5)]
            requests += [client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}) for _ in range(2)]
            return sorted(response.status_code for response in await asyncio.gather(*requests))

    assert asyncio.run(run()) == [200] * 6 + [404]
    assert most == 1


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
