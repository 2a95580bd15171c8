"""Rules between keys of `PPOConfig`: conflicts are problems, surprising values are notices. Batches: plan.py."""

from __future__ import annotations

import re

from verl.config import names
from verl.config.algorithm_rules import algorithm_rules, distillation_rules
from verl.config.block_rules import (
    engine_rules,
    lora_rules,
    optimizer_rules,
    packed_token_rules,
    run_rules,
    user_code_rules,
    values_present,
)
from verl.config.layout import (
    ACTOR,
    BLOCK_OF_ROLE,
    MODEL_OF_ROLE,
    ROLLOUT,
    ROUTER_REPLAY,
    active_roles,
    reward_server_shares_devices,
)
from verl.config.megatron import megatron_rules
from verl.config.plan import batch_plan
from verl.config.ppo import PPOConfig
from verl.config.problems import Report
from verl.config.schema import get_path
from verl.config.unused_keys import report_unused_keys

_TINY_DISCOUNT = 1e-3


def validate(config: PPOConfig, report: Report) -> None:
    """Report all problems of a resolved configuration."""
    values_present(config, "", report)
    for rule in (
        _estimator,
        algorithm_rules,
        _kl,
        distillation_rules,
        _clipping,
        _lengths,
        _turns,
        search_rules,
        _optimizers,
        _engines,
        megatron_rules,
        router_replay_rules,
        lambda config, report: engine_rules(ROLLOUT, config.actor_rollout_ref.rollout, report),
        _packed_tokens,
        _adapters,
        _rewards,
        _pools,
        _run,
        _user_code,
        report_unused_keys,
    ):
        rule(config, report)
    for problem in batch_plan(config).problems:
        report.add(problem)


def _estimator(config: PPOConfig, report: Report) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if not config.distillation.has_advantages:
        return  # the estimator is not used
    traits = names.estimator_traits(estimator)
    uses = ("algorithm.adv_estimator",)
    if traits.uses_groups and n == 1:
        why = f"{estimator} compares the responses to a prompt, so a prompt needs several"
        report.problem(f"{ROLLOUT}.n", n, why, "Set it to 4 or more, or algorithm.adv_estimator=gae", uses)
    if config.algorithm.filter_groups.enable and n == 1:
        why = "groups of one response have equal scores and would all be dropped"
        report.problem("algorithm.filter_groups.enable", True, why, f"Set {ROLLOUT}.n to 4 or more", (f"{ROLLOUT}.n",))
    if traits.needs_critic and not config.critic.enable:
        why = f"algorithm.adv_estimator = {estimator} requires the critic's values"
        report.problem("critic.enable", False, why, "Leave it out, or set algorithm.adv_estimator=grpo", uses)
    if traits.needs_critic is False and config.critic.enable:
        report.notice(f"critic.enable = True: the critic is trained, but {estimator} does not use its values.")
    gamma, length = config.algorithm.gamma, config.data.max_response_length
    if "gamma" in traits.reads and gamma**length < _TINY_DISCOUNT:
        report.notice(
            f"algorithm.gamma = {gamma:g} over data.max_response_length = {length} tokens leaves {gamma**length:.0e} "
            "of the final reward for the first token. Set algorithm.gamma=1.0 for long responses."
        )


def _kl(config: PPOConfig, report: Report) -> None:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.use_kl_in_reward and actor.use_kl_loss:
        report.notice("algorithm.use_kl_in_reward and actor.use_kl_loss are both on: the KL is applied twice.")
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        report.notice(
            f"{ACTOR}.kl_loss_type = k1: the expected gradient of this estimate is 0: it has no effect on the policy. "
            f"Set {ACTOR}.kl_loss_type=kl for the same value with an unbiased gradient."
        )


