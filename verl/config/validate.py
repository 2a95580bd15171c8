"""Rules between keys: what cannot work together is a problem, what may surprise is a notice. (Batches: plan.py.)"""

from __future__ import annotations

import os
import re

from verl.config import names
from verl.config.algorithm_rules import algorithm_rules
from verl.config.data import CustomClassConfig, SamplerConfig
from verl.config.distillation_rules import distillation_rules
from verl.config.engine import OptimConfig
from verl.config.idle import idle_keys
from verl.config.layout import ACTOR, BLOCK_OF_ROLE, ROLLOUT, active_roles, judge_shares_devices
from verl.config.lora_rules import lora_rules
from verl.config.megatron_rules import megatron_rules
from verl.config.plan import batch_plan
from verl.config.ppo import PPOConfig
from verl.config.problems import Report, show
from verl.config.rollout_rules import engine_rules
from verl.config.router_replay import router_replay_rules
from verl.config.schema import Block, entries, join, pick
from verl.config.search_rules import search_rules
from verl.config.trainer import RunConfig

_TINY_DISCOUNT = 1e-3


def validate(config: PPOConfig, report: Report) -> None:
    """Report every rule that a resolved configuration breaks."""
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
        _sequence_parallel,
        _adapters,
        _rewards,
        _pools,
        _run,
        _user_code,
        idle_keys,
    ):
        rule(config, report)
    for problem in batch_plan(config).problems:
        report.add(problem)


def values_present(block: Block, path: str, report: Report) -> None:
    """After resolving, a key has a value unless its type says that it may be without one."""
    for name, entry in entries(type(block)).items():
        where, value = join(path, name), block[name]
        if isinstance(value, Block):
            if entry.key.follows is None:  # else what is missing is missing in the block it follows
                values_present(value, where, report)
        elif entry.key.required is not None:
            if not value:
                report.broken(where, value, "is required", f"Set it, e.g. {where}={entry.key.required}")
        elif value is None and not entry.optional and entry.key.follows is None:
            report.problem(where, value, "must have a value", "Set one, or leave the key out for its default")


