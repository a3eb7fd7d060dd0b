"""QLoRA's 4-bit weights: quantized while a model is loaded, or later, when each is put to use."""

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from sft_play.vision.looks import seeing_parts

NF4_BLOCK, NF4_SUPERBLOCK = 64, 256  # weights per scale, scales per scale of the scales


def nf4(config: PretrainedConfig, compute_dtype: torch.dtype) -> BitsAndBytesConfig:
    """QLoRA's 4-bit base (Dettmers et al. 2023, arXiv 2305.14314): NF4 with quantized block constants.

    What sees stays as it is: it is a small part of a model, and makes what all layers read.
    """
    seeing = seeing_parts(config)
    return BitsAndBytesConfig(
        llm_int8_skip_modules=["lm_head", *seeing] if seeing else None,  # as it is said for 4 bits too
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def quantize_later(model: PreTrainedModel, compute_dtype: torch.dtype) -> None:
    """Gives a loaded model the 4-bit layers that it has when it is loaded with `nf4`; none is quantized yet.

    They hold the weights as they are; each is quantized when it is moved (`Params4bit.to`).

    Raises:
        ImportError: bitsandbytes is missing.
    """
    quantizer: Any = AutoHfQuantizer.from_config(nf4(model.config, compute_dtype), pre_quantized=False)
    quantizer.validate_environment(device_map={"": "cpu"})
    from bitsandbytes.nn import Linear4bit, Params4bit

    loaded = dict(model.named_parameters())
    quantizer.preprocess_model(model, device_map=None)
    for name, layer in model.named_modules():
        if isinstance(layer, Linear4bit):
            weight = loaded[f"{name}.weight"].data
            weight = weight.T if issubclass(layer.source_cls, Conv1D) else weight  # type: ignore[arg-type]
            layer.weight = Params4bit(weight, **layer.weight.__dict__)
            if layer.bias is not None:
                layer.bias = loaded[f"{name}.bias"]
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)
