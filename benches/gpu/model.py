"""The model of the GPU bench: a hybrid Qwen3.5-MoE without weights on disk.

What a request costs the pools is that of Qwen3.5-35B-A3B: 40 layers, of them 10 with attention (2 KV heads of 256: 20,480 bytes of KV a
token) and 30 with gated delta nets (32 value heads of 128 x 128 in float32: 63 MB of state a request), and R3 of 40 layers x 8 of 256
experts (1,280 bytes a token). Hidden size and heads are its too. The experts are 64 wide instead of 512, and the vocabulary has 512
entries, so that an engine loads in seconds (about 12 GB of weights).
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "tests" / "sglang" / "engine"

WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 512,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True)
class Shape:
    """What R3 rows look like."""

    layers: int
    top_k: int
    experts: int


def make(folder: Path, wide: bool) -> Path:
    """Writes the model's folder: the wide one, or the tiny one of the tests for the CPU."""
    spec = importlib.util.spec_from_file_location("make_model", ENGINE / "make_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(folder, "gpu" if wide else "cpu")
    path = folder / "qwen3_5_moe"
    if wide:
        config = json.loads((path / "config.json").read_text())
        text = config["text_config"]
        text.update(WIDE)
        text["rope_parameters"]["partial_rotary_factor"] = WIDE["partial_rotary_factor"]
        config["vision_config"]["out_hidden_size"] = WIDE["hidden_size"]
        (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def shape(path: Path) -> Shape:
    """The R3 shape of a model's folder."""
    text = json.loads((path / "config.json").read_text())["text_config"]
    return Shape(text["num_hidden_layers"], text["num_experts_per_tok"], text["num_experts"])
