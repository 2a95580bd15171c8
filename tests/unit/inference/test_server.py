"""The server as users meet it: a process of its own, asked through the official `openai` client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import tiny_model, tiny_tokenizer
from verl.inference.server import main
from verl.inference.serving.api import ApiError
from verl.inference.serving.app import in_options
from verl.inference.serving.openai_requests import ModelInfo, parse
from verl.protocol import DataProto
from verl.trainer.ppo.teachers import TeacherServer

KEY = "a secret"
MAX_LENGTH = 50_000
LONG = MAX_LENGTH - 100
PARSE_SECONDS = 3
PROMPT = "The quick brown fox"
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}{% if tools %}<|caller|>{% else %}<|assistant|>{% endif %}{% endif %}"
)
# What the model says after <|caller|>, token by token.
CALL = ["Let me see.\n", "<tool_call>", '{"name": "weather", ', '"arguments": ', '{"city": "Bonn"}}', "</tool_call>"]
BROKEN = 287
"""A token with an embedding that is not finite; it is never sampled."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def calling_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|caller|>", *CALL])
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


TOKENIZER = calling_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model that has one thing to say by heart.

    Dimensions of their own, which no layer writes, carry the tokens of CALL from the embedding to the head.
    """
    path = tmp_path_factory.mktemp("model") / "tiny"
    model = tiny_model(vocab_size=288, max_position_embeddings=MAX_LENGTH)
    links = [*TOKENIZER.convert_tokens_to_ids(["<|caller|>", *CALL]), TOKENIZER.eos_token_id]
    with torch.no_grad():
        own = slice(0, len(links))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[own] = 0
            layer.mlp.down_proj.weight[own] = 0
        model.model.embed_tokens.weight[:, own] = 0
        model.lm_head.weight[:, own] = 0
        for place, (token, following) in enumerate(itertools.pairwise(links)):
            model.model.embed_tokens.weight[token, place] = 10
            model.lm_head.weight[following, place] = 10
        model.model.embed_tokens.weight[:, len(links) - 1] = 0.02
        model.lm_head.weight[BROKEN, len(links) - 1] = -1000
        model.model.embed_tokens.weight[BROKEN] = float("nan")
    model.save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """What the server writes."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def server(folder, log):
    """The process: it runs while this module's tests do, and ends with 0 when it is told to."""
    command = [sys.executable, "-m", "verl.inference.server", "--model", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_API_KEY": KEY}
    with log.open("wb") as sink:
        options = ["--max-num-seqs", "32", "--allow-client-templates", "--max-parse-seconds", str(PARSE_SECONDS)]
        process = subprocess.Popen([*command, *options], stdout=sink, stderr=sink, env=environment)
    try:
        while not re.search(r"serving .* at http", log.read_text()):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


@pytest.fixture(scope="module")
def address(server, log):
    return re.search(r"serving .* at (http://127\.0\.0\.1:\d+)/v1", log.read_text())[1]


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture
def complete(client):
    def ask(prompt=PROMPT, **fields):
        own = {"ignore_eos": True, **fields.pop("extra", {})}
        return client.completions.create(model="tiny", prompt=prompt, extra_body=own, **{"max_tokens": 12, **fields})

    return ask


def unfinished(address):
    with urllib.request.urlopen(f"{address}/health") as answer:
        return json.load(answer)["unfinished_requests"]


def texts_of(stream):
    """Text and finish reason of each choice of a stream."""
    texts, reasons = {}, {}
    for event in stream:
        for choice in event.choices:
            piece = choice.delta.content if hasattr(choice, "delta") else choice.text
            texts[choice.index] = texts.get(choice.index, "") + (piece or "")
            assert choice.index not in reasons, "a piece after the last one"
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return [texts[index] for index in sorted(texts)], [reasons[index] for index in sorted(reasons)]


@torch.no_grad()
def greedy(folder, prompt, count):
    """The likeliest tokens after a prompt and their log-probs, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0]
    log_probs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    new = ids[len(prompt) :]
    return new.tolist(), log_probs.gather(1, new[:, None])[:, 0]


def test_the_first_line_appears_before_the_imports(server, log, folder):
    first, second, *_ = log.read_text().splitlines()
    assert str(folder) in first
    assert "imports" in second


def test_the_model_is_listed_under_its_names(client, folder):
    assert [model.id for model in client.models.list()] == [str(folder), "tiny"]
    assert client.models.retrieve("tiny").owned_by == "verl"
    assert client.models.retrieve("tiny").max_model_len == MAX_LENGTH


@pytest.mark.usefixtures("address")
def test_the_log_says_what_ends_an_answer(log):
    said = "end tokens: <|end|> = 1 (generation config, model config, tokenizer, chat template)."
    assert said in log.read_text()


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=6, seed=1
    )
    (choice,) = answer.choices
    assert choice.message.tool_calls is None
    assert (choice.message.role, choice.index) == ("assistant", 0)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode("<|user|>hi<|end|><|assistant|>"))
    assert 1 <= answer.usage.completion_tokens <= 6


@pytest.mark.parametrize(("temperature", "top_k"), [(0, -1), (0.5, 1)])
def test_tokens_and_log_probs_are_those_of_transformers(complete, folder, temperature, top_k):
    answer = complete(temperature=temperature, logprobs=0, extra={"top_k": top_k})
    told = answer.choices[0].logprobs
    ids, log_probs = greedy(folder, TOKENIZER.encode(PROMPT), 12)
    assert told.tokens == [TOKENIZER.decode([token]) for token in ids]
    assert torch.allclose(torch.tensor(told.token_logprobs), log_probs, atol=1e-5)


def test_log_probs_of_a_chat_are_those_of_its_prompt_as_a_completion(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_tokens=8,
        seed=5,
        temperature=0.7,
        top_p=0.9,
        logprobs=True,
        top_logprobs=0,
        extra_body={"ignore_eos": True, "top_k": 200},
    )
    entries = answer.choices[0].logprobs.content
    ascii_only = [entry for entry in entries if entry.bytes is not None]
    assert [bytes(entry.bytes).decode() for entry in ascii_only] == [entry.token for entry in ascii_only]
    streamed = client.completions.create(
        model="tiny", prompt="<|user|>hi<|end|><|assistant|>", max_tokens=8, seed=5, temperature=0.7, top_p=0.9,
        logprobs=0, stream=True, extra_body={"ignore_eos": True, "top_k": 200},
    )  # fmt: skip
    again = [log_prob for event in streamed for log_prob in event.choices[0].logprobs.token_logprobs]
    assert again == pytest.approx([entry.logprob for entry in entries], abs=1e-5)


def test_streamed_pieces_are_the_whole_answer(complete, client):
    whole = complete(n=3, seed=7)
    texts, reasons = texts_of(complete(n=3, seed=7, stream=True))
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length"] * 3
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "n": 2, "seed": 3}
    talk = client.chat.completions.create(**fields)
    events = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert texts_of(events)[0] == [choice.message.content for choice in talk.choices]
    assert events[-1].usage.model_dump(exclude_none=True) == talk.usage.model_dump(exclude_none=True)
    assert events[0].choices[0].delta.role == "assistant"


def test_seeds_reproduce_and_answers_differ(complete):
    first, again, other = (complete(n=3, seed=seed) for seed in (1, 1, 2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for answer in (first, other) for choice in answer.choices}) == 6
    assert complete().choices[0].text != complete().choices[0].text


def test_several_prompts_and_token_ids_are_answered_in_order(complete):
    alone = [complete(prompt=prompt, temperature=0).choices[0].text for prompt in ("abc", "xyz")]
    together = complete(prompt=[TOKENIZER.encode("abc"), TOKENIZER.encode("xyz")], temperature=0, n=2)
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (6, 48)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_its_stop_string(complete, stream):
    whole = complete(seed=11, max_tokens=40).choices[0].text
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if whole[i : i + 2].isascii())
    answer = complete(seed=11, max_tokens=40, stop=[stop, "never said"], stream=stream)
    texts, reasons = (
        texts_of(answer) if stream else ([answer.choices[0].text], [choice.finish_reason for choice in answer.choices])
    )
    assert texts == [whole.partition(stop)[0]]
    assert reasons == ["stop"]


def test_special_tokens_end_an_answer_and_are_not_told(complete):
    answer = complete(seed=1, max_tokens=4000, extra={"ignore_eos": False})
    assert answer.choices[0].finish_reason == "stop"
    assert "<|end|>" not in answer.choices[0].text


def test_many_at_once_get_what_each_gets_alone(address, complete):
    async def all_at_once():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as client:
            ask = client.completions.create
            fields = {"model": "tiny", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            return await asyncio.gather(*(ask(prompt=f"question {i}", seed=i, **fields) for i in range(80)))

    answers = asyncio.run(all_at_once())
    for i in (0, 39, 79):
        assert answers[i].choices[0].text == complete(f"question {i}", seed=i, max_tokens=8).choices[0].text
    assert len({answer.id for answer in answers}) == 80


def test_a_client_that_leaves_aborts_its_request(address, client, complete):
    def wait_until_left(count):
        while (now := unfinished(address)) > count:
            time.sleep(0.05)
        assert now == count

    # As long as the others and begun before them: while it goes on, they cannot have come to their own end.
    witness = complete(max_tokens=LONG, stream=True)
    next(iter(witness))
    stream = complete(max_tokens=LONG, stream=True, n=2)
    next(iter(stream))
    assert unfinished(address) == 3
    stream.close()
    wait_until_left(1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="tiny", prompt="x", max_tokens=LONG, extra_body={"ignore_eos": True}
        )
    wait_until_left(1)
    witness.close()
    wait_until_left(0)


def test_a_request_that_fails_in_the_engine_fails_alone(address, complete):
    alone = complete(temperature=0, max_tokens=200).choices[0].text
    stream = complete(temperature=0, max_tokens=200, stream=True)
    first = next(iter(stream)).choices[0].text
    with pytest.raises(openai.InternalServerError, match="log-prob nan") as caught:
        complete(prompt=[40, BROKEN])
    assert caught.value.type == "server_error"
    with pytest.raises(openai.APIError, match="log-prob nan"):
        list(complete(prompt=[40, BROKEN], stream=True))
    assert first + texts_of(stream)[0][0] == alone
    assert unfinished(address) == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"echo": 1}, "echo", "boolean"),
        ({"suffix": "x"}, "suffix", "suffix"),
        ({"n": 0}, "n", "1 (got 0)"),
        ({"n": 129}, "n", "128 (got 129)"),
        ({"n": True}, "n", "integer"),
        ({"temperature": "hot"}, "temperature", "number"),
        ({"temperature": -1}, "temperature", "0 (got -1)"),
        ({"temperature": 1e-40}, "temperature", "1e-05"),
        ({"top_p": 0}, "top_p", "0 (got 0)"),
        ({"min_tokens": 13}, "min_tokens", "12 tokens"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens"),
        ({"max_tokens": MAX_LENGTH}, "max_tokens", f"{MAX_LENGTH} tokens"),
        ({"stop": [""]}, "stop", "1 character"),
        ({"stop": "x" * 513}, "stop", "512 characters"),
        ({"stop": ["x"] * 17}, "stop", "16 items"),
        ({"logprobs": 21}, "logprobs", "20 (got 21)"),
        ({"presence_penalty": 3}, "presence_penalty", "2 (got 3)"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.001"),
        ({"logit_bias": {"999": 5}}, "logit_bias", "999; ids are 0 to 287"),
        ({"logit_bias": {"x": 5}}, "logit_bias", "pattern"),
        ({"logit_bias": {"9": 500}}, "logit_bias", "100 (got 500)"),
        ({"stop_token_ids": [2**63]}, "stop_token_ids", "stop_token_ids[0]"),
        ({"stop_token_ids": [2**70]}, None, "64 bits"),
        ({"temperature": 10**400}, None, "401 digits"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": 1}, "stream_options", "object"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"tempreature": 1}, "tempreature", "temperature?"),
        ({"prompt": [1, 999]}, "prompt", "999"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": {"a": 1}}, "prompt", '{"a": 1}'),
        ({"prompt": "x" * MAX_LENGTH}, "prompt", f"{MAX_LENGTH} tokens"),
    ],
)
def test_a_bad_request_is_refused_with_its_own_message(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", max_tokens=12, extra_body=fields)
    assert caught.value.param == param
    assert words in caught.value.body["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: .*1 item.*0"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"messages\[0\]\.content\[0\]\.text",
        ),
        ({"messages": [{"role": "user", "content": None}]}, r'messages\[0\]: content .*"content": null'),
        ({"top_logprobs": 3}, "top_logprobs: .* logprobs"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function"),
        ({"tools": [WEATHER], "tool_choice": "later"}, 'tool_choice: .*"later"'),
        ({"tool_choice": "required"}, "tool_choice .*tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, r"chat_template_kwargs: .*\btokenize\b"),
        ({"chat_template": "{{ messages[7].content }}"}, "template .*list object has no element 7"),
        ({"chat_template": "hello", "tools": [WEATHER]}, "^Error code: 400 - tools: .*template"),
        ({"response_format": {"type": "xml"}}, r'response_format\.type: .*"xml"'),
        ({"response_format": {"type": "json_object"}, "min_tokens": 5}, "response_format: .*min_tokens .*ignore_eos"),
    ],
)
def test_a_bad_chat_is_refused(client, fields, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], extra_body=fields)


def test_fields_that_ask_for_nothing_are_let_through(complete):
    neutral = {"user": "me", "best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "suffix": None, "echo": False}
    assert complete(seed=1, extra=neutral).choices[0].text == complete(seed=1).choices[0].text


def test_other_refusals_have_the_status_clients_expect(client, address):
    with pytest.raises(openai.NotFoundError, match=r"404 - .*'gpt-9'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    form = urllib.request.Request(f"{address}/v1/completions", b"prompt=x", {"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError, match="415"):
        urllib.request.urlopen(form)


# ---------------------------------------------------------------- log-probs, penalties, echo


@pytest.mark.parametrize("stream", [False, True])
def test_likeliest_tokens_and_an_echoed_prompt_are_those_of_transformers(complete, folder, stream):
    answer = complete(temperature=0, logprobs=3, echo=True, stream=stream, max_tokens=5)
    told = [event.choices[0] for event in answer] if stream else answer.choices
    prompt, decode = TOKENIZER.encode(PROMPT), AutoTokenizer.from_pretrained(folder).decode
    ids = prompt + greedy(folder, prompt, 5)[0]
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    assert "".join(choice.text for choice in told) == decode(ids, skip_special_tokens=True)
    assert [token for choice in told for token in choice.logprobs.tokens] == [decode([i]) for i in ids]
    values = [value for choice in told for value in choice.logprobs.token_logprobs]
    assert values[0] is None
    expected = log_probs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(values[1:]), expected, atol=1e-5)
    tops = [top for choice in told for top in choice.logprobs.top_logprobs]
    assert tops[0] is None
    for top, row, token in zip(tops[1:], log_probs, ids[1:], strict=True):
        # Several tokens may have the same text (half a character): the likeliest counts.
        likeliest = {decode([i]): row[i].item() for i in [token, *row.topk(3).indices.tolist()[::-1]]}
        assert top == pytest.approx(likeliest, abs=1e-5)


def test_a_prompt_can_be_scored_without_an_answer(complete, folder):
    """As evaluation harnesses ask for it: echo, logprobs, max_tokens=0."""
    answer = complete(prompt=[PROMPT, "abc"], logprobs=1, echo=True, max_tokens=0)
    assert [choice.text for choice in answer.choices] == [PROMPT, "abc"]
    assert [len(choice.logprobs.tokens) for choice in answer.choices] == [len(PROMPT), 3]
    assert answer.usage.completion_tokens == 0
    again = complete(prompt=TOKENIZER.encode("abc"), logprobs=1, echo=True, max_tokens=2)
    assert again.choices[0].logprobs.token_logprobs[:3] == answer.choices[1].logprobs.token_logprobs


def test_a_teacher_tells_the_log_probs_of_given_tokens_by_id(complete, address, folder, monkeypatch):
    """`prompt_logprobs`, and the client that distillation asks with: rows as a batch has them."""
    monkeypatch.setenv("VERL_API_KEY", KEY)
    ids = torch.tensor([[0, 0, 40, 41, 42, 43, 44], [50, 51, 52, 53, 54, 0, 0]])
    tensors = {"input_ids": ids, "attention_mask": (ids > 0).long(), "responses": ids[:, 4:]}
    teacher = TeacherServer("big", [address, f"{address}/v1"], top_k=25)
    found = teacher.columns(DataProto.from_dict(tensors)).batch
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row, (prompt, length) in enumerate(((2, 3), (4, 1))):
        tokens = ids[row][ids[row] > 0]
        with torch.no_grad():
            log_p = model(tokens[None]).logits[0].log_softmax(-1)[prompt - 1 : prompt - 1 + length]
        wanted = log_p.gather(1, tokens[prompt:][:, None])[:, 0]
        torch.testing.assert_close(found["teacher_log_prob"][row, :length], wanted, atol=1e-4, rtol=0)
        top = found["teacher_top_log_probs"][row, :length]
        torch.testing.assert_close(top, log_p.topk(25).values, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            top, log_p.gather(1, found["teacher_top_ids"][row, :length].long()), atol=1e-4, rtol=0
        )
        assert not found["teacher_log_prob"][row, length:].any()
    (choice,) = complete(prompt=[40, 41, 42], max_tokens=1, extra={"prompt_logprobs": 2}).choices
    assert choice.prompt_logprobs[0] is None
    assert "41" in choice.prompt_logprobs[1]
    assert len(choice.prompt_logprobs[1]) in (2, 3)
    with pytest.raises(openai.BadRequestError, match=r"prompt_logprobs: .*logprobs, echo"):
        complete(echo=True, extra={"prompt_logprobs": 2})


def test_a_server_of_another_vocabulary_or_none_at_all_is_no_teacher(address, monkeypatch):
    monkeypatch.setenv("VERL_API_KEY", KEY)
    TeacherServer("big", [address], 0).check(TOKENIZER, "student", 100)
    other = tiny_tokenizer()
    other.add_tokens([f"<|other{number}|>" for number in range(6)])
    with pytest.raises(ValueError, match=r"teacher_models\.big\.url: http.*model\.path = student: token 266 .*other5"):
        TeacherServer("big", [address], 0).check(other, "student", 100)
    monkeypatch.setattr("verl.utils.network.FIRST_PAUSE_S", 0.0)
    with pytest.raises(ConnectionError, match=r"teacher_models\.big\.url"):
        TeacherServer("big", ["http://127.0.0.1:9"], 0).check(TOKENIZER, "student", 100)


def test_a_server_that_cannot_read_the_longest_rows_is_refused_before_training(address, monkeypatch):
    """A row as long as all that it reads would be refused in the middle of training."""
    monkeypatch.setenv("VERL_API_KEY", KEY)
    teacher = TeacherServer("big", [address], 0)
    teacher.check(TOKENIZER, "student", MAX_LENGTH - 1)
    with pytest.raises(ValueError, match=r"teacher_models\.big\.url: http.*50000 .*50000 .*--max-model-len 50001\b"):
        teacher.check(TOKENIZER, "student", MAX_LENGTH)


def test_a_chat_is_told_the_likeliest_tokens(client):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**fields, logprobs=True, top_logprobs=4)
    for entry in answer.choices[0].logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-5)
        assert [top.logprob for top in entry.top_logprobs] == sorted(t.logprob for t in entry.top_logprobs)[::-1]
    streamed = client.chat.completions.create(**fields, logprobs=True, top_logprobs=4, stream=True)
    entries = [entry for event in streamed if event.choices[0].logprobs for entry in event.choices[0].logprobs.content]
    assert entries == answer.choices[0].logprobs.content


@pytest.mark.slow
def test_penalties_and_biases_reach_the_sampler(complete):
    forced = complete(logit_bias={str(TOKENIZER.encode("z")[0]): 100}).choices[0].text
    assert forced == "z" * 12
    varied = complete(logit_bias={str(TOKENIZER.encode(c)[0]): 100 for c in "xyz"}, presence_penalty=2, temperature=0)
    assert set(varied.choices[0].text[:3]) == set("xyz")
    plain, penalised = (
        complete(max_tokens=200, temperature=0, extra={"repetition_penalty": penalty}, logprobs=0).choices[0].logprobs
        for penalty in (1.0, 1.5)
    )
    assert len(set(penalised.tokens)) > len(set(plain.tokens))


# ---------------------------------------------------------------- tools


@pytest.fixture
def call(client):
    def ask(**fields):
        messages = [{"role": "user", "content": "How is it in Bonn?"}]
        given = {"model": "tiny", "temperature": 0, "tools": [WEATHER], "messages": messages, "max_tokens": 20}
        return client.chat.completions.create(**{**given, **fields})

    return ask


def test_a_called_tool_is_told_as_a_call(call):
    choice = call().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (called,) = choice.message.tool_calls
    assert (called.type, called.function.name) == ("function", "weather")
    assert json.loads(called.function.arguments) == {"city": "Bonn"}
    assert called.id.startswith("call_")


def test_a_streamed_call_is_the_same(call):
    content, calls, reasons = "", [], []
    for event in call(stream=True):
        delta = event.choices[0].delta
        content += delta.content or ""
        calls += delta.tool_calls or []
        reasons.append(event.choices[0].finish_reason)
    assert content == "Let me see."
    assert [(c.index, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        (0, "weather", {"city": "Bonn"})
    ]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_tool_that_must_be_called_is_begun_for_the_model(call):
    named = call(tool_choice={"type": "function", "function": {"name": "weather"}})
    assert json.loads(named.choices[0].message.tool_calls[0].function.arguments) == {"city": "Bonn"}
    assert named.choices[0].message.content is None
    begun = TOKENIZER.encode('<tool_call>\n{"name": "')
    assert call(tool_choice="required").usage.prompt_tokens == call().usage.prompt_tokens + len(begun)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_strict_tool_is_called_with_arguments_of_its_schema(client, choice):
    pytest.importorskip("llguidance")
    cities = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Köln"]}}, "required": ["city"]}
    tool = {"name": "weather", "strict": True, "parameters": {**cities, "additionalProperties": False}}
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Rain?"}],
        tools=[{"type": "function", "function": tool}],
        tool_choice=choice,
        temperature=1.5,
        max_tokens=80,
        n=4,
        seed=3,
    )
    for each in reply.choices:
        (call,) = each.message.tool_calls
        assert (each.finish_reason, call.function.name) == ("tool_calls", "weather")
        assert json.loads(call.function.arguments)["city"] in ("Bonn", "Köln")


def test_answers_have_the_format_that_is_asked_for(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"right": {"type": "boolean"}, "score": {"enum": [0, 1, 2]}},
        "required": ["right", "score"],
        "additionalProperties": False,
    }

    def ask(kind, **fields):
        asked = [{"role": "user", "content": "Rate it."}]
        own = {"response_format": {"type": kind, **fields}, "max_tokens": 60, "n": 3, "seed": 1, "logprobs": True}
        return client.chat.completions.create(model="tiny", messages=asked, **own).choices

    for choice in ask("json_schema", json_schema={"name": "rating", "schema": schema}):
        found = json.loads(choice.message.content)
        assert (type(found["right"]), found["score"] in (0, 1, 2)) == (bool, True)
        assert choice.finish_reason == "stop"
    assert all(choice.message.content.startswith("{") for choice in ask("json_object"))
    assert not any(choice.message.content.startswith("{") for choice in ask("text"))
    for fields, words in (({}, '"json_schema": {"schema"'), ({"json_schema": {"schema": {"type": "odd"}}}, r"\bodd\b")):
        with pytest.raises(openai.BadRequestError, match=words):
            ask("json_schema", **fields)


def test_a_tool_that_may_not_be_called_is_not_offered(call, client):
    fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
    without = client.chat.completions.create(**fields)
    assert call(**fields, tool_choice="none").usage.prompt_tokens == without.usage.prompt_tokens


def test_earlier_calls_and_their_results_are_written_by_the_template(client):
    called = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    text = "<|user|>hi<|end|><|assistant|><tool_call>weather(Bonn)<|end|><|tool|>rain<|end|><|assistant|>"
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(text))
    called["function"]["arguments"] = "{city"
    with pytest.raises(openai.BadRequestError, match=r"(?s)tool_calls.*function.arguments"):
        client.chat.completions.create(model="tiny", messages=messages)


# ---------------------------------------------------------------- what one client may not do to the others


@contextlib.contextmanager
def answering(address, seconds=2.0):
    """While this is open, /health is asked all the time, and answers each time within `seconds`."""
    slowest, ended = [], threading.Event()

    def ask():
        after = False
        while not after:
            after = ended.is_set()  # once more: a refusal may come sooner than the second question
            began = time.monotonic()
            unfinished(address)
            slowest.append(time.monotonic() - began)
            time.sleep(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert max(slowest) < seconds


def raw(address, body, path="/v1/completions"):
    """(status, what came) of a body that a client would not send."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, body, headers), timeout=100) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 9000000000 }}"


@pytest.mark.parametrize(("template", "words"), [pytest.param(ENDLESS, "3 s", marks=pytest.mark.slow), (HUGE, "2 GB")])
def test_a_template_that_takes_too_much_is_ended(client, address, template, words):
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with answering(address):
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(**ask, extra_body={"chat_template": template})
        assert client.chat.completions.create(**ask).usage.completion_tokens == 1


def test_too_many_answers_are_refused_before_they_cost_anything(address):
    body = json.dumps({"prompt": ["hello"] * 20_000, "n": 128}).encode()
    with answering(address):
        status, told = raw(address, body)
    assert (status, told["error"]["param"]) == (400, "n")
    assert "2560000 responses" in told["error"]["message"]
    assert "1024" in told["error"]["message"]
    assert unfinished(address) == 0


def test_a_prompt_that_is_far_too_long_costs_neither_time_nor_memory(address, server):
    before = psutil.Process(server.pid).memory_info().rss
    with answering(address):
        assert raw(address, json.dumps({"prompt": "x " * 10_000_000}).encode())[0] == 413
        status, told = raw(address, json.dumps({"prompt": "x " * 3_900_000}).encode())
    assert (status, told["error"]["code"]) == (400, "context_length_exceeded")
    assert psutil.Process(server.pid).memory_info().rss - before < 100 * 2**20


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a\\ud800b"}', "surrogate"),
        (b'{"prompt": "a\xed\xa0\x80b"}', "not UTF-8"),
        (b'{"prompt": "a\xffb"}', "not valid JSON"),
        (b'{"prompt": "x", "\\udc00": 1}', "surrogate"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"temperature": 1e999}', "1e999 is too large"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a number"),
        (b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"", "not valid JSON"),
    ],
)
def test_what_is_no_request_is_refused_in_the_shape_of_the_api(address, body, words):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, told = raw(address, body, path)
        assert status == 400
        assert words in told["error"]["message"]
        assert told["error"]["type"] == "invalid_request_error"


