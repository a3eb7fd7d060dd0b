"""Steps that are made and changed by flat names, as the results of earlier versions have them."""

from dataclasses import fields
from typing import Any

from sft_play.parts import Activations, Kernels, Precision, Sharing
from sft_play.sizing.step import StepSpec


def step_of(**values: Any) -> StepSpec:
    """A step of these values; `shards` processes divide its model, or each of two if it is `replicated`."""

    def taken(**names: str) -> dict[str, Any]:
        return {field: values.pop(name) for field, name in names.items() if name in values}

    replicas = 2 if values.pop("replicated", False) else 1
    sharing = Sharing(
        engine="",
        world_size=values.pop("shards", 1) * replicas,
        replicas=replicas,
        offload="ram" if values.pop("offload", False) else "none",
        **taken(
            sequence_ranks="sequence_ranks",
            defers_exchange="defers_exchange",
            reshard_after_forward="reshard_after_forward",
        ),
    )
    precision = Precision(**taken(autocast="mixed_precision", dtype="dtype"))
    activations = Activations(**taken(policy="activations", kept_layers="kept_layers"))
    kernels = Kernels(**taken(attention="attention", layers="kernels", compiled="compiled"))
    return StepSpec(sharing=sharing, precision=precision, activations=activations, kernels=kernels, **values)


def flat(spec: StepSpec) -> dict[str, Any]:
    """The values of a step."""
    shared, rest = spec.sharing, {field.name: getattr(spec, field.name) for field in fields(spec)}
    for name in ("sharing", "precision", "activations", "kernels"):
        del rest[name]
    return rest | {
        "shards": shared.shards,
        "replicated": shared.replicated,
        "offload": shared.offloads,
        "sequence_ranks": shared.sequence_ranks,
        "defers_exchange": shared.defers_exchange,
        "reshard_after_forward": shared.reshard_after_forward,
        "mixed_precision": spec.precision.autocast,
        "dtype": spec.precision.dtype,
        "activations": spec.activations.policy,
        "kept_layers": spec.activations.kept_layers,
        "attention": spec.kernels.attention,
        "kernels": spec.kernels.layers,
        "compiled": spec.kernels.compiled,
    }


def step_with(spec: StepSpec, **values: Any) -> StepSpec:
    """The step with other values."""
    return step_of(**flat(spec) | values)
