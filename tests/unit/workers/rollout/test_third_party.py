"""A third-party engine as a step engine: chunks at a pause, aborts, new weights, errors; checks of its log-probs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.scripted_server import ScriptedServer, expected_tokens, log_prob
from tests.support.tiny import tiny_tokenizer
from verl.inference.async_engine import AsyncEngine
from verl.inference.sequence import Sequence
from verl.types.request import Output, Request, SamplingParams
from verl.utils.progress import pulse_count
from verl.workers.rollout.third_party import (
    PROBE_TOP_TOKENS,
    ChunkDetails,
    ServerStepEngine,
    TokenChunk,
    accept_reported,
    accept_reported_experts,
    accept_scaled,
    check_reported_log_probs,
)

SHORT = SamplingParams(max_new_tokens=20)
LONG = SamplingParams(max_new_tokens=300)
PROMPT = [7, 8, 9]

VOCAB = 300
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0))


class Served:
    def __init__(self) -> None:
        self.steps = ServerStepEngine(
            self._connect, max_length=1000, log_probs_after_filtering=False, reports_details=True
        )
        self.loop = AsyncEngine(self.steps, tiny_tokenizer)

    def _connect(self, tell) -> ScriptedServer:
        self.server = ScriptedServer(tell)
        return self.server

    def ask(self, name: str, params: SamplingParams = LONG, prompt: list[int] = PROMPT, **fields) -> Future[Output]:
        return self.loop.submit([Request(name, prompt, params, **fields)])[0]

    def set_weights(self, version: int, keep_kv: bool) -> None:
        self.server.weights = version
        self.loop.invalidate_kv_cache(running=not keep_kv)
        self.loop.version = version

    def close(self) -> None:
        self.loop.close()
        self.steps.close()


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def right(output: Output, prompt: list[int] = PROMPT, recomputed: bool = True) -> bool:
    known = output.log_probs == output.sampled_log_probs == [log_prob(token) for token in output.token_ids]
    return known and output.token_ids == expected_tokens(prompt, output.versions, recomputed)


def test_many_threads_get_the_answers_of_the_server(served):
    prompts = [[i, i + 1] for i in range(60)]
    futures: dict[int, Future[Output]] = {}

    def ask(first: int) -> None:
        for i in range(first, 60, 6):
            futures[i] = served.ask(f"r{i}", replace(SHORT, max_new_tokens=1 + i % 7), prompts[i])

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, future in futures.items():
        output = future.result()
        assert right(output, prompts[i])
        assert (len(output.token_ids), output.finish_reason) == (1 + i % 7, "length")
    assert not served.server.running


def test_a_pause_takes_every_token_that_was_sampled_and_no_more_come(served):
    futures = [served.ask(f"r{i}", prompt=[i]) for i in range(4)]
    for _ in range(5):
        wait_for(
            lambda before=served.server.reported: served.server.reported > before or all(f.done() for f in futures)
        )
        served.loop.pause("keep")
        reported = served.server.reported
        taken = sum(len(s.output.token_ids) for s in served.loop.all_unfinished())
        taken += sum(len(f.result().token_ids) for f in futures if f.done())
        time.sleep(0.02)
        assert taken == reported == served.server.reported
        served.loop.unpause()
    assert all(right(future.result(), [i]) for i, future in enumerate(futures))


@pytest.mark.parametrize("keep_kv", [False, True])
def test_weights_change_under_requests_that_go_on(served, keep_kv):
    served.server.hold_at = 30
    futures = [served.ask(f"r{i}") for i in range(3)]
    wait_for(lambda: served.server.reported >= 30)
    served.loop.pause("keep")
    served.server.hold_at = math.inf
    served.set_weights(1, keep_kv)
    later = served.ask("later", SHORT)
    served.loop.unpause()
    for future in futures:
        output = future.result()
        assert set(output.versions) == {0, 1}
        assert right(output, recomputed=not keep_kv)
    # The prompt is the same, and its KV was not taken over from the old weights.
    assert set(later.result().versions) == {1}
    assert right(later.result())


def test_an_aborted_id_is_used_again_while_pieces_of_it_are_told(served):
    for attempt in range(40):
        prompt = [attempt]
        future = served.ask("same", prompt=prompt)
        wait_for(lambda before=served.server.reported: served.server.reported > before)
        served.loop.abort(["same"])
        output = future.result()
        assert (output.finish_reason, right(output, prompt)) == ("abort", True)
    rest = served.ask("same", prompt=prompt, resume_from=output).result()
    assert rest.token_ids[: len(output.token_ids)] == output.token_ids
    assert (len(rest.token_ids), right(rest, prompt)) == (300, True)


def test_an_end_within_a_piece_cuts_the_rest_and_frees_the_server(served):
    tokens = expected_tokens(PROMPT, [0] * 20)
    end = next(i for i in range(3, 20) if i % 3 == 0 and tokens[i] not in tokens[:i])
    output = served.ask("r", replace(LONG, stop_token_ids=frozenset({tokens[end]}))).result()
    assert (output.token_ids, output.finish_reason) == (tokens[: end + 1], "stop")
    wait_for(lambda: not served.server.running)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (TokenChunk("bad", [], [], finished=True, error="out of memory"), "'bad': out of memory"),
        (TokenChunk("bad", [1], [-1.0], finished=True), "'bad': .*4 of .*303 tokens"),
    ],
)
def test_a_request_that_fails_fails_alone_and_may_be_asked_again_at_once(served, piece, message):
    served.server.hold_at = 0
    bad, good = served.ask("bad"), served.ask("good", SHORT)
    wait_for(lambda: served.server.running == {"bad", "good"})
    served.server.abort(["bad"])
    served.server.emit(piece)
    with pytest.raises(RuntimeError, match=message):
        bad.result()
    again = served.ask("bad", SHORT)
    served.server.hold_at = math.inf
    served.server.emit()
    assert right(again.result())
    assert right(good.result())


def test_a_server_that_cannot_be_reached_fails_everybody_and_the_next_start_is_a_new_chance(served):
    running = served.ask("a")
    wait_for(lambda: served.server.reported > 0)
    served.server.start_error = "connection refused"
    with pytest.raises(ConnectionError, match="connection refused"):
        served.ask("b").result()
    with pytest.raises(ConnectionError, match="connection refused"):
        running.result()
    assert not served.server.running
    served.server.start_error = ""
    assert right(served.ask("a", SHORT).result())


def test_a_log_prob_that_is_none_names_the_weights(served):
    served.server.hold_at = 0
    future = served.ask("r")
    wait_for(lambda: served.server.running == {"r"})
    served.server.emit(TokenChunk("r", [1], [math.nan], finished=False))
    with pytest.raises(FloatingPointError, match=r"version 0 .*log-prob nan .*token 1 .*'r'"):
        future.result()


def test_details_are_told_of_the_tokens_that_count_and_of_the_prompt_once(served):
    served.server.hold_at = 0
    future = served.ask("r", replace(LONG, stop_token_ids=frozenset({5}), top_log_probs=1, prompt_log_probs=True))
    wait_for(lambda: served.server.running == {"r"})
    top = [[(token, -1.0)] for token in (4, 5, 6)]
    first = ChunkDetails(2, top[:1], [-3.0, -4.0], [[(8, -3.0)], [(9, -4.0)]])
    served.server.emit(TokenChunk("r", [4], [-1.0], finished=False, details=first))
    served.server.emit(TokenChunk("r", [5, 6], [-1.0, -1.0], finished=False, details=ChunkDetails(7, top[1:], [-9.0])))
    output = future.result()
    assert (output.token_ids, output.top_log_probs, output.cached_tokens) == ([4, 5], top[:2], 2)
    assert (output.prompt_log_probs, output.prompt_top_log_probs) == ([-3.0, -4.0], [[(8, -3.0)], [(9, -4.0)]])
    with pytest.raises(ValueError, match=r"top_log_probs"):
        served.ask("r", replace(LONG, top_log_probs=1, temperature=0.5))


def test_a_server_that_hangs_does_not_look_alive(served):
    served.ask("r", SHORT).result()
    served.server.hold_at = 0
    future = served.ask("hangs")
    wait_for(lambda: "hangs" in served.server.running)
    before = pulse_count()
    time.sleep(0.05)
    assert pulse_count() == before
    future.cancel()
    wait_for(lambda: not served.server.running)


def test_closing_fails_who_is_unfinished():
    served = Served()
    futures = [served.ask(f"r{i}") for i in range(3)]
    served.server.hold_at = 0
    served.close()
    wait(futures, timeout=30)
    done = [f for f in futures if f.exception() is None]
    assert all("closed before" in str(f.exception()) for f in futures if f not in done)


@pytest.mark.parametrize(
    ("changes", "log_probs_after_filtering", "known"),
    [
        ({}, True, "policy raw drawn"),
        ({"temperature": 0.5}, True, "policy drawn"),
        ({"top_p": 0.9}, True, "drawn"),
        ({"top_p": 0.9}, False, "policy raw"),
        ({"top_k": 5, "temperature": 0.5}, False, "policy"),
        ({"presence_penalty": 1.0}, True, "drawn"),
        ({"logit_bias": ((3, 1.0),), "min_p": 0.1}, False, ""),
        ({"min_new_tokens": 1}, True, "drawn"),
    ],
)
def test_what_a_log_prob_stands_for(changes, log_probs_after_filtering, known):
    sequence = Sequence(Request("r", PROMPT, replace(SHORT, **changes)))
    assert not accept_reported(sequence, [4], [-1.5], 0, log_probs_after_filtering)
    output = sequence.output
    values = {"policy": output.log_probs, "raw": output.raw_log_probs, "drawn": output.sampled_log_probs}
    assert " ".join(name for name, value in values.items() if value == [-1.5]) == known
    assert all(math.isnan(value[0]) for name, value in values.items() if name not in known.split())


def test_a_greedy_token_is_drawn_with_certainty():
    sequence = Sequence(Request("r", PROMPT, replace(SHORT, temperature=0.0)))
    accept_reported(sequence, [4], [-1.5], 0, log_probs_after_filtering=True)
    output = sequence.output
    assert (output.log_probs, output.raw_log_probs, output.sampled_log_probs) == ([-1.5], [-1.5], [0.0])


def reporting(distribution: Callable[[float, int], torch.Tensor]) -> Callable[[float, int], dict[int, float]]:
    """An engine that tells log-softmax of these."""

    def top(temperature: float, top_k: int) -> dict[int, float]:
        told = distribution(temperature, top_k).log_softmax(-1)
        values, tokens = told.topk(PROBE_TOP_TOKENS)
        drawn = int(told.argmin())
        return {**dict(zip(tokens.tolist(), values.tolist(), strict=True)), drawn: float(told[drawn])}

    return top


def cut(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    return logits if top_k < 0 else logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)


processed = reporting(lambda temperature, top_k: cut(LOGITS / temperature, top_k))
untruncated = reporting(lambda temperature, top_k: LOGITS / temperature)
raw = reporting(lambda temperature, top_k: LOGITS)
reordered = reporting(lambda temperature, top_k: LOGITS if temperature == 1 else -LOGITS / temperature)


def test_what_is_drawn_from_passes_before_and_after_filtering() -> None:
    assert check_reported_log_probs("e 1", processed, VOCAB, True, torch.float32)
    assert check_reported_log_probs("e 1", untruncated, VOCAB, False, torch.float32)


def test_what_rounds_otherwise_each_time_passes_in_its_own_dtype_alone() -> None:
    generator = torch.Generator().manual_seed(1)

    def rounded(temperature: float, top_k: int) -> torch.Tensor:
        """Between 4 and 8 the values of a bfloat16 are 1/32 apart."""
        return (2 * LOGITS + torch.randint(-1, 2, [VOCAB], generator=generator) / 32) / temperature

    for _ in range(20):
        assert check_reported_log_probs("e 1", reporting(rounded), VOCAB, False, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^rollout: e 1 .*\btop_k 5\b"):
        all(check_reported_log_probs("e 1", reporting(rounded), VOCAB, False, torch.float32) for _ in range(20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("top", "log_probs_after_filtering", "cause"),
    [
        (raw, True, "two tokens .*temperature 0.5"),
        (reordered, True, ": temperature 0.5 .*most likely"),
        (untruncated, True, r"top_k 5 .*\b20 .*\b0\.\d+"),
        (processed, False, ": top_k 5 .*filtering"),
        (
            lambda t, k: {token: lp - 1 for token, lp in processed(t, k).items()},
            True,
            r"temperature 0\.05 .*\b20 .*\b0\.\d+",
        ),
    ],
    ids=["raw", "reordered", "before filtering", "after filtering", "not normalised"],
)
def test_what_is_not_is_refused_by_name(
    top: Callable, log_probs_after_filtering: bool, cause: str, dtype: torch.dtype
) -> None:
    with pytest.raises(RuntimeError, match=rf"^rollout: e 1 .*log-probs.*{cause}"):
        check_reported_log_probs("e 1", top, VOCAB, log_probs_after_filtering, dtype)


@pytest.mark.parametrize("logits", [torch.zeros(VOCAB), torch.full((VOCAB,), torch.nan)], ids=["alike", "broken"])
def test_weights_that_cannot_tell_are_asked_again_later(logits: torch.Tensor) -> None:
    assert not check_reported_log_probs("e 1", reporting(lambda temperature, top_k: logits), VOCAB, True, torch.float32)


def experts(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1)


def ended(versions: list[int], resume_from: Output | None = None) -> list[int]:
    """Row by row after a prompt of 3 tokens, each token of one version; the engine reports 1, 2, 3 …"""
    sequence = Sequence(Request("a", [7, 8, 9], SamplingParams(max_new_tokens=20), resume_from=resume_from))
    for version in versions:
        accept_scaled(sequence, [5], [-1.0], version, (1.0, 1.0, 1.0))
    total = 3 + len(sequence.output.token_ids)
    accept_reported_experts(sequence, experts(*range(1, total)), versions[-1])
    return sequence.output.routed_experts.flatten().tolist()


def test_tokens_of_an_earlier_version_have_unknown_experts():
    assert ended([4, 4, 4]) == [1, 2, 3, 4, 5]
    assert ended([3, 4, 4]) == [255, 255, 255, 4, 5], "the first token's pass read the prompt"
    assert ended([3, 3, 4]) == [255, 255, 255, 255, 5]


def test_what_an_earlier_output_knows_is_kept():
    earlier = Output([5, 5], [-1.0, -1.0], [3, 3], routed_experts=experts(50, 51, 52, 53))
    assert ended([4, 4], earlier) == [50, 51, 52, 53, 5, 6]
    same = Output([5, 5], [-1.0, -1.0], [4, 4])
    assert ended([4, 4], same) == [1, 2, 3, 4, 5, 6], "the prompt was computed again by the same version"
