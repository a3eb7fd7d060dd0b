"""The trace: one training step on fake tensors, with every allocation recorded. No weights, no GPU."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.integrations.neftune import activate_neftune

from sft_play.choices.optimizers import make_optimizer, optimizer_state
from sft_play.errors import ConfigError, UntraceableModel
from sft_play.machine.process import collector_off
from sft_play.model.attention.sequence_parallel import KEY, part_of_group
from sft_play.model.attention.table import ATTENTIONS
from sft_play.model.build import freeze_what_gets_no_gradient
from sft_play.model.collators import Batch
from sft_play.model.layers import inputs_in_ram
from sft_play.model.layers.compilation import compile_layers
from sft_play.model.layers.loss_head import add_loss_head, autocast_of, token_loss
from sft_play.model.layers.recomputation import recompute
from sft_play.model.layers.tiled_mlp import tile_mlps
from sft_play.parts import Activations
from sft_play.sizing.kernels.attention import depends_on_lengths, varlen_attention
from sft_play.sizing.kernels.head_tiles import few_tiles
from sft_play.sizing.kernels.simulation import (
    SymbolicRecorder,
    attributed_loss,
    simulate_cpu,
    simulate_cuda,
)
from sft_play.sizing.recording.fake_results import KeepingFakeMode
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.compiled import generating, joined_in_graphs
from sft_play.sizing.trace.fake_model import (
    attach,
    layer_of_modules,
    layers_told_apart,
    materialise,
    skeleton,
    unpacking_for_dora,
)
from sft_play.timeline import WHOLE_MODEL, StepTrace
from sft_play.units import AUTOCAST
from sft_play.upstream.patching import patched
from sft_play.upstream.torch import making_real_tensors, without_marks
from sft_play.upstream.transformers import features_unchecked
from sft_play.vision.batches import add_empty
from sft_play.vision.looks import NO_LOOK, Look, look_of, trained_parts
from sft_play.vision.models import join_pictures

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GROUP_TIMEOUT_S = 600  # of processes that divide tokens, where they are real
Recorder = TypeVar("Recorder", bound=SymbolicRecorder)


def trace_step(config: "PretrainedConfig", spec: StepSpec, *, all_layers: bool = False) -> StepTrace:
    """Traces a training step in the middle of a run (optimizer states exist), then an evaluation batch.

    With `all_layers`, every decoder layer is traced instead of one of each kind, where this works. So is a
    step that treats some layers otherwise, whose layers are told apart.

    Raises:
        UntraceableModel: an operation depends on data.
    """
    try:
        with warnings.catch_warnings(), collector_off():
            warnings.simplefilter("ignore")
            trace = _trace(config, spec, all_layers)
            trace.step  # noqa: B018  raises LayersDiffer if the layers do not repeat
            return trace
    except ConfigError:
        raise
    except Exception as error:  # libraries can raise anything for an unusual architecture
        if not all_layers:
            # the layers differ, or the model works with all of them only (Gemma 3n)
            return trace_step(config, spec, all_layers=True)
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UntraceableModel(
            f"the training step of {type(config).__name__} cannot be traced ({reason}), so the probe "
            "measures its memory; set train.batch_size for another micro-batch than the smallest"
        ) from error


def _trace(config: "PretrainedConfig", spec: StepSpec, all_layers: bool) -> StepTrace:
    # what is added between the first layers would count for all that they stand for
    adds = any(look_of(config).adds_to_layers for _ in (*spec.fits, *spec.eval_fits))
    base, stand_ins = skeleton(config, spec, all_layers=all_layers or adds)
    model = attach(base, spec)
    if spec.mode == "full":
        freeze_what_gets_no_gradient(base, trained_parts(config, spec.vision))
    join_pictures(base)
    layers = layers_told_apart(base, stand_ins)
    spec = replace(spec, cut_at_longest=spec.joined and depends_on_lengths(config, spec))
    fake = KeepingFakeMode(allow_non_fake_inputs=True)
    with fake, _target_device(spec), unpacking_for_dora(), features_unchecked(), without_marks():
        run = _run_shards if spec.sharing.sharded else _run_whole
        recorder, _optimizer = run(model, layers, spec)  # whose states live as long as the trace
        return recorder.trace(stand_ins)


def _run_whole(model: Any, layers: torch.nn.ModuleList, spec: StepSpec) -> tuple[AllocationRecorder, Any]:
    """Runs the step; returns its recorder and the optimizer."""
    recorder = _recorder(SymbolicRecorder, spec)
    in_graphs = joined_in_graphs(recorder, spec) if spec.kernels.compiled else nullcontext()
    with _group_of(spec), few_tiles(recorder), attributed_loss(recorder), in_graphs:
        materialise(model, layers, recorder)
        _set_up(model, spec)
        if spec.kernels.compiled:
            compile_layers(model, generating(model.config.to_json_string(), spec.device))
            with recorder, recorder.silent():
                forward(model, make_batch(spec, look=look_of(model.config)), spec).backward()
        optimizer = _optimizer_with_states(model, layers, spec, recorder)
        for parameter in trained_parameters(model):
            parameter.register_hook(lambda _: recorder.mark_gradient())
        with recorder, _inputs_in_ram(recorder), layer_hooks(layers, recorder):
            run_step(model, optimizer, spec, recorder)
    return recorder, optimizer


def _group_of(spec: StepSpec) -> AbstractContextManager[None]:
    """A process group for the processes that divide tokens, if there are any."""
    if not spec.sharing.sequence_parallel:
        return nullcontext()
    from sft_play.sizing.trace.sharded import silent_group

    return silent_group(spec.sharing.sequence_ranks)


def _run_shards(model: Any, layers: torch.nn.ModuleList, spec: StepSpec) -> tuple[AllocationRecorder, Any]:
    """As `_run_whole`, after a pass that does not count: FSDP2 sets itself up in the first one.

    It is a whole micro-batch if earlier ones have left gradients, for which nothing needs to be recomputed.
    """
    from sft_play.sizing.trace.sharded import (
        ShardRecorder,
        add_kept_gradients,
        first_pass,
        load_shards,
        offloads,
        silent_group,
    )

    def compute() -> torch.Tensor:
        return forward(model, make_batch(spec, look=look_of(model.config)), spec)

    recorder, before = _recorder(ShardRecorder, spec), _recorder(ShardRecorder, spec)
    before.is_silent = not offloads(spec)  # else it has to know which tensors are in RAM
    replicas = 2 if spec.sharing.replicated else 1
    with silent_group(spec.sharing.shards, replicas), few_tiles(recorder), attributed_loss(recorder):
        load_shards(model, layers, spec, recorder)
        _set_up(model, replace(spec, activations=Activations(), mlp_tile=0))
        with before, model.no_sync() if spec.accumulates else torch.no_grad():
            first_pass(model, compute, backward=spec.accumulates)
        prepare_for_training(model, spec)
        with recorder.placing(in_ram=offloads(spec)):
            optimizer = _optimizer_with_states(model, layers, spec, recorder)
        add_kept_gradients(model, layer_of_modules(model, layers), recorder)
        with recorder, recorder.watching(spec), _inputs_in_ram(recorder), layer_hooks(layers, recorder):
            run_step(model, optimizer, spec, recorder)
    return recorder, optimizer


def _inputs_in_ram(recorder: AllocationRecorder) -> AbstractContextManager[None]:
    """Lets the recorder make both copies, of which each is a fake CPU tensor."""
    return copying_inputs(partial(recorder.copied, in_ram=True), partial(recorder.copied, in_ram=False))


def copying_inputs(
    to_ram: Callable[[torch.Tensor], torch.Tensor], back: Callable[[torch.Tensor], torch.Tensor]
) -> AbstractContextManager[None]:
    """Lets these functions copy what layers are recomputed from, of any shape, to RAM and back."""
    link = inputs_in_ram.direct(to_ram, back)
    return patched(inputs_in_ram, "link_to", lambda device: link)


def _recorder(kind: type[Recorder], spec: StepSpec) -> Recorder:
    return kind(
        cuda=spec.device == "cuda",
        supervised=spec.supervised(spec.batch),
        eval_supervised=spec.eval_supervised,
        autocast=AUTOCAST.get(spec.precision.autocast),
        threads=spec.threads,
        scratch=spec.scratch,
    )


def _target_device(spec: StepSpec) -> Any:
    """Makes libraries behave as they do on the device whose memory is predicted."""
    if spec.device == "cuda":
        return simulate_cuda(
            spec.longest_sequence,
            spec.compute_capability,
            windows=ATTENTIONS[spec.kernels.attention].windows,
            joined=varlen_attention(spec),
        )
    return simulate_cpu()


def _set_up(model: Any, spec: StepSpec) -> None:
    """As the trainer does, which gets a model that its engine has divided."""
    text = model.config.get_text_config()
    if hasattr(text, "router_aux_loss_coef"):
        text.output_router_logits = spec.balanced  # by TRL's trainer
    add_loss_head(model.get_base_model() if spec.mode != "full" else model)
    if spec.neftune:
        activate_neftune(model, 1.0)
    prepare_for_training(model, spec)


def prepare_for_training(model: Any, spec: StepSpec) -> None:
    """Sets the model up as the trainer does before the first step."""
    if spec.mlp_tile:
        tile_mlps(model, spec.mlp_tile)
    if spec.activations.recomputes:
        recompute(model, spec.activations)
        if spec.mode != "full":
            model.enable_input_require_grads()
    model.train()


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that the optimizer updates, in its order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _optimizer_with_states(
    model: torch.nn.Module, layers: torch.nn.ModuleList, spec: StepSpec, recorder: AllocationRecorder
) -> Any:
    """An optimizer as it is during training: with states and, if the step accumulates, gradients.

    Of a divided model, gradients are there already, as the engine made them, or in RAM, a copy of each.
    """
    owner_of: dict[torch.nn.Parameter, int] = {}
    for module, owner in layer_of_modules(model, layers).items():
        owner_of |= dict.fromkeys(module.parameters(recurse=False), owner)
    embeddings = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    parameters = trained_parameters(model)
    recorder.layer_of_parameter = [owner_of[parameter] for parameter in parameters]
    recorder.elements_of_parameter = [parameter.numel() for parameter in parameters]
    with making_real_tensors():  # bitsandbytes computes tables
        optimizer = make_optimizer(spec.optimizer, parameters)
    copied = spec.sharing.offloads and spec.device == "cuda"
    for owner in (*range(len(layers)), WHOLE_MODEL):
        recorder.begin("forward", owner)
        for parameter in (p for p in parameters if owner_of[p] == owner):
            if not spec.accumulates:
                parameter.grad = None
            elif not spec.sharing.sharded or (copied and parameter.grad is not None):
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad is not None:
                recorder.add(parameter.grad, "gradients")
            optimizer.state[parameter] = optimizer_state(
                spec.optimizer, parameter, spec.device, embedding=parameter in embeddings
            )
            for value in optimizer.state[parameter].values():
                if isinstance(value, torch.Tensor) and value.device.type != "meta":  # not paged
                    recorder.add(value, "optimizer")
    return optimizer


def update_bytes(spec: StepSpec, elements: int) -> int:
    """Bytes that the optimizer allocates, and frees, while it updates so many elements in one fp32 vector."""
    with KeepingFakeMode(allow_non_fake_inputs=True):
        vector = torch.nn.Parameter(torch.empty(elements))
        vector.grad = torch.empty(elements)
        with making_real_tensors():
            optimizer = make_optimizer(spec.optimizer, [vector])
        optimizer.state[vector] = optimizer_state(spec.optimizer, vector, spec.device)
        recorder = _recorder(SymbolicRecorder, spec)
        for value in (vector, vector.grad, *optimizer.state[vector].values()):
            if isinstance(value, torch.Tensor):
                recorder.add(value, "optimizer")
        held = recorder.live
        with recorder:
            optimizer.step()
        return recorder.peak - held


@contextmanager
def layer_hooks(layers: torch.nn.ModuleList, recorder: AllocationRecorder) -> Iterator[None]:
    """Tells the recorder which decoder layer runs, in the forward and the backward pass."""
    last = len(layers) - 1

    def mark_gradient(tensor: torch.Tensor, layer: int) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: recorder.begin("backward", layer))

    def before(layer: int, args: Sequence[Any]) -> None:
        if recorder.phase == "backward":  # a checkpointed layer is being recomputed
            return
        recorder.begin(recorder.phase, layer)
        if layer == 0 and recorder.phase == "forward":
            mark_gradient(args[0], WHOLE_MODEL)

    def after(layer: int, output: Any) -> None:
        if recorder.phase == "forward":
            mark_gradient(output if isinstance(output, torch.Tensor) else output[0], layer)
        if layer == last and recorder.phase != "backward":
            recorder.leave_layer()

    handles = []
    for index, layer in enumerate(layers):  # before the engine's hooks, so that these belong to the layer
        begins, ends = partial(before, index), partial(after, index)
        handles.append(layer.register_forward_pre_hook(lambda _, args, do=begins: do(args), prepend=True))
        handles.append(layer.register_forward_hook(lambda _, __, out, do=ends: do(out), prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_batch(
    spec: StepSpec, *, evaluation: bool = False, device: torch.device | str = "cpu", look: Look = NO_LOOK
) -> Batch:
    """The largest micro-batch, with the keys and types of the collators' batches and zeros for tokens.

    Each tensor is [rows, row_tokens]; joined, [1, tokens] with the lengths of the sequences, and with what a
    model with this `look` gets of pictures.
    """
    shape = (spec.evaluated if evaluation else spec.batch).shape
    names = ("input_ids", "labels", "position_ids")
    batch: Batch = {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in names}
    known = spec.eval_lengths if evaluation else spec.lengths
    if spec.joined:
        batch["sequence_lengths"] = list(known or spec.sequence_lengths(shape[1]))
    add_empty(batch, look, spec.eval_fits if evaluation else spec.fits)
    if spec.sharing.sequence_parallel:
        with making_real_tensors():
            part = part_of_group(spec.sharing.sequence_ranks, GROUP_TIMEOUT_S)
        assert part
        batch |= {"labels": None, "shift_labels": batch["labels"], KEY: part.group}
    return batch


def run_step(
    model: Any, optimizer: torch.optim.Optimizer, spec: StepSpec, recorder: AllocationRecorder
) -> None:
    """Runs the last micro-batch of an optimizer step, the optimizer, and an evaluation batch.

    The model is real or fake, the optimizer has its states, and the recorder is told where phases begin.
    """
    recorder.begin("forward")
    parameters = trained_parameters(model)
    device = parameters[0].device
    look = look_of(model.config)
    batch = make_batch(spec, device=device, look=look)  # the trainer, too, keeps it until the next one
    with nullcontext() if spec.exchanges else model.no_sync():
        loss = forward(model, batch, spec)
        saved = [block for block in recorder.blocks_alive() if recorder.terms[block] == "temporaries"]
        recorder.retag(saved, "activations")
        recorder.begin("backward")
        loss.backward()
    del loss
    if not spec.exchanges:  # no update follows
        from sft_play.sizing.trace.sharded import drop_kept_gradients

        drop_kept_gradients(model)
    recorder.begin("optimizer")
    recorder.retag(recorder.blocks_of(p.grad for p in parameters if p.grad is not None), "gradients")
    # foreach as PyTorch would choose it on that device, where it does not know divided tensors
    foreach = spec.device == "cuda" and not spec.sharing.sharded
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    recorder.begin("evaluation")
    model.eval()
    with torch.no_grad():
        forward(model, make_batch(spec, evaluation=True, device=device, look=look), spec)
    model.train()


def forward(model: torch.nn.Module, batch: Batch, spec: StepSpec) -> torch.Tensor:
    """The scalar loss of a micro-batch, under autocast as with accelerate, reduced as TRL reduces it."""
    with autocast_of(spec.precision.autocast, batch["input_ids"].device.type):
        return token_loss(model, batch, router_weight=1.0)