def _clipping(config: PPOConfig, report: Report) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss.loss_mode == "vanilla" and actor.clip_ratio_low >= 1:
        why = "is a distance from 1: the ratio could fall to 0 or below"
        fix = "Set a distance such as 0.2, or a bound of the ratio between 0.5 and 1 such as 0.8"
        report.problem(f"{ACTOR}.clip_ratio_low", actor.clip_ratio_low, why, fix, (f"{ACTOR}.clip_ratio",))


def _lengths(config: PPOConfig, report: Report) -> None:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    for key, tokens in (
        ("max_new_tokens", rollout.max_new_tokens),
        ("val_kwargs.max_new_tokens", rollout.val_kwargs.max_new_tokens),
    ):
        if tokens > data.max_response_length:
            why = f"is more than data.max_response_length = {data.max_response_length}"
            fix = f"Set it to {data.max_response_length} or less, or raise data.max_response_length"
            report.problem(
                f"{ROLLOUT}.{key}", tokens, why, fix, ("data.max_response_length", f"{ROLLOUT}.max_new_tokens")
            )
            break
    needed = data.max_prompt_length + rollout.max_new_tokens
    if rollout.max_model_len < needed:
        why = f"prompt and response may have {needed} tokens (data.max_prompt_length + {ROLLOUT}.max_new_tokens)"
        report.problem(f"{ROLLOUT}.max_model_len", rollout.max_model_len, why, f"Set it to {needed} or leave it out")


