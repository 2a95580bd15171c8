"""Answers in a grammar: whatever the model would rather say they fit the schema, and nobody else's tokens change."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch

from tests.support.tiny import tiny_model, tiny_tokenizer
from verl.config import ModelConfig, RolloutConfig, as_config
from verl.inference.async_engine import AsyncEngine
from verl.inference.build import build_engine
from verl.inference.constraints import json_grammar
from verl.inference.engine import Engine
from verl.inference.sampler import Sampler
from verl.types.request import Request, SamplingParams

pytest.importorskip("llguidance")

TOKENIZER = tiny_tokenizer()
SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["right", "wrong", "wrong again"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "reasons": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["verdict", "score", "reasons"],
    "additionalProperties": False,
}
ENDS = frozenset({TOKENIZER.eos_token_id})
FREE = SamplingParams(max_new_tokens=24, eos_token_ids=ENDS)
IN_GRAMMAR = replace(FREE, max_new_tokens=480)
PROMPT = TOKENIZER("Say it in JSON.")["input_ids"]


class Ahead:
    """A runner as on a GPU: a step is launched before the tokens of the one before are known."""

    steps_ahead = 1

    def __init__(self, runner):
        self.launch = runner.launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=[0, 1], ids=["at once", "one step ahead"])
def answer(folder, request):
    """`answer(requests)`: their outputs, from one engine of few slots."""
    config = as_config(RolloutConfig, {"max_model_len": 512, "max_num_seqs": 6})
    built = build_engine(folder, as_config(ModelConfig, {"path": folder}, at="actor_rollout_ref.model"), config)
    runner = Ahead(built.runner) if request.param else built.runner
    engine = AsyncEngine(Engine(built.engine.scheduler, runner), tiny_tokenizer)
    with contextlib.closing(engine):
        yield lambda requests: [future.result() for future in engine.submit(requests)]


def asked(name, params, key=0, **fields):
    return Request(name, PROMPT, replace(params, key=key), **fields)


def test_answers_fit_the_schema_and_others_are_what_they_are_alone(answer):
    params = replace(IN_GRAMMAR, grammar=json_grammar(SCHEMA))
    greedy = replace(params, temperature=0.0, top_log_probs=3)
    mixed = [asked(f"json {key}", params, key, group="one") for key in range(6)]
    mixed += [asked(f"free {key}", FREE, key) for key in range(6)] + [asked("greedy", greedy)]
    outputs = answer(mixed)
    alone = [answer([asked(f"alone {key}", FREE, key)])[0] for key in range(6)]
    assert [each.token_ids for each in outputs[6:12]] == [each.token_ids for each in alone]
    texts = [TOKENIZER.decode(each.token_ids, skip_special_tokens=True) for each in (*outputs[:6], outputs[12])]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 3
    for each in outputs[:6]:
        assert each.finish_reason == "stop"
        # What training computes is of the whole distribution, what was drawn from is of the tokens that were allowed.
        assert all(drawn >= whole - 1e-5 for drawn, whole in zip(each.sampled_log_probs, each.log_probs, strict=True))
        assert max(each.sampled_log_probs) == pytest.approx(0, abs=1e-6)  # one token was possible
        assert min(each.log_probs) < -3
    assert outputs[12].sampled_log_probs == [0.0] * len(outputs[12].token_ids)


def test_an_aborted_answer_goes_on_where_it_stood(answer):
    params = replace(IN_GRAMMAR, grammar=json_grammar(SCHEMA))
    (whole,) = answer([asked("whole", params, 7)])
    (part,) = answer([asked("part", replace(params, max_new_tokens=9), 7)])
    assert (part.finish_reason, part.token_ids) == ("length", whole.token_ids[:9])
    (rest,) = answer([asked("rest", params, 7, resume_from=replace(part, finish_reason="abort"))])
    assert rest.token_ids == whole.token_ids


def test_a_schema_that_is_none_and_a_grammar_that_never_ends_are_refused():
    with pytest.raises(ValueError, match="nonsense"):
        json_grammar({"type": "nonsense"})
    with pytest.raises(ValueError, match=r"grammar.*ignore_eos"):
        SamplingParams(grammar="x", ignore_eos=True)


def test_a_mask_cuts_rows_of_its_own_whatever_the_vocabulary():
    """Bits in order, none for tokens beyond the mask; the row without one is drawn from as before."""
    sampler, logits = Sampler(4, 16, torch.device("cpu")), torch.randn(3, 40, generator=torch.manual_seed(0))
    greedy = SamplingParams(temperature=0.0)
    sampler.assign([(slot, greedy) for slot in range(3)])
    logits[:, 39] = 9.0
    masks = ([0, 2], np.array([[0b10000010], [0b00000100 << 8]], np.int32))
    found = sampler.sample(logits, [0, 1, 2], torch.arange(3), torch.zeros(3, dtype=torch.int64), (), masks)
    assert found.tokens.tolist() == [1 if logits[0, 1] > logits[0, 7] else 7, 39, 10]
