"""Scripts of `examples/` and `recipe/` compose and validate, data converts, the minimal GRPO learns."""

import gzip
import json
import os
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.commands import ROOT, compose_config, run_script
from tests.support.tiny import tiny_tokenizer
from verl.config import GenerationConfig, PPOConfig, RMConfig, SFTConfig, batch_plan, load_config
from verl.config.command_line import hydra_arguments
from verl.config.problems import Report
from verl.config.schema import alias_table
from verl.config.unused_keys import check_supported
from verl.trainer.main_ppo import create_rl_dataset
from verl.utils.dataset.check import check_files
from verl.utils.import_utils import load_extern_object

# Those of `examples/cluster` start these on several machines: see tests/unit/examples/test_cluster.py.
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in ("examples", "recipe")
    for path in ROOT.glob(f"{folder}/**/*.sh")
    if path.parent.name != "cluster"
)
KNOWN = [
    "examples/ppo_trainer/run_gemma.sh",
    "examples/ppo_trainer/run_deepseek7b_llm.sh",
    "examples/ppo_trainer/run_qwen2-7b_seq_balance.sh",
    "examples/ppo_trainer/run_qwen2-7b_rm.sh",
    "examples/ppo_trainer/run_qwen2-7b_math_megatron.sh",
    "examples/grpo_trainer/run_qwen2-7b.sh",
    "examples/grpo_trainer/run_qwen2.5-0.5b_cpu.sh",
    "examples/rm/run_smollm2_ppo.sh",
    "examples/rm/run_smollm2_rm.sh",
    "examples/sft/run_gsm8k_sft.sh",
    "examples/sft/run_multiturn_sft.sh",
    "examples/sft/run_retool_sft.sh",
    "examples/sft/run_smollm2_gsm8k.sh",
    "examples/smollm2/run.sh",
    "recipe/dapo/run_dapo_qwen2.5_7b.sh",
    "recipe/dapo/run_dapo_quickstart_cpu.sh",
    "recipe/retool/run_qwen2_7b_dapo.sh",
]
DOCUMENTS = [
    *ROOT.glob("examples/*/README.md"),
    *ROOT.glob("recipe/*/README.md"),
    *ROOT.glob("docs/guides/*.md"),
    *ROOT.glob("docs/concepts/*.md"),
    ROOT / "docs/start/first_run.md",
    ROOT / "docs/start/your_task.md",
    ROOT / "docs/results.md",
]
RETOOL = "recipe/retool/run_qwen2_7b_dapo.sh"


# ---------------------------------------------------------------- scripts


def test_the_promised_scripts_are_there():
    assert set(KNOWN) <= set(SCRIPTS)


