"""What we change in PyTorch, and take of its private parts."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal

from sft_play.upstream.patching import patched

# In the state of a schedule: the learning rates that it has set last (2.13). What makes the name unnecessary:
# a way to set them beside `get_last_lr`.
LAST_RATES = "_last_lr"
IN_GIVEN_ORDER: dict[str, Any] = {"reorder_for_peak_memory": False}  # an option of the compiler (2.13)


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """In the block, attention never runs in cuDNN, which PyTorch 2.13 prefers on capability 9 and 10.

    It builds a plan for every new length of a sequence, which takes the CPU tens of milliseconds, and its
    workspace is known only to cuDNN, so its memory could not be predicted. What makes this unnecessary: plans
    that serve several lengths.
    """
    import torch

    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def compiling_layers(variants: int, code: str, folder: Callable[[], str]) -> Iterator[None]:
    """In the block, the compiler leaves layers whole at the buckets of DDP, and compiles so many variants.

    What it compiles is kept in a folder, unless the user's variable names another one. `code` tells one state
    of our code from another: PyTorch's keys (2.13) know an operator by its name alone, so that with another
    backward pass of ours a hit would compute the old gradient. With it, functions of autograd may be kept,
    which by default they are not. These are settings of the process; what makes this unnecessary: such
    settings as arguments of `torch.compile`.
    """
    import torch
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    before = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    own, triton = before.values()
    if own in (None, default_cache_dir()):  # PyTorch sets the variable when it is imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = kept = folder()
        os.environ["TRITON_CACHE_DIR"] = triton or f"{kept}/triton"
    dynamo = torch._dynamo.config.patch(optimize_ddp=False, recompile_limit=variants)
    settings: Any = torch.compiler.config
    keyed = settings.patch(cache_key_tag=code)
    keeps = torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True)
    try:
        with dynamo, keyed, keeps:
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def in_given_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile`, by which memory does not depend on the first micro-batch.

    By default the compiler (2.13) compares orders of the operations by the sizes of its first inputs, and
    keeps one for all others. What makes this unnecessary: an order that is the best for all.
    """
    import torch

    return torch.compile(function, options=IN_GIVEN_ORDER)


