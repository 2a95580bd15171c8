"""Loops by name, by place and by list; what a loop's base class offers; the trace of its calls."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.chat_models import chat_tokenizer
from tests.support.tiny import tiny_tokenizer
from verl.agent.gateway.agent import load_agent
from verl.agent.loop import (
    AGENT_LOOPS,
    AgentLoopMetrics,
    AgentLoopOutput,
    _repetition_start,
    find_loop,
    listed_loops,
    read_loop_file,
    register,
)
from verl.agent.single_turn import SingleTurnAgentLoop
from verl.utils.counter_noise import sample_key
from verl.workers.rollout.call_trace import CallTrace, current_trace, tracing


def test_loops_are_found_by_name_by_decorator_by_place_and_by_list(tmp_path: Path):
    assert find_loop("single_turn_agent", {})[0] is SingleTurnAgentLoop

    @register("mine_of_test_loop")
    class Mine(SingleTurnAgentLoop):
        pass

    try:
        assert find_loop("mine_of_test_loop", {})[0] is Mine
    finally:
        del AGENT_LOOPS["mine_of_test_loop"]
    path = "verl.agent.single_turn.SingleTurnAgentLoop"
    agent = SimpleNamespace(agent_loop_config_path=None, default_agent_loop=path)
    assert find_loop(path, listed_loops(agent))[0] is SingleTurnAgentLoop
    file = tmp_path / "own.py"
    file.write_text(
        "from verl.agent.single_turn import SingleTurnAgentLoop\nclass Own(SingleTurnAgentLoop):\n    pass\n"
    )
    listing = tmp_path / "loops.yaml"
    listing.write_text(f"- name: listed\n  _target_: {file}:Own\n  depth: 3\n")
    cls, keywords = find_loop("listed", read_loop_file(str(listing)))
    assert (cls.__name__, keywords) == ("Own", {"depth": 3})
    agent = SimpleNamespace(agent_loop_config_path=str(listing), default_agent_loop=f"{file}:Own")
    travelled = pickle.loads(pickle.dumps(listed_loops(agent)))
    file.unlink()  # as on another node
    assert find_loop(f"{file}:Own", travelled)[0].__name__ == find_loop("listed", travelled)[0].__name__ == "Own"


def test_the_function_that_a_gateway_agent_runs_travels_as_loops_do(tmp_path: Path):
    file, listing = tmp_path / "agent.py", tmp_path / "loops.yaml"
    file.write_text("def go(base_url, prompt, request_kwargs, metadata):\n    return {'reward': 0.5}\n")
    target = "verl.agent.gateway.agent.GatewayAgentLoop"
    listing.write_text(f"- {{name: mine, _target_: {target}, run_agent: '{file}:go'}}\n")
    travelled = pickle.dumps(read_loop_file(str(listing)))
    file.unlink()  # as on another node
    run_agent = find_loop("mine", pickle.loads(travelled))[1]["run_agent"]
    assert load_agent(run_agent)("", [], {}, {}) == {"reward": 0.5}
    with pytest.raises(ValueError, match=r"(?s)run_agent.*agent\.py"):
        read_loop_file(str(listing))


def test_a_name_that_is_no_loop_says_which_there_are(tmp_path: Path):
    with pytest.raises(ValueError, match=r"(?s)agent_name.*'single_turn'.*'single_turn_agent'"):
        find_loop("single_turn", {})
    agent = SimpleNamespace(agent_loop_config_path=None, default_agent_loop="verl.types.trajectory.Turn")
    with pytest.raises(ValueError, match=r"verl\.types\.trajectory\.Turn.*AgentLoopBase"):
        find_loop("verl.types.trajectory.Turn", listed_loops(agent))
    bad = tmp_path / "loops.yaml"
    bad.write_text("- name: x\n")
    with pytest.raises(ValueError, match=r"_target_"):
        read_loop_file(str(bad))


def test_the_face_has_the_same_things():
    from verl.experimental.agent_loop import agent_loop

    assert agent_loop.AgentLoopOutput is AgentLoopOutput
    assert agent_loop.register == register
    assert AgentLoopOutput([1], [2], [1], metrics={"tool_calls": 0.5}).metrics == AgentLoopMetrics(tool_calls=0.5)


def test_the_first_call_has_the_noise_of_an_answer_without_a_loop_and_later_ones_their_own():
    trace = CallTrace.for_sample(1, 2, "prompt", 3)
    keys = [trace.next_key() for _ in range(3)]
    assert keys[0] == sample_key(1, 2, "prompt", 3)
    assert len(set(keys)) == 3
    again = CallTrace.for_sample(1, 2, "prompt", 3)
    assert [again.next_key() for _ in range(3)] == keys


def test_each_trajectory_and_the_tasks_it_starts_find_their_own_record():
    async def look() -> CallTrace | None:
        await asyncio.sleep(0)
        return current_trace()

    async def trajectory(trace: CallTrace) -> list[CallTrace | None]:
        with tracing(trace):
            return list(await asyncio.gather(look(), asyncio.create_task(look())))

    async def both() -> list[list[CallTrace | None]]:
        return list(await asyncio.gather(trajectory(one), trajectory(other)))

    one, other = CallTrace(noise_key=1), CallTrace(noise_key=2)
    found = asyncio.run(both())
    assert [[trace.noise_key for trace in traces if trace] for traces in found] == [[1, 1], [2, 2]]
    assert current_trace() is None


def test_the_chat_template_may_be_awaited_or_not_and_leaves_out_what_it_writes_by_itself():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ 'sys ' }}{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'go' }}{% endif %}"
    )
    data, rollout = SimpleNamespace(apply_chat_template_kwargs={}), SimpleNamespace(max_model_len=8)

    async def both() -> tuple[list[int], list[int], list[int]]:
        loop = SingleTurnAgentLoop(
            config=SimpleNamespace(data=data), rollout_config=rollout, server_manager=None, tokenizer=tokenizer
        )
        # Every token has 13 characters at most.
        with pytest.raises(ValueError, match=r"rollout.max_model_len=8"):
            loop.apply_chat_template([{"role": "user", "content": "x" * 1001}])
        said = [{"role": "user", "content": "1 + 2"}]
        short = loop.apply_chat_template(said, remove_system_prompt=True)
        return loop.apply_chat_template(said), await loop.apply_chat_template(said), short

    plain, awaited, short = asyncio.run(both())
    assert tokenizer.decode(plain) == "sys 1 + 2 go"
    assert awaited == plain
    assert tokenizer.decode(short) == "1 + 2 go"


def loop_of(tokenizer) -> SingleTurnAgentLoop:
    config = SimpleNamespace(data=SimpleNamespace(apply_chat_template_kwargs={}))
    rollout = SimpleNamespace(max_model_len=1000)
    return SingleTurnAgentLoop(
        config=config, rollout_config=rollout, server_manager=None, tokenizer=tokenizer, loop=object()
    )


@pytest.mark.parametrize(
    ("family", "inserted"),
    [
        *(("gemma2", "<bos>"), ("gemma3", "<bos>"), ("mistral", "<s>"), ("llama2", "")),  # roles must alternate
        ("hermes", "<|begin_of_text|>"),
        ("phi3", ""),  # writes a token at the end of a conversation
    ],
)
def test_what_templates_of_public_models_insert_is_left_out(family, inserted):
    loop, messages = loop_of(chat_tokenizer(family)), [{"role": "user", "content": "1 + 2"}]
    whole, short = (list(loop.apply_chat_template(messages, remove_system_prompt=remove)) for remove in (False, True))
    assert loop.tokenizer.decode(whole[: len(whole) - len(short)]) == inserted
    assert whole[len(whole) - len(short) :] == short


def test_a_template_that_requires_a_system_message_is_refused_with_its_reason():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"remove_system_prompt: .*no system message.*apply_chat_template_kwargs"):
        loop_of(tokenizer).apply_chat_template(messages, remove_system_prompt=True)


def test_both_reasons_are_quoted_if_the_template_renders_neither_conversation():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages|length > 1 and messages[1]['role'] == 'user' %}{{ raise_exception('not alternating') }}"
        "{% elif messages|length > 1 %}{{ messages[0]['content'] + depth }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"not alternating.*TypeError: .*int") as caught:
        loop_of(tokenizer).apply_chat_template([{"role": "user", "content": "a"}], remove_system_prompt=True, depth=3)
    assert "system message" not in str(caught.value)


def test_the_template_is_analyzed_once_for_each_set_of_its_keywords(monkeypatch):
    loop, rendered = loop_of(chat_tokenizer("hermes")), []
    templated = loop._templated
    monkeypatch.setattr(loop, "_templated", lambda *args, **kwargs: rendered.append(args) or templated(*args, **kwargs))
    messages = [{"role": "user", "content": "1 + 2"}]
    for keywords, renderings in (({}, 3), ({}, 1), ({"depth": 1}, 3), ({"depth": 2}, 3), ({"depth": 1}, 1)):
        rendered.clear()
        loop.apply_chat_template(messages, remove_system_prompt=True, **keywords)
        assert len(rendered) == renderings


CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHATML + "<|im_start|>assistant\n", "cannot be distinguished from the start of a message"),
        ("<|im_start|>system\nx<|im_end|>\n" + CHATML + "<|im_start|>assistant\n", "cannot be distinguished"),
        ("<|im_start|>user\n{{ messages[-1]['content'] }}<|im_end|>\n", "not rendered as more tokens"),
        (CHATML.replace("<|im_start|>", "<|im_start|>{{ loop.revindex }} "), "not rendered as repeated tokens"),
    ],
)
def test_no_token_of_a_message_is_removed_if_the_inserted_ones_are_unknown(template, reason):
    tokenizer = chat_tokenizer("qwen2_5")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"(?s)remove_system_prompt: .*{reason}.*apply_chat_template_kwargs"):
        loop_of(tokenizer).apply_chat_template([{"role": "user", "content": "1 + 2"}], remove_system_prompt=True)


@pytest.mark.parametrize(
    ("once", "twice", "start"),
    [
        ([1, 5, 6, 7], [1, 5, 6, 7, 5, 6, 7], 1),
        ([1, 7, 5, 6, 7], [1, 7, 5, 6, 7, 5, 6, 7], 2),  # the first tokens end like a message
        ([1, 5, 6, 7, 8], [1, 5, 6, 7, 5, 6, 7, 8], 1),
        ([1, 5, 6, 7, 5, 8], [1, 5, 6, 7, 5, 6, 7, 5, 8], None),  # the last ones begin like a message
        ([1, 5, 6, 7], [1, 5, 6, 7], None),
        ([1, 5, 6, 7], [1, 5, 6], None),
        ([1, 5, 6, 7], [1, 5, 6, 7, 4, 6, 7], None),
        ([], [], None),
    ],
)
def test_the_start_of_a_repetition_is_certain_or_an_error(once, twice, start):
    if start is None:
        with pytest.raises(ValueError, match="message"):
            _repetition_start(once, twice)
    else:
        assert _repetition_start(once, twice) == start
