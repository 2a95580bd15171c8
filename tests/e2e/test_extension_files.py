"""One file per extension of each kind, all in a temporary directory, are used by a training run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.training_harness import make_task, overrides

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
# Every extension appends its name to this file when training uses it.
USED = """
import os
def used(name):
    with open(os.environ["EXTENSIONS_USED"], "a") as file:
        file.write(name + "\\n")
"""
FILES = {
    "my_estimator": """
from used import used
from verl.algos import register_adv_est
from verl.algos.advantage.grpo import compute_grpo_outcome_advantage

@register_adv_est("mine", uses_groups=True, needs_critic=False)
def compute_mine(token_level_rewards, response_mask, index):
    used("estimator")
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index)
""",
    "my_loss": """
from used import used
from verl.algos import agg_loss, register_policy_loss

@register_policy_loss("mine", loss_agg_mode="seq-mean-token-mean", clip=None)
def compute_mine(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    used("loss " + loss_agg_mode)
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {"mine": log_prob.detach().sum()}
""",
    "my_manager": """
from used import used
from verl.workers.reward_manager import NaiveRewardManager
from verl.workers.reward_manager.registry import register_reward_manager

@register_reward_manager("mine")
class MyManager(NaiveRewardManager):
    def __init__(self, *arguments, **keywords):
        used("reward manager")
        super().__init__(*arguments, **keywords)
""",
    "my_tracker": """
from used import used
from verl.utils.tracking import Tracker, register_tracker

@register_tracker("mine")
class MyTracker(Tracker):
    def __init__(self, run): ...
    def log(self, data, step):
        used(f"tracker {'actor/mine' in data}")
    def log_generations(self, samples, step): ...
    def close(self): ...
""",
    "my_loop": """
from used import used
from verl.agent.loop import register_agent_loop
from verl.agent.single_turn import SingleTurnAgentLoop

@register_agent_loop("mine")
class MyLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **row):
        used("agent loop")
        return await super().run(sampling_params, **row)
""",
    "my_engine": """
from used import used
from verl.workers.rollout import register_rollout
from verl.workers.rollout.hf_rollout import HFRollout

@register_rollout("mine", reports=("full", "drawn"))
class MyRollout(HFRollout):
    def __init__(self, *arguments, **keywords):
        used("rollout engine")
        super().__init__(*arguments, **keywords)
""",
}
CHOSEN = (
    "algorithm.adv_estimator=mine",
    "actor_rollout_ref.actor.policy_loss.loss_mode=mine",
    "reward_model.reward_manager=mine",
    "trainer.logger=[mine]",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.agent.default_agent_loop=mine",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.name=mine",
    "actor_rollout_ref.rollout.n=2",
)


@pytest.mark.slow
def test_a_run_uses_one_extension_of_each_kind_from_its_own_file(tmp_path):
    extensions, log = tmp_path / "extensions", tmp_path / "used.txt"
    extensions.mkdir()
    for name, source in {"used": USED, **FILES}.items():
        (extensions / f"{name}.py").write_text(source)
    task = make_task(tmp_path, rows=8)
    arguments = overrides(
        task, tmp_path, f"external_libs=[{','.join(FILES)}]", "data.train_batch_size=4", "data.val_files=[]", *CHOSEN
    )
    environment = {**os.environ, "PYTHONPATH": f"{extensions}:{ROOT}", "EXTENSIONS_USED": str(log)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    used = Counter(log.read_text().split("\n"))
    assert used["estimator"] == 2  # once per step
    assert used["agent loop"] == 2 * 4 * 2  # steps × prompts × answers
    assert used["tracker True"] == 2
    assert used["loss seq-mean-token-mean"] > 0  # the mode that the loss declares
    assert used["reward manager"] > 0
    assert used["rollout engine"] == 1
