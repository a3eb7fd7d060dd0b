"""All settings of a run, with units, defaults and limits; reads no files and does not import torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from sft_play.config.conflicts import compiler_problem, needs_whole_rows, not_gathered
from sft_play.config.data import DataConfig
from sft_play.config.methods import SCHEDULE_FREE, initialization_problem
from sft_play.config.section import Section
from sft_play.config.values import (
    Auto,
    AutoOrAmount,
    AutoOrCount,
    AutoOrTiles,
    Count,
    Expression,
    Fraction,
    ModuleName,
    PathText,
    PositiveFloat,
    Precision,
    Words,
)  # fmt: skip

RopeType = Literal["yarn", "linear", "llama3"]


class RopeScaling(Section):
    """Rotary positions that are spread over longer rows than the model was trained on."""

    rope_type: RopeType
    """yarn (arXiv 2309.00071): slow frequencies are stretched, fast ones kept. linear (arXiv 2306.15595): all
    are stretched. llama3: only for models that have it. One that has a type already keeps it."""
    factor: Annotated[FiniteFloat, Field(gt=1)]
    """How many times the original positions; of a model that is scaled already, in place of its own
    factor."""
    original_max_position_embeddings: Count | None = None
    """yarn: the positions that are multiplied. Default: those of the model."""

    @model_validator(mode="before")
    @classmethod
    def _not_dynamic(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("rope_type") == "dynamic":
            raise ValueError(
                "rope_type=dynamic changes all positions with the longest row of a micro-batch, so that the "
                "loss of a row would depend on those beside it; use yarn or linear"
            )
        return given


class ModelConfig(Section):
    """The model and how it is loaded."""

    name: PathText = Field(min_length=1)
    """Hub name ("Qwen/Qwen3-0.6B"), a local folder, or a small built-in model ("builtin:demo",
    "builtin:tiny")."""
    max_seq_len: AutoOrCount = "auto"
    """Maximum length of a row in tokens. auto: the longest row of the data, at most what the model
    supports."""
    rope_scaling: RopeScaling | None = None
    """For rows beyond the model's positions: {rope_type: yarn, factor: 4}. It is saved with the trained or
    merged model; an adapter needs it again, and takes it from the config of its run."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights. auto: for adapters bf16 if the device supports it, else fp16, and fp32 on the
    CPU; for full fine-tuning fp32 master weights (autocast computes in 16 bit). bfloat16 there: pure bf16,
    which takes half of their memory, but loses updates below 1/512 of a weight; ZeRO keeps fp32 weights all
    the same."""
    attention: Literal["auto", "varlen_sdpa", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = (
        "auto"
    )
    """Attention kernel. auto: varlen_sdpa (PyTorch's own kernels, called so that neither padding nor packing
    needs a mask), until `make gpu-proof` has seen another one win; for models that it does not know,
    FlashAttention if that is installed, else sdpa or eager. flash_attention_3: Hopper GPUs."""
    trust_remote_code: bool = False
    """Whether to run Python code from the model repository on this machine; needs a commit as revision."""
    revision: str | None = None
    """Branch, tag or commit (40 hex digits) on the Hub."""
    new_tokens: Words = ()
    """Texts that become tokens of their own, e.g. ["<tool>", "</tool>"]. Their rows of the embedding and the
    output head start as the mean of the tokens that they were split into, and are trained, with adapters
    too."""


class LoraSettings(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    r: Count = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32
    """Scaling: the update is multiplied by alpha / r (rsLoRA: alpha / sqrt(r))."""
    dropout: Fraction = 0.0
    """Dropout on the input of the adapters."""
    target_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """Names of the modules that get an adapter. auto: all linear layers and fused experts, but no
    router and no output head."""
    rank_pattern: dict[ModuleName, Count] = {}
    """Other ranks for some of these modules, e.g. {q_proj: 8, "layers.0.self_attn.q_proj": 32}: the end of a
    name, or a regular expression for it. The first one that matches counts."""
    alpha_pattern: dict[ModuleName, PositiveFloat] = {}
    """Other values of alpha, as in rank_pattern. Without one, a module with another rank has alpha, so its
    update is multiplied by alpha / its own rank."""
    use_rslora: bool = False
    """Rank-stabilized LoRA (arXiv 2312.03732)."""
    use_dora: bool = False
    """Weight-decomposed LoRA, DoRA (arXiv 2402.09353)."""
    init: Literal["default", "pissa", "olora"] = "default"
    """What adapters start from. default: zero. pissa: the principal singular vectors of each weight (arXiv
    2404.02948). olora: its QR decomposition (arXiv 2406.01775). Both are taken out of the base while
    training; the saved adapter has twice the rank and fits the original base."""
    plus_ratio: Annotated[FiniteFloat, Field(ge=1)] | None = None
    """LoRA+ (arXiv 2402.12354): how many times train.learning_rate the B matrices get, e.g. 16."""
    modules_to_save: Words = ()
    """Names of modules that are trained whole, without an adapter, and saved with the adapters, e.g.
    ["embed_tokens", "lm_head"] or ["input_layernorm"]."""


class TuningConfig(Section):
    """Which weights are trained."""

    mode: Literal["full", "lora", "qlora"] = "lora"
    """full: all weights. lora: adapters on a 16-bit base. qlora: adapters on a 4-bit (NF4, double-quantized)
    base."""
    lora: LoraSettings = LoraSettings()


class TrainConfig(Section):
    """Optimization, evaluation, checkpoints and logging."""

    epochs: PositiveFloat = 1.0
    """Passes over the training rows; ignored if max_steps is set."""
    max_steps: Count | None = None
    """Number of optimizer steps; overrides epochs."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 2e-4
    """Peak learning rate. Adapters typically need about ten times that of full fine-tuning."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after warmup."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps used for linear warmup from 0; at most all but the last."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How to scale learning_rate with the effective batch size, relative to reference_batch_size."""
    reference_batch_size: Count | None = None
    """The effective batch size for which learning_rate was tuned; required by lr_scaling."""
    effective_batch_size: Count | None = None
    """Sequences (packed: tokens) per optimizer step over all devices. Default: 16 sequences (packed: 16 x
    max_seq_len tokens)."""
    batch_size: AutoOrCount = "auto"
    """Micro-batch size per device in sequences (packed: tokens). auto: chosen by the planner."""
    grad_accum: AutoOrCount = "auto"
    """Gradient accumulation: micro-batches per device and optimizer step. auto: chosen by the planner."""
    packing: bool = False
    """Join rows into full sequences of max_seq_len tokens; attention stays inside each row."""
    padding_free: bool | Auto = "auto"
    """Join the rows of a micro-batch end to end instead of padding them; attention does not cross row
    boundaries. auto: if the layers of the model can keep joined rows apart."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. auto: chosen by
    the planner. The same as activations=recompute, or keep."""
    activations: Literal["auto", "keep", "recompute", "offload"] = "auto"
    """What becomes of what the backward pass needs. keep: it stays in memory. recompute: each decoder layer
    keeps its input alone. offload: that input is in RAM, which a CPU has nothing else than. auto: chosen by
    the planner, which may recompute some of the layers only, and offloads if nothing else fits."""
    mlp_tiles: AutoOrTiles = "auto"
    """In how many tiles of its tokens, one after the other, the MLP of each decoder layer computes the
    largest micro-batch, so that its intermediates never exist whole (tiled MLP of ALST, arXiv 2506.13996).
    Layers are recomputed then, and their MLPs once more; mixtures of experts stay whole. auto: up to 8 for
    rows of 4,096 tokens and more, if nothing else fits."""
    mixed_precision: Precision = "auto"
    """Autocast data type. auto: bf16 if the device supports it, else fp16, and no on the CPU."""
    optimizer: Literal[
        "adamw", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "adafactor",
        "lion_32bit", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "schedule_free_adamw",
    ] = "adamw"  # fmt: skip
    """adamw: AdamW (fused if the device supports it). Those with _8bit or _32bit are from bitsandbytes; a
    paged_ one moves its states to RAM while the GPU is full. lion: one state instead of two; needs a lower
    learning rate. adafactor: for each matrix, a row and a column instead of two states. schedule_free_adamw
    (arXiv 2405.15682): averages the weights instead of lowering the rate."""
    kernels: Literal["auto", "own", "liger"] = "auto"
    """What computes norms, rotary embeddings and gated layers. own: passes of this project. liger: the Triton
    kernels of liger-kernel, on GPUs. auto: own, until `make gpu-proof` has seen Liger's win on a GPU."""
    compile: bool = False
    """Compile the decoder layers with torch.compile, for LoRA and full fine-tuning in one process or with
    DDP; the first step takes longer. Off until `make gpu-proof` has seen it win on a GPU."""
    float8: bool = False
    """Let linear layers of compiled decoder layers multiply in float8 (torchao) in place of bf16, for full
    fine-tuning on Ada, Hopper and B200: rounds more. Off until `make gpu-proof` has seen it win on a GPU."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune (arXiv 2310.05914): noise on the embeddings of the training rows, e.g. 5."""
    router_aux_loss_coef: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Weight of the loss that balances the experts of a mixture, e.g. 0.001; it is computed for each
    micro-batch by itself, and no reported loss contains it."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are clipped."""
    max_skipped_steps: Count = 3
    """End the run after this many steps in a row whose loss or gradients are NaN or infinite. Such a step
    updates nothing."""
    eval_steps: Count | None = None
    """Optimizer steps between evaluations. Default: at most ten evaluations per run, fewer if they would take
    more than a tenth of the time; the model is always evaluated at the start and at the end."""
    save_steps: Count | None = None
    """Optimizer steps between checkpoints. Default: at each evaluation."""
    logging_steps: Count = 10
    """Optimizer steps between log lines."""
    keep_checkpoints: Count = 2
    """Number of the newest checkpoints to keep, at least two in case the newest is damaged. The best one is
    kept too."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without a lower validation loss."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of data order, held-out splits, adapter initialization and dropout."""
    probe: bool | Literal["search"] = True
    """Before training, run two steps and an evaluation on the largest batch and compare measured with
    predicted memory; if the run is long enough for it to pay off, also time plans that may be faster. search:
    time all alternatives of the plan for up to a minute and use the fastest."""
    resume: PathText = "never"
    """never: start from scratch (an earlier run with this name is moved aside). auto: resume from the latest
    complete checkpoint, if any. Or the path of a checkpoint."""
    allow_changed: list[str] = []
    """Settings that may differ from those of the checkpoint that is resumed, e.g. [train.learning_rate]."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    """Experiment trackers; metrics.jsonl is always written. All but tensorboard need their package, e.g.
    wandb. A resumed run continues the curves that it began there."""

    @property
    def layer_kernels(self) -> str:
        """What `kernels` stands for: auto is own, since no proof on a GPU has seen another one win."""
        return "own" if self.kernels == "auto" else self.kernels

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ValueError(
                f"lr_scaling={self.lr_scaling} needs reference_batch_size, the effective batch size "
                "for which learning_rate was tuned"
            )
        if self.lr_scaling == "none" and self.reference_batch_size is not None:
            raise ValueError(
                "reference_batch_size has no effect with lr_scaling=none; set lr_scaling to sqrt or linear"
            )
        asked, way = self.gradient_checkpointing, self.activations
        if "auto" not in (asked, way) and asked != (way != "keep"):
            raise ValueError(
                f"train.gradient_checkpointing={str(asked).lower()} contradicts train.activations={way}; "
                "set one of them to auto"
            )
        if self.mlp_tiles != "auto" and self.mlp_tiles > 1 and self.asked_activations == "keep":
            key = "activations=keep" if way == "keep" else "gradient_checkpointing=false"
            raise ValueError(
                f"train.mlp_tiles={self.mlp_tiles} computes the MLPs of recomputed layers in parts, but "
                f"train.{key} recomputes none; set one of them to auto"
            )
        return self

    @property
    def asked_activations(self) -> Literal["auto", "keep", "recompute", "offload"]:
        """What is to become of activations, by either setting."""
        if self.activations != "auto" or self.gradient_checkpointing == "auto":
            return self.activations
        return "recompute" if self.gradient_checkpointing else "keep"


class ParallelConfig(Section):
    """How processes work together; their number is set at launch (NGPU=)."""

    engine: Literal["auto", "ddp", "deepspeed_z2", "fsdp2", "deepspeed_z3"] = "auto"
    """auto: DDP, or ZeRO-2 or FSDP2 if the memory that it saves makes the run fit or train faster.
    deepspeed_z3 is never chosen, only asked for."""
    offload: Literal["auto", "none", "ram"] = "auto"
    """ram: weights, gradients and the optimizer's states are in RAM, the GPU holds a layer at a time, and the
    CPU updates the weights; also on a single GPU. auto: only if nothing else fits."""
    reshard_after_forward: bool | Auto = "auto"
    """With FSDP2, true frees a layer's gathered weights after its forward pass and gathers them again for the
    backward pass; false keeps them, which sends less and takes memory for all weights. auto: false if that
    fits and is predicted to be faster."""
    defer_exchange: bool | Auto = "auto"
    """With FSDP2, true leaves gradients whole until the last micro-batch of a step and reduces them once;
    false, and offload=ram, reduce those of each. auto: true if that fits and is predicted to be faster. Sums
    are rounded otherwise, so a resumed run goes on as it began."""
    prefetch_layers: Annotated[int, Field(ge=1, le=8)] = 1
    """How many layers ahead FSDP2 gathers weights, in both passes. PyTorch's own way is 1. Each more takes
    memory for a layer, and may help where the network is uneven or the CPU slow; nothing predicts how much,
    so no plan chooses it."""
    nvme_path: PathText | None = None
    """With offload=ram, a folder on a fast local disk for AdamW's moments, and with deepspeed_z3 for weights:
    not in RAM, but in files that each step reads and writes."""
    sequence_parallel_size: AutoOrCount = "auto"
    """Processes that divide the tokens of each micro-batch among them, and for attention its heads (Ulysses,
    arXiv 2309.14509), for rows that are too long for one GPU. It divides the processes of a machine and the
    attention heads of the model. auto: if nothing else fits, or if MLPs in tiles or RAM would take longer,
    the size that is predicted to be fastest; train.grad_accum has to be auto, too."""
    memory_gib: AutoOrAmount = "auto"
    """Memory limit per process in GiB: GPU memory including the CUDA context, or RAM without GPUs. auto: what
    is free."""
    timeout_s: Count = 600
    """Timeout for collectives in seconds; a run that exceeds it is terminated."""

    @property
    def sequence_ranks(self) -> int:
        """Processes that are to divide the tokens of a micro-batch; 1 if the plan decides it."""
        return 1 if self.sequence_parallel_size == "auto" else self.sequence_parallel_size

    @field_validator("offload", mode="before")
    @classmethod
    def _not_to_disk(cls, place: Any) -> Any:
        if place in ("nvme", "disk"):
            raise ValueError(
                f"{place} is no place for all of it; set offload=ram, and for the optimizer's states "
                "nvme_path=<folder on the disk>"
            )
        return place


class EvalConfig(Section):
    """Evaluation after training and by `make eval`."""

    batch_size: AutoOrCount = "auto"
    """Rows per forward pass. auto: as many as in a micro-batch of the plan (8 for generation)."""
    limit: Count = 100
    """Number of rows to generate answers for; loss and token accuracy always use all rows."""
    max_new_tokens: Count = 256
    """Maximum length of a generated answer in tokens."""
    answer_pattern: Expression | None = None
    """Regular expression for exact match: the first group of its last match is compared, e.g. '#### *(\\S+)'.
    Default: compare whole answers, with whitespace normalized."""
    generate: bool = True
    """Generate answers before and after training at the end of the run."""
    samples: Annotated[int, Field(ge=0, le=20)] = 3
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

    def require_compatible(self) -> None:
        """Checks the methods of a run against each other; for a copy with another mode or engine.

        Raises:
            ValueError: two of them exclude each other; says which, and what to set.
        """
        lora, optimizer = self.tuning.lora, self.train.optimizer
        if problem := initialization_problem(self.tuning.mode, lora.init, lora.use_dora):
            raise ValueError(problem)
        if optimizer == SCHEDULE_FREE and self.train.lr_schedule != "constant":
            raise ValueError(
                f"train.optimizer={optimizer} keeps the learning rate after the warmup; set "
                "train.lr_schedule=constant"
            )
        if problem := compiler_problem(self):
            raise ValueError(problem)
        if setting := not_gathered(self):
            raise ValueError(
                f"{setting} does not work with parallel.engine={self.parallel.engine}, only with fsdp2 or "
                "auto; leave it out, or set parallel.engine=fsdp2"
            )
        if self.parallel.sequence_ranks > 1 and (problem := needs_whole_rows(self)):
            raise ValueError(
                f"parallel.sequence_parallel_size={self.parallel.sequence_ranks} divides the tokens "
                f"of a row, but {problem}; remove one of the two"
            )