def _estimator(config: PPOConfig, report: Report) -> None:
    estimator, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    if not config.distillation.has_advantages:
        return  # it is not asked
    traits = names.estimator_traits(estimator)
    uses = ("algorithm.adv_estimator",)
    if traits.uses_groups and n == 1:
        why = f"{estimator} compares the answers to one prompt, and one answer has nothing to compare with"
        report.problem(f"{ROLLOUT}.n", n, why, "Set it to 4 or more, or algorithm.adv_estimator=gae", uses)
    if config.algorithm.filter_groups.enable and n == 1:
        why = "groups of one answer are always equal and would all be dropped"
        report.problem("algorithm.filter_groups.enable", True, why, f"Set {ROLLOUT}.n to 4 or more", (f"{ROLLOUT}.n",))
    if traits.needs_critic and not config.critic.enable:
        why = f"algorithm.adv_estimator = {estimator} needs the critic's values"
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
        report.notice("algorithm.use_kl_in_reward and actor.use_kl_loss are both on: the KL counts twice.")
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        report.notice(
            f"{ACTOR}.kl_loss_type = k1: the gradient of this estimate is 0 on average, it does not hold the policy "
            f"near the reference. Set {ACTOR}.kl_loss_type=kl for the same value with the KL's gradient."
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
        why = f"prompts and answers may have {needed} tokens (data.max_prompt_length + {ROLLOUT}.max_new_tokens)"
        report.problem(f"{ROLLOUT}.max_model_len", rollout.max_model_len, why, f"Set it to {needed} or leave it out")


def _turns(config: PPOConfig, report: Report) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.enable and rollout.mode != "async":
        why = f"{ROLLOUT}.multi_turn.enable = True needs every sample to proceed on its own"
        report.problem(f"{ROLLOUT}.mode", rollout.mode, why, "Set it to async", (f"{ROLLOUT}.multi_turn.enable",))
    if not rollout.do_sample:
        report.notice(f"{ROLLOUT}.do_sample = False: greedy answers do not explore, and all n of a prompt are equal.")
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        report.notice(
            f"{ROLLOUT}.val_kwargs.n = {rollout.val_kwargs.n} greedy answers are all equal. "
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


def optimizer_rules(path: str, optim: OptimConfig, report: Report) -> None:
    """Report what the optimizer block at `path` contradicts itself in."""
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        report.problem(f"{path}.betas", optim.betas, "are two numbers from 0 to below 1", "Set e.g. [0.9,0.999]")


def _engines(config: PPOConfig, report: Report) -> None:
    """Sizes of an engine that is not chosen would be ignored silently: say so instead."""
    for role in active_roles(config):
        path = BLOCK_OF_ROLE.get(role)
        if path is None or role == "ref" or pick(config, path).strategy == "megatron":
            continue
        block = pick(config, path)
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            size = block.megatron_config[name]
            if size > 1:
                why = f"{path}.strategy = {block.strategy} does not split a model this way"
                fix = f"Leave the key out, or set {path}.strategy=megatron"
                report.problem(f"{path}.megatron_config.{name}", size, why, fix, (f"{path}.strategy",))
        _fsdp_size(config, role, path, report)


def _sequence_parallel(config: PPOConfig, report: Report) -> None:
    models = {"critic": "critic.model", "reward_model": "reward_model.model"}
    for role in active_roles(config):
        if role in BLOCK_OF_ROLE and pick(config, BLOCK_OF_ROLE[role]).strategy != "megatron":
            path, model = f"{BLOCK_OF_ROLE[role]}.ulysses_sequence_parallel_size", models.get(role)
            sequence_parallel_rules(path, pick(config, path), model or "actor_rollout_ref.model", config, report)


def sequence_parallel_rules(path: str, size: int, model: str, config: Block, report: Report) -> None:
    """Report a size at `path` that the model block at `model` does not allow."""
    if size > 1 and not pick(config, f"{model}.use_remove_padding"):
        why = f"ranks share packed tokens, and {model}.use_remove_padding = False"
        fix = f"Set {model}.use_remove_padding=True"
        report.problem(path, size, why, fix, (f"{model}.use_remove_padding",))


def _adapters(config: PPOConfig, report: Report) -> None:
    policy, critic = config.actor_rollout_ref, config.critic
    lora_rules("actor_rollout_ref.model", policy.model, policy.actor.optim.lr, report)
    if critic.enable:
        lora_rules("critic.model", critic.model, critic.optim.lr, report)


def _fsdp_size(config: PPOConfig, role: str, path: str, report: Report) -> None:
    size = pick(config, path).fsdp_config.fsdp_size
    pool = config.role_mapping[role]
    world = sum(config.resource_pool_spec.get(pool, []))
    if size == 0 or (size > 0 and world % size):
        why = f"does not divide the {world} ranks of {pool}"
        report.problem(f"{path}.fsdp_config.fsdp_size", size, why, "Set it to -1 (all ranks), or a divisor")


def _rewards(config: PPOConfig, report: Report) -> None:
    reward = config.reward_model
    if reward.enable and reward.path is None:
        report.problem("reward_model.path", None, "reward_model.enable = True needs a model", "Set reward_model.path=…")
    _judge(config, report)
    buffer = reward.overlong_buffer
    if buffer.enable and buffer.len > config.data.max_response_length:
        why = f"is more than data.max_response_length = {config.data.max_response_length}"
        report.problem("reward_model.overlong_buffer.len", buffer.len, why, "Set it to a part of the response length")
    manager = names.REWARD_MANAGERS.get(reward.reward_manager)
    if buffer.enable and manager is not None and not manager.overlong_buffer:
        why = f"reward_model.reward_manager = {reward.reward_manager} knows no overlong buffer"
        report.problem("reward_model.overlong_buffer.enable", True, why, "Set reward_model.reward_manager=dapo")


def _judge(config: PPOConfig, report: Report) -> None:
    reward, judge, at = config.reward_model, config.reward_model.judge, "reward_model.judge"
    if reward.enable and reward.url is not None:
        why = "reward_model.enable = True starts one here"
        report.problem("reward_model.url", reward.url, why, "Keep one of the two")
    if judge_shares_devices(config) and config.trainer.mode != "sync":
        why = f"trainer.mode = {config.trainer.mode} trains while answers are judged, on the same devices"
        report.problem("reward_model.enable", True, why, "Set reward_model.enable_resource_pool=True")
    if not judge.enable:
        return
    if reward.url is None and not reward.enable:
        fix = "Set reward_model.url=host:port of a server that has the judge, or reward_model.enable=True and its path"
        report.problem(f"{at}.enable", True, "there is no judge to ask", fix)
    if config.custom_reward_function.path is not None:
        why = "custom_reward_function.path scores the answers; it can ask the judge itself, at reward_router_address"
        report.problem(f"{at}.enable", True, why, "Leave one of them out")
    if judge.low >= judge.high:
        report.problem(f"{at}.low", judge.low, f"is not below {at}.high = {judge.high:g}", "Set the worst score")
    try:
        if re.compile(judge.pattern).groups < 1:
            report.problem(f"{at}.pattern", judge.pattern, "has no group", "Put the number into parentheses")
    except re.error as error:
        report.problem(f"{at}.pattern", judge.pattern, f"is no regular expression ({error})", "Correct it")


def _pools(config: PPOConfig, report: Report) -> None:
    spec = config.resource_pool_spec
    if not spec:
        report.problem("resource_pool_spec", spec, "has no pool", "Set e.g. {global_pool: [8]}, or leave it out")
    for pool, sizes in spec.items():
        if not sizes or min(sizes) < 1:
            why = "is a list with the devices of each node, each at least 1"
            report.problem(f"resource_pool_spec.{pool}", sizes, why, "Set e.g. [8] for one node or [8, 8] for two")
    used = {config.role_mapping[role] for role in active_roles(config)}
    for pool in spec:
        if pool not in used:
            report.notice(f"resource_pool_spec.{pool}: no role runs on it. Map one with role_mapping, or leave it out.")


def _run(config: PPOConfig, report: Report) -> None:
    trainer = config.trainer
    if not config.data.val_files:
        if trainer.val_only:
            report.problem(
                "data.val_files", [], "trainer.val_only = True needs validation prompts", "Set data.val_files=…"
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


def run_rules(trainer: RunConfig, report: Report) -> None:
    """Report names that lead out of the run's folder, and a mode that does not fit the folder to resume from."""
    for name in ("project_name", "experiment_name"):
        _name_stays_inside(f"trainer.{name}", trainer[name], report)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        why, fix = "trainer.resume_mode = resume_path needs a folder", "Set it to a …/global_step_N folder"
        report.problem("trainer.resume_from_path", None, why, fix)
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        report.notice(
            f"trainer.resume_from_path = {show(trainer.resume_from_path)} has no effect with trainer.resume_mode = "
            f"{trainer.resume_mode}. Set trainer.resume_mode=resume_path to start from it."
        )


def _name_stays_inside(key: str, name: str, report: Report) -> None:
    """Report a name that is empty, absolute or begins with `..`: names are parts of checkpoint and tracker folders."""
    parts = os.path.normpath(name).split(os.sep)
    if not name.strip() or parts[0] in ("", ".", "..") or "\0" in name:
        why = "is part of the checkpoint path (checkpoints/<project_name>/<experiment_name>) and leads out of it"
        report.problem(key, name, why, "Set a plain name. For another folder set trainer.default_local_dir")


def _user_code(config: PPOConfig, report: Report) -> None:
    user_code_rules("data.custom_cls", config.data.custom_cls, report)
    user_code_rules("data.sampler", config.data.sampler, report)


def user_code_rules(key: str, block: CustomClassConfig | SamplerConfig, report: Report) -> None:
    """Report a class of the user of which only the file or only the name is given."""
    if (block.path is None) != (block.name is None):
        missing, given = ("name", "path") if block.name is None else ("path", "name")
        why = f"{key}.{given} = {block[given]} is set, and both are needed"
        report.problem(f"{key}.{missing}", None, why, f"Set {key}.{missing}")
