"""SFTConfig loads as strictly as PPOConfig: one default per key, all problems at once, no groups."""

import hydra
import pytest

from tests.support.doc_scripts import load_script
from verl.config import ConfigError, SFTConfig, load_config
from verl.config.command_line import hydra_arguments
from verl.config.compose import default_tree, groups
from verl.config.schema import alias_table, get_path, walk
from verl.config.supervised import describe

GIVEN = ("data.train_files=openai/gsm8k", "model.path=a/b", "trainer.n_gpus_per_node=2", "trainer.device=cpu")


def load(*overrides, cfg=None):
    return load_config(cfg, [*GIVEN, *overrides], check_files=False, root=SFTConfig)


def problems(*overrides, cfg=None):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, cfg=cfg)
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_yaml_holds_a_default_for_exactly_the_declared_keys():
    tree = default_tree(root="sft_trainer")
    for path, entry in walk(SFTConfig):
        value = get_path(tree, path)
        if entry.block is not None:
            assert set(value) == {below.rpartition(".")[2] for below, _ in walk(entry.block) if "." not in below}, path
    assert set(tree) == {path for path, _ in walk(SFTConfig) if "." not in path}
    assert groups("sft_trainer") == {}


def test_keys_are_explained_and_other_spellings_are_not_keys():
    declared = dict(walk(SFTConfig))
    for path, entry in declared.items():
        assert entry.key.doc.endswith("."), path
        assert len(entry.key.doc) < 120, path
    assert not set(alias_table(SFTConfig)) & set(declared)
    page = load_script("config_page.py").render()
    for path, entry in declared.items():
        assert entry.block is None or f" SFT: {path}\n" in page


def test_nulls_are_resolved_and_a_loaded_config_loads_again():
    config = load("data.train_batch_size=6")
    assert (config.data.micro_batch_size_per_gpu, config.data.val_batch_size, config.ranks) == (3, 6, 2)
    assert (config.fsdp_config.mixed_precision, config.trainer.default_local_dir) == ("fp32", "./checkpoints/verl/sft")
    assert load_config(config.to_dict(), check_files=False, root=SFTConfig) == config
    assert load_config(config, root=SFTConfig) is config
    assert "6 rows of up to 1024 tokens per step over 2 ranks (cpu), 3 each in 1 micro-batch of 3 rows" in describe(
        config
    )


def test_ranks_that_share_rows_are_one_part_of_a_batch():
    shared = ("trainer.n_gpus_per_node=4", "ulysses_sequence_parallel_size=2", "data.train_batch_size=6")
    config = load(*shared, "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=512", "data.max_length=1024")
    assert (config.ranks, config.dp_size) == (4, 2)
    assert "over 4 ranks = data-parallel 2 × Ulysses 2 (cpu), 3 each" in describe(config)
    found = problems(*shared, "data.train_batch_size=7", "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=511")
    assert set(found) == {"data.train_batch_size", "data.max_token_len_per_gpu"}
    assert "2 data-parallel ranks" in found["data.train_batch_size"]
    assert set(problems("ulysses_sequence_parallel_size=3", "data.train_batch_size=6")) == {
        "ulysses_sequence_parallel_size"
    }
    assert (
        "use_remove_padding=True"
        in problems("ulysses_sequence_parallel_size=2", "model.use_remove_padding=False")[
            "ulysses_sequence_parallel_size"
        ]
    )


def test_other_spellings_are_accepted():
    config = load(
        "optim.clip_grad=0.5",
        "optim.warmup_steps=3",
        "optim.lr_warmup_steps_ratio=0",
        "trainer.max_actor_ckpt_to_keep=2",
    )
    assert (config.optim.grad_clip, config.optim.lr_warmup_steps, config.trainer.max_ckpt_to_keep) == (0.5, 3, 2)


def test_scripts_written_for_the_older_keys_run_unchanged():
    typed = (
        "data.train_files=a.parquet",
        "data.prompt_key=extra_info",
        "data.prompt_dict_keys=[question]",
        "data.response_dict_keys=['answer']",
        "data.multiturn.enable=true",
        "data.multiturn.messages_key=chat",
        "data.multiturn.tools_key=functions",
        "+data.multiturn.enable_thinking_key=think",
        "model.partial_pretrain=a/b",
        "model.fsdp_config.model_dtype=bf16",
        "model.fsdp_config.wrap_policy.min_num_params=0",
        "model.fsdp_config.fsdp_size=2",
        "model.strategy=fsdp",
        "model.use_liger=True",
        "optim.warmup_steps_ratio=0.2",
        "use_remove_padding=false",
        "data.pad_mode=no_padding",
        "data.ignore_input_ids_mismatch=False",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
    )
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose("sft_trainer", overrides=hydra_arguments(typed, root="sft_trainer"))
    config = load_config(composed, check_files=False, root=SFTConfig)
    data = config.data
    assert (data.prompt_key, data.response_key, data.multiturn) == ("extra_info.question", "response.answer", True)
    assert (data.messages_key, data.tools_key, data.enable_thinking_key) == ("chat", "functions", "think")
    assert (config.model.path, config.model.use_remove_padding, config.strategy) == ("a/b", False, "fsdp")
    assert (config.fsdp_config.fsdp_size, config.optim.lr_warmup_steps_ratio) == (2, 0.2)
    assert data.rewritten_turns == "error"
    for ignored in ("use_liger", "wrap_policy", "model_dtype", "pad_mode"):
        assert any(ignored in notice for notice in config.notices), ignored
    assert load("data.ignore_input_ids_mismatch=True", "engine=fsdp").strategy == "fsdp"


