"""Supervised fine-tuning learns exactly the answer tokens, as a plain loop would, and resumes bit for bit."""

import json
import math
import os
import signal
import sys
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny import save_tiny_model, tiny_tokenizer
from verl import recording
from verl.config import SFTConfig, load_config
from verl.protocol import DataProto
from verl.trainer.common.training_health import NonFiniteError
from verl.trainer.main_sft import main, run_sft
from verl.trainer.recovery.signals import RUN_ENDED, StopSignal
from verl.trainer.supervised import launch
from verl.trainer.supervised.sft import SFTTrainer, create_sft_dataset, prompt_response_batch
from verl.trainer.supervised.trainer import train_loader
from verl.utils.fs import resolve_model_path
from verl.workers.roles.supervised import SFTWorker, micro_batching, token_mean_loss

ROWS = [
    {"prompt": f"{'please ' * (i % 3)}add {i} and {j}", "response": f"{i}+{j}={i + j}" + "!" * (j % 4)}
    for i in range(4)
    for j in range(4)
]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "val.jsonl").write_text("\n".join(map(json.dumps, ROWS[:7])))
    return tmp_path


def make_config(model_path, *overrides):
    given = [
        f"model.path={model_path}",
        "data.train_files=train.jsonl",
        "data.train_batch_size=5",
        "data.max_length=64",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=1e-3",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.default_local_dir=steps",
        "trainer.logger=file",
    ]
    return load_config(None, [*given, *overrides], root=SFTConfig)


def logged(folder):
    lines = (folder / "runs" / "verl" / "sft" / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["data"]) for record in map(json.loads, lines)]


def first_batch(config):
    rows = create_sft_dataset(config.data, tiny_tokenizer(), is_train=True)
    loader = train_loader(rows, config.data, partial(prompt_response_batch, pad_token_id=0))
    return DataProto.from_dict(next(iter(loader)))


def started_worker(config):
    config.optim.total_training_steps = 100
    worker = SFTWorker(config)
    worker.init_model()
    return worker


def plain_loss(model, rows):
    """The mean over all answer tokens, the way any tutorial writes it: labels, -100 on the prompt, right padding."""
    tokenizer = tiny_tokenizer()
    texts = [(f"<|user|>{row['prompt']}<|end|><|assistant|>", f"{row['response']}<|end|>") for row in rows]
    pairs = [(tokenizer(before)["input_ids"], tokenizer(after)["input_ids"]) for before, after in texts]
    width = max(len(before) + len(after) for before, after in pairs)
    ids, labels, attended = [], [], []
    for before, after in pairs:
        padding = width - len(before) - len(after)
        ids.append(before + after + [0] * padding)
        labels.append([-100] * len(before) + after + [-100] * padding)
        attended.append([1] * (width - padding) + [0] * padding)
    output = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(attended), labels=torch.tensor(labels))
    return output.loss


