"""Two real ranks over gloo give what one rank gives: gradients, steps, weights, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.engine_cases import (
    assert_close,
    make_batch,
    make_engine,
    model_gradients,
    plain_fields,
    plain_gradients,
    run_ranks,
    whole_weights,
)
from tests.support.fsdp_ranks import CHANGES, ROWS, ROWS_BY_RANK, run_rank, steps, value_gradients, value_model
from tests.support.lora_cases import adapter_values, lora_engine, peft_gradients, perturb_lora_b
from tests.support.reads import files_read
from tests.support.tiny import save_tiny_model, tiny_model
from verl.utils.checkpoint.manifest import find_problems, prepare_records, write_manifest


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The folder, with a model and what one rank saved after two steps and made of two more."""
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model")
    data = make_batch(rows=ROWS)
    engine = make_engine(str(folder / "model"), **CHANGES)
    steps(engine, data, 2)
    engine.save(folder / "one")
    prepare_records(folder / "two")
    steps(engine, data, 2)
    adapted = lora_engine(str(folder / "model"))
    steps(adapted, data, 2)
    adapted.save(folder / "lora-one")
    yield folder, whole_weights(engine)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(one_rank):
    """What each of the two ranks found."""
    folder, _ = one_rank
    run_ranks(run_rank, folder)
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("layout", ["all", "hybrid", "padded", "tied"])
def test_gradients_over_two_ranks_are_those_of_plain_transformers(found, layout):
    wanted = plain_gradients("qwen2", make_batch(rows=ROWS), 0.7, tie_word_embeddings=layout == "tied")
    for rank in range(2):
        assert_close(found[rank][f"gradients-{layout}"], wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_after_a_step_are_those_at_the_new_weights(found, tied):
    weights, gradients = found[0]["second step"][tied]
    model = tiny_model(tie_word_embeddings=tied)
    model.load_state_dict(weights)
    assert_close(gradients, model_gradients(model, make_batch(rows=ROWS), 0.7))


def test_weights_of_one_row_which_only_one_rank_has_come_whole_out_of_a_bucket(found):
    wanted = value_model().state_dict()
    for rank in (0, 1):
        assert set(found[rank]["value weights"]) == set(wanted)
        assert all(torch.equal(value, wanted[name]) for name, value in found[rank]["value weights"].items())


def test_gradients_of_a_value_model_do_not_depend_on_the_number_of_ranks(found):
    assert_close(found[0]["value"], value_gradients(make_batch(rows=ROWS)))


def test_each_rank_infers_its_own_rows_although_it_has_fewer_micro_batches(found):
    data = make_batch(rows=ROWS)
    with torch.no_grad():
        wanted = plain_fields(tiny_model(tie_word_embeddings=True), data, 0.7)
    for rank in range(2):
        assert_close(found[rank]["inferred"], {name: value[ROWS_BY_RANK[rank]] for name, value in wanted.items()})
    assert [len(found[rank]["empty"]["log_probs"]) for rank in range(2)] == [0, 2]


def test_statistics_are_of_the_values_of_all_ranks(found):
    """0, 1, 2 on one rank and 3, 4, 5 on the other; masked 0 and 3, 4."""
    for rank in range(2):
        assert found[rank]["statistics"] == pytest.approx([2.5, 5.0, 0.0, 3.5**0.5])
        assert found[rank]["statistics of one rank"] == pytest.approx([4.0, 5.0, 3.0, 1.0])
        assert found[rank]["masked mean"] == pytest.approx(7 / 3)


@pytest.mark.parametrize("layout", ["all", "hybrid", "tied"])
def test_every_rank_walks_the_same_buckets_of_the_whole_state_dict(found, layout):
    wanted = tiny_model(tie_word_embeddings=layout == "tied").state_dict()
    for rank in range(2):
        parts = found[rank][f"buckets-{layout}"]
        assert all(len(part) == 1 or sum(v.nbytes for v in part.values()) <= 40_000 for part in parts)
        assert [name for part in parts for name in part] == list(wanted)
        assert all(torch.equal(value, wanted[name]) for part in parts for name, value in part.items())


def test_a_gradient_broken_on_one_rank_skips_the_step_on_all(found):
    for rank in range(2):
        skipped, unchanged, state_tensors = found[rank]["skipped"]
        assert skipped == 1
        assert unchanged
        assert state_tensors > 0


def test_a_step_is_left_out_only_where_no_rank_has_a_token_and_then_on_all(found):
    for rank in range(2):
        assert found[rank]["no tokens"] == [(0.0, True), (1.0, False)]


def test_two_ranks_continue_bit_for_bit_from_what_two_ranks_saved(found):
    for rank in range(2):
        assert found[rank]["same noise"]
        assert found[rank]["rates again"] == found[rank]["rates"]
        wanted = found[rank]["continued"]
        assert all(torch.equal(found[rank]["continued again"][name], value) for name, value in wanted.items())


def test_two_ranks_continue_from_what_one_rank_saved(found, one_rank):
    assert_close(found[0]["loaded from one"], one_rank[1])


def test_one_rank_continues_from_what_two_ranks_saved(found, one_rank):
    engine = make_engine(tiny_model(seed=9), **CHANGES)
    engine.load(one_rank[0] / "two")
    rates = steps(engine, make_batch(rows=ROWS), 2)
    assert [step["lr"] for step in rates] == [step["lr"] for step in found[0]["rates"]]
    assert_close(whole_weights(engine), found[0]["continued"])


def test_the_export_of_two_ranks_is_what_they_saved(found, one_rank):
    engine = make_engine(tiny_model(seed=9), **CHANGES)
    engine.load(one_rank[0] / "two", ["model"])
    exported = AutoModelForCausalLM.from_pretrained(one_rank[0] / "export" / "huggingface").state_dict()
    weights = whole_weights(engine)
    assert all(torch.equal(exported[name], weights[name]) for name in weights)


def test_what_one_rank_cannot_write_fails_on_both(found):
    """Else the other would wait for it in the next collective, and the run with it."""
    own, told = found[0]["failed saves"], found[1]["failed saves"]
    assert len(own) == len(told) == 4
    assert "extra.pt" in own[0]
    assert "model.json" in own[1]
    assert "no memory" in own[3]
    assert all("rank 0: " in line for line in told)


def test_the_manifest_needs_no_look_at_what_two_ranks_saved(found, one_rank):
    saved = one_rank[0] / "two"
    with files_read(saved) as read:
        listed = write_manifest(saved, step=1, serial=1).files
    assert {path.parent.name for path in read} == {".checksums"}, "only the records that both ranks left"
    assert {"model/__0_0.distcp", "model/__1_0.distcp", "optimizer/__1_0.distcp", "extra.pt"} <= set(listed)
    assert find_problems(saved) == []


# ---------------------------------------------------------------- LoRA


@pytest.fixture(scope="module")
def adapters(found):
    """What each of the two ranks found with adapters."""
    return [mine["adapters"] for mine in found]


def test_adapters_start_equal_and_have_the_gradients_that_peft_gives_them(adapters, one_rank):
    engine = lora_engine(str(one_rank[0] / "model"))
    started = adapter_values(engine)
    perturb_lora_b(engine)
    wanted = peft_gradients(adapter_values(engine), make_batch(rows=ROWS), 0.7)
    for mine in adapters:
        assert all(torch.equal(mine["started"][name], value) for name, value in started.items())
        assert_close(mine["gradients"], wanted)


def test_two_ranks_continue_the_adapters_that_one_rank_saved(adapters, one_rank):
    engine = lora_engine(str(one_rank[0] / "model"))
    engine.load(one_rank[0] / "lora-one")
    steps(engine, make_batch(rows=ROWS), 2)
    assert_close(adapters[0]["continued"], whole_weights(engine))


def test_what_two_ranks_write_merged_or_alone_gives_the_log_probs_of_training(adapters, one_rank):
    folder, data = one_rank[0], make_batch(rows=ROWS)
    trained = torch.cat([mine["trained"] for mine in adapters])
    merged = AutoModelForCausalLM.from_pretrained(folder / "lora-merged")
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        reference = plain_fields(base, data)["log_probs"]
        torch.testing.assert_close(plain_fields(merged, data)["log_probs"], trained, atol=1e-5, rtol=1e-5)
        alone = PeftModel.from_pretrained(base, folder / "lora-two" / "lora_adapter")
        torch.testing.assert_close(plain_fields(alone, data)["log_probs"], trained, atol=1e-5, rtol=1e-5)
    found = torch.cat([mine["reference"] for mine in adapters])
    torch.testing.assert_close(found, reference, atol=1e-5, rtol=1e-5)


def test_adapters_of_a_model_in_half_precision_follow_one_rank(adapters, one_rank):
    engine, data = lora_engine(str(one_rank[0] / "model"), mixed_precision="bf16"), make_batch(rows=ROWS)
    before = engine.infer(data, ["log_probs"]).batch["log_probs"]
    steps(engine, data, 1)
    after = engine.infer(data, ["log_probs"]).batch["log_probs"]
    found = torch.cat([mine["mixed"] for mine in adapters])
    assert (found - after).abs().max() < 0.2 * (after - before).abs().max()
