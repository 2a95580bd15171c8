"""The gateway as agents meet it: through the official `openai` and `anthropic` clients."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
import urllib.error
import urllib.request

import pytest

from tests.support.gateway_server import END, running_gateway

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
WEATHER_ANTHROPIC = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)
ASK = {"role": "user", "content": "How warm is it?"}


# The clients are imported by the tests that use them: that takes seconds, and every pytest worker imports every file.
def open_ai(gateway, name="s"):
    import openai

    return openai.OpenAI(base_url=f"{gateway.base_url(name)}/v1", api_key="any", max_retries=0)


def anthropic_client(gateway, name="s"):
    import anthropic

    return anthropic.Anthropic(base_url=gateway.base_url(name), api_key="any", max_retries=0)


def fetched(gateway, name="s", path="", method="GET", body=None):
    request = urllib.request.Request(
        gateway.base_url(name) + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
        method=method,
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def ids_of(gateway, text):
    return gateway.model.tokenizer._own(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_turns_reuse_ids_and_tokenise_only_the_suffix(stream):
    with running_gateway(["  Warm, \n", "Why?"].__getitem__) as gateway, open_ai(gateway) as client:

        def ask(messages):
            answer = client.chat.completions.create(model="gpt-9", messages=messages, stream=stream, temperature=0.5)
            if not stream:
                assert answer.model == "gpt-9"
                assert answer.choices[0].finish_reason == "stop"
                return answer.choices[0].message
            pieces = [event.choices[0] for event in answer]
            assert pieces[-1].finish_reason == "stop"
            assert len(pieces) > 4, "tokens are told as they come"
            return {"role": "assistant", "content": "".join(piece.delta.content or "" for piece in pieces)}

        first = ask([ASK])
        ask([ASK, first, {"role": "user", "content": "And in Rome?"}])
        start, suffix = gateway.model.tokenizer.texts
        assert "How warm" in start
        assert "How warm" not in suffix
        assert "Warm, " not in suffix
        assert "And in Rome?" in suffix
        one, two = gateway.model.requests
        assert two.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
        said = [*ids_of(gateway, "  Warm, \n"), END]
        assert two.prompt_ids[len(one.prompt_ids) :][: len(said)] == said
        state = fetched(gateway)
        assert state["requests"] == {"start": 1, "extension": 1, "cut_off": 0, "under_way": 0}
        assert [node["parent"] for node in state["nodes"]] == [None, 0]
        assert state["nodes"][0]["token_ids"] == said
        assert state["nodes"][0]["log_probs"] == [-0.001 * (i + 1) for i in range(len(said))]
        assert state["nodes"][0]["versions"] == [7] * len(said)
        assert state["rows"] == [{"nodes": [0, 1], "trained": [True, True]}]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_turns_with_tools_reuse_ids(stream):
    with running_gateway([CALLS, "Warm."].__getitem__) as gateway, anthropic_client(gateway) as client:

        def ask(messages):
            fields = {"model": "claude", "max_tokens": 500, "messages": messages, "tools": [WEATHER_ANTHROPIC]}
            if not stream:
                return client.messages.create(system="Be kind.", **fields)
            with client.messages.stream(system="Be kind.", **fields) as events:
                return events.get_final_message()

        first = ask([ASK])
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert first.content[0].text == "Let me see."
        assert [block.input for block in first.content[1:]] == [{"city": "Bonn"}, {"city": "Rome"}]
        results = [{"type": "tool_result", "tool_use_id": b.id, "content": "20 °C"} for b in first.content[1:]]
        second = ask([ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}])
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "Warm.")
        assert second.usage.output_tokens == len("Warm.") + 1
        assert second.usage.input_tokens == len(gateway.model.requests[1].prompt_ids)
        assert fetched(gateway)["requests"]["extension"] == 1
        assert gateway.model.tokenizer.texts[-1].count("20 °C") == 2
        assert "Bonn" not in gateway.model.tokenizer.texts[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools_are_called_and_answered(stream):
    with running_gateway([CALLS, "Warm."].__getitem__) as gateway, open_ai(gateway) as client:
        fields = {"model": "m", "messages": [ASK], "tools": [WEATHER]}
        if stream:
            pieces = [event.choices[0] for event in client.chat.completions.create(stream=True, **fields)]
            assert pieces[-1].finish_reason == "tool_calls"
            calls = [call for piece in pieces for call in piece.delta.tool_calls or []]
            content = "".join(piece.delta.content or "" for piece in pieces)
            assert sum(bool(piece.delta.content) for piece in pieces) > 3, "text before the calls is told as it comes"
            message = {"role": "assistant", "content": content, "tool_calls": [call.model_dump() for call in calls]}
        else:
            choice = client.chat.completions.create(**fields).choices[0]
            assert choice.finish_reason == "tool_calls"
            message, calls, content = choice.message, choice.message.tool_calls, choice.message.content
        assert content == "Let me see."
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Bonn", "Rome"]
        results = [{"role": "tool", "tool_call_id": call.id, "content": "20"} for call in calls]
        again = client.chat.completions.create(**{**fields, "messages": [ASK, message, *results]}, tool_choice="none")
        assert again.choices[0].message.content == "Warm."
        assert fetched(gateway)["requests"]["extension"] == 1, (
            "tools that may not be called now are still in the context"
        )


def test_a_tool_that_must_be_called_is_begun_for_the_model():
    rest = '{"city": "Bonn"}}\n</tool_call>'
    with running_gateway(lambda _: rest) as gateway, open_ai(gateway) as client:
        choice = {"type": "function", "function": {"name": "weather"}}
        message = client.chat.completions.create(model="m", messages=[ASK], tools=[WEATHER], tool_choice=choice)
        (call,) = message.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bonn"}')
        assert fetched(gateway)["nodes"][0]["token_ids"] == [*ids_of(gateway, rest), END], "only what the model said"


def test_a_malformed_call_is_told_as_text():
    written = '<tool_call>{"name": "weather", "arguments": {"city"</tool_call>'
    with running_gateway(lambda _: written) as gateway, open_ai(gateway) as client:
        choice = client.chat.completions.create(model="m", messages=[ASK], tools=[WEATHER]).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (written, None)
        assert choice.finish_reason == "stop"


def test_a_client_that_strips_white_space_branches_and_one_that_asks_again_makes_a_sibling():
    with running_gateway([" Warm.\n", "Cold.", "Why?", "How?"].__getitem__) as gateway, open_ai(gateway) as client:

        def ask(*messages):
            said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
            return {"role": "assistant", "content": said}

        ask(ASK)
        again = ask(ASK)
        assert again["content"] == "Cold.", "another answer, not the same one again"
        stripped = {"role": "assistant", "content": " Warm.\n".strip()}
        ask(ASK, stripped, {"role": "user", "content": "Sure?"})
        ask(ASK, again, {"role": "user", "content": "Sure?"})
        state = fetched(gateway)
        assert state["requests"] == {"start": 1, "retry": 1, "branch": 1, "extension": 1, "cut_off": 0, "under_way": 0}
        assert [node["parent"] for node in state["nodes"]] == [None, None, None, 1]
        assert [row["nodes"] for row in state["rows"]] == [[2], [1, 3]], "what was asked for again counts for nothing"


def test_stop_strings_and_limits_end_answers_as_each_api_says():
    with running_gateway(lambda _: "One. Two. Three.") as gateway:
        with open_ai(gateway) as client:
            create = client.chat.completions.create
            stopped = create(model="m", messages=[ASK], stop=["Two"], logprobs=True).choices[0]
            assert (stopped.message.content, stopped.finish_reason) == ("One. ", "stop")
            assert [entry.token for entry in stopped.logprobs.content] == list("One. Two")
            cut = create(model="m", messages=[ASK], max_completion_tokens=3).choices[0]
            assert (cut.message.content, cut.finish_reason) == ("One", "length")
        with anthropic_client(gateway) as client:
            asked = {"model": "m", "messages": [ASK]}
            stopped = client.messages.create(**asked, max_tokens=99, stop_sequences=["Two", "Three"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Two")
            assert client.messages.create(**asked, max_tokens=3).stop_reason == "max_tokens"


def test_errors_have_the_shape_of_their_api():
    import anthropic
    import openai

    with running_gateway(lambda _: "x" * 50, max_model_len=60, max_turns=1) as gateway:
        with open_ai(gateway) as client:
            create = client.chat.completions.create
            with pytest.raises(openai.BadRequestError, match=r"\b60 tokens.* 103 tokens.*--max-model-len") as caught:
                create(model="m", messages=[{"role": "user", "content": "x" * 100}])
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(openai.BadRequestError, match=r"400 - n: 2\b"):
                create(model="m", messages=[ASK], n=2)
            with pytest.raises(openai.BadRequestError, match=r"400 - .*temprature.*temperature"):
                create(model="m", messages=[ASK], extra_body={"temprature": 1})
            assert len(create(model="m", messages=[ASK]).choices[0].message.content) < 50, "what fits into the model"
            with pytest.raises(openai.PermissionDeniedError, match=r"403 - .*--max-session-turns"):
                create(model="m", messages=[ASK])
        with anthropic_client(gateway, "t") as client:
            with pytest.raises(
                anthropic.BadRequestError, match=r"\b60 tokens.* 103 tokens.*--max-model-len"
            ) as refused:
                client.messages.create(model="m", max_tokens=5, messages=[{"role": "user", "content": "x" * 100}])
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.BadRequestError, match=r"400 - .*temprature"):
                client.messages.create(model="m", max_tokens=5, messages=[ASK], extra_body={"temprature": 1})
            with pytest.raises(anthropic.NotFoundError):
                client.post("/v2/messages", body={}, cast_to=object)


def test_rewards_are_posted_and_the_session_is_read_and_ended():
    with running_gateway(lambda _: "Warm.") as gateway, open_ai(gateway) as client:
        client.chat.completions.create(model="m", messages=[ASK])
        with pytest.raises(urllib.error.HTTPError, match="400"):
            fetched(gateway, path="/reward_info", method="POST", body={"reward": 1})
        fetched(gateway, path="/reward_info", method="POST", body={"reward_info": {"reward": 0.5, "steps": 2}})
        state = fetched(gateway, method="DELETE")
        assert state["reward_info"] == {"reward": 0.5, "steps": 2}
        assert state["status"] == "closed"
        assert len(state["nodes"]) == 1
        assert len(gateway.sessions) == 0
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_sessions_that_run_at_once_do_not_meet():
    with running_gateway(lambda number: f"answer {number}", pace_s=0.001) as gateway:

        def talk(name):
            messages = [{"role": "user", "content": f"I am {name}."}]
            with open_ai(gateway, name) as client:
                for _ in range(3):
                    answer = client.chat.completions.create(model="m", messages=messages)
                    messages += [answer.choices[0].message, {"role": "user", "content": "Go on."}]

        names = [f"s{number}" for number in range(8)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(talk, names))
        for name in names:
            state = fetched(gateway, name)
            assert state["requests"] == {"start": 1, "extension": 2, "cut_off": 0, "under_way": 0}
            assert state["nodes"][0]["messages"] == [{"role": "user", "content": f"I am {name}."}]


def test_a_client_that_leaves_aborts_its_answer():
    with running_gateway(lambda _: "x" * 3000, pace_s=0.01) as gateway, open_ai(gateway) as client:
        stream = client.chat.completions.create(model="m", messages=[ASK], stream=True)
        next(iter(stream))
        stream.close()
        for _ in range(500):
            if gateway.model.aborted:
                break
            time.sleep(0.01)
        state = fetched(gateway)
        assert gateway.model.aborted == 1
        assert (state["requests"]["cut_off"], state["nodes"]) == (1, [])


def test_a_request_that_the_engine_rejects_is_not_cut_off():
    import openai

    def reject(_):
        raise ValueError("no tokens left")

    with running_gateway(reject) as gateway, open_ai(gateway) as client:
        with pytest.raises(openai.BadRequestError, match="no tokens left"):
            client.chat.completions.create(model="m", messages=[ASK])
        assert fetched(gateway)["requests"] == {"start": 1, "cut_off": 0, "under_way": 0}


def test_a_session_that_is_ended_cuts_off_its_requests():
    import openai

    with running_gateway(lambda _: "x" * 3000, pace_s=0.01) as gateway, open_ai(gateway) as client:
        failed = []

        def ask():
            with pytest.raises(openai.APIStatusError, match="410 - ") as caught:
                client.chat.completions.create(model="m", messages=[ASK])
            failed.append(caught)

        thread = threading.Thread(target=ask)
        thread.start()
        while not gateway.model.requests:
            time.sleep(0.01)
        assert fetched(gateway, method="DELETE")["requests"]["cut_off"] == 1
        thread.join(10)
        assert failed
        assert gateway.model.aborted == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_stream_of_a_session_that_is_ended_ends_with_an_error(path):
    with running_gateway(lambda _: "x" * 3000, pace_s=0.01) as gateway:
        body = json.dumps({"model": "m", "messages": [ASK], "stream": True, "max_tokens": 3000}).encode()
        request = urllib.request.Request(gateway.base_url("s") + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            assert fetched(gateway, method="DELETE")["requests"] == {"start": 1, "cut_off": 1, "under_way": 0}
            last = json.loads(answer.read().decode().strip().splitlines()[-1].removeprefix("data: "))
        assert last["error"]["message"] == "this session has ended."
        assert ("type" in last) == (path == "/v1/messages")


def test_a_stream_that_has_no_news_says_so():
    with running_gateway(lambda _: "ab", pace_s=0.3, ping_s=0.05) as gateway:
        body = json.dumps({"model": "m", "messages": [ASK], "stream": True, "max_tokens": 5}).encode()
        for path, ping in (("/v1/chat/completions", b": ping\n\n"), ("/v1/messages", b"event: ping\n")):
            request = urllib.request.Request(
                gateway.base_url("s") + path, body, {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request) as answer:
                assert ping in answer.read()
