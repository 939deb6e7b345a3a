"""Write tiny local model folders (config.json + byte-level tokenizer, no weights).

    python make_model.py OUT_DIR [gpu|wide]

makes OUT_DIR/qwen3_moe, OUT_DIR/qwen3_next and OUT_DIR/qwen3_5_moe for use with `--load-format dummy`.
`gpu`: head and hidden sizes that CUDA kernels accept. `wide`: qwen3_moe alone, with 2 KiB of R3 a token, so that a prompt that a CPU can
compute has a payload of the size that real models have.
"""

import json
import pathlib
import sys


def tokenizer(out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(specials)
    t.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "model_max_length": 32768,
                "chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
                "{{ m['content'] }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            },
            indent=1,
        )
    )
    return {s: t.token_to_id(s) for s in specials}


BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}
HYBRID = {
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


GPU = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
}
WIDE = {"num_hidden_layers": 8, "num_experts": 128, "num_experts_per_tok": 64, "moe_intermediate_size": 16}
GPU_HYBRID = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 128}


def main(root, size="cpu"):
    root = pathlib.Path(root)
    if size == "gpu":
        BASE.update(GPU)
        HYBRID.update(GPU_HYBRID)
    if size == "wide":
        BASE.update(WIDE)
    hid = BASE["hidden_size"]
    mrope = [11, 11, 10] if size == "gpu" else [3, 3, 2]
    for kind in ("qwen3_moe",) if size == "wide" else ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        out = root / kind
        out.mkdir(parents=True, exist_ok=True)
        ids = tokenizer(out)
        eos, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
        common = dict(BASE, bos_token_id=pad, eos_token_id=eos, pad_token_id=pad)
        if kind == "qwen3_moe":
            cfg = dict(common, model_type=kind, architectures=["Qwen3MoeForCausalLM"], rope_theta=1e6)
        elif kind == "qwen3_next":
            cfg = dict(common, **HYBRID, model_type=kind, rope_theta=1e7, architectures=["Qwen3NextForCausalLM"])
        else:
            text = dict(
                common,
                **HYBRID,
                model_type="qwen3_5_moe_text",
                attn_output_gate=True,
                mamba_ssm_dtype="float32",
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.5,
                    "mrope_interleaved": True,
                    "mrope_section": mrope,
                },
            )
            cfg = {
                "model_type": kind,
                "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                "text_config": text,
                "tie_word_embeddings": False,
                "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"],
                "vision_start_token_id": ids["<|vision_start|>"],
                "vision_end_token_id": ids["<|vision_end|>"],
                "vision_config": {
                    "model_type": "qwen3_5_moe",
                    "depth": 1,
                    "hidden_size": 32,
                    "num_heads": 2,
                    "intermediate_size": 32,
                    "in_channels": 3,
                    "patch_size": 16,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                    "out_hidden_size": hid,
                    "num_position_embeddings": 16,
                    "hidden_act": "gelu_pytorch_tanh",
                    "deepstack_visual_indexes": [],
                    "initializer_range": 0.02,
                },
            }
            (out / "preprocessor_config.json").write_text(
                json.dumps(
                    {
                        "image_processor_type": "Qwen2VLImageProcessorFast",
                        "patch_size": 16,
                        "temporal_patch_size": 2,
                        "merge_size": 2,
                        "image_mean": [0.5] * 3,
                        "image_std": [0.5] * 3,
                        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
                    }
                )
            )
            (out / "video_preprocessor_config.json").write_text(
                json.dumps(
                    {
                        "video_processor_type": "Qwen3VLVideoProcessor",
                        "patch_size": 16,
                        "temporal_patch_size": 2,
                        "merge_size": 2,
                        "image_mean": [0.5] * 3,
                        "image_std": [0.5] * 3,
                        "size": {"shortest_edge": 4096, "longest_edge": 25165824},
                    }
                )
            )
        (out / "config.json").write_text(json.dumps(cfg, indent=1))
        (out / "generation_config.json").write_text(json.dumps({"bos_token_id": pad, "eos_token_id": [eos, pad], "pad_token_id": pad}))
        print(out)


if __name__ == "__main__":
    main(*sys.argv[1:3])
