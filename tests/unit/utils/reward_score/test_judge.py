"""A judge's judgements become scores: read as JSON or by a pattern, scaled, averaged; what cannot be read says so."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.config import load_config
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.reward_score.judge import compute_score

RUN = {"data": {"train_files": ["unused"]}, "actor_rollout_ref": {"model": {"path": "unused"}}}
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6 × 7?"}]


def judge_of(*overrides):
    """What a run with these settings asks and reads with."""
    given = ["reward_model.judge.enable=True", "reward_model.url=http://127.0.0.1:9", *overrides]
    config = load_config(RUN, given, check_files=False)
    return load_reward_manager(config, None).compute_score.keywords["judge"]


@pytest.mark.parametrize(
    ("judgement", "score"),
    [
        ('{"reason": "Right.", "score": 10}', 1.0),
        ('Let me see {not json}. {"score": 3} No: {"reason": "{", "score": 7.5}', 0.75),
        ('{"outer": {"score": 2}} {"score": 4}', 0.4),
    ],
)
def test_the_last_json_object_with_the_field_counts(judgement, score):
    assert judge_of().read(judgement) == pytest.approx(score)


@pytest.mark.parametrize(
    "judgement", ["", "ten", '{"score": "8"}', '{"score": true}', '{"score": NaN}', '{"points": 8}']
)
def test_a_judgement_without_a_number_is_no_score(judgement):
    with pytest.raises(ValueError, match=rf"'score'\): {re.escape(repr(judgement))}"):
        judge_of().read(judgement)


@pytest.mark.parametrize("judgement", ['{"a":' * 100_000, '{"score": 1' + "0" * 400 + "}"])
def test_json_that_is_nested_too_deeply_or_a_huge_integer_is_no_score(judgement):
    with pytest.raises(ValueError, match=r"^the judge's output contains "):
        judge_of().read(judgement)


def test_a_number_off_the_scale_is_no_score():
    with pytest.raises(ValueError, match=r"\b11\b.*\b0 to 10\b"):
        judge_of().read('{"score": 11}')


def test_a_pattern_reads_free_text_and_the_scale_is_the_runs():
    judge = judge_of("reward_model.judge.parser=regex", "reward_model.judge.low=1", "reward_model.judge.high=5")
    assert judge.read("Score: 2 at first.\nFinal score = 4") == 0.75
    assert "response_format" not in judge.request(prompt="", answer="", ground_truth=None)
    own = judge_of("reward_model.judge.parser=regex", r"reward_model.judge.pattern='\[\[(\d+)\]\]'")
    assert own.read("so [[3]] or rather [[8]]") == 0.8


def test_the_template_has_question_answer_and_what_the_row_knows(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("{{ messages | length }} {{ prompt }} -> {{ answer }} ({{ ground_truth }}, {{ extra_info.level }})")
    judge = judge_of(f"reward_model.judge.template={file}", "reward_model.judge.system='You judge.'")
    facts = {"prompt": "Q", "messages": PROMPT, "answer": "42 {{ x }}", "ground_truth": 42, "extra_info": {"level": 3}}
    system, asked = judge.request(**facts)["messages"]
    assert (system["content"], asked["content"]) == ("You judge.", "2 Q -> 42 {{ x }} (42, 3)")
    usual = judge_of().request(prompt="What is 6 × 7?", answer="42", ground_truth=None)
    assert "Question:\nWhat is 6 × 7?\n" in usual["messages"][0]["content"]
    assert "Right result" not in usual["messages"][0]["content"]
    schema = usual["response_format"]["json_schema"]["schema"]
    assert (schema["required"], schema["properties"]["score"]["maximum"]) == (["reason", "score"], 10)
    free = judge_of("reward_model.judge.constrain=False").request(prompt="", answer="", ground_truth=None)
    assert "response_format" not in free


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("reward_model.judge.template='{% if %}'", r"^reward_model\.judge\.template: .*line 1\b"),
        ("reward_model.judge.template=/nowhere/ask.txt", r"^reward_model\.judge\.template: .*'/nowhere/ask\.txt'"),
        ("reward_model.judge.pattern=score", r"reward_model\.judge\.pattern = score: "),
        ("reward_model.judge.low=10", r"reward_model\.judge\.low = 10.*reward_model\.judge\.high = 10\b"),
    ],
)
def test_mistakes_are_told_before_training(override, words):
    with pytest.raises(ValueError, match=words):
        judge_of(override)


@pytest.fixture
def server():
    """A server that has too much to do at first, then answers every question with the same three judgements."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            texts = ['{"reason": "", "score": 4}', "I cannot.", '{"reason": "", "score": 8}']
            body = json.dumps({"choices": [{"message": {"content": text}} for text in texts]}).encode()
            self.send_response(503 if len(asked) == 1 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"127.0.0.1:{made.server_port}", asked
        made.shutdown()
        thread.join()


def test_scores_are_the_mean_of_what_can_be_read(server):
    address, asked = server
    judge = judge_of("reward_model.judge.n=3")
    said = asyncio.run(compute_score("42", "42", "maths", {}, PROMPT, address, judge))
    assert said["score"] == pytest.approx(0.6)
    assert (said["judge_unreadable"], said["judgement"]) == (pytest.approx(1 / 3), '{"reason": "", "score": 4}')
    _, (path, body) = asked
    assert (path, body["n"], body["temperature"]) == ("/v1/chat/completions", 3, 0.0)