def test_ranks_of_the_megatron_engine_share_rows_by_its_sizes():
    sizes = ("engine=megatron", "megatron.tensor_model_parallel_size=2", "megatron_config.context_parallel_size=2")
    config = load(*sizes, "trainer.n_gpus_per_node=8", "data.train_batch_size=6")
    assert (config.strategy, config.dp_size, config.ranks_per_sequence, config.megatron_config.dtype) == (
        "megatron",
        2,
        2,
        "fp32",
    )
    assert "over 8 ranks = data-parallel 2 × TP 2 × CP 2 (cpu), 3 each" in describe(config)
    assert set(problems(*sizes)) == {"megatron_config.tensor_model_parallel_size"}
    found = problems("strategy=megatron", "model.lora_rank=8", "ulysses_sequence_parallel_size=2")
    assert set(found) == {"model.lora_rank", "ulysses_sequence_parallel_size"}
    assert "Set megatron_config.context_parallel_size=2 instead" in found["ulysses_sequence_parallel_size"]
    found = problems("megatron_config.tensor_model_parallel_size=2")
    assert "set strategy=megatron" in found["megatron_config.tensor_model_parallel_size"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("data.max_token_len_per_gpu=2048", "with data.use_dynamic_bsz = False"),
        ("model.lora_alpha=32", "without model.lora_rank"),
        ("megatron_config.sequence_parallel=False", "with strategy = fsdp2"),
        ("data.max_prompt_length=99", "without data.val_prompt_files"),
        ("trainer.log_val_generations=3", "without data.val_prompt_files"),
    ],
)
def test_a_key_that_does_nothing_is_told(given, why):
    assert any(f"{given.partition('=')[0]}: no effect {why}" in notice for notice in load(given).notices)
    assert not any("no effect" in notice for notice in load().notices)
    dynamic = load("data.use_dynamic_bsz=True", "data.micro_batch_size_per_gpu=2")
    assert any("data.micro_batch_size_per_gpu: no effect" in notice for notice in dynamic.notices)


def test_prompts_that_a_validation_answers_have_rules_of_their_own():
    assert any("no effect without data.val_prompt_files" in notice for notice in load("rollout.top_p=0.9").notices)
    asked = ("data.val_prompt_files=x.parquet",)
    assert not any("no effect" in notice for notice in load(*asked, "rollout.top_p=0.9").notices)
    found = problems(*asked, "rollout.name=vllm", "rollout.tensor_model_parallel_size=2", "rollout.max_model_len=9")
    assert set(found) == {"rollout.name", "rollout.tensor_model_parallel_size", "rollout.max_model_len"}


def test_all_problems_come_at_once():
    found = problems(
        "data.train_batch_size=7",
        "data.max_token_len_per_gpu=100",
        "data.use_dynamic_bsz=True",
        "data.custom_cls.path=x.py",
        "trainer.resume_mode=resume_path",
        "fsdp_config.fsdp_size=3",
        "strategy=deepspeed",
        "algorithm.adv_estimator=grpo",
    )
    assert set(found) == {
        "data.train_batch_size",
        "data.max_token_len_per_gpu",
        "data.custom_cls.name",
        "trainer.resume_from_path",
        "fsdp_config.fsdp_size",
        "strategy",
        "algorithm.adv_estimator",
    }
    assert "Set it to 6 or 8" in found["data.train_batch_size"]
    assert "Set it to 4 or less" in problems("data.train_batch_size=8", "data.micro_batch_size_per_gpu=5").popitem()[1]


def test_the_command_line_composes_and_knows_no_groups():
    typed = [*GIVEN, "data.response_key=extra_info.answer", "+trainer.total_epochs=2", "trainer.logger=[console,file]"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        composed = hydra.compose("sft_trainer", overrides=hydra_arguments(typed, root="sft_trainer"))
    config = load_config(composed, check_files=False, root=SFTConfig)
    assert (config.data.response_key, config.trainer.total_epochs) == ("extra_info.answer", 2)
    assert config.trainer.logger == ["console", "file"]
    assert hydra_arguments(["data=rlhf", "critic=null"], root="sft_trainer") == ["++data=rlhf", "++critic=null"]


def test_a_block_or_the_other_programs_config_is_no_sft_config():
    ppo = load_config(None, ["data.train_files=a/b", "actor_rollout_ref.model.path=a/b"], check_files=False)
    with pytest.raises(TypeError, match=r"SFTConfig.*PPOConfig"):
        load_config(ppo, root=SFTConfig)
    with pytest.raises(ValueError, match=r"SFTDataConfig.*PPOConfig, SFTConfig"):
        load_config(None, root=type(load().data))