def test_cfg_job_after_a_script_reaches_hydra_as_one_option(tmp_path):
    flag, module, *typed = run_script("examples/ppo_trainer/run_gemma.sh", tmp_path, "--cfg", "job", "trainer.nnodes=2")
    assert (flag, module) == ("-m", "verl.trainer.main_ppo")
    arguments = hydra_arguments(typed)
    assert arguments[-3:] == ["++trainer.nnodes=2", "--cfg", "job"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_composes_validates_and_takes_overrides(script, tmp_path):
    config = compose_config(run_script(script, tmp_path, "trainer.experiment_name=of my own", "trainer.total_epochs=7"))
    # Nothing obsolete, nothing without effect. What `auto` decides is not a property of the script.
    assert [notice for notice in config.notices if not notice.startswith("use_prefix_grouper = auto")] == []
    assert (config.trainer.experiment_name, config.trainer.total_epochs) == ("of my own", 7)


@pytest.mark.parametrize("script", KNOWN)
def test_a_script_fails_when_the_run_fails(script, tmp_path):
    run_script(script, tmp_path, exit_code=3)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_explained_in_the_readme_beside_it(script):
    path = ROOT / script
    assert path.name in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_states_purpose_and_needs_and_is_in_the_table(script):
    header = re.match(r"#!.*\n((?:#.*\n)+)", (ROOT / script).read_text())[1]
    assert re.match(r"# \w.*\n(?:# .*\n)*# Needs: ", header)
    assert f"# Usage: bash {script} [key=value …]" in header
    assert script in (ROOT / "docs/guides/examples.md").read_text()


def test_configuration_keys_in_documents_exist():
    ppo = load_config(None, ["data.train_files=a/b", "actor_rollout_ref.model.path=a/b"], check_files=False)
    arguments = ["data.train_files=a/b", "model.path=a/b"]
    other_roots = [load_config(None, arguments, check_files=False, root=root) for root in (SFTConfig, RMConfig)]
    arguments = ["data.path=a/b", "data.output_path=c.parquet", "model.path=a/b"]
    other_roots.append(load_config(None, arguments, check_files=False, root=GenerationConfig))
    # Paths that begin with a block's name; those that end in a dot or a star stand for several.
    blocks = "|".join(block for block in ppo if block != "custom")
    written = re.compile(rf"(?<![\w./])((?:{blocks})(?:\.[a-z][a-z_0-9]*)+)")
    for file in DOCUMENTS:
        # Code blocks are executed by tests/unit/docs; some contain wrong keys on purpose.
        prose = re.sub(r"^```.*?^```|\(\S+\.md(#\S*)?\)", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
        for key in sorted(set(written.findall(prose))):
            known = key in alias_table(PPOConfig) or any(_has(config, key) for config in (ppo, *other_roots))
            assert known, f"{file.relative_to(ROOT)}: {key}"


def _has(config, key):
    for part in key.split("."):
        if isinstance(config, dict):
            return True  # free-form: arguments for someone's function
        if not hasattr(config, "keys") or part not in config:
            return False
        config = config[part]
    return True


def test_the_retool_recipe_has_the_published_settings(tmp_path):
    config = compose_config(run_script(RETOOL, tmp_path))
    actor, rollout, model = (config.actor_rollout_ref[name] for name in ("actor", "rollout", "model"))
    assert config.algorithm.adv_estimator == "grpo"
    assert (config.algorithm.use_kl_in_reward, actor.use_kl_loss) == (False, False)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.28)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n, rollout.val_kwargs.n) == (
        64,
        16,
        16,
        30,
    )
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 16384)
    turns = rollout.multi_turn
    assert (turns.enable, turns.max_user_turns, turns.max_assistant_turns, turns.format) == (True, 16, 16, "hermes")
    assert (rollout.name, rollout.mode) == ("vllm", "async")
    assert (rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == (4, 0.9)
    assert (actor.use_dynamic_bsz, actor.ulysses_sequence_parallel_size) == (True, 4)
    assert (actor.fsdp_config.param_offload, actor.fsdp_config.optimizer_offload) == (True, True)
    assert (model.use_remove_padding, model.enable_gradient_checkpointing) == (True, True)
    assert model.path == "checkpoint/multiturn-sft-qwen-2.5-7b-instruct/global_step_372"
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (1, 8)
    assert config.data.train_files == ["/data/dataset/BytedTsinghua-SIA/DAPO-Math-17k"]
    assert config.data.val_files == ["/data/dataset/yentinglin/aime_2025"]
    assert turns.tool_config_path == "recipe/retool/sandbox_fusion_tool_config.yaml"
    assert batch_plan(config).samples == 64 * 16


@pytest.mark.parametrize("script", [path for path in KNOWN if path.startswith("recipe/dapo/")])
def test_the_dapo_recipe_has_the_four_parts_of_the_paper(script, tmp_path):
    config = compose_config(run_script(script, tmp_path))
    actor, groups, buffer = (
        config.actor_rollout_ref.actor,
        config.algorithm.filter_groups,
        config.reward_model.overlong_buffer,
    )
    assert (actor.policy_loss.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high) == ("vanilla", 0.2, 0.28)
    assert (groups.enable, groups.metric) == (True, "acc")
    assert config.data.gen_batch_size > config.data.train_batch_size
    assert actor.loss_agg_mode == "token-mean"
    assert (config.reward_model.reward_manager, buffer.enable, buffer.penalty_factor) == ("dapo", True, 1.0)
    assert (config.algorithm.use_kl_in_reward, actor.use_kl_loss) == (False, False)
    report = Report()
    check_supported(config, report)
    assert (report.problems, report.notices) == ([], [])


def test_the_tools_of_the_retool_recipe_are_functions_a_model_can_be_told():
    (tool,) = yaml.safe_load((ROOT / "recipe/retool/sandbox_fusion_tool_config.yaml").read_text())["tools"]
    function = tool["tool_schema"]["function"]
    assert tool["tool_schema"]["type"] == "function"
    assert function["name"]
    assert function["description"]
    assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    loaded = load_extern_object(*tool["class_name"].rsplit(".", 1))(tool["config"], tool["tool_schema"])
    assert (loaded.name, loaded.limits.wall_s) == ("code_interpreter", 30)


# ---------------------------------------------------------------- data


def python(*arguments, timeout=280):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def write_lines(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def converted(raw, tmp_path, *options):
    done = python(
        "examples/data_preprocess/hh_rlhf.py",
        "--local_dataset_path",
        str(raw),
        "--local_save_dir",
        str(tmp_path / "out"),
        *options,
    )
    assert done.returncode == 0, done.stderr
    return {split: pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def test_preference_rows_become_prompts_that_a_reward_model_judges(tmp_path):
    raw = tmp_path / "pairs"
    raw.mkdir()
    write_lines(raw / "train_clean.jsonl", [{"prompt": "Hello?", "chosen": "Hi.", "rejected": "No."}])
    dialogue = "\n\nHuman: One?\n\nAssistant: 1.\n\nHuman: Two?\n\nAssistant:"
    write_lines(
        raw / "eval.jsonl.gz",
        [
            {"chosen": f"{dialogue} 2.", "rejected": f"{dialogue} 3."},
            {"prompt": dialogue, "chosen": " 2.", "rejected": " 3."},
            {"prompt": " ", "chosen": "a", "rejected": "b"},
        ],
    )
    rows = converted(raw, tmp_path)
    assert rows["train"] == [
        {
            "data_source": "pairs",
            "prompt": [{"role": "user", "content": "Hello?"}],
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": "Hi."},
            "extra_info": {"split": "train", "index": 0, "rejected": "No."},
        }
    ]
    whole, split = rows["test"]  # the one without a prompt is gone
    assert [(message["role"], message["content"]) for message in whole["prompt"]] == [
        ("user", "One?"),
        ("assistant", "1."),
        ("user", "Two?"),
    ]
    assert split["prompt"] == whole["prompt"]
    assert split["reward_model"] == whole["reward_model"] == {"style": "model", "ground_truth": "2."}
    assert check_files(str(tmp_path / "out" / "test.parquet"), any_source=True).problems == []


def test_rows_that_are_no_preferences_are_refused_with_their_place(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"question": "?", "answer": "!"}])
    done = python(
        "examples/data_preprocess/hh_rlhf.py", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)
    )
    assert done.returncode != 0
    assert "train row 0: no 'chosen' (found: question, answer)" in done.stderr


