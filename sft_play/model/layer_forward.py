"""How norms and rotary embeddings compute: in fewer passes than in transformers, with the same values.

Autograd differentiates each small operation of theirs by itself and keeps what each of them needs. Here both
are one function with a backward pass of its own, which keeps little and computes in place. Most decoders in
transformers have a copy of Llama's code; a test compares each one that is listed here with its original.

On a CPU a step takes less time (benchmarks/results/adapter_step_cpu.json). GPUs compute so too, where it has
not been measured.
"""

from collections.abc import Sequence
from types import FunctionType, MethodType
from typing import Any

import torch

# The classes with Llama's code, by family: norms, and attention that rotates queries and keys.
LIKE_LLAMA: dict[str, tuple[str, ...]] = {
    "apertus": ("ApertusRMSNorm", "ApertusAttention"),
    "arcee": ("ArceeRMSNorm", "ArceeAttention"),
    "bamba": ("BambaRMSNorm",),
    "bitnet": ("BitNetRMSNorm", "BitNetAttention"),
    "deepseek_v2": ("DeepseekV2RMSNorm",),
    "deepseek_v3": ("DeepseekV3RMSNorm", "DeepseekV3Attention"),
    "deepseek_v32": ("DeepseekV32RMSNorm",),
    "dots1": ("Dots1RMSNorm", "Dots1Attention"),
    "ernie4_5": ("Ernie4_5RMSNorm",),
    "ernie4_5_moe": ("Ernie4_5_MoeRMSNorm",),
    "exaone4": ("Exaone4RMSNorm", "Exaone4Attention"),
    "falcon": ("FalconAttention",),
    "falcon_h1": ("FalconH1RMSNorm", "FalconH1Attention"),
    "falcon_mamba": ("FalconMambaRMSNorm",),
    "gemma": ("GemmaAttention",),
    "gemma2": ("Gemma2Attention",),
    "gemma3": ("Gemma3Attention",),
    "glm": ("GlmRMSNorm",),
    "glm4": ("Glm4RMSNorm",),
    "glm4_moe": ("Glm4MoeRMSNorm",),
    "glm4_moe_lite": ("Glm4MoeLiteRMSNorm", "Glm4MoeLiteAttention"),
    "granite": ("GraniteRMSNorm", "GraniteAttention"),
    "granitemoe": ("GraniteMoeRMSNorm", "GraniteMoeAttention"),
    "granitemoehybrid": ("GraniteMoeHybridRMSNorm", "GraniteMoeHybridAttention"),
    "granitemoeshared": ("GraniteMoeSharedRMSNorm", "GraniteMoeSharedAttention"),
    "hunyuan_v1_dense": ("HunYuanDenseV1RMSNorm", "HunYuanDenseV1Attention"),
    "hunyuan_v1_moe": ("HunYuanMoEV1RMSNorm", "HunYuanMoEV1Attention"),
    "jamba": ("JambaRMSNorm",),
    "kimi_linear": ("KimiLinearRMSNorm",),
    "lfm2": ("Lfm2RMSNorm", "Lfm2Attention"),
    "lfm2_moe": ("Lfm2MoeRMSNorm", "Lfm2MoeAttention"),
    "llama": ("LlamaRMSNorm", "LlamaAttention"),
    "mamba": ("MambaRMSNorm",),
    "mamba2": ("Mamba2RMSNorm",),
    "minicpm3": ("MiniCPM3RMSNorm", "MiniCPM3Attention"),
    "minimax": ("MiniMaxRMSNorm", "MiniMaxAttention"),
    "minimax_m2": ("MiniMaxM2RMSNorm",),
    "ministral": ("MinistralRMSNorm", "MinistralAttention"),
    "ministral3": ("Ministral3RMSNorm", "Ministral3Attention"),
    "mistral": ("MistralRMSNorm", "MistralAttention"),
    "mistral4": ("Mistral4RMSNorm", "Mistral4Attention"),
    "mixtral": ("MixtralRMSNorm", "MixtralAttention"),
    "mllama": ("MllamaTextRMSNorm", "MllamaTextSelfAttention"),
    "olmoe": ("OlmoeRMSNorm", "OlmoeAttention"),
    "phi": ("PhiAttention",),
    "phi3": ("Phi3RMSNorm",),
    "phimoe": ("PhimoeAttention",),
    "qwen2": ("Qwen2RMSNorm", "Qwen2Attention"),
    "qwen2_5_vl": ("Qwen2_5_VLRMSNorm", "Qwen2_5_VLAttention"),
    "qwen2_moe": ("Qwen2MoeRMSNorm", "Qwen2MoeAttention"),
    "qwen2_vl": ("Qwen2VLRMSNorm", "Qwen2VLAttention"),
    "qwen3": ("Qwen3RMSNorm", "Qwen3Attention"),
    "qwen3_moe": ("Qwen3MoeRMSNorm", "Qwen3MoeAttention"),
    "qwen3_vl": ("Qwen3VLTextRMSNorm", "Qwen3VLTextAttention"),
    "qwen3_vl_moe": ("Qwen3VLMoeTextRMSNorm", "Qwen3VLMoeTextAttention"),
    "seed_oss": ("SeedOssRMSNorm", "SeedOssAttention"),
    "smollm3": ("SmolLM3RMSNorm", "SmolLM3Attention"),
    "solar_open": ("SolarOpenRMSNorm", "SolarOpenAttention"),
    "stablelm": ("StableLmAttention",),
    "starcoder2": ("Starcoder2Attention",),
    "zamba2": ("Zamba2RMSNorm", "Zamba2Attention"),
}


