"""The runs that `same_bits.py` compares: one entry per feature whose numbers must not change in a refactoring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
GRPO = ("algorithm=grpo", f"{ROLLOUT}.n=4")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
STEPS, SAVED_STEP = 4, 2

REWARD_FILE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Share of characters below "P", and a binary accuracy for dynamic sampling."""
    share = sum(c < "P" for c in solution_str) / max(1, len(solution_str))
    return {"score": share, "acc": share > 0.4}
'''

AGENT_FILE = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

TOOL_TOKENS = [70, 71, 72]


class TwoTurns(AgentLoopBase):
    """Two model turns with tool tokens between them and a reward for the tool call."""

    async def run(self, sampling_params, **row):
        prompt = list(row["prompt_ids"])
        first = await generate(self, prompt, sampling_params)
        second = await generate(self, [*prompt, *first, *TOOL_TOKENS], sampling_params)
        mask = [1] * len(first) + [0] * len(TOOL_TOKENS) + [1] * len(second)
        rewards = [(len(first) + len(TOOL_TOKENS), 0.5)]
        return AgentLoopOutput(prompt, [*first, *TOOL_TOKENS, *second], mask, num_turns=3, turn_rewards=rewards)


class RewritesContext(AgentLoopBase):
    """Two training rows per trajectory: the second one has a different prompt. Every eighth sample fails."""

    async def run(self, sampling_params, **row):
        if row["index"] % 2 and row["sample_index"] == 0:
            raise KeyError("no such city")
        outputs = []
        for prompt in (list(row["prompt_ids"]), [80, 81, *row["prompt_ids"]]):
            tokens = await generate(self, prompt, sampling_params)
            outputs.append(AgentLoopOutput(prompt, tokens, [1] * len(tokens), num_turns=2))
        return outputs


async def generate(loop, prompt_ids, sampling_params):
    output = await loop.server_manager.generate(
        request_id=str(len(prompt_ids)), prompt_ids=prompt_ids, sampling_params={**sampling_params, "max_new_tokens": 4}
    )
    return output.token_ids
'''

GATEWAY_FILE = '''
import asyncio
import json
import urllib.request


async def run_agent(base_url, prompt, request_kwargs, metadata, **kwargs):
    """Two chat completions in one session; the reward is computed by the reward function."""
    first = await asyncio.to_thread(complete, base_url, prompt)
    await asyncio.to_thread(complete, base_url, [*prompt, first, {"role": "user", "content": "Continue"}])


def complete(base_url, messages):
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 4}).encode()
    request = urllib.request.Request(base_url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        message = json.loads(response.read())["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}
'''

INTERACTION_FILE = '''
from verl.interactions.base import BaseInteraction


class Repeat(BaseInteraction):
    """A simulated user who sends one more message and gives half a point."""

    async def generate_response(self, instance_id, messages, **kwargs):
        assistant_turns = sum(message["role"] == "assistant" for message in messages)
        return assistant_turns >= 2, "Once more", 0.5, {}
'''


@dataclass(frozen=True)
class Case:
    """One run: `program` is ppo, sft or rm; `ranks` above 1 needs Ray."""

    name: str
    overrides: tuple[str, ...] = ()
    program: str = "ppo"
    ranks: int = 1


