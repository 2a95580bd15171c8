"""Rules between the keys of an algorithm: what would have no effect is said, what could never work is refused."""

import pytest

from verl.config import ConfigError, load_config

GIVEN = ("data.train_files=openai/gsm8k", "actor_rollout_ref.model.path=a/b", "trainer.n_gpus_per_node=1")
CORRECTION = "algorithm.rollout_correction"
FILTER = ("algorithm=grpo", "algorithm.filter_groups.enable=True")
GDPO = "algorithm.adv_estimator=gdpo"
ROLLOUT, POLICY_LOSS = "actor_rollout_ref.rollout", "actor_rollout_ref.actor.policy_loss"
KWARGS = f"+{ROLLOUT}.engine_kwargs.native"
TEACHER = "distillation.teacher_models.big.model_path=org/big"


def load(*overrides):
    return load_config(None, [*GIVEN, *overrides], check_files=False)


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (
            [*FILTER, "data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches=7"],
            "algorithm.filter_groups.max_num_gen_batches",
            "at most 448 prompts",
        ),
        (
            [GDPO, "algorithm.gdpo={reward_keys: [a, b], reward_weights: [1.0]}"],
            "algorithm.gdpo.reward_weights",
            "1 weights for 2",
        ),
        ([GDPO, "algorithm.gdpo.reward_weights=[1.0,2.0]"], "algorithm.gdpo.reward_weights", "2 weights for 1"),
        (
            [GDPO, "algorithm.gdpo.reward_keys=[a,b]", "algorithm.use_kl_in_reward=True"],
            "algorithm.use_kl_in_reward",
            "normalises each reward separately",
        ),
        (
            [f"{CORRECTION}={{rollout_rs: token, rollout_rs_threshold: 0.5}}"],
            f"{CORRECTION}.rollout_rs_threshold",
            "the lower bound 2 is above the upper bound 0.5",
        ),
        (
            [f"{CORRECTION}={{rollout_rs: geometric, rollout_rs_threshold: 2.0, rollout_rs_threshold_lower: 3.0}}"],
            f"{CORRECTION}.rollout_rs_threshold",
            "everything would be masked",
        ),
        ([f"{CORRECTION}={{bypass_mode: true, rollout_is: token}}"], f"{CORRECTION}.rollout_is", "there is no ratio"),
        (
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=3_2"],
            f"{CORRECTION}.rollout_is_threshold",
            "lower",
        ),
        (
            [f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: two}}"],
            f"{CORRECTION}.rollout_is_threshold",
            "lo_hi",
        ),
        ([f"{CORRECTION}.rollout_rs=token_k4"], f"{CORRECTION}.rollout_rs", "'token_k4' is not known"),
        ([f"{CORRECTION}.rollout_rs=seq_max_k1"], f"{CORRECTION}.rollout_rs", "'seq_max_k1' is not known"),
        ([f"{CORRECTION}.rollout_rs=seq_max_k2"], f"{CORRECTION}.rollout_rs_threshold", "needs a threshold"),
        (
            [f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=0.1_0.5"],
            f"{CORRECTION}.rollout_rs_threshold",
            "a lower bound (0.1_0.5) has no meaning",
        ),
        (
            [f"{CORRECTION}.rollout_rs=token_k1,seq_sum_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold=2.0,0.1"],
            f"{CORRECTION}.rollout_rs_threshold",
            "2 thresholds for 3",
        ),
        (
            [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: 0.5_2.0, rollout_rs_threshold_lower: 0.9}}"],
            f"{CORRECTION}.rollout_rs_threshold",
            "has no effect",
        ),
        (
            [f"{CORRECTION}={{rollout_rs: token_k2, rollout_rs_threshold: 0.1, rollout_rs_threshold_lower: 0.9}}"],
            f"{CORRECTION}.rollout_rs_threshold",
            "has no effect",
        ),
        (
            [f"{CORRECTION}={{bypass_mode: true, loss_type: reinforce, rollout_is_batch_normalize: true}}"],
            f"{CORRECTION}.rollout_is_batch_normalize",
            "weights per micro-batch",
        ),
        (
            [f"{CORRECTION}={{bypass_mode: true, loss_type: reinforce}}", f"{POLICY_LOSS}.loss_mode=gspo"],
            f"{POLICY_LOSS}.loss_mode",
            "replaces the policy loss",
        ),
        ([f"{CORRECTION}={{bypass_mode: true, rollout_rs: token}}"], f"{CORRECTION}.rollout_rs", "there is no ratio"),
        (
            ["algorithm=grpo", "algorithm.truncated_responses=bootstrap"],
            "algorithm.truncated_responses",
            "algorithm.adv_estimator = grpo does not use",
        ),
        (
            ["actor_rollout_ref.actor.policy_loss.clip_cov_lb=6.0"],
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb",
            "no token could be selected",
        ),
    ],
)
def test_what_could_never_work_is_one_problem_with_a_remedy(overrides, key, why):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert why in problem.why
    assert problem.fix


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.gen_batch_size=64"], "data.gen_batch_size = 64 has no effect without algorithm.filter_groups"),
        ([GDPO], "algorithm.gdpo.reward_keys is not set: the score is the only reward"),
    ],
)
def test_what_has_no_effect_is_a_notice(overrides, words):
    assert any(words in notice for notice in load(*overrides).notices)


