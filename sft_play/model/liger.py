"""Norms, rotary embeddings and gated layers by Liger's Triton kernels, which train.kernels=liger asks for.

They replace our own passes (`layer_forward`) on the classes that these know, the norms of Gemma, and the
products of SwiGLU and GeGLU.
Liger's functions are called one by one, instead of `use_liger_kernel`: that exchanges classes and functions
in the modules of transformers, for all models of the process, and a forward pass that the output head
replaces. The output head stays TRL's, which is one of Triton too and never makes the logits either.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError
from sft_play.extras import install_command
from sft_play.model.attention_table import Capability

if TYPE_CHECKING:
    import torch

NAME = "liger"
PACKAGES = ("liger_kernel", "triton")
# served architectures
EXAMPLES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "mixtral", "gemma2", "gemma3_text")
KERNELS = ("norm", "rotate", "gated", "gelu_gated")  # the functions here that call one; a trace has others
LEAST_CAPABILITY = (7, 0)  # Triton compiles for no older GPU


def is_installed() -> bool:
    """Whether Liger can be imported, which is found out without doing so."""
    return all(map(find_spec, PACKAGES))


def require_runnable(device: str, capability: Capability | None, *, here: bool) -> None:
    """Refuses Liger's kernels on devices for which there are none, and `here` without the package.

    Raises:
        ConfigError: the device cannot run them, or the package is missing.
    """
    old = capability is not None and capability < LEAST_CAPABILITY
    if device != "cuda" or old:
        found = "a GPU of compute capability {}.{}".format(*capability or ()) if old else "the CPU"
        raise ConfigError(
            f"train.kernels=liger: {found} cannot run Liger's kernels, which Triton compiles for NVIDIA GPUs "
            "of compute capability 7.0 and newer; allowed here: auto, own"
        )
    if here and not is_installed():
        raise ConfigError(
            "train.kernels=liger needs the packages liger-kernel and triton, which are not installed; run "
            f"`{install_command('liger')}`, or set train.kernels=auto"
        )


def require_modules(model_type: str, count: int) -> None:
    """Raises a ConfigError if Liger's kernels serve none of a model's modules."""
    if not count:
        raise ConfigError(
            f"train.kernels=liger: none of {model_type}'s modules are those that Liger's kernels compute "
            f"(norms, rotary embeddings and gated layers as of {', '.join(EXAMPLES)}); allowed for it: "
            "auto, own"
        )


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`layer_forward.RMSNorm` by Liger's kernel; x is [..., size], the weight [size].

    With an offset, that is added to the weight, all is computed in fp32, as in Gemma. The gradient does not
    take the place of that of the result, as Liger does by default: after a residual sum, as of norms behind a
    layer, that one belongs to another branch too.
    """
    from liger_kernel.ops import LigerRMSNormFunction

    return LigerRMSNormFunction.apply(x, weight, eps, offset, "gemma" if offset else "llama", False, None)


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`layer_forward.rotated` by Liger's kernel, which writes into q and k; shapes as there."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of [..., size] by Liger's kernel, whose gradients take the place of both."""
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up, 1.0, 1.0)


def gelu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As `gated`, by GELU in its approximation by tanh."""
    from liger_kernel.ops import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def rotated(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of Llama's `apply_rotary_pos_emb`; shapes as in `layer_forward.rotated`."""
    return rotate(q, k, cos, sin)


def swiglu_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The forward pass of Llama's gated layer; x and the result are [..., hidden_size]."""
    return module.down_proj(gated(module.gate_proj(x), module.up_proj(x)))


def geglu_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The same of Gemma's, which has GELU."""
    return module.down_proj(gelu_gated(module.gate_proj(x), module.up_proj(x)))


def norm_forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """As in Llama; `hidden_states` and the result are [..., hidden_size]."""
    return norm(hidden_states, module.weight, module.variance_epsilon)


def offset_norm_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As in Gemma, whose weights are differences from 1; x and the result are [..., hidden_size]."""
    return norm(x, module.weight, module.eps, 1.0)


def forward_for(module: Any) -> Callable[..., torch.Tensor] | None:
    """What to put in the place of the forward pass of a gated layer, or of a norm as in Gemma; else None."""
    from torch.nn import SiLU
    from transformers.activations import GELUTanh, SiLUActivation
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaMLP

    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    if _same(kind, GemmaRMSNorm, "forward", "_norm"):
        return offset_norm_forward
    if not _same(kind, LlamaMLP, "forward"):
        return None
    if isinstance(module.act_fn, (SiLUActivation, SiLU)):
        return swiglu_forward
    return geglu_forward if isinstance(module.act_fn, GELUTanh) else None


def _same(kind: Any, known: Any, *names: str) -> bool:
    """Whether functions of a class, by their names, have the code of those of a known one."""
    return all(same_code(getattr(kind, name, None), getattr(known, name)) for name in names)


def same_code(function: Any, known: Any) -> bool:
    """Whether a function does what a known one does, by its code, numbers and defaults."""

    def code(found: Any) -> Any:
        code = found.__code__
        numbers = [each for each in code.co_consts if isinstance(each, int | float)]
        return code.co_code, code.co_names, numbers, found.__defaults__

    return hasattr(function, "__code__") and code(function) == code(known)
