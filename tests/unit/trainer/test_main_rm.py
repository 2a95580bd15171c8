"""A reward model learns from pairs as a plain loop would, and its checkpoint scores alike wherever it is loaded."""

import json

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.tiny import save_tiny_model, tiny_config, tiny_tokenizer
from verl.config import ConfigError, RewardModelConfig, RMConfig, as_config, load_config
from verl.config.supervised import describe
from verl.protocol import DataProto
from verl.trainer.main_rm import run_rm
from verl.trainer.supervised.rm import RMTrainer
from verl.utils.fs import resolve_model_path
from verl.utils.scoring_tokens import ScoringEncoder
from verl.workers.roles.reward_model import RewardModelWorker

ROWS = [
    {"prompt": "add 1", "chosen": "it is two", "rejected": "no", "margin": 0.5},
    {"prompt": "add 1", "chosen": "it is two", "rejected": "three, I think", "weight": 3.0},
    {"prompt": "add 1", "chosen": "no", "rejected": "three, I think", "tie": True},
    {"prompt": "please say something long", "chosen": "words " * 5, "rejected": "w"},
    {"prompt": "hi", "chosen": "hello", "rejected": "go away", "preference": 0.8},
]
CENTERING = 0.05


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def save_classifier(folder, labels=1):
    torch.manual_seed(1)
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=labels)).float().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def make_config(model_path, *overrides):
    given = [
        f"model.path={model_path}",
        "data.train_files=pairs.jsonl",
        "data.train_batch_size=3",
        "data.max_length=64",
        "data.shuffle=False",
        "model.enable_gradient_checkpointing=False",
        f"centering_coef={CENTERING}",
        "optim.lr=3e-3",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.default_local_dir=steps",
        "trainer.save_freq=0",
        "trainer.logger=file",
    ]
    return load_config(None, [*given, *overrides], root=RMConfig)


def logged(folder):
    lines = (folder / "runs" / "verl" / "rm" / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["data"]) for record in map(json.loads, lines)]


def plain_scores(model, rows, key):
    """One text at a time, so without padding."""
    tokenizer = tiny_tokenizer()
    texts = [f"<|user|>{row['prompt']}<|end|><|assistant|>{row[key]}<|end|>" for row in rows]
    return torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts])


def plain_loss(model, rows):
    chosen, rejected = (plain_scores(model, rows, key) for key in ("chosen", "rejected"))
    better = torch.tensor([0.5 if row.get("tie") else row.get("preference", 1.0) for row in rows])
    margin, weight = (torch.tensor([row.get(k, d) for row in rows]) for k, d in (("margin", 0.0), ("weight", 1.0)))
    apart = chosen - rejected - margin
    costs = -better * logsigmoid(apart) - (1 - better) * logsigmoid(-apart) + CENTERING * (chosen + rejected) ** 2
    return (weight * costs).sum() / weight.sum()


