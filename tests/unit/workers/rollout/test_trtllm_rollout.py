"""Our side of every call to TensorRT-LLM, which does not install here: by its documented signatures."""

import importlib.machinery
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import fake_tensorrt_llm
from tests.support.fake_tensorrt_llm import AsyncLLM, ExecutorMemoryType, LogprobMode
from tests.support.tiny import tiny_model
from tests.support.url_server import expected_tokens
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.workers.rollout import trtllm_rollout
from verl.workers.rollout.trtllm_rollout import TRTLLMRollout

PROMPTS = [[10 + i, 20, 30 + i] for i in range(6)]


@pytest.fixture
def start(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TRTLLMRollout]]:
    for name, module in fake_tensorrt_llm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.machinery.ModuleSpec("tensorrt_llm", None)
    monkeypatch.setattr("verl.workers.rollout.trtllm_rollout.find_spec", lambda _: spec)
    monkeypatch.setattr(trtllm_rollout, "local_devices", lambda: {"here": torch.device("cpu")})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: AsyncLLM.last.log.append(("synchronize",)))
    started: list[TRTLLMRollout] = []

    def start_engine(overrides: dict | None = None, **keys) -> TRTLLMRollout:
        asked = {"path": str(model_path), "override_config": overrides or {}}
        model = as_config(ModelConfig, asked, "actor_rollout_ref.model")
        usual = {"name": "trtllm", "max_model_len": 128, "dtype": "float32", "load_format": "auto"}
        config = as_config(RolloutConfig, {**usual, **keys})
        started.append(TRTLLMRollout(str(model_path), model, config, "cpu"))
        return started[-1]

    yield start_engine
    for engine in started:
        engine.close()


def ask(rollout: TRTLLMRollout, **params) -> list:
    asked = SamplingParams(**{"max_new_tokens": 40, **params})
    return rollout.submit([Request(f"r{i}", prompt, asked) for i, prompt in enumerate(PROMPTS)])


def test_keys_are_its_arguments_and_what_is_forwarded_comes_last(start, model_path):
    start(
        {"rms_norm_eps": 1e-4},
        tensor_model_parallel_size=2,
        max_num_seqs=7,
        max_num_batched_tokens=300,
        enforce_eager=False,
        cudagraph_capture_sizes=[1, 4],
        gpu_memory_utilization=0.4,
        engine_kwargs={"trtllm": {"disable_overlap_scheduler": True}},
    )
    given = AsyncLLM.last.arguments
    assert (given["model"], given["dtype"], given["load_format"]) == (str(model_path), "float32", "auto")
    assert (given["max_batch_size"], given["max_num_tokens"], given["max_seq_len"]) == (7, 300, 128)
    assert (given["tensor_parallel_size"], given["disable_overlap_scheduler"]) == (2, True)
    assert given["kv_cache_config"].free_gpu_memory_fraction == 0.4
    assert given["cuda_graph_config"].batch_sizes == [1, 4]
    assert given["skip_tokenizer_init"]
    assert given["model_kwargs"] == {"rms_norm_eps": 1e-4}
    assert AsyncLLM.last.log[0] == ("setup_async",)


def test_what_it_does_not_know_it_refuses_by_itself(start):
    with pytest.raises(TypeError, match="no_such_key"):
        start(engine_kwargs={"trtllm": {"no_such_key": 1}})
    with pytest.raises(ValueError, match=r"engine_kwargs\.trtllm\.stream_interval"):
        start(engine_kwargs={"trtllm": {"stream_interval": 8}})


def test_answers_come_token_by_token_with_log_probs_of_what_is_drawn(start):
    outputs = [future.result() for future in ask(start(), temperature=0.7, key=11, stop_token_ids=frozenset([3]))]
    assert [output.token_ids for output in outputs] == [expected_tokens(prompt, 40) for prompt in PROMPTS]
    assert outputs[0].log_probs == [-token / 100 for token in outputs[0].token_ids]
    params = AsyncLLM.last.requests[0].params
    assert (params.temperature, params.seed, params.logprobs) == (0.7, 11, 0)
    assert (params.stop_token_ids, params.end_id, params.include_stop_str_in_output) == ([3], -1, True)
    assert (params.logprobs_mode, params.detokenize) == (LogprobMode.PROCESSED, False)


