"""Traces the steps that others ran, with what the planner uses: only what they did differently is exchanged.

Exchanged are the loss (that of transformers, with whole logits), AdamW's kernels, PEFT's preparation for
4-bit training, single quantization, the kernel of attention, FSDP1 for FSDP2, and which tensors outlive the
backward pass.
"""

import gc
import warnings
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from accelerate.utils.operations import convert_to_fp32
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Linear4bit
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from benchmarks.evidence import flat, fused
from benchmarks.evidence.runs import Head, Run
from benchmarks.random_models import stock_forwards
from benchmarks.steps import step_of
from sft_play.choices.optimizers import optimizer_state
from sft_play.config.schema import LoraSettings
from sft_play.model.attention import varlen
from sft_play.model.attention.varlen import type_name
from sft_play.model.weights import four_bit
from sft_play.sizing.kernels.simulation import SymbolicRecorder, simulate_cuda
from sft_play.sizing.step import PaddedRows, StepSpec
from sft_play.sizing.trace import fake_model
from sft_play.sizing.trace.trace import layer_hooks, trained_parameters
from sft_play.timeline import WHOLE_MODEL, LayersDiffer, StepTrace
from sft_play.units import AUTOCAST, SIXTEEN_BIT
from sft_play.upstream.patching import patched


def trace_run(config: PretrainedConfig, run: Run, *, all_layers: bool = False) -> StepTrace:
    """Traces a step as its publisher ran it.

    Args:
        config: the architecture.
        run: the settings.
        all_layers: trace every decoder layer; needed if the traced ones do not repeat.
    """
    gc.collect()
    gc.disable()  # it frees cycles at random moments
    try:
        trace = _trace(config, run, all_layers)
        trace.step  # noqa: B018  raises LayersDiffer
        return trace
    except LayersDiffer:
        if all_layers:
            raise
        return trace_run(config, run, all_layers=True)
    finally:
        gc.enable()


def _spec(run: Run) -> StepSpec:
    modules = list(run.target_modules) or "auto"
    lora = LoraSettings(
        r=run.r, alpha=2 * run.r, dropout=run.dropout, target_modules=modules, use_dora=run.use_dora
    )
    return step_of(
        mode=run.mode,
        lora=lora,
        dtype=run.dtype,
        mixed_precision=run.autocast,
        attention="eager" if run.attention == "eager" else varlen.NAME,
        activations="recompute" if run.checkpointing else "keep",
        batch=PaddedRows(run.rows, run.row_tokens),
        accumulates=False,
        device="cuda",
        compute_capability=run.compute_capability,
        optimizer=run.optimizer,
    )


def _trace(config: PretrainedConfig, run: Run, all_layers: bool) -> StepTrace:
    spec = _spec(run)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not run.double_quantization:
            stack.enter_context(patched(fake_model, "four_bit_tensors", _single_quantized))
        with stock_forwards():
            base, stand_ins = fake_model.skeleton(config, spec, all_layers=all_layers or run.processes > 1)
        if run.fused_layers:
            fused.replace_forwards(base)
        stack.enter_context(stock_forwards())
        model: Any = fake_model.attach(base, spec)
        layers: Any = fake_model.layers_told_apart(base, stand_ins)
        if run.loss in ("shifted", "fused"):
            base.loss_function = _shifted_loss if run.loss == "shifted" else fused.shifted_loss
        elif run.loss == "linear":
            fused.linear_loss(base, getattr(torch, AUTOCAST.get(run.autocast, run.dtype)))
        if run.fp32_head:
            base.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: logits.float())
        _prepare(model, layers, run)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(simulate_cuda(run.row_tokens, run.compute_capability, windows=False))
        stack.enter_context(patched(varlen, "_supports_groups", lambda *_: run.attention == "sdpa"))
        stack.enter_context(fused.simulated())
        recorder = SymbolicRecorder(cuda=True, supervised=0, eval_supervised=0)
        if run.processes > 1:
            model = stack.enter_context(flat.loaded(model, run, recorder))
            _outputs(model, _ids(run), run).loss.backward()  # FSDP1 sets itself up
            flat.forget_gradients(model)
            stack.enter_context(flat.watched(recorder))
        else:
            fake_model.materialise(model, layers, recorder)
        if run.upcast or run.upcast_norms:
            _upcast(model, layers, recorder, norms_only=run.upcast_norms)
        optimizer = _states(model, layers, spec, recorder)
        with recorder, layer_hooks(layers, recorder):
            _run_step(model, optimizer, run, recorder)
    return recorder.trace(stand_ins)


