"""The symbolic step: one training step executed on fake tensors, every allocation counted. No weights, no GPU, a second."""

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sft_play.errors import ConfigError
from sft_play.model import freeze_all_but_text
from sft_play.sizing.fake import attach, decoder_layers, layer_of_modules, materialise, skeleton
from sft_play.sizing.kernels import SymbolicLedger, as_on_cpu, as_on_cuda, few_tiles, watched_loss
from sft_play.sizing.ledger import Ledger
from sft_play.sizing.step import StepSpec
from sft_play.sizing.timeline import WHOLE_MODEL, LayersDiffer, StepTrace

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EIGHT_BIT_BLOCK, EIGHT_BIT_FROM = 256, 4096  # bitsandbytes: values that share a scale; smaller tensors keep 32-bit states
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
SPARE_BATCHES = 1  # the data loader has fetched the next batch when one is worked on


class UntraceableModel(ConfigError):
    """The model's training step cannot be executed on fake tensors; only a real step can measure it."""


def trace_step(config: "PretrainedConfig", spec: StepSpec, *, all_layers: bool = False) -> StepTrace:
    """Records one steady training step (optimizer states exist), then an evaluation batch.

    Args:
        config: the architecture, as transformers builds it.
        spec: the step.
        all_layers: record every decoder layer instead of one of each kind.

    Raises:
        UntraceableModel: an operation needs data, or the architecture has no list of decoder layers.
    """
    try:
        with warnings.catch_warnings(), _no_collection():
            warnings.simplefilter("ignore")
            trace = _record(config, spec, all_layers)
            trace.step  # noqa: B018  whether the layers repeat
            return trace
    except LayersDiffer:
        if all_layers:
            raise
        return trace_step(config, spec, all_layers=True)
    except ConfigError:
        raise
    except Exception as error:  # any library's code runs here, on any architecture
        first_line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UntraceableModel(
            f"the training step of {type(config).__name__} cannot be traced symbolically: {first_line}\n"
            "Its memory shows in the first real steps only; set train.batch_size by hand"
        ) from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Within, the garbage collector is off: it takes a third of the time here and would free cycles at chance moments."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _record(config: "PretrainedConfig", spec: StepSpec, all_layers: bool) -> StepTrace:
    from trl.trainer.utils import add_fused_lm_head

    base, stand_ins = skeleton(config, spec, all_layers=all_layers)
    model = attach(base, spec)
    if spec.mode == "full":
        freeze_all_but_text(base)
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    prepare_for_training(model, spec)
    layers = decoder_layers(base)[2]
    spec = replace(spec, one_by_one=spec.packing and has_window(config, spec.row_tokens) and not is_flash(spec))
    eval_tokens = spec.eval_shape[0] * spec.eval_shape[1]
    with FakeTensorMode(allow_non_fake_inputs=True), few_tiles(), _costed_as(spec):
        ledger = SymbolicLedger(
            cuda=spec.device == "cuda",
            supervised=spec.supervised(spec.tokens),
            eval_supervised=spec.supervised(eval_tokens),
        )
        with watched_loss(ledger):
            materialise(model, layers, ledger)
            optimizer = _with_states(model, layers, spec, ledger)
            with ledger, marked_layers(layers, ledger):
                run_step(model, optimizer, spec, ledger)
    return ledger.trace(stand_ins)


def _costed_as(spec: StepSpec) -> Any:
    return as_on_cuda(longest=spec.row_tokens, flash=is_flash(spec)) if spec.device == "cuda" else as_on_cpu()


def is_flash(spec: StepSpec) -> bool:
    """Whether attention is FlashAttention's package."""
    return spec.attention.startswith("flash")


def has_window(config: "PretrainedConfig", tokens: int) -> bool:
    """Whether some layer lets a token see fewer than `tokens` before it."""
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    return window is not None and window < tokens and (kinds is None or "sliding_attention" in kinds)


