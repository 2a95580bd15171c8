"""An agent with a tool, token by token: source of agent_with_a_tool.ipynb (see docs/scripts/notebooks.py)."""

# %% [markdown]
# # An agent with a tool, token by token
#
# A tiny model learns to call a calculator, on a CPU in about three minutes. Then we look at one trajectory: which
# tokens the model sampled, which are tool output, and the mask, log-prob, score and advantage of each token.
#
# Run it in the repository root, in an environment with verl.

# %%
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

project = Path("runs/notebook_agent")
shutil.rmtree(project, ignore_errors=True)
subprocess.run([sys.executable, "-m", "verl", "init", str(project)], check=True, capture_output=True)
print((project / "tools.py").read_text())

# %% [markdown]
# One function is the tool; its name, parameters and docstring become the schema that the model sees. Ten steps of GRPO;
# `trainer.dump_steps` writes the tensors of the last batch.

# %%
steps = ["trainer.total_training_steps=10", "trainer.test_freq=5", "trainer.dump_steps=[10]"]
environment = {**os.environ, "PYTHON": sys.executable}
run = subprocess.run(
    ["bash", str(project / "run.sh"), *steps], check=True, capture_output=True, text=True, env=environment
)
rows = [json.loads(line) for line in (project / "metrics/metrics.jsonl").open()]
for row in rows[1:]:
    data = row["data"]
    print(f"step {row['step']:2}  reward {data['reward/mean']:.3f}  tool calls {data['tool_call_counts/mean']:.2f}")
assert rows[-1]["data"]["tool_call_counts/mean"] > rows[1]["data"]["tool_call_counts/mean"]

# %% [markdown]
# ## A conversation
#
# Every trajectory is a line of `conversations/STEP.jsonl`, with its turns in order.

# %%
conversations = [json.loads(line) for line in (project / "conversations/10.jsonl").open()]
example = next(row for row in conversations if len(row["turns"]) == 3)
print(example["input"])
for turn in example["turns"]:
    print(f"  {turn['by']:10} {turn['text']}")
print("score", example["score"])

# %% [markdown]
# ## Its tokens
#
# `debug_step_10.pt` has the tensors of the batch; docs/reference/columns.md lists them. `response_mask` is 1 on tokens
# that the model sampled, 0 on tokens of the tool and on padding. Only sampled tokens have a log-prob of the rollout and
# an advantage.

# %%
batch = torch.load(project / "checkpoints/debug_step_10.pt", weights_only=True)
tokenizer = AutoTokenizer.from_pretrained(project / "model")
mask, responses = batch["response_mask"], batch["responses"]
attention = batch["attention_mask"][:, -responses.shape[1] :]
tool_tokens = (attention.bool() & ~mask.bool()).sum(-1)
index = int(tool_tokens.argmax())
print(f"{'token':66} {'mask':>4} {'log-prob':>9} {'score':>6} {'advantage':>9}")
for position in range(int(attention[index].sum())):
    values = [batch[name][index, position] for name in ("rollout_log_probs", "token_level_scores", "advantages")]
    token = tokenizer.decode([int(responses[index, position])])
    log_prob, score, advantage = map(float, values)
    print(f"{token:66} {int(mask[index, position]):4} {log_prob:9.4f} {score:6.2f} {advantage:9.4f}")

# %% [markdown]
# ## Invariants
#
# - The score of a trajectory is on its last sampled token.
# - Tokens of the tool have no advantage, and all sampled tokens of a GRPO trajectory have the same one.
# - The log-probs of the rollout engine equal those of training: on a CPU up to rounding.

# %%
sampled = mask.bool()
assert (batch["advantages"][~sampled] == 0).all()
assert (batch["token_level_scores"][~sampled] == 0).all()
for row in range(len(mask)):
    assert batch["advantages"][row][sampled[row]].unique().numel() <= 1
difference = (batch["rollout_log_probs"] - batch["old_log_probs"])[sampled].abs().max()
print(f"{int(sampled.sum())} sampled tokens, largest difference of log-probs {float(difference):.1e}")
assert difference < 1e-3
