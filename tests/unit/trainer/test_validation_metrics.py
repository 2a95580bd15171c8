"""Best-of-n, majority and pass@k: worked values, exact vectorisation, intervals that hold what they promise."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.trainer.ppo.metric_utils import (
    bootstrap_metric,
    calc_maj_val,
    pass_at_k,
    process_validation_metrics,
    prompt_intervals,
)


def values_only(metrics: dict[str, float]) -> dict[str, float]:
    """Without the bounds of the intervals."""
    return {name: value for name, value in metrics.items() if not name.endswith(("/low", "/high"))}


def test_bootstrap_reduces_subsets_of_the_right_size():
    data = [1.0, 2.0, 3.0, 4.0]
    (best, _), (worst, _), (mean, spread), (size, no_spread) = bootstrap_metric(data, 3, [np.max, np.min, np.mean, len])
    assert (size, no_spread) == (3.0, 0.0)
    # E[max of 3 draws with replacement] = Σ k (k³ - (k-1)³) / 64
    exact = sum(k * (k**3 - (k - 1) ** 3) for k in (1, 2, 3, 4)) / 64
    assert best == pytest.approx(exact, abs=0.1)
    assert worst == pytest.approx(5 - exact, abs=0.1)
    assert mean == pytest.approx(2.5, abs=0.1)
    assert spread == pytest.approx(math.sqrt(1.25 / 3), abs=0.05)


def test_bootstrap_is_the_same_for_the_same_seed_and_for_fast_and_slow_reductions():
    data = [0.3, 0.1, 0.9]
    fast = bootstrap_metric(data, 2, [np.max, min])
    slow = bootstrap_metric(data, 2, [lambda drawn: max(drawn), lambda drawn: min(drawn)])
    np.testing.assert_allclose(fast, slow)
    assert bootstrap_metric(data, 2, [np.max], seed=1) != bootstrap_metric(data, 2, [np.max], seed=2)
    with pytest.raises(ValueError, match="bootstrap"):
        bootstrap_metric([], 2, [np.max])


def test_majority_value_is_that_of_the_winning_answer_and_the_first_wins_a_tie():
    votes = [{"pred": "7", "acc": 0.0}, {"pred": "8", "acc": 1.0}, {"pred": "8", "acc": 1.0}]
    assert calc_maj_val(votes, "pred", "acc") == 1.0
    assert calc_maj_val(votes[:2], "pred", "acc") == 0.0


def test_validation_metrics_are_averaged_over_prompts_of_each_source():
    metrics = process_validation_metrics(
        ["gsm8k", "math", "gsm8k"], ["a", "b", "c"], {"reward": [1.0, 0.25, 0.0], "acc": [True, False, False]}
    )
    found = {source: {name: values_only(of) for name, of in all_of.items()} for source, all_of in metrics.items()}
    assert found == {
        "gsm8k": {"reward": {"mean@1": 0.5}, "acc": {"mean@1": 0.5}},
        "math": {"reward": {"mean@1": 0.25}, "acc": {"mean@1": 0.0}},
    }
    # One prompt: nothing is known about others. Two, right and wrong: anything from none to both is possible.
    assert (metrics["math"]["reward"]["mean@1/low"], metrics["math"]["reward"]["mean@1/high"]) == (0.25, 0.25)
    assert (metrics["gsm8k"]["acc"]["mean@1/low"], metrics["gsm8k"]["acc"]["mean@1/high"]) == (0.0, 1.0)


def test_validation_of_several_samples_per_prompt_has_best_worst_and_majority():
    infos = {"acc": [1.0, 0.0, 1.0, 0.0], "pred": ["4", "5", "4", "6"], "note": ["x"] * 4}
    metrics = process_validation_metrics(["gsm8k"] * 4, ["a"] * 4, infos)["gsm8k"]
    assert list(metrics) == ["acc"]
    parts = ("mean", "std", "low", "high")
    names = {f"{kind}@{k}/{part}" for kind in ("best", "worst", "maj") for k in (2, 4) for part in parts}
    names |= {f"{name}{part}" for name in ("mean@4", "pass@1", "pass@2", "pass@4") for part in ("", "/low", "/high")}
    assert set(metrics["acc"]) == names | {"std@4"}
    # two of four are right: 1 - C(2, 2) / C(4, 2) = 5/6 with two samples, certainty with all four
    assert (metrics["acc"]["pass@1"], metrics["acc"]["pass@2"], metrics["acc"]["pass@4"]) == (0.5, 1 - 1 / 6, 1.0)
    assert metrics["acc"]["mean@4"] == metrics["acc"]["std@4"] == 0.5
    assert metrics["acc"]["best@2/mean"] == pytest.approx(0.75, abs=0.05)
    assert metrics["acc"]["best@4/mean"] > metrics["acc"]["best@2/mean"] > 0.5 > metrics["acc"]["worst@2/mean"]


@settings(max_examples=15)
@given(st.data())
def test_all_prompts_at_once_equal_one_prompt_at_a_time(data):
    n, prompts = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    total = n * prompts
    values = data.draw(st.lists(st.floats(-2, 2), min_size=total, max_size=total))
    preds = data.draw(st.lists(st.sampled_from(["1", "2", "3"]), min_size=total, max_size=total))
    uids = [str(row % prompts) for row in range(total)]  # samples of a prompt need not stand together
    got = process_validation_metrics(["s"] * total, uids, {"reward": values, "pred": preds}, seed=3)["s"]["reward"]
    singles = []
    for prompt in range(prompts):
        own = [{"value": v, "pred": p} for v, p in zip(values[prompt::prompts], preds[prompt::prompts], strict=True)]
        numbers = [item["value"] for item in own]
        (best, worst) = bootstrap_metric(numbers, n, [np.max, np.min], seed=3)
        (majority,) = bootstrap_metric(own, n, [lambda drawn: calc_maj_val(drawn, "pred", "value")], seed=3)
        singles.append([np.mean(numbers), *best, *worst, *majority])
    names = [f"mean@{n}"] + [f"{kind}@{n}/{part}" for kind in ("best", "worst", "maj") for part in ("mean", "std")]
    assert [got[name] for name in names] == pytest.approx(np.mean(singles, axis=0).tolist(), abs=1e-9)


def test_prompts_do_not_mix_when_their_votes_are_equal():
    uids = ["a", "a", "b", "b"]
    infos = {"acc": [1.0, 1.0, 0.0, 0.0], "pred": ["4", "4", "4", "4"]}
    metrics = process_validation_metrics(["s"] * 4, uids, infos)["s"]["acc"]
    assert (metrics["maj@2/mean"], metrics["maj@2/std"]) == (0.5, 0.0)


def test_samples_without_a_value_and_prompts_of_different_counts():
    infos = {"acc": [1.0, None, 0.0, float("nan")], "empty": [None] * 4}
    metrics = process_validation_metrics(["s"] * 4, ["a", "a", "b", "c"], infos)["s"]
    assert {name: values_only(of) for name, of in metrics.items()} == {
        "acc": {"mean@2": 1.0, "pass@1": 1.0, "mean@1": 0.0}
    }
    metrics = process_validation_metrics(["s"] * 3, ["a", "a", "b"], {"acc": [1, 0, 1]})["s"]["acc"]
    assert (metrics["mean@1"], metrics["mean@2"]) == (1.0, 0.5)


def test_a_sample_that_could_not_be_scored_costs_its_prompt_no_metric_that_the_others_can_give():
    """Four prompts of four: one of them, the only one never right, has lost a sample."""
    right = [1.0, 1.0, 1.0, 1.0] * 3 + [0.0, 0.0, None, 0.0]
    uids = [str(row // 4) for row in range(16)]
    metrics = process_validation_metrics(["s"] * 16, uids, {"acc": right, "pred": ["7"] * 16})["s"]["acc"]
    assert metrics["mean@4"] == 0.75
    assert "mean@3" not in metrics
    for name in ("pass@1", "pass@2", "best@2/mean", "worst@2/mean", "maj@2/mean"):
        assert metrics[name] == 0.75, name
    assert (metrics["best@2/low"], metrics["best@2/high"]) == (metrics["mean@4/low"], metrics["mean@4/high"])
    # Four samples are left of three prompts only.
    assert (metrics["pass@4"], metrics["best@4/mean"], metrics["pass@4/low"]) == (1.0, 1.0, 1.0)


@given(st.integers(2, 5), st.data())
def test_pass_at_k_with_lost_samples_is_the_mean_of_the_prompts_own(n, data):
    prompts = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.sampled_from([0.0, 1.0, None]), min_size=n * prompts, max_size=n * prompts))
    uids = [str(row // n) for row in range(n * prompts)]
    metrics = process_validation_metrics(["s"] * len(rows), uids, {"acc": rows})["s"].get("acc", {})
    kept = [[value for value in rows[at : at + n] if value is not None] for at in range(0, len(rows), n)]
    for k in {1, 2, n}:
        own = [pass_at_k(np.array([values]) >= 1, k)[0] for values in kept if len(values) >= k]
        assert metrics.get(f"pass@{k}") == (pytest.approx(np.mean(own)) if own else None)


def test_infos_of_another_length_are_named():
    with pytest.raises(ValueError, match=r"^acc: 1\b.*\b2 samples"):
        process_validation_metrics(["s", "s"], ["a", "b"], {"acc": [1.0]})


# ---------------------------------------------------------------- pass@k


def test_pass_at_k_by_hand():
    passed = np.array([[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1], [1, 1, 1, 1]], dtype=bool)
    # c = 0, 1, 2, 4 of n = 4;  k = 2: 1 - C(4 - c, 2) / 6 with C = 6, 3, 1, 0
    assert pass_at_k(passed, 2).tolist() == pytest.approx([0.0, 1 / 2, 5 / 6, 1.0])
    assert pass_at_k(passed, 1).tolist() == [0.0, 0.25, 0.5, 1.0]
    assert pass_at_k(passed, 4).tolist() == [0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"^pass@5: 4\b.*\b1 to 4\b"):
        pass_at_k(passed, 5)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass_whatever_k(k):
    """Counted over all subsets of k; so its mean over random samples is the true chance: no bias."""
    passed = np.array([[1, 0, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=bool)
    subsets = list(itertools.combinations(range(5), k))
    for prompt, estimate in zip(passed, pass_at_k(passed, k), strict=True):
        assert estimate == pytest.approx(np.mean([prompt[list(chosen)].any() for chosen in subsets]))


def test_pass_needs_a_score_of_one_and_is_left_out_where_values_are_no_scores():
    infos = {"reward": [1.0, 0.1, 0.1, -1.0], "length": [3, 1, 4, 1]}
    metrics = process_validation_metrics(["s"] * 4, ["a", "a", "b", "b"], infos)["s"]
    assert (metrics["reward"]["pass@1"], metrics["reward"]["pass@2"]) == (0.25, 0.5)
    assert not [name for name in metrics["length"] if name.startswith("pass")]


def test_best_worst_and_majority_of_all_samples_have_their_exact_expectations():
    """Values 1 and 0, two draws with replacement: {1,1} {1,0} {0,1} {0,0} alike likely."""
    infos = {"acc": [1.0, 0.0], "pred": ["4", "5"]}
    metrics = process_validation_metrics(["s"] * 2, ["a"] * 2, infos)["s"]["acc"]
    assert metrics["best@2/mean"] == pytest.approx(3 / 4, abs=0.04)
    assert metrics["worst@2/mean"] == pytest.approx(1 / 4, abs=0.04)
    assert metrics["maj@2/mean"] == pytest.approx(1 / 2, abs=0.05)  # a tie goes to the sample drawn first
    assert metrics["best@2/std"] == pytest.approx(math.sqrt(3) / 4, abs=0.03)


# ---------------------------------------------------------------- intervals


def test_the_interval_is_that_of_the_mean_over_prompts():
    """100 prompts, 30 right: the mean is 0.3 with standard error √(0.3 · 0.7 / 100) = 0.0458, ±1.96 of it."""
    right = np.array([1.0] * 30 + [0.0] * 70)
    low, high = prompt_intervals(np.stack([right, np.full(100, 0.25)], axis=1))
    error = math.sqrt(0.3 * 0.7 / 100)
    assert low.tolist() == pytest.approx([0.3 - 1.96 * error, 0.25], abs=0.015)
    assert high.tolist() == pytest.approx([0.3 + 1.96 * error, 0.25], abs=0.015)


def test_the_interval_holds_the_truth_about_as_often_as_it_promises():
    rng = np.random.default_rng(0)
    samples = rng.normal(2.0, 1.0, size=(60, 200))  # 200 validations of 60 prompts each
    low, high = prompt_intervals(samples, seed=1)
    covered = np.mean((low <= 2.0) & (high >= 2.0))
    assert 0.88 <= covered <= 0.99


def test_intervals_are_the_same_for_the_same_seed_and_in_any_number_of_chunks(monkeypatch):
    values = np.random.default_rng(3).random((50, 3))
    whole = prompt_intervals(values, seed=5)
    np.testing.assert_array_equal(whole, prompt_intervals(values, seed=5))
    assert not np.array_equal(whole, prompt_intervals(values, seed=6))
    monkeypatch.setattr("verl.trainer.ppo.metric_utils.CHUNK_ELEMENTS", 50 * 64)
    np.testing.assert_allclose(whole, prompt_intervals(values, seed=5))


def test_more_prompts_give_a_narrower_interval_and_every_metric_lies_in_its_own():
    rng = np.random.default_rng(0)

    def width(prompts: int) -> float:
        right = (rng.random(prompts * 4) < 0.4).astype(float).tolist()
        uids = [str(row // 4) for row in range(prompts * 4)]
        found = process_validation_metrics(["s"] * len(uids), uids, {"acc": right})["s"]["acc"]
        for name in ("mean@4", "pass@2", "best@4/mean", "worst@4/mean"):
            base = name.removesuffix("/mean")
            assert found[f"{base}/low"] <= found[name] <= found[f"{base}/high"], name
        return found["mean@4/high"] - found["mean@4/low"]

    assert width(400) < width(25) / 2
