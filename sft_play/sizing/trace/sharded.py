"""A step whose tensors are divided among processes: training's own `fully_shard`, on fake tensors.

The process group sends nothing, so its size does not matter, and this process is the first one, whose shards
are the largest. What a CUDA device does at the same time on several streams happens here in turn, and NCCL's
own buffers are not seen.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from bitsandbytes.nn import modules as four_bit
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore

from sft_play.engines import shards
from sft_play.engines.fsdp2 import gathered_dtype
from sft_play.model.architecture.shape import units_of
from sft_play.sizing.kernels.simulation import SymbolicRecorder
from sft_play.sizing.recording.recorder import AllocationRecorder
from sft_play.sizing.step import StepSpec
from sft_play.sizing.trace.fake_model import BESIDE_BASE, layer_of_modules, layer_shapes, materialise
from sft_play.sizing.trace.zero3 import simulate_zero3
from sft_play.timeline import WHOLE_MODEL, LayersDiffer
from sft_play.upstream.patching import patched
from sft_play.upstream.torch import forget_shardings, making_real_tensors
from sft_play.work import EXCHANGING, GATHERING

# Of process groups, in torch. Names of groups are numbers, and must not be used twice.
REGISTRIES: dict[str, Any] = {
    "_world": distributed_c10d._World(),
    **dict.fromkeys(("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config"), {}),
    **dict.fromkeys(("_tags_to_pg", "_pg_to_tag"), {}),
    "_backend": None,
    "_group_count": 1_000_000,
}


# what a group does besides computing
COMMUNICATING = {"unshard": GATHERING, "wait_for_unshard": GATHERING, "post_backward": EXCHANGING}


class ShardRecorder(SymbolicRecorder):
    """A recorder that sees what a process holds of divided tensors, not the whole tensors."""

    def __init__(self, **settings: Any) -> None:
        """As the base class."""
        super().__init__(**settings)
        self._computes_shapes = False
        self._streams: list[Any] = []  # that of computation first; [] if they are not told apart

    def device_of(self, tensor: FakeTensor) -> torch.device:
        """As of the base class, which gets to know nothing of a tensor of any shape that nobody allocates."""
        return tensor.fake_device if self._computes_shapes else super().device_of(tensor)

    def run(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs the operation and records its results, once they are those of shards."""
        if types and any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operation for its shard
        if self._computes_shapes:
            return func(*args, **kwargs)
        if not self.in_ram or self._copies:
            return super().run(func, types, args, kwargs)
        # the processor that has the arguments computes
        found = (each for value in args for each in (value if isinstance(value, (list, tuple)) else (value,)))
        in_ram = any(self.is_in_ram(each) for each in found if isinstance(each, torch.Tensor))
        with self.placing(in_ram=in_ram):
            return super().run(func, types, args, kwargs)

    def stream(self) -> int:
        """The one that `fully_shard` has chosen, which it does on a CPU too, where it means nothing."""
        if not self._streams:
            return 0
        if (current := torch.cpu.current_stream()) not in self._streams:
            self._streams.append(current)
        return self._streams.index(current)

    @contextmanager
    def watching(self, spec: StepSpec) -> Iterator[None]:
        """Records what FSDP2 does besides calling operations.

        It resizes storages. DTensor finds out the shapes of its results with whole fake tensors, which nobody
        allocates. Processes on a CPU communicate through gloo, which copies what it gathers and scatters.
        """
        if spec.device == "cuda" and not spec.regathers:  # those of DeepSpeed are others
            self._streams = self._streams or [torch.cpu.current_stream()]
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
        end = FSDPState._root_post_backward_final_callback

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            self.resized(storage)
            return storage

        def propagated(propagator: Any, schema: Any) -> Any:
            with patched(self, "_computes_shapes", True):
                return propagate(propagator, schema)

        def ended(state: Any) -> None:
            # what layers have left until now is freed after those that have waited, for each of them
            groups = [group for each in state._state_ctx.all_states for group in _groups(each)]
            *_, last = (each for each in groups if each._training_state.name != "POST_BACKWARD")
            exchange = last.post_backward

            def exchanged() -> None:
                exchange()
                self.begin("backward")

            with patched(last, "post_backward", exchanged):
                end(state)

        with ExitStack() as stack:
            if spec.regathers:
                stack.enter_context(simulate_zero3(self))
            for target, name, replacement in (
                (torch.UntypedStorage, "resize_", resized),
                (FSDPState, "_root_post_backward_final_callback", ended),
                (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagated),
                *((FSDPParamGroup, name, _attributed(self, name)) for name in COMMUNICATING),
                *(_copying() if spec.device == "cpu" else ()),
                *(_transferring(self) if offloads(spec) else ()),
            ):
                stack.enter_context(patched(target, name, replacement))
            yield