def without_leftovers(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of `torch.compile`; what compiling leaves behind is collected at once.

    The compiler's objects (2.13) refer to each other and to inputs of the first call, which so stayed in
    memory until Python looked for cycles, many steps later. What makes this unnecessary: objects that do not.
    """
    from torch._dynamo.utils import counters

    def call(*args: object, **named: object) -> Any:
        graphs = counters["stats"]["unique_graphs"]
        outputs = compiled(*args, **named)
        if counters["stats"]["unique_graphs"] > graphs:
            gc.collect()
        return outputs

    return call


def changed_in_place(result: Any) -> Any:
    """What a function of autograd returns that it has changed in place, a tensor of any shape.

    In a graph of PyTorch 2.11 the tensor itself would get no gradient, and what it was computed from none or
    a wrong one, without a word. What makes this unnecessary: 2.13 as the oldest version.
    """
    import torch

    return result.detach() if torch.compiler.is_compiling() else result


def without_kernels(graph: Any, inputs: Sequence[Any], options: dict[str, Any] | None = None) -> Any:
    """A backend of `torch.compile` whose code allocates and frees as that of PyTorch's, with these options.

    It is the same code, of a CPU, but what it calls is neither compiled nor does anything, so that tensors
    may be fake. Caches of graphs are neither read nor written. What makes this unnecessary: a compiler that
    says what its code allocates (2.13 does not).
    """
    import torch
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering

    def generate(*args: Any, **settings: Any) -> Any:
        with patched(GraphLowering, "compile_to_module", _generated):
            return compile_fx_inner(*args, **settings)

    alone = dict(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        return compile_fx(graph, inputs, generate, config_patches=alone | (options or {}))


def _generated(graph: Any) -> Any:
    """The module with the code of a graph, for `without_kernels`."""
    import torch
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    key, path = PyCodeCache.write(graph.codegen()[0].value, "without kernels")  # not that of a run
    graph.cache_key, graph.cache_path, graph.cache_linemap = key, path, []
    with patched(AsyncCompile, "cpp_pybinding", lambda *_: lambda *arguments: None):
        module: Any = PyCodeCache.load_by_key_path(key, path, attrs=dict(graph.constants))
    module.empty_strided_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    module.reinterpret_tensor = lambda tensor, size, stride, offset: tensor.as_strided(
        size, stride, tensor.storage_offset() + offset
    )
    return module


def joined_attention_backward() -> Any:
    """The operation that computes gradients of `varlen_attn`, as it is called by compiled code.

    What makes this unnecessary: a public name (2.13 has none).
    """
    import torch

    return torch.ops.torch_attn._varlen_attn_backward.default


def mark_dynamic(tensor: object, *dimensions: int) -> None:
    """Lets the compiler take these sizes of a tensor for ones that change, unless a model needs a constant.

    What makes this unnecessary: an argument of `torch.compile`. With its `dynamic=True` (2.13) sizes that are
    equal in the first micro-batch are one symbol, and the code is for such micro-batches alone.
    """
    import torch

    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def cpu_attention(query: Any, key: Any, value: Any, mask: Any, scale: float | None) -> tuple[Any, Any]:
    """The fused kernel of CPUs, causal if there is no mask, as `scaled_dot_product_attention` calls it.

    Tensors are [batch, heads, tokens, head_dim]. Besides the output it returns the logarithms of the sums of
    exponentials, [batch, heads, tokens], which the gradients need. What makes this unnecessary: a public
    function that returns them (2.13 keeps them to itself).
    """
    import torch

    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )


def cpu_attention_gradients(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, mask: Any, scale: float | None
) -> tuple[Any, Any, Any]:
    """The gradients of query, key and value of `cpu_attention`, from that of its output."""
    import torch

    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, sums, 0.0, mask is None, attn_mask=mask, scale=scale
    )


@contextmanager
def dividing_integers() -> Iterator[None]:
    """In the block, FSDP2 divides weights of integers, as 4-bit ones are.

    What makes this unnecessary: to support no torch that fails at them, as 2.11 does.
    """
    from torch import nn
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    def parameter(data: Any, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and (data.is_floating_point() or data.is_complex()))

    with patched(_fsdp_param, "nn", SimpleNamespace(**vars(nn) | {"Parameter": parameter})):
        yield


def wait_for_ranks(seconds: int) -> None:
    """Lets this launcher wait so long for ranks that it ends.

    What makes this unnecessary: to support no torch without a variable for that, as 2.11.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    PContext.close.__defaults__ = (None, seconds)


def forget_shardings() -> None:
    """Drops what DTensor has found out, which names the groups of the mesh that it was found out for.

    What makes this unnecessary: meshes that are equal only if their groups are (2.13: those of one shape).
    """
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def is_view(tensor: Any) -> bool:
    """Whether a tensor is a view for autograd, which copies the gradient of one that is changed in place.

    What makes this unnecessary: a public name (2.13 has none).
    """
    return tensor._is_view()


def wait_longer(seconds: float) -> None:
    """Lets collectives that begin from now on wait so long for other processes.

    What makes this unnecessary: a public name (2.13 has none).
    """
    from torch.distributed import distributed_c10d

    distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def keep_busy(cycles: int) -> None:
    """Lets a GPU wait, so that operations are in its queue when it is done.

    What makes this unnecessary: a public name (2.13 has none).
    """
    import torch

    torch.cuda._sleep(cycles)


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no memory: of a trace, or one of the compiler's.

    What makes this unnecessary: a public name of its class (2.13 has none).
    """
    from torch._subclasses import FakeTensor

    return isinstance(tensor, FakeTensor)


def making_real_tensors() -> AbstractContextManager[Any]:
    """In the block, tensors are real, also where a trace makes fake ones.

    What makes this unnecessary: a public name (2.13 has none).
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def schema_of(operation: Any) -> Any:
    """The schema of an operation: its name without the overload, whether it changes an argument.

    What makes this unnecessary: public names for these (2.13 has none).
    """
    return operation._schema


@cache
def fake_by(operation: Any) -> Literal["view", "kernel", "constructor", "collective"] | None:
    """How a `FakeTensorMode` comes to an operation's result (`_dispatch_impl`), if in one of these ways.

    It asks nothing but the operation's kernel for meta tensors; of a constructor, which then makes one there.
    Arguments of a collective cannot be compared: its group is among them.
    What makes this unnecessary: a mode that finds this out once for an operation (2.13 does for each call).
    """
    from torch import Tag
    from torch._decomp import decomposition_table, meta_table
    from torch._subclasses import fake_impls
    from torch._subclasses.fake_tensor import FakeTensorMode, torch_decomp_decompositions

    if operation.namespace == "c10d":
        return "collective"
    if operation.namespace != "aten" or not fake_impls.has_meta(operation):
        return None
    composite = operation._can_decompose()
    if operation.is_view:
        left = composite or operation in FakeTensorMode.lift_fns or Tag.inplace_view in operation.tags
        return None if left else "view"
    if operation in fake_impls._like_tensor_constructors or fake_impls._is_tensor_constructor(operation):
        return "constructor"
    decomposed = operation in decomposition_table and torch_decomp_decompositions(operation)
    own = any(answers(operation) for answers, _ in fake_impls.op_implementations_checks)
    if own or (operation not in meta_table and (decomposed or composite)):
        return None
    return "kernel"


def active_modes() -> Sequence[Any]:
    """The modes that see this thread's operations, the innermost last.

    What makes this unnecessary: a public list of them (2.13 has none).
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


@contextmanager
def without_marks() -> Iterator[None]:
    """In the block, code sets no marks for a profiler, which FSDP2 does at each turn.

    What makes this unnecessary: marks that take no time where nobody profiles (2.13 calls two operations).
    """
    from torch.profiler import record_function

    with patched(record_function, "__enter__", lambda mark: mark):
        with patched(record_function, "__exit__", lambda *_: None):
            yield


def begin_profile() -> Callable[[], list[Any]]:
    """Records marks and the events of the CPU allocator, until its result is called and returns them.

    They are trees; these are their roots.

    What makes this unnecessary: a torch.profiler (2.13) that can leave out the operations, which take longer
    to record than to run.
    """
    import torch
    from torch._C._profiler import (
        ProfilerActivity,
        ProfilerConfig,
        ProfilerState,
        RecordScope,
        _ExperimentalConfig,
    )

    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig(), "")
    activities = {ProfilerActivity.CPU}
    # The type stub lacks the third argument: only marks are recorded, not every operation.
    enable: Any = torch.autograd._enable_profiler
    torch.autograd._prepare_profiler(config, activities)
    enable(config, activities, {RecordScope.USER_SCOPE})

    def end() -> Any:
        result: Any = torch.autograd._disable_profiler()
        return result.experimental_event_tree()

    return end
