"""On a GPU: a checkpoint that is written while the next step runs is that of the step it began at."""

import pytest
import torch

from tests.support.engine_cases import make_batch, make_engine, token_loss, whole_weights
from tests.support.tiny import tiny_model
from verl.workers.engine.common import host_snapshot
from verl.workers.engine.common.host_snapshot import HostSnapshot

pytestmark = pytest.mark.gpu

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
ALL = ["model", "optimizer", "extra", "hf_model"]
LAYOUTS = [{}, {"optimizer_offload": True}, {"param_offload": True, "optimizer_offload": True}]


def step(engine, seed):
    with engine.on_device():
        engine.forward_backward(make_batch(seed=seed), token_loss, ["log_probs"])
        engine.optimizer_step()


def state_of(engine):
    with engine.on_device():
        engine.infer(make_batch(), ["log_probs"])
        moments = {name: value.to_local() if hasattr(value, "to_local") else value
                   for name, value in engine.optimizer.tensors().items()}  # fmt: skip
        return whole_weights(engine), {name: value.cpu().clone() for name, value in moments.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_the_file_is_step_n_bit_for_bit_while_the_next_steps_run(layout, state_dtype, tmp_path):
    engine = make_engine(tiny_model(**SIZES), mixed_precision="bf16", state_dtype=state_dtype, **layout)
    engine.offload()
    for number in range(1, 4):
        step(engine, seed=number)
        weights, moments = state_of(engine)
        engine.begin_save(tmp_path / str(number), ALL)
        if number == 2:
            engine.to("cpu")  # also what is copied from the device
        with engine.on_device(optimizer=False):  # as a hand-over of weights does
            engine.infer(make_batch(), ["log_probs"])
        step(engine, seed=10 + number)  # at once
        engine.finish_save()
        again = make_engine(tiny_model(seed=5, **SIZES), mixed_precision="bf16", state_dtype=state_dtype)
        again.load(tmp_path / str(number), ["model", "optimizer", "extra"])
        found, found_moments = state_of(again)
        assert all(torch.equal(found[name], weights[name]) for name in weights)
        assert all(torch.equal(found_moments[name], moments[name]) for name in moments)


def test_what_is_written_behind_equals_what_is_written_at_once(tmp_path):
    contents = []
    for background_save in (True, False):
        torch.manual_seed(0)
        engine = make_engine(tiny_model(**SIZES), mixed_precision="bf16", background_save=background_save)
        step(engine, seed=0)
        torch.manual_seed(1)
        engine.save(tmp_path / str(background_save), ALL)
        folder = tmp_path / str(background_save)
        contents.append({
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*") if path.is_file() and path.name != ".metadata"
        })  # fmt: skip
    assert set(contents[0]) == set(contents[1])
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []


def test_many_buffers_of_several_tensors_arrive_whole(monkeypatch):
    monkeypatch.setattr(host_snapshot, "BUFFER_BYTES", 2**16)
    monkeypatch.setattr(host_snapshot, "COPY_BYTES", 2**12)
    device = torch.device("cuda", torch.cuda.current_device())
    taken = HostSnapshot(device)
    for _ in range(2):
        tensors = {str(i): torch.randn(7 * i * i, device=device) for i in range(60)}
        tensors |= {"here": torch.randn(50_000), "one": torch.ones((), device=device)}
        sources = {name: [value.view(-1).view(torch.uint8)] if value.numel() else [] for name, value in tensors.items()}
        found = taken.take(tensors, sources)
        taken.wait()
        assert all(torch.equal(found[name], value.cpu()) for name, value in tensors.items())