def _attributed(recorder: AllocationRecorder, name: str) -> Callable[..., Any]:
    function = getattr(FSDPParamGroup, name)

    def call(*args: object, **kwargs: object) -> Any:
        with recorder.attributing_to("engine"), patched(recorder, "engine", COMMUNICATING[name]):
            return function(*args, **kwargs)

    return call


def _copying() -> Iterator[tuple[Any, str, Any]]:
    """Gloo's temporaries: as large as what is gathered, and as what is reduced and scattered."""

    def with_copy_of(kind: Any, name: str) -> Callable[..., Any]:
        communicate = kind.__call__

        def call(self: Any, *args: object, **tensors: Any) -> Any:
            copy = torch.empty_like(tensors[name])  # noqa: F841 - lives until this returns
            return communicate(self, *args, **tensors)

        return call

    yield DefaultAllGather, "__call__", with_copy_of(DefaultAllGather, "output_tensor")
    yield DefaultReduceScatter, "__call__", with_copy_of(DefaultReduceScatter, "input_tensor")


def offloads(spec: StepSpec) -> bool:
    """Whether a step leaves to RAM what its device would hold; a CPU has nothing else."""
    return spec.sharing.offloads and spec.device == "cuda"


def _transferring(recorder: ShardRecorder) -> Iterator[tuple[Any, str, Any]]:
    """Where tensors are copied: shards to RAM, shards to the GPU to be gathered, gradients to RAM.

    On a GPU, these copies go on beside its computation, from and to pinned memory: which of them overlap, and
    how long their GPU memory stays taken, is not traced.
    """
    move = torch.Tensor.to

    def during(function: Callable[..., Any], to: str) -> Callable[..., Any]:
        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return recorder.copied(tensor, in_ram=to == "ram")

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return copied(tensor) if "non_blocking" in kwargs else move(tensor, *args, **kwargs)

        def call(*args: object, **kwargs: object) -> Any:
            with patched(torch.Tensor, "cpu", copied), patched(torch.Tensor, "to", moved):
                return function(*args, **kwargs)

        return call

    gathered: Any = FSDPParam.all_gather_inputs
    yield FSDPParam, "_init_sharded_param", during(FSDPParam._init_sharded_param, "ram")
    yield FSDPParam, "all_gather_inputs", property(during(gathered.fget, "device"))
    yield _fsdp_param_group, "foreach_reduce", during(_fsdp_param_group.foreach_reduce, "ram")


@contextmanager
def silent_group(each: int, replicas: int = 1) -> Iterator[None]:
    """A process group in which this process is the first of all, and nothing is sent.

    `each` are the processes that divide one of the replicas.

    Another group that this process is in is out of sight meanwhile.
    """
    before = distributed.GroupMember.WORLD
    with ExitStack() as stack:
        if before:  # else whoever makes a mesh forgets them
            forget_shardings()
            stack.callback(forget_shardings)
        stack.callback(distributed_c10d._update_default_pg, before)  # at the end
        stack.enter_context(patched(sys, "excepthook", sys.excepthook))  # it would name this process's rank
        for name, value in REGISTRIES.items():
            stack.enter_context(patched(distributed_c10d, name, copy.copy(value)))
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=each * replicas)
        stack.callback(_forget_groups)
        with making_real_tensors():  # a mesh looks at its ranks
            mesh = shards.mesh_of("cpu", replicas)  # whose groups have the same names each time
        stack.enter_context(patched(shards, "process_mesh", lambda *_: mesh))
        stack.enter_context(patched(four_bit, "fix_4bit_weight_quant_state_from_module", _find_quant_state))
        yield


def _forget_groups() -> None:
    for name in distributed_c10d._world.pg_names.values():
        distributed_c10d._unregister_process_group(name)


def _find_quant_state(module: Any) -> None:
    """As bitsandbytes does for a weight that was gathered; a Params4bit cannot hold a fake tensor."""
    module.weight.quant_state = module.quant_state