def test_without_dynamic_sampling_both_batches_are_the_same_and_with_it_each_has_its_size():
    assert load("data.gen_batch_size=64").data.gen_batch_size == 512
    assert load(*FILTER, "data.gen_batch_size=1536").data.gen_batch_size == 1536
    assert load(*FILTER).data.gen_batch_size == 512


@pytest.mark.parametrize(
    "good",
    [
        [*FILTER, "data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches=8"],
        [*FILTER, "data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches=0"],
        [*FILTER, "data.gen_batch_size=64", "algorithm.filter_groups.max_num_gen_batches=-1"],
        [f"{CORRECTION}={{rollout_is: sequence, rollout_rs: geometric, rollout_rs_threshold: 1.01}}"],
        [f"{CORRECTION}.rollout_rs=token_k1,seq_max_k2", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0,0.1"],
        [GDPO, "algorithm.gdpo={reward_keys: [a, b], reward_weights: [1.0, 0.5]}"],
    ],
)
def test_what_works_is_accepted(good):
    load(*good)


@pytest.mark.parametrize("name", ["seq_reward", "seq_final_reward", "score"])
def test_the_score_has_several_names(name):
    assert load(*FILTER, f"algorithm.filter_groups.metric={name}").algorithm.filter_groups.metric == "score"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            [f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=20"],
            [f"{ROLLOUT}.top_p = 0.9, {ROLLOUT}.top_k = 20: responses are"],
        ),
        (
            [f"{ROLLOUT}.min_p=0.1"],
            ["training is off-policy", "rollout_is=token or", f"set {CORRECTION}.denominator=drawn"],
        ),
        ([f"{ROLLOUT}.top_k=5", f"{CORRECTION}.rollout_is=token"], [f"set {CORRECTION}.denominator=drawn."]),
        (
            [f"{ROLLOUT}.top_k=5", f"{CORRECTION}={{rollout_is: token, denominator: drawn}}"],
            ["denominator = drawn corrects for it by rollout_is."],
        ),
        (
            [f"{ROLLOUT}.top_k=5", f"{CORRECTION}.bypass_mode=True", f"{ROLLOUT}.logprobs_mode=processed_logprobs"],
            ["denominator = drawn corrects for it by bypass_mode."],
        ),
        ([f"{CORRECTION}.denominator=drawn"], ["denominator = drawn has no effect"]),
    ],
)
def test_truncated_sampling_is_said_with_what_corrects_for_it(overrides, said):
    notices = load(*overrides).notices
    (notice,) = [notice for notice in notices if "denominator" in notice and "is an alias" not in notice]
    assert all(words in notice for words in said), notice


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["trainer.mode=async", "trainer.max_staleness=3", f"{CORRECTION}.rollout_is=null"], 3),
        (["trainer.mode=one_step_off", f"{CORRECTION}.rollout_is=null"], 1),
        (["trainer.mode=async", f"{CORRECTION}={{rollout_is: null, rollout_rs: token}}"], 1),
        (["trainer.mode=async", "trainer.max_staleness=0", f"{CORRECTION}.rollout_is=null"], None),
        (["trainer.mode=async", f"{CORRECTION}.rollout_is=token"], None),
        (["trainer.mode=async", f"{CORRECTION}.bypass_mode=True"], None),
        ([], None),
    ],
)
def test_stale_answers_that_nothing_weighs_are_said(overrides, steps):
    notices = [notice for notice in load(*overrides).notices if "steps old" in notice]
    assert len(notices) == (steps is not None)
    assert all(f"{steps} steps old" in notice and "rollout_is=token" in notice for notice in notices)


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ([], None),
        (["trainer.mode=async"], "token"),
        (["trainer.mode=one_step_off"], "token"),
        (["trainer.mode=async", f"{CORRECTION}.rollout_is=sequence"], "sequence"),
        (["trainer.mode=async", f"{CORRECTION}.rollout_is=null"], None),
        (["trainer.mode=async", "trainer.max_staleness=0"], None),
        (["trainer.mode=async", f"{CORRECTION}.bypass_mode=True"], None),
        (["trainer.mode=async", f"{ROLLOUT}.name=hf", f"{ROLLOUT}.top_p=0.9"], "token"),
        ([f"{CORRECTION}={{bypass_mode: true, loss_type: reinforce}}"], "token"),
        ([f"{CORRECTION}={{bypass_mode: true, loss_type: reinforce, rollout_is: null}}"], None),
    ],
)
def test_stale_answers_are_weighed_by_themselves(overrides, level):
    config = load(*overrides)
    assert config.algorithm.rollout_correction.rollout_is == level
    said = [notice for notice in config.notices if f"{CORRECTION}.rollout_is = token" in notice]
    by_itself = level == "token" and "trainer.mode" in str(overrides)
    assert len(said) == by_itself