def cases(task: dict[str, str]) -> list[Case]:
    """All cases; `task` holds the paths that `same_bits.make_task` returns."""
    agent = (*GRPO, f"{ROLLOUT}.mode=async", f"{ROLLOUT}.agent.num_workers=1", "data.max_response_length=16")
    reward_model = (
        "reward_model.enable=True",
        f"reward_model.path={task['judge']}",
        "custom_reward_function.path=null",
    )
    teacher = (
        "distillation.enabled=True",
        f"distillation.teacher_models.large.model_path={task['teacher']}",
        "distillation.distillation_loss.use_task_rewards=True",
    )
    filtered = (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "data.gen_batch_size=6",
        f"{ACTOR}.clip_ratio_high=0.28",
    )
    loop = f"{ROLLOUT}.agent.default_agent_loop"
    return [
        Case("ppo_critic", ("algorithm=ppo",)),
        Case(
            "ppo_kl_in_reward", ("algorithm=ppo", "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive")
        ),
        *(Case(f"grpo_{mode}", (*GRPO, f"{ACTOR}.loss_agg_mode={mode}")) for mode in AGGREGATIONS),
        Case("grpo_kl_loss", (*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1")),
        Case("gspo", (*GRPO, f"{ACTOR}.policy_loss.loss_mode=gspo")),
        Case("remax", ("algorithm.adv_estimator=remax", f"{ROLLOUT}.n=2")),
        Case("dapo", (*GRPO, *filtered)),
        Case(
            "correction_token",
            (
                *GRPO,
                f"{CORRECTION}.rollout_is=token",
                f"{CORRECTION}.rollout_rs=token_k2",
                f"{CORRECTION}.rollout_rs_threshold=1.0",
            ),
        ),
        Case("correction_sequence", (*GRPO, f"{CORRECTION}.rollout_is=sequence")),
        Case("bypass", (*GRPO, f"{CORRECTION}.bypass_mode=True")),
        Case("reward_model", (*GRPO, *reward_model)),
        Case("validation", (*GRPO, "trainer.val_before_train=True", "trainer.test_freq=2")),
        Case("async_staleness_0", (*GRPO, "trainer.mode=async", "trainer.max_staleness=0")),
        Case("one_step_off", (*GRPO, "trainer.mode=one_step_off")),
        Case("agent_two_turns", (*agent, f"{loop}={task['agents']}:TwoTurns")),
        Case("agent_rewrites", (*agent, f"{loop}={task['agents']}:RewritesContext")),
        Case(
            "tool_agent",
            (
                *agent,
                f"{loop}=tool_agent",
                f"data.train_files={task['interaction_rows']}",
                f"{ROLLOUT}.multi_turn.enable=True",
                f"{ROLLOUT}.multi_turn.interaction_config_path={task['interactions']}",
                "data.max_response_length=64",
                f"{ROLLOUT}.max_model_len=128",
            ),
        ),
        Case(
            "gateway_agent",
            (
                *agent,
                f"{ROLLOUT}.agent.agent_loop_config_path={task['gateway']}",
                f"{loop}=gateway",
                "data.max_response_length=32",
            ),
        ),
        Case("distillation", (*GRPO, *teacher)),
        Case("two_ranks", (*GRPO, "trainer.n_gpus_per_node=2"), ranks=2),
        Case("sft", (), program="sft"),
        Case("reward_model_training", (), program="rm"),
    ]


def ppo_overrides(task: dict[str, str], folder: Path, *more: str) -> list[str]:
    """The command line of a small RL run."""
    return [
        f"data.train_files={task['train']}",
        f"data.val_files={task['val']}",
        "data.train_batch_size=8",
        "data.max_prompt_length=48",
        "data.max_response_length=8",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={task['model']}",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "critic.ppo_mini_batch_size=4",
        "critic.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        f"custom_reward_function.path={task['reward']}",
        "reward_model.reward_kwargs={num_processes: 0}",
        f"trainer.default_local_dir={folder}",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[file]",
        "trainer.val_before_train=False",
        "trainer.log_val_generations=0",
        f"trainer.save_freq={SAVED_STEP}",
        "trainer.test_freq=-1",
        f"trainer.total_training_steps={STEPS}",
        *more,
    ]


def supervised_overrides(task: dict[str, str], folder: Path, program: str) -> list[str]:
    """The command line of a small SFT or reward-model run."""
    return [
        f"model.path={task['model']}",
        f"data.train_files={task[program]}",
        f"data.val_files={task[program]}",
        "data.train_batch_size=4",
        "data.max_length=64",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=1e-3",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={folder}",
        f"trainer.save_freq={SAVED_STEP}",
        f"trainer.test_freq={SAVED_STEP}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=file",
    ]