def load_shards(model: Any, layers: torch.nn.ModuleList, spec: StepSpec, recorder: ShardRecorder) -> None:
    """Replaces meta tensors with fake ones, of which this process keeps its shards, as training does.

    The model is on the CPU as a whole. A GPU gets it unit by unit, whole, and keeps its shards.

    Raises:
        LayersDiffer: what a layer sends ahead for the next one is not the same everywhere.
    """
    if len(set(map(layer_shapes, layers))) > 1:
        raise LayersDiffer("layers of several shapes are gathered")
    on_host = spec.device == "cpu"
    materialise(model, layers, recorder if on_host else AllocationRecorder())
    owners = layer_of_modules(model, layers)
    owner_of = {id(p): owners[module] for module in owners for p in module.parameters(recurse=False)}
    terms = {id(p): term for term, p in _terms(model)}
    move = _fsdp_init._move_states_to_device

    def moved(parameters: list[Any], buffers: list[Any], device: torch.device) -> None:
        recorder.begin("load", owner_of[id(parameters[0])] if parameters else WHOLE_MODEL)
        for tensor in (*parameters, *buffers) if not on_host else ():
            recorder.add(tensor, terms.get(id(tensor), "weights"))
            for part in quant_tensors(getattr(tensor, "quant_state", None)):
                recorder.add(part, "weights")
        move(parameters, buffers, device)

    dtype = gathered_dtype(spec.mode, spec.precision.dtype, spec.precision.autocast)
    with (
        recorder,
        recorder.watching(spec),
        patched(_fsdp_init, "_move_states_to_device", moved),
        patched(_fsdp_param, "_chunk_with_empty", _first_chunk),
    ):
        shards.shard(
            units_of(model),
            "cpu",
            gathered_dtype=dtype,
            offload=spec.sharing.offloads,
            defers_exchange=spec.sharing.defers_exchange,
            regathers=spec.regathers,
            reshard_after_forward=spec.sharing.reshard_after_forward,
        )
    for term, parameter in _terms(model):
        recorder.retag(recorder.blocks_of([parameter]), term)
    recorder.begin("load")


def _first_chunk(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """The first of so many chunks of a tensor of any shape: a view for each process would take seconds."""
    return [tensor.narrow(dim, 0, min(-(-tensor.shape[dim] // count), tensor.shape[dim]))]


def add_kept_gradients(
    model: torch.nn.Module, owner_of: Mapping[torch.nn.Module, int], recorder: AllocationRecorder
) -> None:
    """Records gradients that are outside the parameters between the micro-batches of a step.

    They are whole, or shards that replicas have not reduced yet. `owner_of` has the layer of each module.
    """
    for module, group in _divided(model):
        whole = [parameter._unsharded_param.grad for parameter in group.fsdp_params]
        sums = [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]
        for gradient in (group._partial_reduce_output, *whole, *sums):
            if gradient is not None:
                recorder.add(gradient, "gradients", owner_of[module])


def drop_kept_gradients(model: torch.nn.Module) -> None:
    """Frees what `add_kept_gradients` records."""
    for _, group in _divided(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None


def changes_in_a_pass(model: torch.nn.Module) -> bool:
    """Whether layers change in their first pass: those in 4 bits cast their bias for good."""
    return any(isinstance(each, four_bit.Linear4bit) and each.bias is not None for each in model.modules())


def first_pass(model: Any, compute: Callable[[], torch.Tensor], *, backward: bool) -> None:
    """Lets FSDP2 do what it does in a pass of a divided model, beside what it computes, which does not count.

    `compute`, the forward pass, returns the loss, and is computed only where the model changes meanwhile.
    `backward` says whether trained weights get gradients, which are exchanged or kept.
    """
    groups = [group for _, group in _divided(model)]
    if changes_in_a_pass(model):
        loss = compute()
        if backward:
            loss.backward()
        for group in groups:  # what no backward pass has followed leaves nothing for the next one to look for
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()
        return
    root = model._get_fsdp_state()
    root._lazy_init()
    for group in groups:
        group.unshard()
        group.wait_for_unshard()
        if not backward:
            group.reshard()
            continue
        for whole in (parameter.unsharded_param for parameter in group.fsdp_params):
            if whole.requires_grad:
                whole.grad = torch.empty_like(whole)
        group.post_backward()
    if backward:
        root._root_post_backward_final_callback()


def _divided(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """The modules that FSDP2 divides, each with its groups of parameters."""
    for module in model.modules():
        for group in _groups(module._get_fsdp_state()) if isinstance(module, FSDPModule) else ():
            yield module, group


def _groups(state: Any) -> list[Any]:
    """The groups of parameters of a module that FSDP2 divides; in torch 2.11 there is one, or none."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _terms(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for path, module in model.named_modules():
        term = "adapters" if BESIDE_BASE.search(path) else "weights"
        yield from product([term], module.parameters(recurse=False))


def quant_tensors(state: object) -> Iterator[torch.Tensor]:
    """The tensors, of any shape, in bitsandbytes' state of a 4-bit weight; none if there is no state."""
    for value in vars(state).values() if state is not None else ():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, type(state)):
            yield from quant_tensors(value)