def prepare_for_training(model: Any, spec: StepSpec) -> None:
    """What the trainer does to a model before the first step."""
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if spec.mode != "full":
            model.enable_input_require_grads()
    model.train()


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What the optimizer updates, in its order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_state(parameter: torch.Tensor, spec: StepSpec, *, embedding: bool) -> dict[str, torch.Tensor]:
    """What the trainer's optimizer keeps for a parameter; 8-bit AdamW keeps embeddings in 32 bits at transformers' request."""
    if spec.optimizer == "adamw":
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32), **moments}
    count = parameter.numel()
    if embedding or count < EIGHT_BIT_FROM:
        return {name: torch.empty(count, dtype=torch.float32) for name in ("state1", "state2")}
    scales = {name: torch.empty(-(-count // EIGHT_BIT_BLOCK), dtype=torch.float32) for name in ("absmax1", "absmax2")}
    return {**{name: torch.empty(count, dtype=torch.uint8) for name in ("state1", "state2")}, **scales}


def _with_states(model: torch.nn.Module, layers: torch.nn.ModuleList, spec: StepSpec, ledger: Ledger) -> Any:
    """An optimizer in the middle of training: each trained parameter has its state and, if the step accumulates, a gradient."""
    owners = layer_of_modules(model, layers)
    owner_of = {parameter: owner for module, owner in owners.items() for parameter in module.parameters(recurse=False)}
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    parameters = trained_parameters(model)
    ledger.parameters_per_layer = [owner_of[parameter] for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for owner in (*range(len(layers)), WHOLE_MODEL):
        ledger.begin("forward", owner)
        for parameter in (p for p in parameters if owner_of[p] == owner):
            if spec.accumulates:
                parameter.grad = torch.empty_like(parameter)
                ledger.add(parameter.grad, "gradients")
            optimizer.state[parameter] = optimizer_state(parameter, spec, embedding=parameter in embeddings)
            for tensor in optimizer.state[parameter].values():
                ledger.add(tensor, "optimizer")
    return optimizer


@contextmanager
def marked_layers(layers: torch.nn.ModuleList, ledger: Ledger) -> Iterator[None]:
    """Tells the ledger which decoder layer is at work, forward and backward."""
    last = len(layers) - 1

    def mark_gradient(tensor: torch.Tensor, layer: int) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: ledger.begin("backward", layer))

    def before(layer: int, args: Sequence[Any]) -> None:
        if ledger.phase == "backward":  # a checkpointed layer runs again
            return
        ledger.begin(ledger.phase, layer)
        if layer == 0 and ledger.phase == "forward":
            mark_gradient(args[0], WHOLE_MODEL)

    def after(layer: int, output: Any) -> None:
        if ledger.phase == "forward":
            mark_gradient(output if isinstance(output, torch.Tensor) else output[0], layer)
        if layer == last and ledger.phase != "backward":
            ledger.leave_layer()

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(lambda _, args, i=index: before(i, args)))
        handles.append(layer.register_forward_hook(lambda _, __, output, i=index: after(i, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_batch(spec: StepSpec, *, evaluation: bool = False, device: Any = "cpu") -> dict[str, Any]:
    """A micro-batch at its largest, as the collators make it; its tokens are all alike, which changes no size."""
    shape, lengths = spec.eval_shape if evaluation else (spec.rows, spec.row_tokens), {}
    if spec.packing and not evaluation:
        shape, lengths = (1, spec.tokens), {"sequence_lengths": list(spec.sequence_lengths)}
    names = ("input_ids", "labels", "position_ids")
    return {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in names} | lengths


def run_step(model: Any, optimizer: torch.optim.Optimizer, spec: StepSpec, ledger: Ledger) -> None:
    """The last micro-batch of an optimizer step, the step, and an evaluation batch."""
    ledger.begin("forward")
    parameters = trained_parameters(model)
    device = parameters[0].device
    waiting = [make_batch(spec, device=device) for _ in range(SPARE_BATCHES)]  # noqa: F841
    loss = forward(model, make_batch(spec, device=device), spec)
    ledger.retag((b for b in ledger.blocks_alive() if ledger.terms[b] == "temporaries"), "activations")
    ledger.begin("backward")
    loss.backward()
    del loss
    ledger.begin("optimizer")
    ledger.retag(ledger.blocks_of(p.grad for p in parameters if p.grad is not None), "gradients")
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=spec.device == "cuda")  # its own choice on each device
    if spec.optimizer == "adamw":  # the 8-bit one updates in place
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    ledger.begin("evaluation")
    model.eval()
    with torch.no_grad():
        forward(model, make_batch(spec, evaluation=True, device=device), spec)
    model.train()


def forward(model: Any, batch: dict[str, Any], spec: StepSpec) -> torch.Tensor:
    """The loss of a micro-batch, with autocast around the model as accelerate puts it, reduced as TRL does."""
    device, dtype = batch["input_ids"].device.type, AUTOCAST.get(spec.mixed_precision)
    autocast = torch.autocast(device, dtype=dtype) if dtype else nullcontext()
    with autocast:
        return token_loss(model, batch)


def token_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """TRL's loss of a micro-batch on this process alone, through the head that `add_fused_lm_head` gave the model."""
    outputs = model(**batch, use_cache=False, fused_lm_head=True)
    return -outputs.log_probs.sum() / outputs.label_mask.sum().clamp(min=1)