@pytest.mark.parametrize(
    "cutting",
    [
        ["data.micro_batch_size_per_gpu=5"],
        ["data.micro_batch_size_per_gpu=2", "model.enable_gradient_checkpointing=True"],
        ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=70", "use_prefix_grouper=False"],
        ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=70", "use_prefix_grouper=True"],
    ],
)
def test_loss_and_gradient_equal_a_plain_transformers_loop(model_path, files, cutting):
    config = make_config(model_path, "data.shuffle=False", *cutting)
    worker = started_worker(config)
    found = worker.engine.forward_backward(
        first_batch(config), token_mean_loss, ["log_probs"], micro=micro_batching(worker.config)
    )
    model = AutoModelForCausalLM.from_pretrained(model_path)
    loss = plain_loss(model, ROWS[:5])
    loss.backward()
    total, tokens = found["loss"]
    assert total / tokens == pytest.approx(loss.item(), rel=1e-5)
    assert ("prefix_saving" in found) == ("use_prefix_grouper=False" not in cutting)
    ours = {name: weight.grad.full_tensor() for name, weight in worker.engine.model.hf.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("cutting", ["data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=True"])
def test_a_token_counts_by_its_weight(model_path, files, cutting):
    """Two answers weigh 0.5 and 0.25: the mean is one of weights, however the step is cut."""
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]}
        for row in ROWS[:5]
    ]
    rows[1]["messages"][1]["loss"], rows[4]["messages"][1]["loss"] = 0.5, 0.25
    (files / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config(model_path, "data.shuffle=False", "data.max_token_len_per_gpu=70", cutting)
    worker, batch = started_worker(config), first_batch(config)
    found = worker.engine.forward_backward(batch, token_mean_loss, ["log_probs"], micro=micro_batching(worker.config))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    weights = (1, 0.5, 1, 1, 0.25)
    sizes = [weight * (len(row["response"]) + 1) for weight, row in zip(weights, ROWS, strict=False)]
    loss = sum(size * plain_loss(model, [row]) for size, row in zip(sizes, ROWS, strict=False)) / sum(sizes)
    loss.backward()
    assert found["loss"][1] == pytest.approx(sum(sizes))
    assert found["loss"][0] / found["loss"][1] == pytest.approx(loss.item(), rel=1e-5)
    ours = {name: weight.grad.full_tensor() for name, weight in worker.engine.model.hf.named_parameters()}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(ours[name], weight.grad, rtol=1e-4, atol=1e-6, msg=name)
    total = worker.evaluate(batch).meta_info["metrics"]["val/loss"]
    assert total[0] / total[1] == pytest.approx(loss.item(), rel=1e-5)


def test_rows_with_nothing_to_learn_change_nothing(model_path, files):
    """Cut so short that no answer token is left, a row has no say: not in the loss, not in what it is divided by."""
    config = make_config(model_path)
    batch = first_batch(config)
    alone = batch.select_idxs([0, 1, 2])
    silent = batch.select_idxs([0, 1, 2, 3, 4])
    silent.batch["response_mask"][3:] = 0
    gradients = []
    for data in (alone, silent):
        worker = started_worker(config)
        found = worker.engine.forward_backward(data, token_mean_loss, ["log_probs"])
        gradients.append(
            {name: weight.grad.full_tensor() for name, weight in worker.engine.model.hf.named_parameters()}
        )
        assert found["loss"][1] == float(alone.batch["response_mask"].sum())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_only_the_answer_and_its_end_are_learned(model_path, files):
    tokenizer = tiny_tokenizer()
    batch = first_batch(make_config(model_path, "data.shuffle=False")).batch
    for row, given in enumerate(ROWS[:5]):
        learned = batch["responses"][row][batch["response_mask"][row] == 1]
        assert tokenizer.decode(learned) == f"{given['response']}<|end|>"
        prompt = batch["prompts"][row]
        assert tokenizer.decode(prompt[prompt != 0]) == f"<|user|>{given['prompt']}<|end|><|assistant|>"
        assert batch["attention_mask"][row].sum() == len(learned) + (prompt != 0).sum()


def test_multiturn_learns_every_answer_and_nothing_between(model_path, files):
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "later"},
    ]
    (files / "train.jsonl").write_text(json.dumps({"messages": messages}))
    tokenizer = tiny_tokenizer()
    for multiturn, learned in (("True", "hello<|end|>later<|end|>"), ("False", "later<|end|>")):
        config = make_config(model_path, f"data.multiturn={multiturn}")
        dataset = create_sft_dataset(config.data, tokenizer, is_train=True)
        batch = prompt_response_batch([dataset[0]], pad_token_id=0)
        assert tokenizer.decode(batch["responses"][batch["response_mask"] == 1]) == learned
        assert tokenizer.decode(batch["input_ids"][0]) == tokenizer.apply_chat_template(messages, tokenize=False)


EXACT = """
def compute_score(data_source, solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "tokens": len(solution_str)}
"""


