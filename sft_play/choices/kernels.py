"""Kernels that a run may ask for: one row each, from which settings and refusals follow."""

from dataclasses import dataclass, field
from importlib.util import find_spec

from sft_play.errors import ConfigError
from sft_play.extras import install_command

Capability = tuple[int, int]  # compute capability of a GPU, e.g. (8, 0)
Span = tuple[Capability, Capability]  # of compute capabilities: from the first, before the second


def within(capability: Capability, spans: tuple[Span, ...]) -> bool:
    """Whether some span contains a compute capability."""
    return any(first <= capability < end for first, end in spans)


@dataclass(frozen=True, kw_only=True)
class Option:
    """Kernels that a setting asks for."""

    setting: str
    off: str  # what to set where they cannot run
    gpus: tuple[Span, ...]
    of_gpus: str  # these, in words
    on_cpu: bool = False
    packages: dict[str, str] = field(default_factory=dict)  # module -> name of its package
    extra: str = ""  # that installs them

    def is_installed(self) -> bool:
        """Whether the packages can be imported, which is found out without doing so: it may take seconds."""
        return all(map(find_spec, self.packages))

    def runs_on(self, device: str, capability: Capability | None) -> bool:
        """Whether they run on a "cuda" or "cpu" device; of an unknown GPU, that is assumed."""
        return (capability is None or within(capability, self.gpus)) if device == "cuda" else self.on_cpu

    def require_runnable(
        self, device: str, capability: Capability | None, *, name: str = "a GPU", here: bool
    ) -> None:
        """Refuses devices on which they do not run, and `here` missing packages.

        Raises:
            ConfigError: the device, of this name, cannot run them, or a package is missing.
        """
        if not self.runs_on(device, capability):
            found = "{} ({}.{})".format(name, *capability or ()) if device == "cuda" else "the CPU"
            raise ConfigError(f"{self.setting} needs {self.of_gpus}, but this is {found}; set {self.off}")
        if here and not self.is_installed():
            raise ConfigError(
                f"{self.setting} needs the package {' and '.join(self.packages.values())}, which is not "
                f"installed; run `{install_command(self.extra)}`, or set {self.off}"
            )


@dataclass(frozen=True, kw_only=True)
class LayerKernels(Option):
    """A value of `train.kernels`: what computes modules of the layers."""

    name: str
    code: str  # the module that has them, with their stand-ins in a trace (`model.layers.own_passes`)
    label: str
    says: str  # in the reference
    serves: str  # kinds of modules
    examples: tuple[str, ...]  # architectures that have them

    def require_modules(self, model_type: str, count: int) -> None:
        """Raises a ConfigError if they serve none of a model's modules."""
        if not count:
            raise ConfigError(
                f"{self.setting}: {self.label} replace {self.serves} like those of "
                f"{', '.join(self.examples)}, and {model_type} has none; allowed for it: auto, own"
            )


@dataclass(frozen=True, kw_only=True)
class CompiledLayers(Option):
    """Decoder layers that torch.compile compiles: faster steps, after seconds of compiling."""

    name: str
    label: str
    # by "cuda" or "cpu": seconds to compile where no code is kept, and how many times as fast steps are then;
    # a device without them compiles only if asked to
    expected: dict[str, tuple[float, float]]


# Triton compiles for no older GPU.
TRITON: tuple[Span, ...] = (((7, 0), (99, 0)),)
OF_TRITON = "a GPU of compute capability 7.0 or newer, as Triton does"
# Seconds of an H200, and the gain that its data sheet predicts for the same steps, since the ones that were
# timed there left a part out (decision 0105). On a CPU steps of useful size were no faster.
COMPILED = CompiledLayers(
    name="compiled",
    label="Compiled layers",
    setting="train.compile=true",
    off="train.compile=false",
    gpus=TRITON,
    of_gpus=OF_TRITON,
    on_cpu=True,
    expected={"cuda": (91.0, 1.16)},
)
# PyTorch has such products for Blackwell of workstations (12.x) too, where they were reported to fail:
# https://github.com/pytorch/pytorch/issues/192707
FLOAT8 = Option(
    setting="train.float8=true",
    off="train.float8=false",
    gpus=(((8, 9), (9, 1)), ((10, 0), (11, 0))),
    of_gpus="a GPU of compute capability 8.9 (Ada), 9.0 (Hopper) or 10.x (data-center Blackwell)",
    packages={"torchao": "torchao"},
    extra="float8",
)
LIGER = LayerKernels(
    name="liger",
    code="sft_play.model.layers.liger",
    setting="train.kernels=liger",
    off="train.kernels=auto",
    gpus=TRITON,
    of_gpus=OF_TRITON,
    packages={"liger_kernel": "liger-kernel"},  # triton, which it needs, comes with PyTorch's CUDA build
    extra="liger",
    label="Liger's kernels",
    says="liger: the Triton kernels of liger-kernel, on GPUs.",
    serves="norms, rotary embeddings and gated layers",
    examples=(
        "llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "mixtral", "gemma2", "gemma3_text",
    ),
)  # fmt: skip
LIBRARY = LayerKernels(
    name="library",
    code="sft_play.model.layers.library_passes",
    setting="train.kernels=library",
    off="train.kernels=auto",
    gpus=(((0, 0), (99, 0)),),
    of_gpus="any device",
    on_cpu=True,
    label="The passes of transformers",
    says="library: those of transformers.",
    serves="norms and rotary embeddings",
    examples=("llama", "mistral", "qwen2", "qwen3"),
)
LAYERS = {row.name: row for row in (LIGER, LIBRARY)}
