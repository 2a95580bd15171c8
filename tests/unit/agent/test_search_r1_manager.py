"""LLMGenerationManager: a batch that takes its turns together, a scripted model in the real engine, a real service."""

from __future__ import annotations

import asyncio

import pytest
import torch

from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
from tests.support.chat_models import chat_tokenizer
from tests.support.requests import requests_of
from tests.support.script_runner import scripted_engine
from tests.support.search_server import serving, write_corpus
from verl.agent.search_loop import FAILED, INVALID
from verl.config import RolloutConfig, as_config
from verl.protocol import DataProto
from verl.search.client import format_documents
from verl.search.retriever import open_retriever
from verl.types.trajectory import Turn
from verl.workers.rollout.prompts import sampling_params, trajectories_from_prompts
from verl.workers.rollout.training_rows import rows_from_trajectories

pytest.importorskip("bm25s")
TOKENIZER = chat_tokenizer("qwen2_5")
TEXTS = {"Tavor": "The colour of Tavor is red.", "Belan": "The colour of Belan is blue."}


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


class Group:
    """A worker group of two ranks, as far as the manager sees it: the real engine behind `generate_sequences`."""

    world_size = 2

    def __init__(self, conversations):
        wholes = [[token for _, ids in turns for token in ids] for turns in conversations]

        def speak(seen):
            whole = next(whole for whole in wholes if whole[: len(seen)] == list(seen))
            return whole[len(seen)]

        self.engine, self.calls = scripted_engine(speak, tokenizer=TOKENIZER), 0

    def generate_sequences(self, prompts):
        assert len(prompts) % self.world_size == 0
        self.calls += 1
        params = sampling_params(as_config(RolloutConfig, {}), prompts.meta_info)
        begun = trajectories_from_prompts(prompts)
        requests = requests_of(prompts, params, seed=0)

        async def answers():
            return await asyncio.gather(*map(self.engine.generate, requests))

        for one, output in zip(begun, asyncio.run(answers()), strict=True):
            one.rows[0].turns.append(Turn.sampled(output))
        return rows_from_trajectories(begun, TOKENIZER.pad_token_id or 0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c.jsonl", TEXTS)


def run(conversations, url, **lengths):
    prompts = [turns[0][1] for turns in conversations]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    group = Group(conversations)
    sizes = {"max_turns": 2, "max_start_length": 64, "max_prompt_length": 512, "max_response_length": 64} | lengths
    manager = LLMGenerationManager(
        TOKENIZER, group, GenerationConfig(**sizes, max_obs_length=200, search_url=url, topk=2)
    )
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": mask}, meta_info={"temperature": 1.0})
    try:
        return manager, manager.run_llm_loop(batch, ids), group.calls
    finally:
        group.engine.close()


@pytest.mark.processes
def test_rows_take_their_turns_together_and_masks_say_whose_tokens_are_whose(corpus):
    local = open_retriever(str(corpus), index_path=str(corpus.parent / "kept"))
    found = format_documents(local.retrieve(["colour of Belan"], 2)[0]).rstrip()
    told = encode("\n\n<information>") + encode(found) + encode("</information>\n\n")
    conversations = [
        [
            ("prompt", encode("What colour has Belan?")),
            ("model", encode("<search>colour of Belan</search>")),
            ("told", told),
            ("model", encode("<answer>blue</answer>")),
        ],
        [("prompt", encode("Say a word.")), ("model", encode("<answer>word</answer>"))],
        [
            ("prompt", encode("Go on.")),
            ("model", encode("<search></search>")),
            ("told", encode(INVALID)),
            ("model", encode("<answer>on</answer>")),
        ],
    ]
    with serving(corpus) as server:
        manager, batch, calls = run(conversations, server.url)
    assert calls == 2  # the row that has answered waits for nobody's turn
    columns, start = batch.batch, batch.batch["prompts"].shape[1]
    for row, turns in enumerate(conversations):
        expected = [(token, who == "model") for who, ids in turns[1:] for token in ids]
        size = len(expected)
        assert columns["responses"][row, :size].tolist() == [token for token, _ in expected]
        assert columns["response_mask"][row].tolist() == [int(ours) for _, ours in expected] + [0] * (
            columns["responses"].shape[1] - size
        )
        assert columns["prompts"][row][-len(turns[0][1]) :].tolist() == turns[0][1]
    assert torch.equal(columns["info_mask"][:, start:], columns["response_mask"])
    assert torch.equal(columns["info_mask"][:, :start], columns["attention_mask"][:, :start])
    assert bool((columns["rollout_log_probs"][columns["response_mask"].bool()] < 0).all())
    stats = batch.meta_info
    assert (stats["turns_stats"], stats["valid_action_stats"]) == ([2, 1, 2], [2, 1, 1])
    assert (stats["valid_search_stats"], stats["search_failures"]) == ([1, 0, 0], 0)
    assert stats["active_mask"] == [False, False, False], "every row has answered"
    assert stats["temperature"] == 1.0
    masked, metrics = manager._create_loss_mask(batch, {})
    assert torch.equal(masked.batch["loss_mask"], columns["response_mask"])
    assert 0 < metrics["state_tokens/coverage"] < 1


def test_no_retriever_costs_a_turn_and_the_last_turn_does_not_search():
    ask = encode("<search>colour of Belan</search>")
    told = encode("\n\n<information>") + encode(FAILED) + encode("</information>\n\n")
    conversation = [("prompt", encode("What?")), ("model", ask), ("told", told), ("model", ask)]
    _, batch, calls = run([conversation], "http://127.0.0.1:9/retrieve", max_turns=1)
    assert calls == 2
    assert batch.meta_info["search_failures"] == 1
    assert batch.meta_info["active_mask"] == [True], "the row ended without an answer"
    assert batch.batch["responses"][0].tolist() == ask + told + ask


def test_a_row_without_room_for_what_it_is_told_ended_by_length():
    prompt, ask = encode("What?"), encode("<search>colour of Belan</search>")
    dead = "http://127.0.0.1:9/retrieve"
    _, batch, _ = run([[("prompt", prompt), ("model", ask)]], dead, max_prompt_length=len(prompt + ask) + 3)
    assert batch.batch["responses"][0].tolist() == ask
    assert batch.non_tensor_batch["finish_reason"].tolist() == ["length"]


def test_prompts_are_cut_at_their_beginning_and_context_at_its_end():
    prompt, ask = encode("one two three four five"), encode("<search>Belan</search>")
    cut = prompt[-3:]
    both = [[("prompt", ids), ("model", ask)] for ids in (prompt, cut)]
    _, batch, calls = run(both, None, max_turns=0, max_start_length=3)
    assert calls == 1
    assert batch.batch["prompts"].tolist() == [cut, cut]
    with pytest.raises(ValueError, match=r"GenerationConfig\.search_url"):
        run([[("prompt", cut), ("model", ask)]], None)
