"""Engines that run already, by URL: what is asked of them over HTTP, and what becomes of a run when they fail."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny import tiny_config, tiny_model
from tests.support.url_server import URLServer, expected_tokens
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.types.request import EngineDiedError, Request, SamplingParams
from verl.types.weights import WeightMismatchError
from verl.utils.transfer_group import TransferGroup
from verl.workers.rollout import url_rollout
from verl.workers.rollout.placement import open_rollout
from verl.workers.rollout.url_rollout import URLRollout
from verl.workers.rollout.url_rollout import server as server_module
from verl.workers.rollout.url_rollout.server import ControlClient, ServerError, ServerLostError
from verl.workers.rollout.url_rollout.sglang_server import SGLangServerAPI, SGLangTransport

PROMPTS = [[10 + i, 20, 30 + i] for i in range(12)]


@pytest.fixture
def server() -> Iterator[URLServer]:
    started = URLServer(tiny_config().to_dict()).start()
    yield started
    started.stop()


@pytest.fixture
def join(model_path: Path) -> Iterator[Callable[..., URLRollout]]:
    joined: list[URLRollout] = []

    def join_server(server: URLServer, **keys) -> URLRollout:
        model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
        config = {"name": "vllm", "max_model_len": 128, "dtype": "float32", "load_format": "auto", **keys}
        joined.append(URLRollout(str(model_path), model, as_config(RolloutConfig, config), "cpu", server.url))
        return joined[-1]

    yield join_server
    for rollout in joined:
        rollout.close()


def requests(count: int = 12, tokens: int = 40) -> list[Request]:
    params = SamplingParams(max_new_tokens=tokens)
    return [Request(f"r{number}", PROMPTS[number], params) for number in range(count)]


def wait_until_generating(server: URLServer, streams: int = 1) -> None:
    deadline = time.monotonic() + 120
    while server.running < streams and time.monotonic() < deadline:
        time.sleep(0.001)


def test_answers_are_the_servers_and_no_more_streams_are_open_than_it_runs_at_a_time(server, join):
    outputs = [future.result() for future in join(server).submit(requests())]
    assert [output.token_ids for output in outputs] == [expected_tokens(prompt, 40) for prompt in PROMPTS]
    assert outputs[0].log_probs == [-token / 100 for token in outputs[0].token_ids]
    assert server.max_running == 8  # twice its max_num_seqs


def test_what_is_paused_goes_on_from_its_tokens_and_none_is_lost(server, join):
    rollout = join(server)
    futures = rollout.submit(requests())
    wait_until_generating(server)
    rollout.pause_generation("keep")
    running = server.running
    rollout.resume_generation()
    assert [future.result().token_ids for future in futures] == [expected_tokens(prompt, 40) for prompt in PROMPTS]
    assert running == 0
    continued = [prompt for prompt in server.prompts if len(prompt) > 3]
    assert continued
    assert all(prompt == prompt[:3] + expected_tokens(prompt[:3], len(prompt) - 3) for prompt in continued)


def test_what_is_aborted_ends_at_the_server_too(server, join):
    rollout = join(server)
    futures = rollout.submit(requests(4, tokens=100))
    wait_until_generating(server, 4)
    rollout.abort()
    assert {future.result().finish_reason for future in futures} == {"abort"}
    assert all(len(future.result().token_ids) < 100 for future in futures)  # 0 if no token had been received yet
    deadline = time.monotonic() + 120
    while server.running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.running


def test_a_connection_that_breaks_is_made_again_where_it_was(server, join):
    rollout = join(server)
    server.disconnect_at = 7
    assert rollout.submit(requests(1))[0].result().token_ids == expected_tokens(PROMPTS[0], 40)
    assert server.prompts == [PROMPTS[0], PROMPTS[0] + expected_tokens(PROMPTS[0], 8)]


def test_a_server_that_was_started_anew_has_other_weights_and_answers_nobody(server, join):
    rollout = join(server)
    rollout.update_weights(tiny_model(seed=3).state_dict().items())
    server.disconnect_at, server.weights = 7, "default"
    with pytest.raises(EngineDiedError, match=rf"^rollout\.server_urls: {server.url} .*'default', .*'verl-"):
        rollout.submit(requests(1))[0].result()
    assert rollout.restart_if_dead()
    with pytest.raises(RuntimeError, match=r"^rollout: .*weight sync"):
        rollout.submit(requests(1))
    rollout.update_weights(tiny_model(seed=3).state_dict().items())
    assert rollout.submit(requests(1))[0].result().token_ids == expected_tokens(PROMPTS[0], 40)
    assert not rollout.restart_if_dead()


def test_a_server_that_stays_away_fails_everybody_with_its_url(server, join, monkeypatch):
    monkeypatch.setattr(server_module, "RECONNECT_TIMEOUT_S", 0.2)
    rollout = join(server)
    futures = rollout.submit(requests(4, tokens=100))
    wait_until_generating(server, 4)
    server.stop()
    for future in futures:
        with pytest.raises(EngineDiedError, match=rf"{server.url} .*\b0 s: "):
            future.result()
    with pytest.raises(RuntimeError, match=rf"{server.url} .*: \[Errno 111\]"):
        rollout.update_weights(tiny_model().state_dict().items())


def test_weights_arrive_bit_for_bit_and_old_prefixes_go(server, join):
    rollout, model = join(server, load_format="dummy"), tiny_model(seed=3)
    with pytest.raises(RuntimeError, match=r"^rollout: .*load_format=dummy"):
        rollout.submit(requests(1))
    rollout.update_weights(model.state_dict().items())
    assert server.member.loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, server.member.loaded[name]) for name, tensor in model.state_dict().items())
    assert server.prefix_resets == 1
    assert rollout.submit(requests(1))[0].result().versions == [1] * 40


def test_what_a_server_says_against_a_hand_over_is_heard_at_once_and_the_next_one_goes_well(server, join, monkeypatch):
    rollout, weights = join(server), tiny_model(seed=3).state_dict()
    abort, aborted = TransferGroup.abort, []
    monkeypatch.setattr(TransferGroup, "abort", lambda group: (aborted.append(group.rank), abort(group)))
    with monkeypatch.context() as patch:
        patch.setattr(server.member, "verl_receive", lambda pieces: 1 / 0)
        with pytest.raises(ServerError, match=r"/collective_rpc .*500"):
            rollout.update_weights(weights.items())
    rollout.update_weights(weights.items())
    assert aborted == [0, 1], "both members of the group that failed"
    assert all(torch.equal(tensor, server.member.loaded[name]) for name, tensor in weights.items())


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux says which timers a connection has")
def test_a_server_that_is_silent_is_asked_whether_it_is_there(server, join):
    """Its machine may have lost power, and then nobody says so."""
    rollout = join(server)
    server.paused = True
    (future,) = rollout.submit(requests(1))

    def timers() -> list[str]:
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        return [line[5] for line in lines if line[2].endswith(f":{server.port:04X}") and line[3] == "01"]

    deadline = time.monotonic() + 120
    while not timers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [timer[:2] for timer in timers()] == ["02"]  # of keep-alive
    future.cancel()


def test_a_bit_that_flips_on_its_way_is_found(server, join, monkeypatch):
    rollout, name = join(server), "model.layers.1.mlp.up_proj.weight"
    load = server.member.verl_load_weights

    def flip(tensors):
        for found, tensor in tensors:
            if found == name:
                tensor.view(torch.int32)[3, 5] ^= 1
        load(tensors)

    monkeypatch.setattr(server.member, "verl_load_weights", flip)
    with pytest.raises(WeightMismatchError, match=name):
        rollout.update_weights(tiny_model(seed=3).state_dict().items())
    with pytest.raises(RuntimeError, match="^rollout: .*version 1 .*" + name):
        rollout.submit(requests(1))


@pytest.mark.parametrize(
    ("setting", "value", "trouble", "remedy"),
    [
        ("development", False, "no development endpoints", "VLLM_SERVER_DEV_MODE=1 vllm serve"),
        ("length", 64, "max_model_len is 64; 128 are needed", "--max-model-len 128"),
        ("logprobs_mode", "raw_logprobs", "logprobs_mode is raw_logprobs", "--logprobs-mode processed_logprobs"),
        ("dtype", "torch.bfloat16", "dtype is torch.bfloat16", "--dtype float32"),
        ("worker_extension_cls", "", "worker_extension_cls is ''", "--worker-extension-cls verl.workers.rollout.url_"),
        ("vocab_size", 300, "vocab_size 300, the trainer's has 264", "/model"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_with_the_command_that_starts_it_right(
    setting, value, trouble, remedy, server, join, model_path
):
    for place in (server.info["model_config"], server.info["parallel_config"], server.member.config):
        if setting in place:
            place[setting] = value
    if hasattr(server, setting):
        setattr(server, setting, value)
    with pytest.raises(ServerError) as refused:
        join(server)
    text = str(refused.value)
    assert server.url in text
    assert trouble in text
    assert remedy.replace("/model", str(model_path)) in text


def test_log_probs_that_are_not_of_what_is_drawn_are_found_at_the_first_request(server, join):
    rollout = join(server)
    server.ignores_temperature = True
    with pytest.raises(RuntimeError, match=rf"vLLM 0\.0 at {server.url} .*log-probs.*3\.8000 .*temperature 0\.5"):
        rollout.submit(requests(1))
    server.ignores_temperature = False
    assert rollout.submit(requests(1))[0].result().token_ids == expected_tokens(PROMPTS[0], 40)


def test_every_replica_has_a_server_of_its_own(server, model_path):
    model = as_config(ModelConfig, {"path": str(model_path)}, "actor_rollout_ref.model")
    urls = {"name": "vllm", "max_model_len": 128, "dtype": "float32", "server_urls": [server.url]}
    with open_rollout(str(model_path), model, as_config(RolloutConfig, urls), "cpu") as rollout:
        rollout.update_weights(tiny_model().state_dict().items())
        assert rollout.submit(requests(1))[0].result().token_ids == expected_tokens(PROMPTS[0], 40)
    two = as_config(RolloutConfig, urls | {"server_urls": [server.url] * 2})
    with pytest.raises(ValueError, match=r"^server_urls: 2 servers .*\b1 ranks.*tensor_model_parallel_size=1"):
        open_rollout(str(model_path), model, two, "cpu")


def test_what_sglang_streams_is_read_whether_it_repeats_itself_or_not():
    def event(tokens: list[int], count: int, ended: dict[str, str] | None = None) -> dict[str, Any]:
        log_probs = [[-token / 100, token, None] for token in tokens]
        said = {"completion_tokens": count, "output_token_logprobs": log_probs, "finish_reason": ended}
        return {"output_ids": tokens, "meta_info": said}

    sglang = SGLangServerAPI.__new__(SGLangServerAPI)
    for second in ([7, 8, 9], [8, 9]):
        assert sglang.parse_event(event([7], 1), 0) == ([7], [-0.07], None)
        assert sglang.parse_event(event(second, 3, {"type": "length"}), 1) == ([8, 9], [-0.08, -0.09], "length")
    assert sglang.parse_event(event([], 3, {"type": "abort"}), 3) == ([], [], "abort")


def test_nobody_there_or_another_engine_is_said_at_start(server, join):
    with pytest.raises(ServerError, match=r"rollout\.name"):
        join(server, name="sglang")
    with pytest.raises(ServerError, match=r"/v1 .*/version.*/model_info"):
        join(SimpleNamespace(url=f"{server.url}/v1"))
    del server.info["device_config"]
    with pytest.raises(ServerError, match=r"\(KeyError: 'device_config'\)"):
        join(server)
    server.stop()
    with pytest.raises(ServerError, match=rf"^rollout\.server_urls: {server.url} .*Errno 111"):
        join(server)


def test_a_server_that_is_refused_leaves_no_open_client(server, join, monkeypatch):
    clients: list[ControlClient] = []

    class Recorded(ControlClient):
        def __init__(self, url: str) -> None:
            super().__init__(url)
            clients.append(self)

    monkeypatch.setattr(url_rollout, "ControlClient", Recorded)
    server.length = 64
    for name in ("sglang", "vllm"):
        with pytest.raises(ServerError):
            join(server, name=name)
        with pytest.raises(RuntimeError, match="closed"):
            clients[-1].get("/version")


def test_a_wait_that_ends_because_the_client_is_closed_names_no_timeout(server):
    class Closing(ControlClient):
        """Closed after its first attempt."""

        def has_endpoint(self, path: str) -> bool:
            try:
                return super().has_endpoint(path)
            finally:
                self.close()

    server.stop()
    with pytest.raises(ServerLostError, match="closed") as caught:
        Closing(server.url).wait_for_reply()
    assert "120 s" not in str(caught.value)


def test_weights_without_a_common_name_say_nothing_about_the_hash_of_sglang(caplog):
    reply = {"ranks": [{"checksums": {"model.layers.0.self_attn.qkv_proj.weight": "0" * 16}}]}
    api: Any = SimpleNamespace(
        client=SimpleNamespace(url="http://server"),
        ranks=1,
        command=lambda path, **body: reply,
        set_weight_label=lambda label: None,
    )
    SGLangTransport(api, torch.device("cpu")).finish()
    (record,) = caplog.records
    assert "http://server" in record.getMessage()
    assert "SHA-256" not in record.getMessage()