@pytest.mark.parametrize(
    ("cutting", "passes"),
    [
        pytest.param(["data.micro_batch_size_per_gpu=3", "model.use_remove_padding=False"], 3, id="whole"),
        pytest.param(["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=1000"], 1, id="all at once"),
        pytest.param(["data.micro_batch_size_per_gpu=2"], 2 + 4, id="the first prompt is torn"),
        pytest.param(["data.micro_batch_size_per_gpu=1", "model.enable_gradient_checkpointing=True"], 14, id="torn"),
        pytest.param(["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=70"], None, id="by tokens"),
        pytest.param(
            ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=1000", "use_prefix_grouper=True"],
            1,
            id="shared prompts",
        ),
    ],
)
def test_loss_and_gradient_equal_a_plain_transformers_loop(files, cutting, passes):
    """Margins, ties, weights, centring, answers of several pairs; pairs torn by micro-batches and whole ones, which
    take one pass each."""
    folder = save_classifier(files / "classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    loss = plain_loss(model, ROWS)
    loss.backward()
    with RMTrainer(make_config(folder, *cutting)) as trainer:
        trainer.start()
        engine = trainer.worker_group.worker.engine
        ours, step = {}, engine.optimizer_step

        def taken():
            ours.update({name: weight.grad.full_tensor().clone() for name, weight in named})
            return step()

        named, engine.optimizer_step = list(engine.model.hf.named_parameters()), taken
        run = []
        engine.model.register_forward_hook(lambda *_: run.append(1))
        batch = DataProto.from_dict(next(iter(trainer.train_dataloader)))
        assert len(batch) == 7, "three answers to the first prompt, though six in its pairs"
        found = trainer._train_step(batch)
    assert passes is None or len(run) == passes
    assert found.get("train/prefix_saving", 0) > 0 or "use_prefix_grouper=True" not in cutting
    assert found["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_causal_lm_becomes_a_reward_model_that_scores_alike_wherever_it_is_loaded(files):
    """In transformers, padded, though the end token was the padding; as `reward_model.path`; when training goes on."""
    folder = save_tiny_model(files / "lm")
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    common = ["data.val_files=pairs.jsonl", "data.val_batch_size=2", "optim.lr_scheduler=constant"]
    run_rm(make_config(folder, *common, "trainer.total_training_steps=10", "trainer.test_freq=10"))
    run_rm(make_config(folder, *common, "trainer.total_training_steps=20", "trainer.test_freq=10"))
    records = logged(files)
    assert [step for step, _ in records] == list(range(21))
    before, after = records[0][1], records[-1][1]
    assert before["val/accuracy"] == 0.5, "a new head gives every answer the same score"
    assert after["val/accuracy"] == 1.0
    assert after["val/loss"] < before["val/loss"]

    step = files / "steps" / "global_step_20"
    exported = resolve_model_path(step)
    model = AutoModelForSequenceClassification.from_pretrained(exported)
    with torch.no_grad():
        assert after["val/loss"] == pytest.approx(float(plain_loss(model, ROWS)), rel=1e-4)
        alone = plain_scores(model, ROWS, "chosen")
        own = AutoTokenizer.from_pretrained(exported)
        texts = [f"<|user|>{row['prompt']}<|end|><|assistant|>{row['chosen']}<|end|>" for row in ROWS]
        padded = own(texts, padding=True, return_tensors="pt")
        assert own.pad_token != own.eos_token
        torch.testing.assert_close(model(**padded).logits[:, 0], alone, rtol=1e-4, atol=1e-5)
    own.chat_template = own.chat_template.replace("<|end|>", "<|end|>\n")
    said = [{"role": "user", "content": ROWS[0]["prompt"]}, {"role": "assistant", "content": ROWS[0]["chosen"]}]
    assert ScoringEncoder(own).encode([said])[0][-1] == own.convert_tokens_to_ids("<|end|>"), "as it was trained"

    block = {"enable": True, "path": str(step), "strategy": "fsdp2", "micro_batch_size_per_gpu": 2}
    worker = RewardModelWorker(as_config(RewardModelConfig, reward_block(block)))
    worker.init_model()
    mask = padded["attention_mask"]
    answers = {"input_ids": padded["input_ids"], "attention_mask": mask, "response_mask": mask[:, 1:]}
    scores = worker.compute_rm_score(DataProto.from_dict({**answers, "responses": padded["input_ids"][:, 1:]}))
    torch.testing.assert_close(scores.batch["rm_scores"].sum(dim=1), alone, rtol=1e-4, atol=1e-5)


def reward_block(changes):
    whole = load_config(None, ["data.train_files=x", "actor_rollout_ref.model.path=x"], check_files=False)
    return whole.reward_model.to_dict() | changes


@pytest.mark.slow
def test_adapters_and_head_learn_and_the_export_is_whole(model_path, files, caplog):
    lora = ["model.lora_rank=4", "model.lora_alpha=8", "optim.lr=2e-2", "data.val_files=pairs.jsonl"]
    with caplog.at_level("INFO"):
        run_rm(make_config(model_path, *lora, "trainer.total_training_steps=20", "trainer.test_freq=0"))
    exported = files / "steps" / "global_step_20" / "huggingface"
    assert caplog.records[-2].getMessage() == f"Training finished at step 20. Model: {exported}"
    last = logged(files)[-1][1]
    assert last["val/accuracy"] == 1.0
    assert (files / "steps" / "global_step_20" / "lora_adapter" / "adapter_model.safetensors").is_file()
    merged = AutoModelForSequenceClassification.from_pretrained(resolve_model_path(files / "steps" / "global_step_20"))
    with torch.no_grad():
        assert last["val/loss"] == pytest.approx(float(plain_loss(merged, ROWS)), rel=1e-3)


def test_a_classifier_of_several_labels_is_refused(files):
    with pytest.raises(ConfigError, match=r"model\.path = .*three: .*\b3 labels.*num_labels=1"):
        make_config(save_classifier(files / "three", labels=3))


def test_a_micro_batch_holds_the_answers_of_a_prompt_on_as_many_ranks_as_there_are_prompts(model_path, files):
    eight = ["data.train_batch_size=8", "trainer.n_gpus_per_node=8"]
    config = make_config(model_path, *eight)
    assert config.data.micro_batch_size_per_gpu == 4
    assert "16 rows or more of up to 64 tokens per step over 8 ranks (cpu), in micro-batches of up to 4 rows" in (
        describe(config)
    )
    assert make_config(model_path, *eight, "data.micro_batch_size_per_gpu=9"), "nine answers to a prompt"


def test_padding_that_was_asked_for_is_used(model_path, files):
    with RMTrainer(make_config(model_path, "+model.override_config.pad_token_id=2")) as trainer:
        assert trainer.tokenizer.pad_token == "<|system|>"
    with RMTrainer(make_config(model_path)) as trainer:
        assert trainer.config.model.override_config["pad_token_id"] == 0


def test_a_batch_of_more_prompts_than_there_are_is_refused(model_path, files):
    with pytest.raises(ValueError, match=r"(?s)data\.train_batch_size.*data\.train_files"):
        RMTrainer(make_config(model_path, "data.train_batch_size=4"))