def test_what_is_paused_is_aborted_there_and_goes_on_from_its_tokens_under_new_weights(start):
    rollout, model = start(), tiny_model(seed=3)
    futures = ask(rollout, key=5)
    time.sleep(0.05)
    rollout.pause_generation("keep")
    first = list(AsyncLLM.last.requests)
    assert all(result.aborted for result in first)
    rollout.update_weights(model.state_dict().items())
    rollout.resume_generation()
    for prompt, future in zip(PROMPTS, futures, strict=True):
        output = future.result()
        assert output.token_ids == expected_tokens(prompt, 40)
        assert set(output.versions) == {0, 1}
    second = AsyncLLM.last.requests[len(first) :]
    assert {result.params.seed for result in second}.isdisjoint({result.params.seed for result in first})
    assert set(AsyncLLM.last.salts[len(first) :]).isdisjoint(AsyncLLM.last.salts[: len(first)])


def test_what_is_aborted_ends_there(start):
    rollout = start()
    futures = ask(rollout, max_new_tokens=100)
    time.sleep(0.05)
    rollout.abort()
    assert all(future.result().finish_reason == "abort" for future in futures)
    deadline = time.monotonic() + 120
    while not all(result.aborted for result in AsyncLLM.last.requests) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(result.aborted for result in AsyncLLM.last.requests)


def test_a_request_that_ends_for_another_reason_fails_with_that_reason(start, monkeypatch):
    monkeypatch.setattr(fake_tensorrt_llm.RequestOutput, "times_out_at", 3)
    with pytest.raises(RuntimeError, match=r"^rollout: request 'r0': .*'timeout'"):
        ask(start())[0].result()


def test_weights_go_by_handles_of_the_workers_device_and_then_the_end_is_said(start, monkeypatch):
    rollout, model = start(load_format="dummy"), tiny_model(seed=3)
    rollout.update_weights(model.state_dict().items())
    llm = AsyncLLM.last
    assert all(torch.equal(tensor, llm.weights[name]) for name, tensor in model.state_dict().items())
    calls = [call for call in llm.log if call[0] != "setup_async"]
    assert calls[0] == ("collective_rpc", "report_device_id")
    assert calls[1:3] == [("synchronize",), ("update_weights", False)]  # what a handle shows has been written
    assert calls[-1] == ("update_weights", True)
    rollout.begin_update(2, None)
    with pytest.raises(WeightMismatchError, match=r"'model.embed_tokens.weight'"):
        rollout.finish_update({})
    monkeypatch.setattr(trtllm_rollout, "local_devices", dict)
    other = start()
    with pytest.raises(RuntimeError, match=r"TensorRT-LLM .*GPU-here, .*\[\]"):
        other.update_weights(model.state_dict().items())


def test_memory_is_given_back_by_its_names_for_our_tags(start):
    rollout = start()
    rollout.release(["kv_cache"])
    rollout.resume()
    log = [call for call in AsyncLLM.last.log if call[0] in ("release", "resume")]
    assert log == [("release", ExecutorMemoryType.KV_CACHE), ("resume", ExecutorMemoryType.KV_CACHE)]


def test_log_probs_of_another_kind_are_found_at_the_first_request(start, monkeypatch):
    monkeypatch.setattr(fake_tensorrt_llm, "LogprobMode", SimpleNamespace(PROCESSED=LogprobMode.RAW))
    with pytest.raises(RuntimeError, match=r"TensorRT-LLM 0\.0\.0 .*log-probs.*3\.8000 .*temperature 0\.5"):
        ask(start())


def test_without_the_package_the_install_line_is_said(model_path):
    model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
    with pytest.raises(ImportError, match=r"^TRTLLMRollout: tensorrt_llm .*pip install tensorrt-llm"):
        TRTLLMRollout(str(model_path), model, as_config(RolloutConfig, {"name": "trtllm"}), "cpu")


class Worker:
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_is_killed_is_told_of(start, ray_cluster):
    """Its workers are actors of Ray: real ones here."""
    import ray

    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    rollout, workers = start(), [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
    try:
        pids = ray.get([worker.pid.remote() for worker in workers])
        rollout.watch_processes(told.put)
        os.kill(pids[1], signal.SIGKILL)
        assert told.get(timeout=60) == f"process {pids[1]} (Ray actor Worker) has ended"
    finally:
        for worker in workers:
            ray.kill(worker)