def test_a_tiny_set_is_learned_by_heart_and_the_export_answers_it(model_path, files):
    """Validation has the model answer as it is then, and scores what it says."""
    (files / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS[:4])))
    asked = [
        {"data_source": "sums", "prompt": row["prompt"], "reward_model": {"ground_truth": row["response"]}}
        for row in ROWS[:4]
    ]
    (files / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (files / "exact.py").write_text(EXACT)
    size = ["data.train_batch_size=4", "trainer.total_epochs=60", "trainer.save_freq=0", "optim.lr=1e-2"]
    answers = ["data.val_prompt_files=asked.jsonl", "custom_reward_function.path=exact.py", "data.max_prompt_length=64"]
    answers += ["rollout.max_new_tokens=12", "trainer.test_freq=0", "data.val_n=2"]
    run_sft(make_config(model_path, *size, *answers))
    (_, first), *steps = logged(files)
    assert first["val-core/sums/reward/mean@2"] == 0
    assert first["val/reward/errors/timeout"] == 0
    assert steps[-1][1]["val-core/sums/reward/mean@2"] == 1
    assert steps[-1][1]["val-aux/sums/tokens/mean@2"] == sum(len(row["response"]) for row in ROWS[:4]) / 4
    losses = [data["train/loss"] for _, data in steps]
    assert losses[0] > 5
    assert losses[-1] < 0.2
    run = recording.read(files / "steps")
    assert run.run["program"] == "sft"
    assert run.metrics.table()["train/loss"].to_pylist()[1:] == losses
    assert run.validation.steps == [0, 60]
    answers = run.validation.table(step=60).to_pylist()
    assert [(row["response"], row["sample_index"]) for row in answers] == [
        (row["response"], number) for row in ROWS[:4] for number in (0, 1)
    ]
    assert all(row["correct"] and ROWS[i // 2]["prompt"] in row["prompt"] for i, row in enumerate(answers))
    assert {"sft/0"} <= set(run.phases.table()["track"].to_pylist())
    folder = resolve_model_path(files / "steps" / "global_step_60")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": ROWS[1]["prompt"]}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == f"{ROWS[1]['response']}<|end|>"


def test_a_model_takes_the_template_and_the_end_it_learned_along(files):
    """As a base model, which ends texts with another token than a chat's answers end with."""
    folder = save_tiny_model(files / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(folder)
    config = make_config(folder, "trainer.total_training_steps=1")
    template = tokenizer.chat_template.replace("<|user|>", "<|user|>Q: ")
    config.data.apply_chat_template_kwargs = {"chat_template": template}
    run_sft(config)
    exported = resolve_model_path(files / "steps" / "global_step_1")
    assert AutoTokenizer.from_pretrained(exported).chat_template == template
    ends = AutoModelForCausalLM.from_pretrained(exported).generation_config.eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|end|>") in ends


@pytest.mark.parametrize(
    ("cut", "workers"),
    [(2, 0), *(pytest.param(cut, workers, marks=pytest.mark.slow) for cut, workers in ((3, 0), (2, 1)))],
)
def test_a_run_in_two_parts_equals_one_bit_for_bit(model_path, files, cut, workers):
    """An epoch has 3 steps: the first part ends inside one, or exactly with one."""
    common = ["optim.total_training_steps=5", "trainer.save_freq=0", f"data.dataloader_num_workers={workers}"]
    run_sft(make_config(model_path, *common, "trainer.total_training_steps=5", "trainer.default_local_dir=whole"))
    whole = logged(files)
    (files / "runs" / "verl" / "sft" / "metrics.jsonl").unlink()
    run_sft(make_config(model_path, *common, f"trainer.total_training_steps={cut}"))
    run_sft(make_config(model_path, *common, "trainer.total_training_steps=5"))
    parts = logged(files)
    names = ("train/loss", "train/grad_norm", "train/lr", "train/learned_tokens")
    assert [[data[name] for name in names] for _, data in parts] == [
        [data[name] for name in names] for _, data in whole
    ]
    one = load_file(files / "whole" / "global_step_5" / "huggingface" / "model.safetensors")
    two = load_file(files / "steps" / "global_step_5" / "huggingface" / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert len({data["train/loss"] for _, data in whole}) == 5


def test_the_last_line_says_that_training_finished_and_where_the_model_is(model_path, files, caplog):
    with caplog.at_level("INFO"):
        run_sft(make_config(model_path, "trainer.total_training_steps=1"))
    model = files / "steps" / "global_step_1" / "huggingface"
    assert model.is_dir()
    finished, commands = caplog.messages[-2:]
    assert finished == f"Training finished at step 1. Model: {model}"
    assert commands.splitlines()[0] == f"  serve:    verl serve --model {model}"


def test_validation_is_the_mean_over_all_answer_tokens(model_path, files):
    config = make_config(
        model_path, "data.val_files=val.jsonl", "data.val_batch_size=4", "trainer.total_training_steps=1"
    )
    run_sft(config)
    (before, first), (_, step) = logged(files)
    with torch.no_grad():
        expected = float(plain_loss(AutoModelForCausalLM.from_pretrained(model_path), ROWS[:7]))
    assert before == 0
    assert first["val/loss"] == pytest.approx(expected, rel=1e-5)
    exported = AutoModelForCausalLM.from_pretrained(resolve_model_path(files / "steps" / "global_step_1"))
    with torch.no_grad():
        assert step["val/loss"] == pytest.approx(float(plain_loss(exported, ROWS[:7])), rel=1e-5)
    assert step["perf/tokens_per_second"] == pytest.approx(
        step["perf/total_num_tokens"] / step["perf/time_per_step"], rel=1e-6
    )


def test_warm_up_then_cosine(model_path, files):
    size = ["trainer.total_training_steps=6", "optim.lr_warmup_steps_ratio=0.34", "optim.min_lr_ratio=0.1"]
    run_sft(make_config(model_path, *size, "trainer.save_freq=0"))
    rates = [data["train/lr"] for _, data in logged(files)]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(4)]
    assert rates == pytest.approx([0.0, 5e-4, *(1e-3 * share for share in cosine)])


def test_sigterm_finishes_the_step_and_saves(model_path, files, monkeypatch, caplog):
    train_step, handler = SFTTrainer._train_step, signal.getsignal(signal.SIGTERM)

    def interrupted(self, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self, batch)

    monkeypatch.setattr(SFTTrainer, "_train_step", interrupted)
    run_sft(make_config(model_path))
    assert [step for step, _ in logged(files)] == [1]
    assert (files / "steps" / "global_step_1" / "trainer.pt").is_file()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "Training finished" not in caplog.text


def test_a_signal_before_the_first_step_stops_at_once_and_finishes_no_step(model_path, files, monkeypatch, caplog):
    monkeypatch.setattr(SFTTrainer, "_validate", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StopSignal) as caught:
        run_sft(make_config(model_path, "data.val_files=val.jsonl"))
    assert (caught.value.name, caught.value.before_first_step) == ("SIGTERM", True)
    assert "this step is finished" not in caplog.text
    assert not list((files / "steps").glob("global_step_*"))


@pytest.mark.parametrize("is_program", [True, False])
def test_after_a_complete_run_of_a_program_a_signal_ends_it_in_words(model_path, files, monkeypatch, is_program):
    messages, closed = [], []
    close = SFTTrainer.close
    monkeypatch.setattr(SFTTrainer, "close", lambda self, error: (close(self, error), closed.append(True)))
    monkeypatch.setattr(launch, "exit_on_signals", lambda message: messages.append((message, bool(closed))))
    keys = ("trainer.total_training_steps=1", "trainer.max_restarts=0")
    run_sft(make_config(model_path, *keys), supervised=is_program)
    assert messages == ([(RUN_ENDED, True)] if is_program else []), "after the last save is complete"


def test_gradients_that_are_not_finite_stop_the_run_and_leave_the_weights(files):
    folder = save_tiny_model(files / "broken")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(folder)
    with SFTTrainer(make_config(folder, "trainer.max_nonfinite_steps=2")) as trainer:
        trainer.start()
        with pytest.raises(NonFiniteError, match=r"optim\.lr"):
            trainer.fit()
        engine = trainer.worker_group.worker.engine
        for name, weight in engine.model.hf.named_parameters():
            assert torch.equal(weight.full_tensor().nan_to_num(), model.get_parameter(name).nan_to_num()), name
    assert {path.name for path in (files / "steps").glob("[!.]*")} == {"debug_step_1.pt", "debug_step_2.pt", "record"}


def test_too_few_rows_for_a_batch_is_one_clear_error(model_path, files):
    with pytest.raises(ValueError, match=r"(?s)data\.train_batch_size.*data\.train_files"):
        SFTTrainer(make_config(model_path, "data.train_batch_size=64"))


def test_bad_rows_are_named_with_file_and_line_and_no_traceback(model_path, files, monkeypatch, capsys):
    (files / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": 7}\n')
    arguments = ["data.train_files=rows.jsonl", f"model.path={model_path}", "data.max_length=64"]
    monkeypatch.setattr(sys, "argv", ["main_sft", *arguments, "trainer.max_restarts=0"])  # in this process
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-2:]
    assert said[0] == "1 problem in the configuration:"
    assert said[1].startswith("1. data.train_files: ")
    assert "rows.jsonl" in said[1]
    assert "response" in said[1]
