"""What vLLM is asked for: its arguments, its environment, a request's parameters, and when it sleeps."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.sequence import Sequence
from verl.types.request import EngineBrokenError, Output, Request, SamplingParams
from verl.workers.rollout.process.transport import BufferHandle, SharedBuffer
from verl.workers.rollout.vllm_rollout.step_engine import VllmStepEngine, sampling_arguments
from verl.workers.rollout.vllm_rollout.vllm_rollout import SleepMode, WeightReceiver, engine_arguments, vLLMRollout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def arguments(device: torch.device = CPU, **keys: Any) -> dict[str, Any]:
    model = as_config(ModelConfig, {"path": "m", "override_config": {"rope_theta": 5}}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": "vllm", **keys})
    return engine_arguments("m", model, config, device, torch.bfloat16)


def test_keys_become_arguments_and_engine_kwargs_are_forwarded_over_them() -> None:
    asked = {"max_num_seqs": 7, "tensor_model_parallel_size": 2, "expert_parallel_size": 2, "quantization": "fp8"}
    found = arguments(CUDA, **asked, engine_kwargs={"vllm": {"max_num_seqs": 9, "block_size": 32}})
    expected = {
        "model": "m",
        "dtype": "bfloat16",
        "hf_overrides": {"rope_theta": 5},
        "max_num_seqs": 9,
        "block_size": 32,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enable_expert_parallel": True,
        "quantization": "fp8",
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": True,
        "enforce_eager": False,
    }
    assert expected.items() <= found.items()
    assert (arguments()["distributed_executor_backend"], arguments()["enforce_eager"]) == ("uni", True)


def test_what_the_rollout_rests_on_cannot_be_set() -> None:
    with pytest.raises(ValueError, match=r"^engine_kwargs\.vllm\.logprobs_mode"):
        arguments(engine_kwargs={"vllm": {"logprobs_mode": "raw_logprobs"}})


def test_what_a_user_has_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (as_config(RolloutConfig, {"tensor_model_parallel_size": size}) for size in (1, 2))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {4, 5, 6, 7})
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert vLLMRollout.process_environment(one, "cpu")["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert vLLMRollout.process_environment(two, "cpu")["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert not any("CPU" in name for name in vLLMRollout.process_environment(two, "cuda"))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert "VLLM_LOGGING_LEVEL" not in vLLMRollout.process_environment(one, "cpu")


def test_a_resumed_request_asks_for_what_is_left_and_for_other_noise() -> None:
    params = SamplingParams(max_new_tokens=10, min_new_tokens=4, key=-5, eos_token_ids=frozenset([1, 3]), top_k=-1)
    fresh = sampling_arguments(Sequence(Request("a", [7, 8], params)))
    assert (fresh["max_tokens"], fresh["min_tokens"], fresh["stop_token_ids"], fresh["top_k"]) == (10, 4, [1, 3], 0)
    earlier = Output([9, 9, 9], [-1.0] * 3, [0] * 3)
    resumed = sampling_arguments(Sequence(Request("a", [7, 8], params, resume_from=earlier)))
    assert (resumed["max_tokens"], resumed["min_tokens"]) == (7, 1)
    assert fresh["seed"] != resumed["seed"]
    assert 0 <= fresh["seed"] < 2**63
    greedy = sampling_arguments(Sequence(Request("a", [7], SamplingParams(do_sample=False, top_p=0.5))))
    assert greedy["temperature"] == 0
    assert "top_p" not in greedy


class Sleeper:
    """Writes down what vLLM's engine is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def sleep(self, level: int, mode: str) -> None:
        self.told.append(("sleep", level))
        assert mode == "keep", "requests go on afterwards"

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(("wake", *tags))


class NewSleeper(Sleeper):
    def release_kv_cache_memory(self) -> None:
        self.told.append("release kv")


@pytest.mark.parametrize(("discard", "level"), [(True, 2), (False, 1)])
def test_both_kinds_of_memory_sleep_at_once_and_wake_one_by_one(discard: bool, level: int) -> None:
    engine = Sleeper()
    memory = SleepMode(engine, enabled=True, discard_weights=discard)
    memory.requested |= {"kv_cache", "weights"}
    memory.apply()
    memory.apply()
    memory.wake("weights")
    memory.wake("kv_cache")
    memory.wake("kv_cache")
    assert engine.told == [("sleep", level), ("wake", "weights"), ("wake", "kv_cache")]
    assert not memory.asleep


@pytest.mark.parametrize(
    ("engine", "told"),
    [(Sleeper(), [("sleep", 1), ("wake", "weights")]), (NewSleeper(), [("sleep", 0), "release kv"])],
)
def test_kv_memory_alone_is_given_back_and_weights_may_follow(engine: Sleeper, told: list[Any]) -> None:
    memory = SleepMode(engine, enabled=True, discard_weights=True)
    memory.requested.add("kv_cache")
    memory.apply()
    assert engine.told == told
    memory.requested.add("weights")
    memory.apply()
    assert engine.told[len(told) :] == [("wake", "kv_cache"), ("sleep", 2)]
    assert memory.asleep == {"kv_cache", "weights"}


def test_a_cpu_has_no_sleep() -> None:
    engine = Sleeper()
    memory = SleepMode(engine, enabled=False, discard_weights=True)
    memory.requested.add("kv_cache")
    memory.apply()
    memory.wake("kv_cache")
    assert engine.told == []


def test_a_step_that_fails_is_the_end_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raised: of what was scheduled nothing will come, and its process has to be started anew."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict, __version__="0"))
    sizes = {"max_model_len": 8, "max_logprobs": 20, "get_vocab_size": lambda: 9, "get_num_experts": lambda: 0}
    model = SimpleNamespace(dtype=torch.float32, **sizes)
    core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[1]), get_output=lambda: [].pop())
    engine = Sleeper()
    vars(engine).update(vllm_config=SimpleNamespace(model_config=model), engine_core=core)
    with pytest.raises(EngineBrokenError, match="IndexError: pop from empty list"):
        VllmStepEngine(engine, CPU).drain()


class Receiver(WeightReceiver):
    """Keeps what it is given, or cannot."""

    device = CPU
    fails = False

    def verl_load_weights(self, tensors: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in tensors}
        assert not self.fails


def test_the_first_rank_alone_opens_a_bucket_and_gives_it_up_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []
    told = [
        lambda flat: sent.append(flat.clone()),
        lambda flat: flat.copy_(sent[0]),
    ]  # what a broadcast is, to the first rank and to the second
    ranks = [
        SimpleNamespace(rank_in_group=rank, broadcast=lambda flat, src, f=f: f(flat)) for rank, f in enumerate(told)
    ]
    weights = {"a": torch.randn(3, 5).to(torch.bfloat16), "b": torch.arange(7)}
    buffer = SharedBuffer(4096, "cpu")
    handle = buffer.put(weights)
    nowhere = replace(handle, buffer=BufferHandle("/nowhere", 4096))
    files = len(os.listdir("/proc/self/fd"))
    for rank, bucket in zip(ranks, [handle, nowhere], strict=True):
        group = SimpleNamespace(get_world_group=lambda rank=rank: rank)
        monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", group)
        receiver = Receiver()
        receiver.fails = True
        with pytest.raises(AssertionError):
            receiver.verl_load_shared(bucket)
        assert all(torch.equal(receiver.loaded[name], tensor) for name, tensor in weights.items())
    gc.collect()  # what pytest keeps of an error holds views of the memory
    assert len(os.listdir("/proc/self/fd")) <= files
    buffer.close()
