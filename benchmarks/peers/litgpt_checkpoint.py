"""Converts a Llama for LitGPT: `python litgpt_checkpoint.py FROM TO`, run by the Python that has LitGPT.

LitGPT's own converter accepts only models that it knows by name.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from litgpt.config import Config
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import save_config
from safetensors.torch import load_file


def litgpt_config(llama: dict) -> Config:
    """LitGPT's config for the architecture in a config.json."""
    return Config(
        name="peer",
        block_size=llama["max_position_embeddings"],
        n_layer=llama["num_hidden_layers"],
        n_embd=llama["hidden_size"],
        n_head=llama["num_attention_heads"],
        n_query_groups=llama["num_key_value_heads"],
        intermediate_size=llama["intermediate_size"],
        vocab_size=llama["vocab_size"],
        padded_vocab_size=llama["vocab_size"],
        norm_class_name="RMSNorm",
        norm_eps=llama["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )


def main(source: Path, target: Path) -> None:
    """Writes the checkpoint folder."""
    config = litgpt_config(json.loads((source / "config.json").read_text(encoding="utf-8")))
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(source / "model.safetensors"))
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(weights, target / "lit_model.pth")
    save_config(config, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