def replace_forwards(model: torch.nn.Module) -> None:
    """Lets the listed modules compute in fewer passes; leaves all others as they are.

    Args:
        model: of transformers, without adapters.
    """
    ours = {kind: _our_forward(kind) for kind in set(map(type, model.modules()))}
    for module in model.modules():
        if forward := ours[type(module)]:
            module.forward = MethodType(forward, module)


def _our_forward(kind: type) -> Any:
    """What to put in the place of the forward pass of a module of this class; None for those that stay."""
    family = kind.__module__.rpartition(".modeling_")[2]
    if kind.__module__ != module_of(family) or kind.__name__ not in LIKE_LLAMA.get(family, ()):
        return None
    forward: Any = kind.forward  # type: ignore[attr-defined]
    return _norm_forward if kind.__name__.endswith("RMSNorm") else _with_our_rotation(forward)


def module_of(family: str) -> str:
    """The module of transformers with the layers of a family of models."""
    return f"transformers.models.{family}.modeling_{family}"


def _with_our_rotation(forward: FunctionType) -> FunctionType:
    """The same function with another `apply_rotary_pos_emb`; others that call that one are not touched."""
    names = forward.__globals__ | {"apply_rotary_pos_emb": rotated}
    copy = FunctionType(forward.__code__, names, None, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _norm_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As in Llama; `hidden_states` and the result are [..., hidden_size]."""
    return RMSNorm.apply(hidden_states, module.weight, module.variance_epsilon)


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with their positions, in place of Llama's `apply_rotary_pos_emb`.

    Args:
        q: [batch, heads, tokens, head_dim].
        k: [batch, key_value_heads, tokens, head_dim].
        cos: [batch, tokens, head_dim].
        sin: [batch, tokens, head_dim].
        unsqueeze_dim: the dimension of the heads.

    Returns:
        The shapes of q and k.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)


class RMSNorm(torch.autograd.Function):
    """`weight * x / sqrt(mean(x**2) + eps)`, computed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalizes x, [..., size], and keeps it; the weight is [size]."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of x and, if it is trained, of the weight."""
        x, weight, scale = ctx.saved_tensors
        wide, weight_grad = x.float(), None
        if ctx.needs_input_grad[1]:
            weight_grad = (grad * (wide * scale).to(x.dtype)).sum_to_size(weight.shape)
        towards = grad.float() * weight
        along = (towards * wide).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(x.shape[-1])
        return towards.mul_(scale).addcmul_(wide, along, value=-1).to(x.dtype), weight_grad, None


class Rotation(torch.autograd.Function):
    """`x * cos + rotate_half(x) * sin`; its gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotates x, [batch, heads, tokens, head_dim], by angles whose cos and sin broadcast to it."""
        ctx.save_for_backward(cos, sin)
        out = x * cos
        _add_halves(out, x, sin.chunk(2, dim=-1), sign=1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of x."""
        cos, sin = ctx.saved_tensors
        out = grad * cos
        _add_halves(out, grad, sin.chunk(2, dim=-1)[::-1], sign=-1)
        return out, None, None


def _add_halves(out: torch.Tensor, x: torch.Tensor, sines: Sequence[torch.Tensor], *, sign: int) -> None:
    """Adds the second half of x to the first half of `out`, times -sign, and the first to the second."""
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sines[0], value=-sign)
    out_second.addcmul_(first, sines[1], value=sign)
