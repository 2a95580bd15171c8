"""A reward model behind HTTP: scores are those of transformers, whatever is asked together, and rewards ask it."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.tiny import tiny_config, tiny_tokenizer
from verl import DataProto
from verl.config import load_config
from verl.inference.serving import options_parser
from verl.inference.serving.program import load_app
from verl.inference.serving.scoring import Classifier
from verl.protocol import object_array
from verl.trainer.ppo.reward import compute_reward, load_reward_manager
from verl.utils.http_server.server import serve_in_thread
from verl.utils.reward_score.served import require_server

TOKENIZER = tiny_tokenizer()
CHAT = [{"role": "user", "content": "Is 7 prime?"}, {"role": "assistant", "content": "Yes."}]
TEXTS = ["a", "The quick brown fox", "jumps", "over the lazy dog, and then over another one"]


def saved(folder, labels):
    torch.manual_seed(labels)
    config = tiny_config(num_labels=labels, max_position_embeddings=128)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def serving(folder, *options):
    """The server of the command line, in a thread: `ask(path, **fields)` and `address`."""
    parsed = options_parser().parse_args(["--model", folder, "--device", "cpu", *options])
    with contextlib.ExitStack() as resources:
        served = load_app(parsed, resources)
        port = resources.enter_context(serve_in_thread(served.app, served.description))

        def ask(path, **fields):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(fields).encode(), headers)
            with urllib.request.urlopen(request) as reply:
                return json.load(reply)

        yield SimpleNamespace(ask=ask, address=f"127.0.0.1:{port}")


@torch.no_grad()
def by_transformers(folder, ids):
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return model(torch.tensor([ids])).logits[0]


def chat_ids(messages):
    return TOKENIZER.apply_chat_template(messages)["input_ids"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "judge", 1)


@pytest.fixture(scope="module")
def server(reward_model):
    with serving(reward_model, "--max-num-batched-tokens", "60") as made:
        yield made


def test_rewards_are_those_of_transformers_however_many_are_asked_together(server, reward_model):
    inputs = [*TEXTS, TOKENIZER("by ids")["input_ids"], CHAT]
    ids = [*(TOKENIZER(text)["input_ids"] for text in TEXTS), inputs[4], chat_ids(CHAT)]
    wanted = [by_transformers(reward_model, each).item() for each in ids]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: server.ask("/v1/rewards", model="judge", input=inputs), range(8)))
    for reply in replies:
        assert [entry["reward"] for entry in reply["data"]] == pytest.approx(wanted, abs=1e-5)
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.ask("/v1/rewards", messages=CHAT)["data"][0]["reward"] == pytest.approx(wanted[-1], abs=1e-5)
    (classes,) = server.ask("/classify", input=TEXTS[0])["data"]
    assert classes["logits"] == pytest.approx(wanted[:1], abs=1e-5)
    assert classes["probs"] == pytest.approx([torch.tensor(wanted[0]).sigmoid().item()], abs=1e-5)


def test_a_text_that_is_too_long_is_refused_or_loses_its_beginning(server, reward_model):
    long = "x" * 200 + "end"
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask("/v1/rewards", input=long)
    assert "maximum context length is 128" in json.load(refused.value)["error"]["message"]
    wanted = by_transformers(reward_model, TOKENIZER(long)["input_ids"][-128:]).item()
    cut = server.ask("/v1/rewards", input=long, truncate_prompt_tokens=-1)
    assert cut["data"][0]["reward"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "words"),
    [
        ("/v1/rewards", {"input": []}, 400, "input", "has 0 entries"),
        ("/v1/rewards", {}, 400, "input", "should be a text, token ids, a conversation"),
        ("/v1/rewards", {"input": "a", "messages": CHAT}, 400, "input", "should be a text, token ids, a conversation"),
        ("/v1/rewards", {"input": {"text": "a"}}, 400, "input", "should be a text, token ids, a conversation"),
        ("/v1/rewards", {"messages": "hello"}, 400, "messages", "valid list"),
        ("/v1/rewards", {"input": [[9999]]}, 400, "input", "there is no token 9999"),
        ("/v1/rewards", {"input": "a", "temperature": 1}, 400, "temperature", "Unrecognized request argument"),
        ("/v1/rewards", {"input": "a", "truncate_prompt_tokens": 129}, 400, "truncate_prompt_tokens", "1 to 128"),
        ("/v1/rewards", {"input": "a", "model": "other"}, 404, "model", "does not exist"),
        ("/v1/chat/completions", {"messages": CHAT}, 404, None, "POST /v1/rewards, POST /classify"),
    ],
)
def test_what_cannot_be_scored_is_refused(server, path, fields, status, param, words):
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask(path, **fields)
    error = json.load(refused.value)["error"]
    assert (refused.value.code, error["param"]) == (status, param)
    assert words in error["message"]


@pytest.mark.slow
def test_a_classifier_of_several_labels_tells_their_probabilities(tmp_path):
    folder = saved(tmp_path / "three", 3)
    logits = by_transformers(folder, TOKENIZER(TEXTS[1])["input_ids"])
    with serving(folder, "--task", "classify") as server:
        (told,) = server.ask("/classify", input=TEXTS[1])["data"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.ask("/v1/rewards", input=TEXTS[1])
    assert told["probs"] == pytest.approx(logits.softmax(-1).tolist(), abs=1e-5)
    assert (told["label"], told["num_classes"]) == (f"LABEL_{int(logits.argmax())}", 3)
    assert "this model has 3 labels" in json.load(refused.value)["error"]["message"]


def test_a_run_scores_with_a_reward_model_behind_a_url(server, reward_model):
    """As a run does: the manager its configuration asks for, messages and answers of a batch, scores on last tokens."""
    given = {"data": {"train_files": ["unused"]}, "actor_rollout_ref": {"model": {"path": "unused"}}}
    config = load_config(given, [f"reward_model.url={server.address}"], check_files=False)
    questions, answers = ["Is 7 prime?", "And 8?", "Why?"], ["Yes.", "No.", "x" * 200]
    ids = [TOKENIZER(answer, add_special_tokens=False)["input_ids"] for answer in answers]
    mask = torch.tensor([[1] * len(row) + [0] * (200 - len(row)) for row in ids])
    tensors = {"responses": mask * 0, "attention_mask": mask, "response_mask": mask}
    for row, tokens in enumerate(ids):
        tensors["responses"][row, : len(tokens)] = torch.tensor(tokens)
    prompts = [[{"role": "user", "content": question}] for question in questions]
    columns = {"data_source": object_array(["any"] * 3), "raw_prompt": object_array(prompts)}
    manager = load_reward_manager(config, TOKENIZER, num_processes=1)
    try:
        scores, said = compute_reward(DataProto.from_dict(tensors, columns), manager)
    finally:
        manager.close()
    whole = [
        [*prompt, {"role": "assistant", "content": answer}] for prompt, answer in zip(prompts, answers, strict=True)
    ]
    wanted = [by_transformers(reward_model, chat_ids(each)[-128:]).item() for each in whole]
    assert scores.sum(-1).tolist() == pytest.approx(wanted, abs=1e-5)
    assert scores[0, len(ids[0]) - 1] == scores[0].sum()
    assert said["scoring_error"] == [None] * 3


def test_a_server_that_is_not_there_is_told_before_training():
    with pytest.raises(ValueError, match=r"reward_model\.url"):
        require_server("127.0.0.1:9")


def test_an_offloaded_classifier_can_be_closed_and_fails_waiting_requests(reward_model):
    model = Classifier(AutoModelForSequenceClassification.from_pretrained(reward_model), max_tokens=64)
    model.offload()
    (waits,) = model.submit([[1, 2, 3]])
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        waits.result()
