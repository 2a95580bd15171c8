"""A first GRPO run and its curve: source of first_grpo_run.ipynb (see docs/scripts/notebooks.py)."""

# %% [markdown]
# # A first GRPO run and its curve
#
# A small model learns arithmetic word problems on a CPU in about three minutes. Nothing is downloaded. Then we read
# what the run recorded: metrics, responses and the trained model.
#
# Run it in the repository root, in an environment with verl.

# %%
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path("runs/notebook")
command = [sys.executable, "examples/quickstart/run.py", "--algo", "grpo", "--folder", str(folder)]
run = subprocess.run([*command, "trainer.total_training_steps=40"], check=True, capture_output=True, text=True)
print(run.stdout[run.stdout.index("== 4. ") :])

# %% [markdown]
# The script created problems and a model with random weights, trained it on imperfect demonstrations (four of five
# losses are added instead of subtracted), and then with GRPO: four responses per problem, scored by the number after
# `####`.
#
# ## Metrics
#
# `metrics.jsonl` has one line per step: `{"step": …, "time": …, "data": {…}}`. docs/reference/metrics.md explains all
# of them.

# %%
rows = [json.loads(line) for line in (folder / "grpo/metrics.jsonl").open()]
last = rows[-1]["data"]
for name in ("reward/mean", "actor/entropy", "actor/ppo_ratio", "response_length/mean", "rollout_corr/log_prob_diff"):
    print(f"{name:28} {rows[1]['data'][name]:9.5f} -> {last[name]:9.5f}")

# %% [markdown]
# `rollout_corr/log_prob_diff` is the difference between the log-probs of the rollout engine and those of training. On a
# CPU in float32 it is rounding only.
#
# ## The curve


# %%
class Picture:
    """An SVG with the representation method that notebooks call."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg


spec = importlib.util.spec_from_file_location("figures", "docs/scripts/figures.py")
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)
metrics = folder / "grpo/metrics.jsonl"
curves = {
    "accuracy": figures.read_curve(metrics, "accuracy"),
    "reward": figures.read_curve(metrics, "reward/mean"),
}
Picture(figures.draw(curves, "GRPO on word problems"))

# %% [markdown]
# ## Responses
#
# `trainer.validation_data_dir` has the validation responses of every validated step, `trainer.rollout_data_dir` those
# of training.

# %%
before, after = ([json.loads(line) for line in (folder / f"grpo/answers/{step}.jsonl").open()] for step in (0, 40))
learned = [pair for pair in zip(before, after, strict=True) if pair[1]["score"] > pair[0]["score"]]
for old, new in learned[:3]:
    print(old["input"].strip(), "| before:", old["output"].strip(), "| after:", new["output"].strip())
accuracy = [sum(row["score"] for row in part) / len(part) for part in (before, after)]
print(f"accuracy {accuracy[0]:.0%} -> {accuracy[1]:.0%}")
assert accuracy[1] > accuracy[0] + 0.2

# %% [markdown]
# ## Where the time went

# %%
summary = subprocess.run([sys.executable, "-m", "verl", "summary", str(metrics.parent)], capture_output=True, text=True)
print(summary.stdout)

# %% [markdown]
# ## The model
#
# The checkpoint contains the model for transformers. `verl serve --model runs/notebook/grpo/global_step_40` serves it
# over the OpenAI API.

# %%
path = folder / "grpo/global_step_40/actor/huggingface"
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
question = [{"role": "user", "content": learned[0][0]["input"].strip()}]
inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(tokens[0]))