def test_ratios_are_taken_to_what_the_engine_reports_unless_that_was_asked_otherwise():
    cut = ["trainer.mode=async", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.top_p=0.9"]
    found = load(*cut).algorithm.rollout_correction
    assert (found.rollout_is, found.denominator) == ("token", "drawn")
    found = load(*cut[:2]).algorithm.rollout_correction
    assert (found.rollout_is, found.denominator) == ("token", "full"), "nothing is cut off"


def test_what_was_asked_for_goes_before_what_comes_by_itself():
    """A run that only learns from teachers has no policy loss to weight."""
    taught = ("distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False", TEACHER)
    config = load("algorithm=grpo", "trainer.mode=async", *taught)
    assert config.algorithm.rollout_correction.rollout_is is None
    assert not any("steps old" in notice for notice in config.notices)


def test_reinforce_is_the_plain_policy_gradient_and_needs_the_bypass():
    config = load(f"{CORRECTION}={{bypass_mode: true, loss_type: reinforce}}")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "gpg"
    assert any(f"{CORRECTION}.loss_type" in notice for notice in load(f"{CORRECTION}.loss_type=reinforce").notices)


def test_whole_distributions_need_no_word_and_validation_may_cut_off():
    assert not [notice for notice in load(f"{ROLLOUT}.val_kwargs.top_p=0.7").notices if "denominator" in notice]


@pytest.mark.parametrize("text", ["1_4", "0.5_2", "1_2.5", "0.5_2.0"])
def test_two_bounds_are_not_one_number(text):
    config = load(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold={text}", f"{KWARGS}.x=8_192")
    assert config.algorithm.rollout_correction.rollout_is_threshold == text
    assert config.actor_rollout_ref.rollout.engine_kwargs["native"]["x"] == 8192, "other keys as ever"


def test_bounds_that_a_file_made_one_number_are_refused():
    with pytest.raises(ConfigError, match=rf"{CORRECTION}\.rollout_is_threshold = 0\.52: .*\b1\b"):
        load(f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: 0.5_2}}")