def _prepare(model: Any, layers: torch.nn.ModuleList, run: Run) -> None:
    """What is trained, and checkpointing, as the publisher set them up."""
    for name, parameter in model.named_parameters() if run.only_b else ():
        parameter.requires_grad_("lora_B" in name)
    for index, layer in enumerate(layers if run.use_cache else ()):
        layer.self_attn.layer_idx = index  # the traced layers alone have places in the cache
    if run.checkpointing:
        if run.processes == 1:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": run.reentrant}
            )
        if run.mode != "full" and run.input_gradients:
            model.enable_input_require_grads()
    model.train()


def _single_quantized(module: Linear4bit) -> list[tuple[torch.Tensor, bool]]:
    """Packs a weight of [rows, columns] as `four_bit_tensors` does, but with scales in fp32 that stay."""
    rows, columns = module.weight.shape
    state = QuantState(
        absmax=torch.empty(-(-rows * columns // four_bit.NF4_BLOCK)),
        shape=torch.Size((rows, columns)),
        code=torch.empty(16),
        blocksize=four_bit.NF4_BLOCK,
        quant_type="nf4",
        dtype=module.compute_dtype,
    )
    packed = torch.empty((-(-rows * columns // 2), 1), dtype=torch.uint8)
    weight: Any = torch.nn.Parameter(packed, requires_grad=False)
    weight.quant_state, weight.bnb_quantized = state, True
    module._parameters["weight"], module.quant_state = weight, state
    original = packed.new_empty((rows, columns), dtype=module.compute_dtype)
    return [(original, False), (state.absmax, True), (weight, True), (state.code, True)]


def _upcast(
    model: torch.nn.Module, layers: torch.nn.ModuleList, recorder: SymbolicRecorder, *, norms_only: bool
) -> None:
    """Every 16-bit parameter, or those of norms, becomes fp32, while its original is there as well."""
    owners = fake_model.layer_of_modules(model, layers)
    norms = {module for name, module in model.named_modules() if "norm" in name or "ln_" in name}
    done: set[int] = set()
    for owner in (WHOLE_MODEL, *range(len(layers))):
        recorder.begin("load", owner)
        for module in (each for each in model.modules() if owners[each] == owner):
            if norms_only and module not in norms:
                continue
            for parameter in module.parameters(recurse=False):
                if type_name(parameter.dtype) in SIXTEEN_BIT and id(parameter) not in done:
                    done.add(id(parameter))
                    upcast = parameter.data.float()
                    recorder.add(upcast, "weights")
                    parameter.data = upcast
    recorder.begin("load")


def _states(
    model: torch.nn.Module, layers: torch.nn.ModuleList, spec: StepSpec, recorder: SymbolicRecorder
) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The optimizer's states, of which AdamW's step counter is on the CPU unless it is fused."""
    owner_of: dict[torch.nn.Parameter, int] = {}
    for module, owner in fake_model.layer_of_modules(model, layers).items():
        owner_of |= dict.fromkeys(module.parameters(recurse=False), owner)
    parameters = trained_parameters(model)
    recorder.layer_of_parameter = [owner_of[parameter] for parameter in parameters]
    recorder.elements_of_parameter = [parameter.numel() for parameter in parameters]
    states = {}
    for owner in (*range(len(layers)), WHOLE_MODEL):
        recorder.begin("forward", owner)
        for parameter in (each for each in parameters if owner_of[each] == owner):
            states[parameter] = optimizer_state(spec.optimizer, parameter, spec.device)
            states[parameter].pop("step", None)
            for tensor in states[parameter].values():
                recorder.add(tensor, "optimizer")
    return states


def _run_step(
    model: Any, states: dict[torch.Tensor, dict[str, torch.Tensor]], run: Run, recorder: SymbolicRecorder
) -> None:
    """A step; what is freed after the optimizer belongs to the phase `evaluation`."""
    recorder.begin("forward")
    parameters = trained_parameters(model)
    ids = _ids(run)
    outputs = _outputs(model, ids, run)
    loss = outputs.loss
    if run.outputs_kept_until == "loss":
        del outputs
    saved = [block for block in recorder.blocks_alive() if recorder.terms[block] == "temporaries"]
    recorder.retag(saved, "activations")
    recorder.begin("backward")
    loss.backward()
    recorder.begin("optimizer")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    recorder.retag(recorder.blocks_of(gradients), "gradients")
    del gradients
    if run.clip:
        if run.processes > 1:
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    if run.optimizer == "adamw":  # of its kernels, only that of the square roots makes new tensors
        roots = torch._foreach_sqrt([states[parameter]["exp_avg_sq"] for parameter in parameters])
        del roots
    recorder.begin("evaluation")
    loss = outputs = None
    for parameter in parameters:
        parameter.grad = None
    if run.processes > 1:
        flat.forget_gradients(model)


def _ids(run: Run) -> torch.Tensor:
    return torch.zeros((run.rows, run.row_tokens), dtype=torch.int64)


def _outputs(model: Any, ids: torch.Tensor, run: Run) -> Any:
    """What the model returns for `ids`, [rows, tokens], as accelerate prepares it under autocast."""
    if run.autocast == "no":
        return model(input_ids=ids, labels=ids, use_cache=run.use_cache)
    with torch.autocast("cpu", dtype=getattr(torch, AUTOCAST[run.autocast])):
        outputs = model(input_ids=ids, labels=ids, use_cache=run.use_cache)
    return convert_to_fp32(outputs)


def _shifted_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """The scalar loss of logits [rows, tokens, vocabulary] as ForCausalLMLoss of transformers 4.48 has it.

    Later versions pad the labels, [rows, tokens], instead of copying the logits.
    """
    logits = logits.float()
    shift_logits = logits[..., :-1, :].contiguous().view(-1, vocab_size)
    shift_labels = labels[..., 1:].contiguous().view(-1)
    return torch.nn.functional.cross_entropy(shift_logits, shift_labels)


def warmup_bytes(config: PretrainedConfig, run: Run) -> int:
    """What transformers reserves before it loads weights onto a GPU (caching_allocator_warmup): their size.

    Those that will be 4-bit count half a byte per element.
    """
    model, _ = fake_model.skeleton(config, _spec(run), all_layers=True)
    packed = {id(module.weight) for module in model.modules() if isinstance(module, Linear4bit)}
    sizes = (
        each.numel() * (0.5 if id(each) in packed else each.element_size()) for each in model.parameters()
    )
    return int(sum(sizes))


def head_peak(head: Head) -> int:
    """Peak bytes of a loss alone, with everything that its benchmark keeps alive."""
    dtype = getattr(torch, head.dtype)
    with FakeTensorMode(), simulate_cuda(1, head.compute_capability, windows=False):
        recorder = SymbolicRecorder(cuda=True, supervised=0, eval_supervised=0)
        make = partial(torch.empty, dtype=dtype, requires_grad=True)
        with recorder:
            labels = torch.zeros(head.tokens, dtype=torch.int64)
            if head.head == "cross_entropy":
                inputs = [make((head.tokens, head.vocabulary))]
            else:
                inputs = [make((head.tokens, head.hidden)), make((head.vocabulary, head.hidden))]
                other_provider = make((head.vocabulary, head.hidden))  # noqa: F841
            for each in inputs:
                each.grad = torch.empty_like(each)
            _loss(inputs, labels).backward()
    return recorder.peak


def _loss(inputs: list[torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """The scalar loss; logits that were computed here are not kept."""
    logits = inputs[0] if len(inputs) == 1 else inputs[0] @ inputs[1].t()
    return torch.nn.functional.cross_entropy(logits, labels)
