"""Tiny vision-language checkpoints of real architectures with random weights, made on the spot."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig

from tests.conftest import VOCABULARY

IMAGE, VIDEO, START, END = VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN_VISION = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 64,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 4,
}  # fmt: skip
QWEN_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TREES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": MROPE},
        "vision_config": QWEN_VISION | {"deepstack_visual_indexes": [0, 1]},
        **QWEN_TOKENS,
    },
    "qwen3_5": {
        "text_config": TEXT | LINEAR | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN_VISION,
        **QWEN_TOKENS,
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 16, "image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END,
    },
    "smolvlm": {
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"} | {"model_type": "llama"},
        "vision_config": SIGLIP, "scale_factor": 2, "image_token_id": IMAGE, "pad_token_id": 0,
    },
    "mllama": {
        "text_config": {key: value for key, value in TEXT.items() if key not in ("head_dim", "bos_token_id")} | {"cross_attention_layers": [1]},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 32, "patch_size": 4, "vision_output_dim": 64,
            "intermediate_layers_indices": [0], "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
        "image_token_index": IMAGE,
    },
}  # fmt: skip


def config_of(kind: str, **changes: Any) -> PretrainedConfig:
    """The config of a kind, `model_type`, with other values at its top."""
    return AutoConfig.for_model(kind, **TREES[kind] | changes)


def checkpoint(kind: str, folder: Path, tokenizer: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a model with random weights, large enough that images matter, and the tokenizer of a folder."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    for path in tokenizer.glob("*token*"):
        shutil.copy(path, folder / path.name)
    for path in tokenizer.glob("chat_template*"):
        shutil.copy(path, folder / path.name)
    return folder