@pytest.mark.skipif(not (ROOT / "../shared/data/ultrafeedback").is_dir(), reason="an UltraFeedback subset is not here")
def test_ultrafeedback_converts_whole(tmp_path):
    rows = converted(ROOT / "../shared/data/ultrafeedback", tmp_path)
    assert (len(rows["train"]), len(rows["test"])) == (1000, 200)
    assert rows["train"][0]["data_source"] == "ultrafeedback"


def template_config(tmp_path):
    rows = [{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1?"}], "ground_truth": "2"}]
    write_lines(tmp_path / "rows.jsonl", rows)
    data = {
        "train_files": [str(tmp_path / "rows.jsonl")],
        "max_prompt_length": 128,
        "custom_cls": {"path": str(ROOT / "recipe/custom/dataset.py"), "name": "CustomRLHFDataset"},
    }
    return load_config({"data": data}, ["actor_rollout_ref.model.path=a/b"], check_files=False).data


def test_the_dataset_template_changes_prompt_and_extra_info(tmp_path):
    config, tokenizer = template_config(tmp_path), tiny_tokenizer()
    template = load_extern_object(config.custom_cls.path, config.custom_cls.name)
    row = template(config.train_files, tokenizer, config)[0]
    length = int(row["attention_mask"].sum())
    text = tokenizer.decode(row["input_ids"][-length:])
    assert text.startswith("<|system|>You are a careful assistant.")
    assert text.endswith("<|user|>1+1?<|end|><|assistant|>")
    assert row["extra_info"]["prompt_tokens"] == length


def test_the_dataset_template_takes_the_place_of_ours_by_configuration(tmp_path):
    config = template_config(tmp_path)
    dataset = create_rl_dataset(config.train_files, config, tiny_tokenizer(), None)
    assert type(dataset).__name__ == "CustomRLHFDataset"


# ---------------------------------------------------------------- GRPO in one file


def rewards_of(output):
    return [float(value) for value in re.findall(r"reward=([\d.]+)", output)]


@pytest.mark.slow
def test_minimal_grpo_raises_its_reward_within_ten_steps():
    small = ["--steps", "10", "--prompts", "16", "--mini_batch_prompts", "8", "--warm_up_steps", "60"]
    done = python("examples/minimal_grpo.py", *small)
    assert done.returncode == 0, done.stderr
    first, last = rewards_of(done.stdout)
    assert last > first + 0.2


@pytest.mark.slow
def test_minimal_grpo_solves_held_out_problems():
    done = python("examples/minimal_grpo.py")
    assert done.returncode == 0, done.stderr
    before, after = (float(value) for value in re.findall(r"held-out accuracy ([\d.]+)", done.stdout))
    assert before < 0.4
    assert after > 0.85


def test_minimal_grpo_fits_on_a_few_screens():
    assert len((ROOT / "examples/minimal_grpo.py").read_text().splitlines()) <= 270