def test_templates_of_clients_are_not_run_unless_the_operator_says_so():
    model_info = ModelInfo(("tiny",), 100, 288, frozenset(), max_responses=1, client_templates=False, longest_token=20)
    messages = [{"role": "user", "content": "hi"}]
    for own in ({"chat_template": "x"}, {"chat_template_kwargs": {"chat_template": "x"}}):
        with pytest.raises(ApiError, match="--allow-client-templates"):
            parse("/v1/chat/completions", json.dumps({"messages": messages, **own}).encode(), model_info, TOKENIZER)


def test_what_cannot_be_started_says_why(folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--model", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "Choose another" in capsys.readouterr().err
    assert main(["--model", str(folder), "--port", "0", "--max-model-len", str(MAX_LENGTH + 1)]) == 2
    assert "--max-model-len: 50001 is more than the 50000 positions" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "nothing"), "--port", "0", "--host", "0.0.0.0"]) == 2
    told = capsys.readouterr().err
    assert "anyone who can connect to 0.0.0.0 can use this server" in told
    assert "--model: there is no" in told


def test_errors_of_the_engine_name_options_of_this_program():
    told = "max_model_len: too long. Raise gpu_memory_utilization, or lower max_new_tokens."
    assert in_options(told) == "--max-model-len: too long. Raise --gpu-memory-utilization, or lower max_new_tokens."
