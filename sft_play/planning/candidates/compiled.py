"""Whether the decoder layers of a run can be compiled, and what its plan says of it."""

from typing import Any

from sft_play.choices.engines import WHOLE
from sft_play.choices.kernels import COMPILED, FLOAT8
from sft_play.config.schema import RunConfig
from sft_play.engines.registry import engine_of
from sft_play.errors import ConfigError
from sft_play.machine.compiler import missing_for_compiler
from sft_play.model.attention.table import NAME
from sft_play.model.layers import float8
from sft_play.plan import Device, Plan
from sft_play.planning.candidates.drafts import choose_precision
from sft_play.reasons.method import NOT_COMPILED, compiled_layers, unproven
from sft_play.sizing.facts.architecture import Architecture
from sft_play.sizing.step import StepSpec
from sft_play.units import AUTOCAST
from sft_play.vision.fits import RowFits


def require_compiler(config: RunConfig, device: Device, *, here: bool) -> None:
    """Refuses to compile for a device for which nothing compiles, and `here` where a compiler is missing.

    Raises:
        ConfigError: the GPU is too old, or something is missing.
    """
    if config.train.asks_compile:
        COMPILED.require_runnable(device.kind, device.compute_capability, name=device.name, here=here)
    engine = config.parallel.engine
    # DeepSpeed's own collectives on a CPU are an extension
    builds = device.kind == "cpu" and engine != "auto" and "deepspeed" in engine_of(engine).packages
    compiling = [
        ("train.compile=true", config.train.asks_compile, "train.compile=false"),
        (f"parallel.engine={engine}", builds, f"parallel.engine={WHOLE.name}"),
    ]
    for setting, compiles, other in compiling:
        missing = missing_for_compiler(device.kind) if compiles and here else None
        if missing:
            raise ConfigError(
                f"{setting} needs {missing}, which is not installed; install it, or set {other}"
            )


def require_compilable(config: RunConfig, architecture: Architecture, attention: str, device: Device) -> None:
    """Refuses to compile layers with which it was not measured, or takes more memory than is predicted.

    Raises:
        ConfigError: the attention is not ours, layers have experts or carry a state, adapters compute in
            another type than that of the frozen weights, or layers cannot multiply in float8.
    """
    if not config.train.asks_compile:
        return
    dtype, autocast = choose_precision(config, device)
    computes_in = AUTOCAST.get(autocast, "float32")
    if config.tuning.mode != "full" and dtype != computes_in:
        raise ConfigError(
            f"train.compile=true with adapters on {dtype} weights and train.mixed_precision="
            f"{autocast} may take more memory than is predicted; set model.dtype={computes_in}, or "
            "train.compile=false"
        )
    if attention != NAME:
        raise ConfigError(
            f"train.compile=true does not work with model.attention={attention}: layers are compiled around "
            f"{NAME} only; set model.attention={NAME}, or train.compile=false"
        )
    if other := _other_than_dense(architecture):
        raise ConfigError(
            "train.compile=true compiles only layers made of attention and a dense MLP, and "
            f"{architecture.facts.model_type} has {other}; set train.compile=false"
        )
    if config.train.float8:
        _require_float8(architecture, dtype, autocast)


def _other_than_dense(architecture: Architecture) -> str | None:
    """What the decoder layers have besides attention and a dense feed-forward part; None if nothing."""
    if architecture.modules.experts:
        return "experts"
    found = architecture.facts.rows_mix
    if found is None:
        return None
    return f"layers of type {found.what}" if found.cause == "layers" else "an attention of its own"


def _require_float8(architecture: Architecture, dtype: str, precision: str) -> None:
    """Refuses float8 with types with which it was not measured, or if no layer can multiply in it."""
    if (dtype, precision) != ("float32", "bf16"):
        raise ConfigError(
            "train.float8=true needs float32 weights under bf16 autocast: anything else may take more memory "
            f"than predicted (found {dtype} weights, train.mixed_precision={precision}); set "
            "model.dtype=float32 and train.mixed_precision=bf16, or train.float8=false"
        )
    if not architecture.modules.float8_layers:
        raise ConfigError(
            "train.float8=true needs linear layers in the decoder layers whose sizes are multiples of "
            f"{float8.MULTIPLE}, and {architecture.facts.model_type} has none; set train.float8=false"
        )


def compiled_reasons(
    config: RunConfig, plan: Plan, architecture: Architecture, pictures: RowFits
) -> list[str]:
    """That layers are compiled and multiply in float8, or, on a GPU where they could, why they do not."""
    if config.train.float8:
        return [compiled_layers("float8")]
    traced_for: Any = plan.device if StepSpec.of(config, plan).kernels.compiled else None
    if config.train.asks_compile:
        return [compiled_layers("on", traced_for), *_float8_off(config, plan, architecture)]
    if plan.kernels.compiled:
        return [compiled_layers("timed", traced_for), *_float8_off(config, plan, architecture)]
    may = may_compile(config, plan, architecture, pictures)
    return [NOT_COMPILED, *_float8_off(config, plan, architecture)] if may else []


def may_compile(config: RunConfig, plan: Plan, architecture: Architecture, pictures: RowFits) -> bool:
    """Whether `train.compile=auto` may compile the layers of a plan, if a probe finds them faster so."""
    asked = pictures.compiled(config.train.compile)
    dtype, autocast, engine = plan.precision.dtype, plan.precision.autocast, engine_of(plan.sharing.engine)
    return (
        asked == "auto"
        and plan.device in COMPILED.expected
        and plan.kernels.layers == "own"
        and not config.tuning.lora.use_dora
        and engine.compiles_layers
        and not engine.shards_weights  # ranks would wait for one whose trial fails
        and not plan.sharing.offloads
        and not plan.sharing.sequence_parallel
        and plan.activations.policy != "offload"
        and not plan.activations.in_tiles
        and plan.kernels.attention == NAME
        and (config.tuning.mode == "full" or dtype == AUTOCAST.get(autocast, "float32"))
        and COMPILED.runs_on(plan.device, plan.compute_capability)
        and not _other_than_dense(architecture)
    )


def _float8_off(config: RunConfig, plan: Plan, architecture: Architecture) -> list[str]:
    """That layers, which can be compiled, do not multiply in float8, on a GPU where they could."""
    precision = plan.precision
    could = (
        plan.device == "cuda"
        and config.tuning.mode == "full"
        and (precision.dtype, precision.autocast) == ("float32", "bf16")
        and plan.compute_capability is not None
        and FLOAT8.runs_on(plan.device, plan.compute_capability)
        and architecture.modules.float8_layers > 0
    )
    if not could:
        return []
    compiles = "" if config.train.asks_compile else " with train.compile=true"
    return [unproven("float8", f"train.float8=true{compiles}")]
