"""What we change in DeepSpeed, and take of its private parts, without importing it before it is used."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import getclosurevars
from threading import Timer
from typing import Any

from sft_play.upstream.patching import lasting, patched

BUILD_IS_SLOW_S = 2.0  # to load one that was compiled before takes less


@contextmanager
def slow_builds_told(say: Callable[[str], None]) -> Iterator[None]:
    """Within it, an extension that DeepSpeed has not loaded after BUILD_IS_SLOW_S is said to be compiled.

    It compiles for minutes without a word (since 0.3). What makes this unnecessary: a line of its own.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    def told(builder: Any, *args: object, **kwargs: object) -> Any:
        text = f"DeepSpeed compiles its extension {builder.name}, once, which may take minutes"
        timer = Timer(BUILD_IS_SLOW_S, say, [text])
        timer.daemon = True
        timer.start()
        try:
            return load(builder, *args, **kwargs)
        finally:
            timer.cancel()

    with patched(OpBuilder, "jit_load", told):
        yield


@contextmanager
def inference_left_out() -> Iterator[None]:
    """In the block, DeepSpeed does not compile, for a minute on a CPU, what only its inference would call.

    It does when it joins a process group (0.19), but not on a GPU, where to ask what is compatible would run
    compilers. What makes this unnecessary: a build on demand.
    """
    from deepspeed import ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if get_accelerator().device_name() != "cpu":
        yield
        return
    with patched(ops, "__compatible_ops__", {**ops.__compatible_ops__, ShareMemCommBuilder.NAME: False}):
        yield


@contextmanager
def units_reduced_when_computed() -> Iterator[None]:
    """In the block, ZeRO-3 reduces the gradients of a unit once they are computed, whatever its input needs.

    It would do so before where the input of a leaf module needs no gradient (0.18). What makes this
    unnecessary: hooks on the parameters of a leaf module, not on its input.
    """
    from deepspeed.runtime.zero import stage3

    with patched(stage3, "z3_leaf_parameter", lambda parameter: False):
        yield


@contextmanager
def units_hooked_alone() -> Iterator[None]:
    """In the block, ZeRO-3 follows the calls of units and of the whole model, not of modules between them.

    Those gather nothing, but it wants all processes to call the same ones, and what sees is not called where
    no row has an image (0.19). What makes this unnecessary: to go by what is gathered.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import z3_leaf_module

    register = DeepSpeedZeRoOffload._register_deepspeed_module

    def units_registered(offload: Any, module: Any, **counted: object) -> None:
        if module is offload.module or z3_leaf_module(module):
            register(offload, module, **counted)
            return
        for child in module.children():
            units_registered(offload, child, **counted)

    with patched(DeepSpeedZeRoOffload, "_register_deepspeed_module", units_registered):
        yield


@contextmanager
def stage_saved_by_value() -> Iterator[None]:
    """In the block, the stage in a saved state is pickled by its value (0.19).

    Python 3.11.2, that of Debian 12, writes a call of `getattr` for it, which no reader of tensors alone
    accepts. What makes this unnecessary: 3.12 as the oldest Python.
    """
    from deepspeed.runtime.zero.config import ZeroStageEnum

    with patched(ZeroStageEnum, "__reduce_ex__", lambda stage, protocol: (type(stage), (stage.value,))):
        yield


def make_next_optimizer(kind: type | None) -> None:
    """Lets DeepSpeed's engine make its next optimizer of ZeRO-3 from this class; None: from its own.

    It takes the class from its module (0.18). What makes this unnecessary: to pass the class to it.
    """
    from deepspeed.runtime.zero import stage3

    lasting(_own_optimizer_in_the_end)
    own = stage3.DeepSpeedZeroOptimizer_Stage3
    own = getattr(own, "in_place_of", own)

    def make(*args: object, **kwargs: object) -> Any:
        stage3.DeepSpeedZeroOptimizer_Stage3 = own  # again: it is for a single training
        return (kind or own)(*args, **kwargs)

    make.in_place_of = own  # type: ignore[attr-defined]
    stage3.DeepSpeedZeroOptimizer_Stage3 = make if kind else own


def _own_optimizer_in_the_end() -> AbstractContextManager[None]:
    from deepspeed.runtime.zero import stage3

    return patched(stage3, "DeepSpeedZeroOptimizer_Stage3", stage3.DeepSpeedZeroOptimizer_Stage3)


# What its optimizers leave on parameters when they are destroyed, themselves among it.
_LEFT_ON_PARAMETERS = ("_zero_optimizer", "_z3_optimizer", "grad_accum")


def let_go(engine: Any) -> None:
    """Takes off what would keep DeepSpeed's engine alive: its hooks, and what parameters refer to.

    `destroy` leaves them (0.18). What makes this unnecessary: that it does not.
    """
    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for parameter in engine.module.parameters():
        for name in _LEFT_ON_PARAMETERS:
            vars(parameter).pop(name, None)


def tie_states(optimizer: Any) -> None:
    """Ties each parameter of ZeRO-2 to its part of the optimizer's state, as after the first step.

    Until then its public functions find no state to set (0.19). What makes this unnecessary: that they do.
    """
    optimizer._lazy_init_hp_params_optimizer_state()


# What ZeRO-3's hooks leave on modules, which would call the engine of an earlier training.
_LEFT_ON_MODULES = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt", "ds_grads_remaining")
_RELEASED = "_PartitionedParameterCoordinator__params_to_release"  # a function that remembers its results


def forget_hooks(model: Any) -> None:
    """Removes what ZeRO-3's hooks that were taken off have left: on a model's modules, in DeepSpeed itself.

    What makes this unnecessary: that `destroy` removes it (0.19 does not).
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for module in model.modules():
        for name in _LEFT_ON_MODULES:
            vars(module).pop(name, None)
    FWD_MODULE_STACK.clear()
    released: Any = getattr(PartitionedParameterCoordinator, _RELEASED)
    getclosurevars(released).nonlocals["func"].cache_clear()  # which would keep the model alive
