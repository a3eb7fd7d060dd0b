"""The output head on a CPU: log-probabilities in tiles of tokens, whose gradients are computed along the way.

TRL's head computes in tiles too, but its kernel is made for GPUs. On a CPU it goes over each tile a dozen
times, scores tokens that carry no loss, and computes everything again in the backward pass, which takes four
times as long as full logits. Here PyTorch's cross entropy scores a tile of supervised tokens and its gradient
is taken at once, while the tile is in the cache. Nothing is computed twice, and one tile of logits is alive.
"""

from types import FunctionType
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

TILE = 256  # tokens; larger tiles are no faster and take more memory


def add_loss_head(model: Any) -> None:
    """Gives a causal language model TRL's fused output head, which on a CPU computes with `TiledLogProbs`.

    `model(**batch, fused_lm_head=True)` then returns log-probabilities instead of logits.

    Args:
        model: with or without an adapter around it.
    """
    from trl.trainer.utils import add_fused_lm_head

    ours = {"_ChunkedLogProbFunction": LogProbs, "_use_triton": _always}
    # The same function over other globals: TRL's own trainers in this process keep its kernel.
    add = FunctionType(add_fused_lm_head.__code__, {**add_fused_lm_head.__globals__, **ours})
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.base_model is base:  # its prefix is that of a model that it is a part of (Llama 4)
        head = base.get_output_embeddings()
        base.base_model_prefix = next(name for name, child in base.named_children() if child is not head)
    text = base.config.get_text_config()
    if not hasattr(text, "num_experts") and hasattr(text, "num_local_experts"):
        text.num_experts = text.num_local_experts  # by that name, TRL's head balances them (Phi-3.5-MoE)
    if hasattr(text, "output_logit_soft_cap"):
        text.final_logit_softcapping = text.output_logit_soft_cap  # by that name, TRL's head caps (xLSTM)
    if not _has_routers(base):
        text.output_router_logits = False  # TRL asks for it wherever the config knows the word (Doge)
    add(base, temperature=1.0, cast_lm_head_to_fp32=False, outputs=("log_probs", "is_top1"))


def _has_routers(model: Any) -> bool:
    """Whether any of its layers is one whose router logits transformers would record."""
    recorders = [getattr(module, "_can_record_outputs", None) or {} for module in model.modules()]
    found = [recorder["router_logits"] for recorder in recorders if "router_logits" in recorder]
    routers = [router for each in found for router in (each if isinstance(each, list) else [each])]
    classes = tuple(getattr(router, "target_class", router) for router in routers)
    return not classes or any(isinstance(module, classes) for module in model.modules())


def _always(device: torch.device) -> bool:
    """Only supervised tokens are scored, on any device."""
    return True


def token_loss(
    model: Any, batch: dict[str, Any], tokens: Any = None, *, router_weight: float = 0.0
) -> torch.Tensor:
    """The scalar loss of a micro-batch.

    Args:
        model: has the head of `add_loss_head`, whose `log_probs` are [rows, tokens].
        batch: of a collator, tensors of [rows, tokens].
        tokens: supervised tokens that the loss is averaged over; default those of the micro-batch.
        router_weight: of the auxiliary loss that balances experts, where the model computes one.
    """
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    count = outputs.label_mask.sum() if tokens is None else torch.as_tensor(tokens)
    loss = -outputs.log_probs.sum() / count.clamp(min=1)
    return loss if outputs.aux_loss is None else loss + router_weight * outputs.aux_loss


def is_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the CPU computes with a tensor of any shape; a trace for a GPU gives another answer."""
    return tensor.device.type == "cpu"


class LogProbs:
    """`TiledLogProbs` on a CPU, TRL's kernel on a GPU."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> Any:
        """Arguments and results as those of `TiledLogProbs`: hidden [tokens, hidden_size], and so on."""
        from trl.kernels import ChunkedLogProbFunction

        kernel = TiledLogProbs if is_on_cpu(hidden) else ChunkedLogProbFunction
        if not torch.is_grad_enabled():  # which a function cannot see from within
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return kernel.apply(hidden, weight, bias, *args)


class TiledLogProbs(torch.autograd.Function):
    """Log-probabilities of targets under `hidden @ weight.T`, without the [tokens, vocabulary] logits.

    Gradients are those of the sum of the log-probabilities, times a factor: a loss that weighs some tokens
    more than others cannot be trained with it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Scores the tokens and takes the gradients.

        Args:
            ctx: keeps the gradients for `backward`.
            hidden: [tokens, hidden_size].
            weight: [vocabulary, hidden_size].
            bias: [vocabulary], or None.
            targets: [tokens].
            temperature: divides the logits.
            chunk_size: a setting of TRL's kernel; not used.
            softcap: the logits approach it and never exceed it; None for no such limit.
            logit_scale: multiplies the logits.
            outputs: "is_top1" asks whether each target ranks first; only without gradients.

        Returns:
            log-probabilities [tokens] in fp32, three times None for statistics that nobody asks for, and
            whether each target ranks first, [tokens], or None.
        """
        needed = ctx.needs_input_grad[:3]
        head = [_leaf(p, wanted) for p, wanted in zip((weight, bias), needed[1:], strict=True)]
        hidden_grad = torch.empty_like(hidden) if needed[0] else None
        head_grads = [_fp32_zeros(p) if p is not None and p.requires_grad else None for p in head]
        log_probs = hidden.new_empty(len(targets), dtype=torch.float32)
        ranks_first = None
        if "is_top1" in outputs and not any(needed):
            ranks_first = torch.empty_like(targets, dtype=torch.bool)
        for start in range(0, len(targets), TILE):
            tile = slice(start, start + TILE)
            with torch.set_grad_enabled(any(needed)):
                tokens = _leaf(hidden[tile], needed[0])
                logits = _scaled(linear(tokens, *head), logit_scale, softcap, temperature)
                scores = -cross_entropy(logits, targets[tile], reduction="none")
                leaves = [p for p in (tokens, *head) if p is not None and p.requires_grad]
                grads = list(torch.autograd.grad(scores.sum(), leaves)) if leaves else []
            log_probs[tile] = scores.detach()
            if ranks_first is not None:
                ranks_first[tile] = logits.argmax(-1) == targets[tile]
            if hidden_grad is not None:
                hidden_grad[tile] = grads.pop(0)
            for total in head_grads:
                if total is not None:
                    total += grads.pop(0)
        ctx.save_for_backward(hidden_grad, *head_grads)
        ctx.dtype = weight.dtype
        return log_probs, None, None, None, ranks_first

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `forward` times the gradient of the log-probabilities, [tokens]."""
        hidden_grad, *head_grads = ctx.saved_tensors
        if grad is None:
            return (None,) * 9
        found = [None if hidden_grad is None else hidden_grad.mul_(grad[:, None])]
        factor = grad[:1].sum()  # the same for all tokens; 0 where there are none
        found += [None if total is None else total.mul_(factor).to(ctx.dtype) for total in head_grads]
        return *found, *(None,) * 6


def _leaf(tensor: torch.Tensor | None, requires_grad: bool) -> Any:
    """The tensor, of any shape, apart from the graph."""
    return None if tensor is None else tensor.detach().requires_grad_(requires_grad)


def _fp32_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros in the same shape as the tensor."""
    return torch.zeros_like(tensor, dtype=torch.float32)


def _scaled(logits: torch.Tensor, scale: float, softcap: float | None, temperature: float) -> torch.Tensor:
    """The logits [tokens, vocabulary] in fp32 as the model defines them."""
    logits = logits.float()
    if scale != 1:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1 else logits / temperature
