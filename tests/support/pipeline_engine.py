"""A TrainEngine with two pipeline stages: the embedding in the first, all other layers and the loss in the last.

The workers of all roles must run on it unchanged.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.models.loading import pretrained_model, read_config
from verl.models.packing import right_padded_rows
from verl.protocol import DataProto
from verl.types.weights import TensorSlice, TensorSpec
from verl.utils.balancing import COST_PER_TOKEN
from verl.workers.engine.common.micro_batches import MetricSums, local_counts, micro_batches
from verl.workers.engine.common.optim import step_metrics

FIRST, LAST = 0, 1


class PipelineEngine:
    dp_rank, dp_size = 0, 1
    device = torch.device("cpu")

    @classmethod
    def from_config(cls, model, kind, model_config, block, device, optim=None, grad_clip=None, router_replay=False):
        return cls(model, kind, optim, grad_clip)

    def __init__(self, path: str, kind: str, optim: Any, grad_clip: float | None) -> None:
        self.stage, self.kind, self.grad_clip = dist.get_rank(), kind, grad_clip
        self.collects = self.stage == LAST
        self.hf: Any = pretrained_model(path, read_config(path), kind).float()
        self.embedding = self.hf.base_model.get_input_embeddings()
        self.owner = {name: FIRST if "embed_tokens" in name else LAST for name in self.hf.state_dict()}
        self.stage_parameters = {
            name: value for name, value in self.hf.named_parameters() if self.owner[name] == self.stage
        }
        if optim is not None:
            rates = {"lr": optim.lr, "eps": optim.eps, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay}
            self.adamw = torch.optim.AdamW(self.stage_parameters.values(), **rates)

    def forward_backward(self, data, loss_fn, outputs, temperature=1.0, micro=None, counts=None):
        counts, sums = counts or local_counts(data), MetricSums()
        for part, _ in micro_batches(data, micro, COST_PER_TOKEN, lambda count: count):
            rows = self._rows(part)
            hidden = self._hidden(rows)
            if self.stage == FIRST:
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, LAST)
                hidden.backward(gradient)
                continue
            loss, metrics = loss_fn(self._fields(hidden, rows, outputs, part, temperature), part, counts)
            for name, (total, count) in metrics.items():
                sums.add(name, total, count)
            loss.backward()
            dist.send(hidden.grad, FIRST)
        return sums.result()

    def optimizer_step(self):
        squares = sum((value.grad**2).sum() for value in self.stage_parameters.values()).reshape(1)
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        for value in self.stage_parameters.values():
            value.grad *= min(1.0, self.grad_clip / (norm + 1e-6))
        self.adamw.step()
        self.adamw.zero_grad()
        return step_metrics(norm, self.adamw.param_groups[0]["lr"], None)

    def weights_finite(self, thorough):
        return True

    @torch.no_grad()
    def infer(self, data, outputs, temperature=1.0, micro=None, top_k=0):
        order, outputs_of_parts = [], []
        for part, rows in micro_batches(data, micro, COST_PER_TOKEN, lambda count: count):
            front = self._rows(part)
            hidden = self._hidden(front)
            if self.stage == LAST:
                outputs_of_parts.append(self._fields(hidden, front, outputs, part, temperature))
                order += rows
        if self.stage == FIRST:
            return DataProto()
        row_order = torch.tensor(order).argsort()
        return DataProto.from_dict(
            {name: torch.cat([part[name] for part in outputs_of_parts])[row_order] for name in outputs}
        )

    def base_weights(self):
        return nullcontext()

    def manifest(self):
        return {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in self.hf.state_dict().items()}

    def buckets(self, dtype, max_bytes, requested=None):
        for name, value in self.hf.state_dict().items():
            tensor = (
                value.to(dtype).clone() if self.owner[name] == self.stage else torch.empty(value.shape, dtype=dtype)
            )
            dist.broadcast(tensor, self.owner[name])
            rows = range(len(tensor)) if requested is None else requested[self.stage].get(name, range(0))
            yield {TensorSlice(name, rows.start, rows.stop): tensor[rows.start : rows.stop]} if rows else {}

    def to(self, device, model=True, optimizer=True):
        pass

    def offload(self):
        pass

    @contextmanager
    def on_device(self, optimizer=True):
        yield

    def begin_save(self, path, contents):
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save([self.stage_parameters, self.adamw.state_dict()], Path(path) / f"stage-{self.stage}.pt")

    def finish_save(self):
        pass

    def load(self, path, contents):
        weights, moments = torch.load(Path(path) / f"stage-{self.stage}.pt", weights_only=False)
        with torch.no_grad():
            for name, value in weights.items():
                self.stage_parameters[name].copy_(value)
        self.adamw.load_state_dict(moments)

    def _rows(self, part):
        width = part.batch["responses"].shape[1] if self.kind != "sequence_classification" else 0
        return right_padded_rows(part.batch["input_ids"], part.batch["attention_mask"], width)

    def _hidden(self, rows):
        """Hidden states [batch, tokens, hidden] that the first stage sends to the last."""
        if self.stage == FIRST:
            hidden = self.embedding(rows.input_ids)
            dist.send(hidden.detach().contiguous(), LAST)
            return hidden
        hidden = torch.empty(*rows.input_ids.shape, self.hf.config.hidden_size)
        dist.recv(hidden, FIRST)
        return hidden.requires_grad_(torch.is_grad_enabled())

    def _fields(self, hidden, rows, outputs, part, temperature):
        states = self.hf.base_model(inputs_embeds=hidden, use_cache=False).last_hidden_state.flatten(0, 1)
        if self.kind == "sequence_classification":
            return {"scores": self.hf.score(states[rows.last])[:, 0]}
        fields, indices = {}, (rows.rows, rows.columns)
        if self.kind == "value":
            fields["values"] = self.hf.score(states[rows.before])[:, 0]
        else:
            log_p = (self.hf.lm_head(states[rows.before]) / temperature).log_softmax(-1)
            fields["log_probs"] = log_p.gather(1, rows.labels[:, None])[:, 0]
            fields["entropy"] = fields["entropy_value"] = -(log_p.exp() * log_p).sum(-1)
        empty = torch.zeros(part.batch["responses"].shape)
        return {name: empty.index_put(indices, fields[name]) for name in outputs}
