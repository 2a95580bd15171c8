"""The server as users meet it: a process of its own, asked through the official `openai` client."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import pytest
import torch
from tiny import save_tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from verl.inference.server import main
from verl.inference.serving.app import in_options

KEY = "a secret"
MAX_LENGTH = 50_000
TOKENIZER = tiny_tokenizer()
PROMPT = "The quick brown fox"

# The command sets up logging.
pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=MAX_LENGTH)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """What the server writes."""
    return tmp_path_factory.mktemp("log") / "server.log"


@pytest.fixture(scope="module")
def address(folder, log):
    """http://…: the server runs while this module's tests do, and ends with 0 when it is told to."""
    command = [sys.executable, "-m", "verl.inference.server", "--model", str(folder), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_API_KEY": KEY}
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "--max-num-seqs", "32"], stdout=sink, stderr=sink, env=environment)
    try:
        while not (found := re.search(r"serving .* at (http://127\.0\.0\.1:\d+)/v1", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


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
        return int(re.search(rb'"unfinished_requests": (\d+)', answer.read())[1])


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


def test_the_model_is_listed_under_its_names(client, folder):
    assert [model.id for model in client.models.list()] == [str(folder), "tiny"]
    assert client.models.retrieve("tiny").owned_by == "verl"


@pytest.mark.usefixtures("address")
def test_the_log_says_what_ends_an_answer(log):
    said = "end tokens: <|end|> = 1 (generation config, model config, tokenizer, chat template)."
    assert said in log.read_text()


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=6, seed=1
    )
    (choice,) = answer.choices
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
    witness = complete(max_tokens=MAX_LENGTH, stream=True)
    next(iter(witness))
    stream = complete(max_tokens=MAX_LENGTH, stream=True, n=2)
    next(iter(stream))
    assert unfinished(address) == 3
    stream.close()
    wait_until_left(1)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="tiny", prompt="x", max_tokens=MAX_LENGTH, extra_body={"ignore_eos": True}
        )
    wait_until_left(1)
    witness.close()
    wait_until_left(0)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"echo": True}, "echo", "not done"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": True}, "n", "whole number"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": -1}, None, "temperature"),
        ({"top_p": 0}, None, "top_p"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"logprobs": 5}, "logprobs", "only 0"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": 1}, "stream_options", "object"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "not done"),
        ({"tempreature": 1}, "tempreature", "Did you mean temperature?"),
        ({"prompt": [1, 999]}, "prompt", "no token 999"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": {"a": 1}}, "prompt", "must be a text"),
        ({"prompt": "x" * MAX_LENGTH}, "prompt", f"maximum context length is {MAX_LENGTH} tokens"),
    ],
)
def test_a_bad_request_is_refused_with_its_own_message(client, fields, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", extra_body=fields)
    assert caught.value.param == param
    assert words in caught.value.body["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "list of"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type text"),
        ({"messages": [{"role": "user", "content": None}]}, "must be a text"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_bad_chat_is_refused(client, fields, words):
    with pytest.raises(openai.BadRequestError, match=re.escape(words)):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], extra_body=fields)


def test_fields_that_ask_for_nothing_are_let_through(complete):
    neutral = {"user": "me", "best_of": 1, "frequency_penalty": 0, "logit_bias": {}, "suffix": None}
    assert complete(seed=1, extra=neutral).choices[0].text == complete(seed=1).choices[0].text


def test_other_refusals_have_the_status_clients_expect(client, address):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError, match="/v1/completions"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    form = urllib.request.Request(f"{address}/v1/completions", b"prompt=x", {"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(form)


def test_what_cannot_be_started_says_why(folder, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--model", str(folder), "--port", str(taken.getsockname()[1])]) == 2
    assert "Choose another" in capsys.readouterr().err
    assert main(["--model", str(folder), "--port", "0", "--max-model-len", str(MAX_LENGTH + 1)]) == 2
    assert "--max-model-len: 50001 is more than the 50000 positions" in capsys.readouterr().err
    assert main(["--model", str(tmp_path / "nothing"), "--port", "0", "--host", "0.0.0.0"]) == 2
    told = capsys.readouterr().err
    assert "anybody who reaches 0.0.0.0 may use this server" in told
    assert "--model: there is no" in told


def test_errors_of_the_engine_name_options_of_this_program():
    told = "max_model_len: too long. Raise gpu_memory_utilization, or lower max_new_tokens."
    assert in_options(told) == "--max-model-len: too long. Raise --gpu-memory-utilization, or lower max_new_tokens."
