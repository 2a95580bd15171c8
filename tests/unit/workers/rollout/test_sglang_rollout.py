"""What SGLang is told: its engine by the configuration's keys, and of each request how to go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams
from verl.workers.rollout.sglang_rollout.server import SGLangRequest
from verl.workers.rollout.sglang_rollout.sglang_rollout import engine_arguments

EOS = frozenset({1, 2})


def arguments(device: str = "cpu", **keys: Any) -> dict[str, Any]:
    model = as_config(ModelConfig, {"path": "m", "override_config": {"rope_theta": 5}}, "actor_rollout_ref.model")
    config = as_config(RolloutConfig, {"name": "sglang", "max_model_len": 99, **keys})
    return engine_arguments("m", model, config, torch.device(device), torch.bfloat16)


def test_the_configurations_keys_become_sglangs() -> None:
    told = arguments(
        "cuda:3",
        max_num_seqs=7,
        max_num_batched_tokens=512,
        tensor_model_parallel_size=2,
        expert_parallel_size=2,
        gpu_memory_utilization=0.4,
        enable_prefix_caching=False,
        enforce_eager=True,
        quantization="fp8",
        seed=5,
        cudagraph_capture_sizes=[1, 8],
        free_weights=True,
        load_format="dummy",
    )
    expected = {
        "model_path": "m",
        "json_model_override_args": '{"rope_theta": 5}',
        "dtype": "bfloat16",
        "context_length": 99,
        "max_running_requests": 7,
        "max_prefill_tokens": 512,
        "chunked_prefill_size": 512,
        "tp_size": 2,
        "ep_size": 2,
        "mem_fraction_static": 0.4,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "quantization": "fp8",
        "random_seed": 5,
        "cuda_graph_bs_decode": [1, 8],
        "enable_weights_cpu_backup": False,
        "enable_memory_saver": True,
        "base_gpu_id": 3,
        "device": "cuda",
        "load_format": "dummy",
        "log_level": "error",
    }
    assert {key: told[key] for key in expected} == expected


def test_its_own_keys_go_before_ours_but_for_those_that_a_rollout_stands_on() -> None:
    told = arguments(engine_kwargs={"sglang": {"log_level": "info", "page_size": 16}}, enable_chunked_prefill=False)
    assert (told["log_level"], told["page_size"], told["chunked_prefill_size"]) == ("info", 16, -1)
    with pytest.raises(ValueError, match=r"engine_kwargs\.sglang\.stream_interval"):
        arguments(engine_kwargs={"sglang": {"stream_interval": 8}})


def asked(resume_from: Output | None = None, **params: Any) -> SGLangRequest:
    sequence = Sequence(Request("r", [5, 6], SamplingParams(max_new_tokens=10, **params), resume_from=resume_from))
    return SGLangRequest.from_sequence(sequence, "0", EOS)


@pytest.mark.parametrize(
    ("params", "ends", "ignores"),
    [
        ({"eos_token_ids": EOS}, [1, 2], False),
        ({"eos_token_ids": EOS, "stop_token_ids": frozenset({9})}, [1, 2, 9], False),
        # SGLang would end at 2, which this request wants to go on after.
        ({"stop_token_ids": frozenset({1})}, [1], True),
        ({"eos_token_ids": EOS, "ignore_eos": True}, [], True),
    ],
)
def test_sglang_ends_an_answer_only_where_the_request_does(params: dict, ends: list[int], ignores: bool) -> None:
    (phase,) = asked(**params).phases
    assert (phase["stop_token_ids"], phase["ignore_eos"]) == (ends, ignores)


def test_ends_are_banned_until_the_answer_is_long_enough() -> None:
    first, then = asked(eos_token_ids=EOS, min_new_tokens=4, logit_bias=((7, 2.0), (1, 3.0))).phases
    assert (first["max_new_tokens"], then["max_new_tokens"]) == (4, 6)
    assert {token: bias < -1e6 for token, bias in first["logit_bias"].items()} == {"7": False, "1": True, "2": True}
    assert then["logit_bias"] == {"7": 2.0, "1": 3.0}
    assert first["ignore_eos"]
    resumed = Output([8] * 5, [-1.0] * 5, [0] * 5)
    (rest,) = asked(resumed, eos_token_ids=EOS, min_new_tokens=4).phases
    assert (rest["max_new_tokens"], rest["logit_bias"]) == (5, None)
    (all_banned,) = asked(eos_token_ids=EOS, min_new_tokens=10).phases
    assert all_banned["max_new_tokens"] == 10


def test_greedy_has_no_other_way_to_draw() -> None:
    (phase,) = asked(do_sample=False, temperature=0.7, top_p=0.5, top_k=3).phases
    assert (phase["temperature"], phase.keys() & {"top_p", "top_k", "min_p"}) == (0.0, set())
