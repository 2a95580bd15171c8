"""What Megatron-Core writes, worked out by hand: joined maps, stacked layers, a padded vocabulary."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.merger_cases import assert_holds, merge
from tests.support.tiny import tiny_model


def core_state(model, stacked):
    """Every tensor under Core's name, whole."""
    state, config = model.state_dict(), model.config
    groups, layers = config.num_key_value_heads, range(config.num_hidden_layers)

    def joined(layer, end):
        """Of each group its queries, its key, its value."""
        parts = [
            state[f"model.layers.{layer}.self_attn.{each}_proj.{end}"].unflatten(0, (groups, -1)) for each in "qkv"
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def plain(layer, name):
        return state[f"model.layers.{layer}.{name}.weight"]

    makers = {
        "self_attention.linear_qkv.weight": lambda at: joined(at, "weight"),
        "self_attention.linear_qkv.bias": lambda at: joined(at, "bias"),
        "self_attention.linear_qkv.layer_norm_weight": lambda at: plain(at, "input_layernorm"),
        "self_attention.linear_proj.weight": lambda at: plain(at, "self_attn.o_proj"),
        "mlp.linear_fc1.layer_norm_weight": lambda at: plain(at, "post_attention_layernorm"),
        "mlp.linear_fc1.weight": lambda at: torch.cat([plain(at, "mlp.gate_proj"), plain(at, "mlp.up_proj")]),
        "mlp.linear_fc2.weight": lambda at: plain(at, "mlp.down_proj"),
    }
    padding = torch.full((120, config.hidden_size), 7.0)
    found = {
        "model.embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], padding]),
        "model.output_layer.weight": torch.cat([state["lm_head.weight"], padding]),
        "model.decoder.final_layernorm.weight": state["model.norm.weight"],
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.zeros(2),
    }
    for name, make in makers.items():
        each = [make(layer) for layer in layers]
        if stacked:
            found[f"model.decoder.layers.{name}"] = torch.stack(each)
        else:
            found |= {f"model.decoder.layers.{layer}.{name}": value for layer, value in enumerate(each)}
    return found


@pytest.mark.parametrize("stacked", [True, False])
def test_a_checkpoint_of_core_becomes_the_model(stacked, tmp_path, capsys):
    model = tiny_model()
    folder = tmp_path / "actor"
    dcp.save(core_state(model, stacked), checkpoint_id=folder / "dist_ckpt", no_dist=True)
    (folder / "dist_ckpt" / "common.pt").write_bytes(b"")
    assert merge(folder, tmp_path / "merged", backend="megatron") == 1
    assert "--base-model" in capsys.readouterr().err
    model.config.save_pretrained(folder / "huggingface")
    assert merge(folder, tmp_path / "merged", backend="megatron") == 0
    assert_holds(tmp_path / "merged", model.state_dict())
    assert merge(folder, tmp_path / "again", backend="fsdp") == 1
    assert "Set --backend megatron" in capsys.readouterr().err