def _turns(config: PPOConfig, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.enable and rollout.mode != "async":
        why = f"{ROLLOUT}.multi_turn.enable = True requires asynchronous rollout"
        report.problem(f"{ROLLOUT}.mode", rollout.mode, why, "Set it to async", (f"{ROLLOUT}.multi_turn.enable",))
    if not rollout.do_sample:
        report.notice(
            f"{ROLLOUT}.do_sample = False: greedy responses do not explore, and all n responses to a prompt are equal."
        )
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        report.notice(
            f"{ROLLOUT}.val_kwargs.n = {rollout.val_kwargs.n} greedy responses are all equal. "
            f"Set {ROLLOUT}.val_kwargs.do_sample=True and a temperature above 0."
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        why = "sampling at temperature 0 is greedy"
        report.problem(
            f"{ROLLOUT}.val_kwargs.temperature", 0.0, why, f"Set it above 0, or {ROLLOUT}.val_kwargs.do_sample=False"
        )


def _optimizers(config: PPOConfig, report: Report) -> None:
    optimizer_rules(f"{ACTOR}.optim", config.actor_rollout_ref.actor.optim, report)
    if config.critic.enable:
        optimizer_rules("critic.optim", config.critic.optim, report)


def _engines(config: PPOConfig, report: Report) -> None:
    """For roles with another strategy than megatron, report Megatron parallel sizes and invalid FSDP sizes."""
    for role in active_roles(config):
        path = BLOCK_OF_ROLE.get(role)
        if path is None or role == "ref" or get_path(config, path).strategy == "megatron":
            continue
        block = get_path(config, path)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            size = block.megatron_config[name]
            if size > 1:
                why = f"{path}.strategy = {block.strategy} does not support this parallelism"
                fix = f"Leave the key out, or set {path}.strategy=megatron"
                report.problem(f"{path}.megatron_config.{name}", size, why, fix, (f"{path}.strategy",))
        _fsdp_size(config, role, path, report)


def _packed_tokens(config: PPOConfig, report: Report) -> None:
    for role in active_roles(config):
        if role in BLOCK_OF_ROLE and get_path(config, BLOCK_OF_ROLE[role]).strategy != "megatron":
            path = BLOCK_OF_ROLE[role]
            packed_token_rules(path, get_path(config, path), MODEL_OF_ROLE[role], config, report)


def _adapters(config: PPOConfig, report: Report) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    lora_rules("actor_rollout_ref.model", policy.model, policy.actor.optim.lr, report)
    if critic.enable:
        lora_rules("critic.model", critic.model, critic.optim.lr, report)


def _fsdp_size(config: PPOConfig, role: str, path: str, report: Report) -> None:
    size = get_path(config, path).fsdp_config.fsdp_size
    pool = config.role_mapping[role]
    world = sum(config.resource_pool_spec.get(pool, []))
    if size == 0 or (size > 0 and world % size):
        why = f"does not divide the {world} ranks of {pool}"
        report.problem(f"{path}.fsdp_config.fsdp_size", size, why, "Set it to -1 (all ranks), or a divisor")


def _rewards(config: PPOConfig, report: Report) -> None:
    reward = config.reward_model
    if reward.enable and reward.path is None:
        report.problem(
            "reward_model.path", None, "reward_model.enable = True requires a model", "Set reward_model.path=…"
        )
    _judge(config, report)
    buffer = reward.overlong_buffer
    if buffer.enable and buffer.len > config.data.max_response_length:
        why = f"is more than data.max_response_length = {config.data.max_response_length}"
        report.problem("reward_model.overlong_buffer.len", buffer.len, why, "Set it to a part of the response length")
    manager = names.REWARD_MANAGERS.get(reward.reward_manager)
    if buffer.enable and manager is not None and not manager.overlong_buffer:
        why = f"reward_model.reward_manager = {reward.reward_manager} does not support it"
        report.problem("reward_model.overlong_buffer.enable", True, why, "Set reward_model.reward_manager=dapo")


def _judge(config: PPOConfig, report: Report) -> None:
    reward, judge, at = config.reward_model, config.reward_model.judge, "reward_model.judge"
    if reward.enable and reward.url is not None:
        why = "reward_model.enable = True starts a reward model in this run"
        report.problem("reward_model.url", reward.url, why, "Keep one of the two")
    if reward_server_shares_devices(config) and config.trainer.mode != "sync":
        why = f"trainer.mode = {config.trainer.mode} trains while the reward model scores, on the same devices"
        report.problem("reward_model.enable", True, why, "Set reward_model.enable_resource_pool=True")
    if not judge.enable:
        return
    if reward.url is None and not reward.enable:
        fix = "Set reward_model.url=host:port of a server with the judge, or reward_model.enable=True and its path"
        report.problem(f"{at}.enable", True, "there is no judge", fix)
    if config.custom_reward_function.path is not None:
        why = "custom_reward_function.path scores the responses; it can call the judge itself, at reward_router_address"
        report.problem(f"{at}.enable", True, why, "Leave one of them out")
    if judge.low >= judge.high:
        report.problem(
            f"{at}.low", judge.low, f"is not below {at}.high = {judge.high:g}", "Set the lowest score below the highest"
        )
    try:
        if re.compile(judge.pattern).groups < 1:
            report.problem(f"{at}.pattern", judge.pattern, "has no group", "Put the score into parentheses")
    except re.error as error:
        report.problem(f"{at}.pattern", judge.pattern, f"is not a regular expression ({error})", "Correct it")


def _pools(config: PPOConfig, report: Report) -> None:
    spec = config.resource_pool_spec
    if not spec:
        report.problem("resource_pool_spec", spec, "has no pool", "Set e.g. {global_pool: [8]}, or leave it out")
    for pool, sizes in spec.items():
        if not sizes or min(sizes) < 1:
            why = "must be a list of the devices of each node, each at least 1"
            report.problem(f"resource_pool_spec.{pool}", sizes, why, "Set e.g. [8] for one node or [8, 8] for two")
    used = {config.role_mapping[role] for role in active_roles(config)}
    for pool in spec:
        if pool not in used:
            report.notice(f"resource_pool_spec.{pool}: no role runs on it. Set role_mapping, or leave it out.")


def _run(config: PPOConfig, report: Report) -> None:
    trainer = config.trainer
    if not config.data.val_files:
        if trainer.val_only:
            report.problem(
                "data.val_files", [], "trainer.val_only = True requires validation prompts", "Set data.val_files=…"
            )
        else:
            report.notice("data.val_files is not set: no validation.")
    run_rules(trainer, report)
    if trainer.node_rank is not None and trainer.node_rank >= trainer.nnodes:
        why = f"is not below trainer.nnodes = {trainer.nnodes}"
        report.problem("trainer.node_rank", trainer.node_rank, why, f"Set it from 0 to {trainer.nnodes - 1}")
    if trainer.node_rank is not None and trainer.node_rank > 0 and trainer.master_addr is None:
        why = f"trainer.node_rank = {trainer.node_rank} joins node 0"
        report.problem("trainer.master_addr", None, why, "Set it to the address of node 0")


def _user_code(config: PPOConfig, report: Report) -> None:
    user_code_rules("data.custom_cls", config.data.custom_cls, report)
    user_code_rules("data.sampler", config.data.sampler, report)


# Rollout engines that return the experts of each token.
_RECORDS_EXPERTS = ("native", "vllm")


def router_replay_rules(config: PPOConfig, report: Report) -> None:
    """Report router replay without recorded experts, or with conflicting keys."""
    rollout, mode = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.router_replay.mode
    engines = " or ".join(_RECORDS_EXPERTS)
    if mode == "R3" and rollout.name not in _RECORDS_EXPERTS:
        why = f"{ROLLOUT}.name = {rollout.name} does not return the experts of tokens"
        report.problem(ROUTER_REPLAY, mode, why, f"Set it to R2, or {ROLLOUT}.name to {engines}", (f"{ROLLOUT}.name",))
    elif mode == "R3" and rollout.server_urls:
        why = f"the engines at {ROLLOUT}.server_urls do not return the experts of tokens"
        fix = f"Set it to R2, or leave {ROLLOUT}.server_urls out"
        report.problem(ROUTER_REPLAY, mode, why, fix, (f"{ROLLOUT}.server_urls",))
    elif mode == "R3" and not rollout.return_routed_experts:
        why = "router_replay.mode = R3 needs them"
        report.problem(f"{ROLLOUT}.return_routed_experts", False, why, "Leave it out")
    elif mode == "R2" and rollout.return_routed_experts:
        why = "router_replay.mode = R2 replays the experts of the old log-prob pass"
        report.problem(f"{ROLLOUT}.return_routed_experts", True, why, f"Leave it out, or set {ROUTER_REPLAY}=R3")
    bypass = "algorithm.rollout_correction.bypass_mode"
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        why = f"{bypass} = True skips the pass whose experts are replayed"
        report.problem(ROUTER_REPLAY, mode, why, f"Set it to R3, or {bypass}=False", (bypass,))


def search_rules(config: PPOConfig, report: Report) -> None:
    """Report conflicting keys of the search agent."""
    retriever, data = config.retriever, config.data
    if retriever.url and retriever.corpus_path:
        why = f"retriever.url = {retriever.url} is set too"
        report.problem("retriever.corpus_path", retriever.corpus_path, why, "Keep one of the two")
    if config.do_search and not retriever.url and not retriever.corpus_path:
        fix = "Set it to a service (http://127.0.0.1:8000/retrieve), or retriever.corpus_path to a file"
        report.problem("retriever.url", retriever.url, "do_search = True requires a service or corpus", fix)
    if data.max_start_length is not None and data.max_start_length > data.max_prompt_length:
        why = f"is more than data.max_prompt_length = {data.max_prompt_length}"
        report.problem("data.max_start_length", data.max_start_length, why, "Lower it, or leave it out")
    if config.do_search and data.max_obs_length >= data.max_response_length:
        why = (
            f"search results of one turn fill data.max_response_length = {data.max_response_length}, which limits "
            "all turns together"
        )
        report.problem("data.max_obs_length", data.max_obs_length, why, "Lower it, or raise data.max_response_length")
