"""Whole batches: what is generated, in what columns, and that only the sample itself decides about it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny import save_tiny_model, tiny_tokenizer
from tests.support.truncation import drawn_probs
from verl.protocol import DataProto
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.hf_rollout import HFRollout

EOS = 1


def answers(batch: DataProto) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch.batch["responses"], batch.batch["response_mask"], strict=True)
    ]


@pytest.fixture(scope="module")
def ending_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that ends about every tenth answer per token, so that lengths differ."""
    folder = save_tiny_model(tmp_path_factory.mktemp("ending"), tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # The head has no bias: the direction that all hidden states share does the same.
        hidden = model.model(torch.arange(5, 205).view(10, 20)).last_hidden_state.flatten(0, 1).mean(dim=0)
        model.lm_head.weight[EOS] += 3.5 * hidden / hidden.norm() ** 2
    model.save_pretrained(folder)
    return folder


def test_columns_are_those_of_the_schema(start, make_prompts, ending_model):
    prompts = make_prompts(rows=12)
    result = start(ending_model).generate_sequences(prompts)
    rows = len(prompts)
    tensors = result.batch
    length = tensors["responses"].shape[1]
    lengths = tensors["response_mask"].sum(dim=1)
    assert length == lengths.max()
    assert len(set(lengths.tolist())) > 3, "the model must end answers at different lengths for this to prove anything"
    assert torch.equal(tensors["prompts"], prompts.batch["input_ids"])
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    for row in range(rows):
        n = int(lengths[row])
        response = tensors["responses"][row]
        assert tensors["response_mask"][row].tolist() == [1] * n + [0] * (length - n)
        assert EOS not in response[: n - 1]
        assert n == 24 or response[n - 1] == EOS
        assert (response[n:] == 0).all()
        assert (tensors["rollout_log_probs"][row, n:] == 0).all()
        assert (tensors["rollout_log_probs"][row, :n] < 0).all()
        assert tensors["rollout_versions"][row].tolist() == [0] * n + [-1] * (length - n)
        attended = tensors["attention_mask"][row].bool()
        assert attended.tolist() == prompts.batch["attention_mask"][row].bool().tolist() + [True] * n + [False] * (
            length - n
        )
        assert tensors["position_ids"][row][attended].tolist() == list(range(int(attended.sum())))
    assert {name: tensors[name].dtype for name in ("responses", "response_mask", "rollout_log_probs")} == {
        "responses": torch.int64,
        "response_mask": torch.int64,
        "rollout_log_probs": torch.float32,
    }


def test_rows_name_their_trajectory_where_the_prompts_say_which_answer_they_are(start, make_prompts):
    engine, prompts = start(max_new_tokens=2), make_prompts(rows=2)
    # A number counted here could be another rank's too.
    assert set(engine.generate_sequences(prompts).non_tensor_batch) == {"finish_reason"}
    prompts.non_tensor_batch["sample_index"] = np.array([4, 0], dtype=object)
    whole = engine.generate_sequences(prompts)
    assert whole.non_tensor_batch["trajectory"].tolist() == ["prompt-0-0/4", "prompt-0-1/0"]
    assert set(whole.non_tensor_batch) == {"finish_reason", "trajectory"}, "uid and sample_index are the caller's"
    assert {row: one.non_tensor_batch["trajectory"].item() for row, one in engine.stream(prompts)} == {
        0: "prompt-0-0/4",
        1: "prompt-0-1/0",
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_full_forward_pass_at_the_same_temperature(
    start, make_prompts, model_path, temperature
):
    engine = start(temperature=temperature, top_p=0.8, top_k=50)
    tensors = engine.generate_sequences(make_prompts()).batch
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model_path)(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=tensors["position_ids"],
        ).logits
    width, length = tensors["prompts"].shape[1], tensors["responses"].shape[1]
    logits = logits[:, width - 1 : width - 1 + length].double() / temperature
    expected = logits.log_softmax(dim=-1).gather(-1, tensors["responses"].unsqueeze(-1)).squeeze(-1)
    difference = (expected - tensors["rollout_log_probs"]).abs() * tensors["response_mask"]
    assert difference.max() < 1e-5
    for row, column in tensors["response_mask"].nonzero().tolist():
        probs = drawn_probs(logits[row, column].tolist(), top_k=50, top_p=0.8)
        drawn = probs[tensors["responses"][row, column].item()]
        assert tensors["rollout_drawn_log_probs"][row, column].exp() == pytest.approx(drawn, rel=1e-4)
    assert (tensors["rollout_drawn_log_probs"][tensors["response_mask"] == 0] == 0).all()


def test_what_was_drawn_from_is_a_column_where_it_is_not_the_whole_distribution(start, make_prompts):
    engine, name = start(val_kwargs={"do_sample": True, "temperature": 1.0, "top_p": 0.5}), "rollout_drawn_log_probs"
    assert name not in engine.generate_sequences(make_prompts()).batch.keys()
    assert name not in engine.generate_sequences(make_prompts(validate=True)).batch.keys()
    for cut in ({"top_p": 0.9}, {"top_k": 9}, {"min_p": 0.9}):
        tensors = engine.generate_sequences(make_prompts(), **cut).batch
        real = tensors["response_mask"].bool()
        assert (tensors[name] > tensors["rollout_log_probs"])[real].all()
    greedy = engine.generate_sequences(make_prompts(), do_sample=False).batch
    assert (greedy[name] == 0).all(), "one token has probability 1"
    prompts = make_prompts()
    prompts.non_tensor_batch["do_sample"] = np.array([True] * 4 + [False] * 4, dtype=object)
    tensors = engine.generate_sequences(prompts, top_k=9).batch
    assert (tensors[name][4:] == 0).all()
    assert (tensors[name][:4] < 0).any()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("gemma", {"head_dim": 16}),
        ("mistral", {"sliding_window": 6}),
        ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_greedy_equals_transformers_generate(start, make_prompts, tmp_path, family, changes):
    engine = start(save_tiny_model(tmp_path, family, **changes), do_sample=False)
    prompts = make_prompts(rows=5)
    ours = answers(engine.generate_sequences(prompts))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generate(
        input_ids=prompts.batch["input_ids"],
        attention_mask=prompts.batch["attention_mask"],
        do_sample=False,
        max_new_tokens=24,
        pad_token_id=0,
    )[:, prompts.batch["input_ids"].shape[1] :]
    for mine, reference in zip(ours, theirs.tolist(), strict=True):
        assert mine == reference[: len(mine)]
        assert all(token == 0 for token in reference[len(mine) :])


def test_samples_do_not_depend_on_the_batch(start, make_prompts, ending_model):
    engine = start(ending_model)
    prompts = make_prompts(rows=16)
    whole = answers(engine.generate_sequences(prompts))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    assert answers(engine.generate_sequences(prompts[order])) == [whole[row] for row in order]
    two_ranks = [answers(engine.generate_sequences(half)) for half in prompts.chunk(2)]
    assert two_ranks[0] + two_ranks[1] == whole
    assert answers(engine.generate_sequences(prompts[3:4])) == whole[3:4]


@pytest.mark.parametrize("limits", [{"max_num_seqs": 3}, {"max_num_seqs": 5, "max_num_batched_tokens": 20}])
def test_samples_do_not_depend_on_how_many_are_decoded_at_once(start, make_prompts, ending_model, limits):
    prompts = make_prompts(rows=14)
    expected = answers(start(ending_model).generate_sequences(prompts))
    assert len({len(answer) for answer in expected}) > 3
    assert answers(start(ending_model, **limits).generate_sequences(prompts)) == expected


def test_samples_do_not_depend_on_padding(start, make_prompts, ending_model):
    engine = start(ending_model)
    assert answers(engine.generate_sequences(make_prompts(width=16))) == answers(
        engine.generate_sequences(make_prompts(width=40))
    )


@pytest.mark.parametrize("engine_name", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_the_same_call_gives_the_same_bits(start, make_prompts, ending_model):
    prompts = make_prompts(rows=16)
    first, second = (start(ending_model, max_num_seqs=6).generate_sequences(prompts).batch for _ in range(2))
    for name in first.keys():
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("engine_name", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_seed_step_uid_and_sample_index_each_give_other_samples(start, make_prompts):
    engine = start()
    prompts = make_prompts()
    base = answers(engine.generate_sequences(prompts))

    def changed(column: np.ndarray | None = None, name: str = "uid", **meta) -> list[list[int]]:
        other = prompts.select(deepcopy=True)
        other.meta_info |= meta
        if column is not None:
            other.non_tensor_batch[name] = column
        return answers(engine.generate_sequences(other))

    assert changed() == base
    assert changed(np.zeros(8, dtype=object), "sample_index") == base, "one row per uid: its index is 0"
    for other in (
        changed(seed=6),
        changed(step=4),
        changed(prompts.non_tensor_batch["uid"][::-1].copy()),
        changed(np.ones(8, dtype=object), "sample_index"),
    ):
        assert all(a != b for a, b in zip(base, other, strict=True))


def test_rows_of_one_prompt_differ_with_and_without_a_sample_index(start, make_prompts):
    engine = start()
    repeated = make_prompts(rows=2).repeat(3, interleave=True)
    counted = answers(engine.generate_sequences(repeated))
    assert len(set(map(tuple, counted))) == 6
    repeated.non_tensor_batch["sample_index"] = np.array([0, 1, 2] * 2, dtype=object)
    assert answers(engine.generate_sequences(repeated)) == counted


def test_without_uids_a_prompts_tokens_stand_for_it(start, make_prompts):
    engine = start()
    prompts = make_prompts()
    prompts.non_tensor_batch.pop("uid")
    expected = answers(engine.generate_sequences(prompts))
    assert answers(engine.generate_sequences(prompts[4:])) == expected[4:]


@pytest.mark.parametrize("engine_name", ["native", pytest.param("hf", marks=pytest.mark.slow)])
def test_first_tokens_follow_the_models_distribution(start, tmp_path):
    engine = start(save_tiny_model(tmp_path, vocab_size=8, seed=3), max_num_batched_tokens=512)
    rows = 6000
    ids = torch.tensor([[2, 7, 3, 4]])
    prompts = DataProto.from_dict(
        {"input_ids": ids.expand(rows, -1), "attention_mask": torch.ones(rows, 4, dtype=torch.int64)},
        {"uid": np.array(["one prompt"] * rows, dtype=object), "sample_index": np.arange(rows).astype(object)},
        {"eos_token_id": []},
    )
    tokens = engine.generate_sequences(prompts, max_new_tokens=1, temperature=0.5).batch["responses"].flatten()
    with torch.no_grad():
        probs = (AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits[0, -1].double() / 0.5).softmax(dim=-1)
    counts = torch.bincount(tokens, minlength=8)
    chi_square = ((counts - probs * rows) ** 2 / (probs * rows)).sum()
    assert chi_square < 29.9, "the 99.99 % quantile with 7 degrees of freedom"


def test_stop_tokens_end_an_answer_and_are_part_of_it(start, make_prompts):
    engine = start()
    free = answers(engine.generate_sequences(make_prompts()))
    stops = sorted({answer[5] for answer in free})
    stopped = answers(engine.generate_sequences(make_prompts(), stop_token_ids=stops))
    for whole, answer in zip(free, stopped, strict=True):
        end = next(i for i, token in enumerate(whole) if token in stops)
        assert answer == whole[: end + 1]


def test_ignore_eos_goes_on_to_the_longest_answer(start, make_prompts, ending_model):
    engine = start(ending_model)
    ended = answers(engine.generate_sequences(make_prompts()))
    free = answers(engine.generate_sequences(make_prompts(), ignore_eos=True))
    assert {len(answer) for answer in free} == {24}
    assert any(len(answer) < 24 for answer in ended)
    assert all(whole[: len(answer)] == answer for whole, answer in zip(free, ended, strict=True))


def test_min_new_tokens_delays_the_end(start, make_prompts, ending_model):
    engine = start(ending_model)
    assert any(len(answer) < 8 for answer in answers(engine.generate_sequences(make_prompts(rows=16))))
    late = answers(engine.generate_sequences(make_prompts(rows=16), min_new_tokens=8))
    assert all(len(answer) >= 8 and EOS not in answer[:7] for answer in late)


def test_eos_token_id_of_the_batch_wins_over_the_models(start, make_prompts, ending_model):
    engine = start(ending_model)
    assert engine.eos_token_ids == {EOS}
    other = engine.generate_sequences(make_prompts(eos_token_id=[300]))
    assert {len(answer) for answer in answers(other)} == {24}


def test_responses_are_padded_to_the_maximum_on_request(start, make_prompts, ending_model):
    engine = start(ending_model)
    short = make_prompts(rows=1, pad_to_max=True, pad_token_id=7)
    result = engine.generate_sequences(short, stop_token_ids=list(range(264)))
    assert result.batch["responses"].shape == (1, 24)
    assert (result.batch["responses"][0, 1:] == 7).all()
    assert result.batch["response_mask"].sum() == 1


def test_validation_uses_its_own_parameters(start, make_prompts):
    engine = start(val_kwargs={"temperature": 0.0, "max_new_tokens": 5})
    validated = answers(engine.generate_sequences(make_prompts(validate=True)))
    greedy = answers(engine.generate_sequences(make_prompts(), do_sample=False, max_new_tokens=5))
    assert validated == greedy
    sampled = answers(engine.generate_sequences(make_prompts(validate=True, do_sample=True, temperature=1.0)))
    assert sampled == answers(engine.generate_sequences(make_prompts(), max_new_tokens=5))


def test_an_unknown_override_is_an_error_with_the_known_ones(start, make_prompts):
    with pytest.raises(ValueError, match=r"^generate_sequences: .*'temprature'.*'temperature'"):
        start().generate_sequences(make_prompts(), temprature=1.0)


def test_stream_gives_every_sample_once_and_the_shortest_first(start, make_prompts, ending_model):
    engine = start(ending_model)
    prompts = make_prompts(rows=10)
    whole = engine.generate_sequences(prompts)
    streamed = list(engine.stream(prompts))
    assert sorted(row for row, _ in streamed) == list(range(10))
    assert [answers(sample)[0] for _, sample in sorted(streamed, key=lambda item: item[0])] == answers(whole)
    lengths = [len(answers(sample)[0]) for _, sample in streamed]
    assert lengths == sorted(lengths)
    assert streamed[0][1].batch["prompts"].shape == (1, 16)


def test_closing_a_stream_ends_what_is_left(start, make_prompts):
    engine = start(max_new_tokens=400)
    stream = engine.stream(make_prompts(rows=4), eos_token_ids=[], stop_token_ids=range(132))
    next(stream)
    stream.close()
    engine.pause_generation("finish")
    assert engine.loop.all_unfinished() == []


def test_engines_are_chosen_by_name():
    assert get_rollout_class("hf") is HFRollout
    with pytest.raises(ValueError, match=r"(?s)rollout.name.*'mine'"):
        get_rollout_class("mine")


def test_an_answer_ends_at_the_token_that_completes_a_stop_string(start, make_prompts):
    prompts, decode = make_prompts(rows=1), tiny_tokenizer().decode
    whole = start(ignore_eos=True).generate_sequences(prompts).batch["responses"][0].tolist()
    # A token is a byte: the first two in a row that are characters make a string that spans tokens.
    stop = next(pair for pair in map(decode, pairwise(whole)) if len(pair) == 2 and pair.isascii())
    answer = start(ignore_eos=True, stop=[stop]).generate_sequences(prompts).batch["responses"][0].tolist()
    assert answer == whole[: next(n for n in range(len(whole) + 1) if stop in decode(whole[:n]))]
    assert len(answer) < len(whole)


def test_what_the_engine_cannot_do_is_refused_at_the_start(start):
    with pytest.raises(ValueError, match=r"^tensor_model_parallel_size: "):
        start(tensor_model_parallel_size=2)


def test_a_prompt_that_fills_the_context_is_refused_and_a_shorter_one_ends_there(start, make_prompts):
    engine = start(max_model_len=20)
    ends = engine.generate_sequences(make_prompts(), eos_token_ids=[])
    assert (ends.batch["attention_mask"].sum(dim=1) == 20).all()
    with pytest.raises(ValueError, match="max_model_len=2"):
        start(max_model_len=2).generate_sequences(make_prompts())
