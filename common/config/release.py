"""The release's own configuration, for what must know its widths without its files.

Plain data: `parse_spec(RELEASE)` is Kimi K3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RELEASE: Mapping[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "media_placeholder_token_id": 163605,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "vocab_size": 163840,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "head_dim": 74,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": [*range(4, 93, 4), 93],
            "kda_layers": [i for i in range(1, 93) if i % 4],
        },
        "attn_res_block_size": 12,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "intermediate_size": 33792,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                        "dynamic": False,
                        "scale_dtype": "torch.uint8",
                    },
                }
            },
        },
    },
    "vision_config": {
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "vt_hidden_size": 1024,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 12,
        "qkv_hidden_size": 1536,
        "vt_intermediate_size": 4096,
        "merge_kernel_size": [2, 2],
        "text_hidden_size": 7168,
        "projector_ln_eps": 1e-5,
    },
}
