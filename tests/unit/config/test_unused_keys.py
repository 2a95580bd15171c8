"""Keys that work only beside another one: named, with what would switch them on, where that is off; else not."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from verl.config import PPOConfig, load_config
from verl.config.schema import walk
from verl.config.unused_keys import RULES

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{block}" for block in ("actor", "rollout", "ref"))
TEACHER = "distillation.teacher"
MODEL, CORRECTION = "actor_rollout_ref.model", "algorithm.rollout_correction"
RUN = ["data.train_files=openai/gsm8k", "data.val_files=openai/gsm8k", f"{MODEL}.path=org/model"]
GRPO, KL = "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=True"
DYNAMIC = f"{ACTOR}.use_dynamic_bsz=True"
NORM = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
SAMPLED = f"{ROLLOUT}.val_kwargs.do_sample=True"
ON_MEGATRON = {block: f"{block}.strategy=megatron" for block in (ACTOR, "critic", REF, "reward_model", TEACHER)}
JUDGED = ["reward_model.enable=True", "reward_model.path=org/judge"]
TAUGHT = ["distillation.enabled=True", "distillation.teacher_models.big.model_path=org/big"]
STARTED = {ACTOR: [], "critic": [], REF: [KL], "reward_model": JUDGED, TEACHER: TAUGHT}


def engine_cases():
    """Each engine reads its own keys, of every role."""
    for block, run in STARTED.items():
        on = [ON_MEGATRON[block], *run]
        megatron = f"{block}.megatron_config"
        yield f"{megatron}.grad_offload=True", run, on
        yield f"{block}.fsdp_config.fsdp_size=1", on, run
        yield f"{megatron}.dist_checkpointing_path=/old/actor", on, [*on, f"{megatron}.use_dist_checkpointing=True"]
        if block not in (REF, TEACHER):
            model = MODEL if block == ACTOR else f"{block}.model"
            yield f"{model}.use_remove_padding=False", on, run


# (what was set, what switches it off if the defaults do not, what switches it on: None for nothing)
CASES: list[tuple[str, list[str], list[str] | None]] = [
    *engine_cases(),
    ("critic.optim.lr=2e-5", [GRPO], []),
    ("trainer.record.texts=False", ["trainer.record.enable=False"], []),
    ("distillation.distillation_loss.loss_mode=k2", [], TAUGHT),
    (
        "distillation.distillation_loss.topk=9",
        TAUGHT,
        [*TAUGHT, "distillation.distillation_loss.loss_mode=forward_kl_topk"],
    ),
    (f"{TEACHER}.log_prob_micro_batch_size_per_gpu=2", [*TAUGHT, f"{TEACHER}.log_prob_use_dynamic_bsz=True"], TAUGHT),
    (f"{TEACHER}.log_prob_max_token_len_per_gpu=99", TAUGHT, [*TAUGHT, f"{TEACHER}.log_prob_use_dynamic_bsz=True"]),
    (f"{ROLLOUT}.in_process=True", [], [f"{ROLLOUT}.name=vllm"]),
    (f"{ROLLOUT}.return_routed_experts=True", [f"{ROLLOUT}.name=hf"], []),
    (f"{ROLLOUT}.cudagraph_capture_sizes=[1,8]", [], [f"{ROLLOUT}.name=vllm"]),
    (f"{ROLLOUT}.gpu_memory_utilization=0.5", [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.server_urls=[http://one:8000]"], []),
    (f"{ROLLOUT}.prometheus.port=9500", [], [f"{ROLLOUT}.prometheus.enable=True"]),
    (f"{ROLLOUT}.n_gpus_per_node=2", [], [f"{ROLLOUT}.nnodes=1"]),
    (f"{ROLLOUT}.free_weights=True", [f"{ROLLOUT}.nnodes=1"], []),
    (f"{ROLLOUT}.free_cache_engine=False", ["trainer.mode=async"], []),
    (f"{ROLLOUT}.free_weights=True", ["trainer.mode=one_step_off"], ["trainer.mode=async"]),
    (f"{ROLLOUT}.agent.num_workers=8", [], [f"{ROLLOUT}.mode=async"]),
    ("max_turns=3", [], [f"{ROLLOUT}.mode=async"]),
    ("retriever.topk=5", [], [f"{ROLLOUT}.mode=async"]),
    ("data.max_start_length=512", [], [f"{ROLLOUT}.mode=async"]),
    ("data.max_obs_length=100", [], [f"{ROLLOUT}.mode=async"]),
    ("algorithm.state_masking.start_state_marker=<x>", [], [f"{ROLLOUT}.mode=async"]),
    ("trainer.max_critic_ckpt_to_keep=2", [GRPO], []),
    ("trainer.max_staleness=3", ["trainer.mode=one_step_off"], ["trainer.mode=async"]),
    ("trainer.partial_kv=keep", [], ["trainer.mode=async"]),
    ("trainer.overlap=True", [], ["trainer.mode=async"]),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=2", [], [KL]),
    (f"{REF}.fsdp_config.param_offload=True", [KL, f"{MODEL}.lora_rank=8"], [KL]),
    ("reward_model.micro_batch_size_per_gpu=2", [], ["reward_model.enable=True", "reward_model.path=org/judge"]),
    ("reward_model.path=org/judge", [], ["reward_model.url=one:8001"]),
    ("reward_model.rollout.max_num_seqs=8", JUDGED, [*JUDGED, "reward_model.judge.enable=True"]),
    ("reward_model.judge.n=3", [], ["reward_model.judge.enable=True", "reward_model.url=one:8001"]),
    ("reward_model.enable_resource_pool=True", [], ["reward_model.enable=True", "reward_model.path=org/judge"]),
    (
        "reward_model.nnodes=2",
        ["reward_model.enable=True", "reward_model.path=org/judge"],
        ["reward_model.enable=True", "reward_model.path=org/judge", "reward_model.enable_resource_pool=True"],
    ),
    (
        "reward_model.overlong_buffer.len=16",
        [],
        ["reward_model.overlong_buffer.enable=True", "reward_model.reward_manager=dapo"],
    ),
    ("sandbox_fusion.max_concurrent=8", [], ["sandbox_fusion.url=http://127.0.0.1:8080"]),
    (f"{ACTOR}.kl_loss_coef=0.2", [], [KL]),
    (f"{ACTOR}.kl_loss_type=low_var_kl", [], [KL]),
    ("algorithm.kl_penalty=low_var_kl", [], ["algorithm.use_kl_in_reward=True"]),
    ("algorithm.kl_ctrl.kl_coef=0.2", [KL], ["algorithm.use_kl_in_reward=True"]),
    (
        "algorithm.kl_ctrl.target_kl=0.2",
        ["algorithm.use_kl_in_reward=True"],
        ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"],
    ),
    ("algorithm.filter_groups.metric=acc", [GRPO], [GRPO, "algorithm.filter_groups.enable=True"]),
    ("algorithm.gamma=0.9", [GRPO], ["algorithm.adv_estimator=reinforce_plus_plus"]),
    ("algorithm.lam=0.9", ["algorithm.adv_estimator=reinforce_plus_plus"], []),
    ("algorithm.norm_adv_by_std_in_grpo=False", [], [GRPO]),
    ("algorithm.gdpo.reward_keys=[a]", [], ["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=2"]),
    (f"{CORRECTION}.rollout_rs_threshold=3", [], [f"{CORRECTION}.rollout_rs=token"]),
    (f"{CORRECTION}.rollout_is_batch_normalize=True", [], [f"{CORRECTION}.rollout_is=token"]),
    (f"{CORRECTION}.loss_type=reinforce", [], [f"{CORRECTION}.bypass_mode=True"]),
    (f"{CORRECTION}.rollout_is_threshold=3", [], [f"{CORRECTION}.rollout_rs=token"]),
    (f"{ROLLOUT}.val_kwargs.top_p=0.9", [], [SAMPLED, f"{ROLLOUT}.val_kwargs.temperature=1"]),
    (f"{ROLLOUT}.val_kwargs.temperature=1", [f"{ROLLOUT}.val_kwargs.do_sample=False"], []),
    (f"{ROLLOUT}.top_k=5", [f"{ROLLOUT}.do_sample=False"], []),
    (f"{ACTOR}.loss_scale_factor=8", [], [NORM]),
    ("critic.loss_scale_factor=8", [], [NORM]),
    (f"{ACTOR}.clip_ratio_c=5", [f"{ACTOR}.policy_loss.loss_mode=gspo"], []),
    (f"{ACTOR}.policy_loss.clip_cov_ratio=0.1", [], [f"{ACTOR}.policy_loss.loss_mode=clip_cov"]),
    (f"{ACTOR}.policy_loss.ppo_kl_coef=2", [], [f"{ACTOR}.policy_loss.loss_mode=kl_cov"]),
    (f"{ACTOR}.policy_loss.kl_cov_ratio=0.1", [], [f"{ACTOR}.policy_loss.loss_mode=kl_cov"]),
    (f"{ACTOR}.policy_loss.tau_pos=2", [], [f"{ACTOR}.policy_loss.loss_mode=sapo"]),
    (f"{MODEL}.lora_alpha=32", [], [f"{MODEL}.lora_rank=8"]),
    ("critic.model.target_modules=[q_proj]", [], ["critic.model.lora_rank=8"]),
    (f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", [f"{ACTOR}.optim.lr_warmup_steps=5"], []),
    ("critic.optim.lr_warmup_steps_ratio=0.1", ["critic.optim.lr_warmup_steps=5"], ["critic.optim.lr_warmup_steps=-1"]),
    (f"{ACTOR}.optim.min_lr_ratio=0.1", [], [f"{ACTOR}.optim.lr_scheduler=cosine"]),
    ("critic.optim.min_lr_ratio=0.1", [], ["critic.optim.lr_scheduler=cosine"]),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=9999", [], [DYNAMIC]),
    (f"{ACTOR}.ppo_max_token_len_per_gpu=9998", [], [f"{ROLLOUT}.log_prob_use_dynamic_bsz=True"]),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", [DYNAMIC], [DYNAMIC, "critic.use_dynamic_bsz=False"]),
    (f"{ACTOR}.ppo_micro_batch_size=2", [DYNAMIC], []),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2", [DYNAMIC], []),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu=9999", [], [DYNAMIC]),
    (f"{REF}.log_prob_micro_batch_size_per_gpu=3", [KL, DYNAMIC], [KL]),
    (f"{REF}.log_prob_max_token_len_per_gpu=9999", [KL], [KL, DYNAMIC]),
    ("critic.forward_micro_batch_size_per_gpu=2", [DYNAMIC], []),
    ("critic.forward_max_token_len_per_gpu=9999", [], [DYNAMIC]),
]


def said(*overrides: str) -> list[str]:
    config = load_config(None, [*RUN, *overrides], check_files=False)
    return [notice for notice in config.notices if ": no effect, " in notice]


@pytest.mark.parametrize(("asked", "off", "on"), CASES, ids=[asked for asked, _, _ in CASES])
def test_a_key_that_nothing_reads_is_named_until_its_switch_is_on(asked, off, on):
    key = asked.partition("=")[0]
    (notice,) = said(asked, *off)
    assert notice.startswith(f"{key} = ")
    assert on is None or not [other for other in said(asked, *on) if key in other]
    assert not said(*off)


def test_every_rule_has_a_case_and_every_pattern_a_key():
    leaves = [path for path, entry in walk(PPOConfig) if entry.block is None]
    asked = [case.partition("=")[0] for case, _, _ in CASES]
    for rule in RULES:
        for pattern in rule.keys:
            assert any(fnmatchcase(path, pattern) for path in leaves), pattern
    unproven = [rule.reason for rule in RULES if not any(fnmatchcase(a, key) for a in asked for key in rule.keys)]
    assert not unproven


def test_a_whole_block_is_one_line():
    block = [f"critic.{key}" for key in ("optim.lr=2e-5", "optim.weight_decay=0", "grad_clip=2", "cliprange_value=0.2")]
    size = ["critic.ppo_micro_batch_size_per_gpu=2", "critic.model.lora_rank=8", "critic.model.lora_alpha=8"]
    (notice,) = said(GRPO, *block, *size)
    assert " and 2 more: no effect, there is no critic" in notice


def test_a_switch_that_is_off_and_a_default_that_is_written_down_are_no_idle_keys():
    assert not said(GRPO, "critic.enable=False", f"{ACTOR}.kl_loss_coef=0.001", f"{ACTOR}.use_kl_loss=False")
    assert not said("algorithm=grpo", "critic=megatron")


def test_what_follows_another_key_is_not_told_for_having_its_value():
    assert not said(f"{REF}.strategy=fsdp", f"{REF}.log_prob_use_dynamic_bsz=False")


def test_an_estimator_or_a_loss_of_the_users_own_may_read_anything():
    lib = "external_libs=[my.losses]"
    assert not said(lib, "algorithm.adv_estimator=mine", "algorithm.lam=0.5", "algorithm.gdpo.reward_keys=[a]")
    assert not said(lib, f"{ACTOR}.policy_loss.loss_mode=mine", f"{ACTOR}.policy_loss.tau_pos=2")
