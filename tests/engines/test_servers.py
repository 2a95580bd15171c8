"""Servers that run already, as users start them, joined by URL: requests, new weights, a training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engines.engines import MODELS
from tests.support.search_server import free_port
from tests.support.tiny import tiny_model
from tests.support.training_harness import make_task, overrides, run_training
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import Request, SamplingParams
from verl.workers.rollout.url_rollout import URLRollout

ROOT = Path(__file__).parents[2]
SHIMS = Path(__file__).parent / "shims"
PROMPTS = [[10 + i, 20, 30 + 2 * i, 77] for i in range(6)]
LENGTH = 128

pytestmark = pytest.mark.needs("server")


def command(engine: str, model: str, port: int) -> list[str]:
    """As docs/reference/servers.md says, and what a small CPU machine needs besides."""
    at = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    if engine == "vllm":
        vllm = str(Path(sys.executable).with_name("vllm"))
        length = ["--max-model-len", str(LENGTH), "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"]
        extension = ["--worker-extension-cls", "verl.workers.rollout.url_rollout.vllm_worker.WeightMember"]
        return [vllm, "serve", model, *at, *length, *extension, "--enforce-eager"]
    length = ["--context-length", str(LENGTH), "--max-running-requests", "16", "--stream-interval", "1"]
    cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    cpu += ["--disable-cuda-graph", "--disable-overlap-schedule", "--grammar-backend", "none"]
    small = ["--max-total-tokens", "4096"]
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *at, *length, *cpu, *small]


def environment(engine: str, folder: Path) -> dict[str, str]:
    paths = [str(ROOT)]
    if engine == "vllm":
        needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            metadata.version("vllm")
        except metadata.PackageNotFoundError:
            # Its build for CPUs has a package name of its own, under which its command line does not look.
            about = folder / f"vllm-{metadata.version('vllm-cpu')}+cpu.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Name: vllm\nVersion: {metadata.version('vllm-cpu')}+cpu\n")
            paths.append(str(folder))
    else:
        needed = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "SGLANG_USE_CPU_ENGINE": "1"}
        paths.append(str(SHIMS))
    return {**os.environ, **needed, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_task(tmp_path_factory.mktemp("task"), **MODELS["wide"])


@pytest.fixture(scope="session")
def url(engine_name: str, task: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            command(engine_name, task["model"], port),
            env=environment(engine_name, folder),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    found = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 280
        while not answers(found):
            assert server.poll() is None, (folder / "log").read_text()[-4000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
            time.sleep(1)
        yield found
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # its workers too
        server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture
def rollout(engine_name: str, url: str, task: dict[str, str]) -> Iterator[URLRollout]:
    model = as_config(ModelConfig, {"path": task["model"]}, "actor_rollout_ref.model")
    keys = {"name": engine_name, "max_model_len": LENGTH, "dtype": "float32"}
    with URLRollout(task["model"], model, as_config(RolloutConfig, keys), "cpu", url) as joined:
        yield joined


def ask(rollout: URLRollout, **params: Any) -> list[Any]:
    asked = SamplingParams(**{"max_new_tokens": 30, **params})
    return rollout.submit([Request(f"r{i}", prompt, asked) for i, prompt in enumerate(PROMPTS)])


def log_probs(model: Any, prompt: list[int], answer: list[int], first: int, temperature: float = 1.0) -> torch.Tensor:
    """Of the answer's tokens from number `first` on."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) + first - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(answer[first:]).unsqueeze(1))[:, 0]


def test_tokens_and_log_probs_are_those_of_the_weights_that_were_handed_over(rollout: URLRollout) -> None:
    for version, seed in enumerate((5, 6), start=1):
        model = tiny_model(seed=seed, **MODELS["wide"])
        rollout.update_weights(model.state_dict().items())
        for prompt, future in zip(PROMPTS, ask(rollout, do_sample=False), strict=True):
            output = future.result()
            with torch.no_grad():
                logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
            assert output.token_ids == logits.argmax(-1).tolist()
            assert set(output.versions) == {version}
        for prompt, future in zip(PROMPTS, ask(rollout, temperature=0.7, key=3), strict=True):
            found = torch.tensor(future.result().log_probs)
            expected = log_probs(model, prompt, future.result().token_ids, 0, 0.7)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_what_is_paused_goes_on_under_new_weights(rollout: URLRollout) -> None:
    old, new = (tiny_model(seed=seed, **MODELS["wide"]) for seed in (7, 8))
    rollout.update_weights(old.state_dict().items())
    futures = ask(rollout, max_new_tokens=100, ignore_eos=True)
    time.sleep(0.5)
    rollout.pause_generation("keep")
    rollout.update_weights(new.state_dict().items())
    rollout.resume_generation()
    for prompt, future in zip(PROMPTS, futures, strict=True):
        output = future.result()
        first = output.versions.count(1)
        assert output.versions == [1] * first + [2] * (100 - first)
        parts = [log_probs(old, prompt, output.token_ids[:first], 0), log_probs(new, prompt, output.token_ids, first)]
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.cat(parts), atol=1e-4, rtol=0)
    assert any(0 < future.result().versions.count(1) < 100 for future in futures)


def test_answers_end_at_stop_tokens_and_when_they_are_aborted(rollout: URLRollout) -> None:
    rollout.update_weights(tiny_model(seed=5, **MODELS["wide"]).state_dict().items())
    outputs = [future.result() for future in ask(rollout, do_sample=False)]
    first = outputs[0].token_ids
    stop = next(token for token in first[3:] if token not in first[:3])
    outputs = [future.result() for future in ask(rollout, do_sample=False, stop_token_ids=frozenset([stop]))]
    assert outputs[0].token_ids == first[: first.index(stop) + 1]
    assert outputs[0].finish_reason == "stop"
    futures = ask(rollout, max_new_tokens=100, ignore_eos=True)
    time.sleep(0.3)
    rollout.abort()
    assert all(future.result().finish_reason == "abort" for future in futures)
    assert all(future.result().finish_reason == "length" for future in ask(rollout, ignore_eos=True))


def test_a_training_learns_with_it(engine_name: str, url: str, task: dict[str, str], tmp_path: Path) -> None:
    arguments = [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.name={engine_name}",
        f"actor_rollout_ref.rollout.server_urls=[{url}]",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=8",
    ]
    history = run_training(overrides(task, tmp_path, *arguments)).history
    rewards = [metrics["critic/score/mean"] for metrics in history]
    assert sum(rewards[-2:]) > sum(rewards[:2])
    assert all(metrics["rollout_corr/log_prob_diff_max"] < 1e-3 for metrics in history)
