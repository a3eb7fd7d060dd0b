"""Counts the arithmetic of a training step by the usual formula for model FLOPs utilization (MFU)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from sft_play.config.schema import LoraSettings, RunConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Workload:
    """The sizes of a model that its arithmetic depends on."""

    matmul_parameters: int  # used by each token: with the output head, and of the experts only active ones
    trained_parameters: int
    layers: int
    attention_width: int  # heads x head_dim


def flops_per_token(work: Workload, sequence: int) -> int:
    """FLOPs of a training step per token: weights, attention to half of `sequence`, weight gradients.

    Recomputation does not count, as is usual for MFU.

    Args:
        work: of the model.
        sequence: the most tokens that a token can attend to.
    """
    forward = 2 * work.matmul_parameters + 2 * sequence * work.attention_width * work.layers
    return 2 * forward + 2 * work.trained_parameters


def _rank(lora: LoraSettings, module: str) -> int:
    from peft.utils.other import get_pattern_key

    return lora.rank_pattern.get(get_pattern_key(list(lora.rank_pattern), module), lora.r)


def workload(config: "PretrainedConfig", run: RunConfig) -> Workload:
    """The sizes of a model, from its skeleton on the meta device; experts that a token skips do not count."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight
    layers = {name: each for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    linears = [layer.weight for layer in layers.values()]
    in_linears = sum(weight.numel() for weight in linears) - head.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    body = max(in_linears, parameters - head.numel() - model.get_input_embeddings().weight.numel())
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    active = body * getattr(text, "num_experts_per_tok", 1) / experts if experts else body
    # LoRA's A and B for a weight of [out, in] have r * (out + in) elements.
    adapted = [(name, layer.weight.shape) for name, layer in layers.items() if layer.weight is not head]
    adapter = sum(_rank(run.tuning.lora, name) * sum(shape) for name, shape in adapted)
    return Workload(
        matmul_parameters=int(active) + head.numel(),
        trained_parameters=parameters if run.tuning.mode == "full" else adapter,
        layers=text.num_hidden_layers,
        attention_width=text.hidden_size,
    )
