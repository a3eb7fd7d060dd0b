"""The settings of the train section: optimization, evaluation, checkpoints and logging."""

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from sft_play.choices.kernels import LAYERS
from sft_play.choices.optimizers import DEFAULT, OPTIMIZERS
from sft_play.config.section import Section
from sft_play.config.values import (
    NUMBER,
    Auto,
    AutoOrCount,
    AutoOrTiles,
    Count,
    Fraction,
    PathText,
    PositiveFloat,
    Precision,
)


class TrainConfig(Section):
    """Optimization, evaluation, checkpoints and logging."""

    epochs: PositiveFloat = 1.0
    """Passes over the training rows; ignored if max_steps is set."""
    max_steps: Count | None = None
    """Number of optimizer steps; overrides epochs."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=1), NUMBER] = 2e-4
    """Peak learning rate. Adapters typically need about ten times that of full fine-tuning."""
    lr_schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    """Learning rate schedule after warmup. warmup_stable_decay: constant, then falling (decay_ratio)."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps used for linear warmup from 0; at most all but the last."""
    decay_ratio: Fraction = 0.2
    """With warmup_stable_decay, the share of the steps at the end over which the rate falls linearly to
    0."""
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
    """Join the rows of a micro-batch instead of padding them; attention stays inside each row. auto: if the
    layers of the model can keep joined rows apart."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. auto: chosen by
    the planner. true is the same as activations=recompute, false as keep."""
    activations: Literal["auto", "keep", "recompute", "offload"] = "auto"
    """What to do with activations. keep: hold them until the backward pass. recompute: keep only the input
    of each decoder layer, and compute the rest again. offload: as recompute, with those inputs in RAM (no
    gain on a CPU). auto: chosen by the planner, which may recompute only some layers, and offloads only if
    nothing else fits."""
    mlp_tiles: AutoOrTiles = "auto"
    """Number of tiles in which MLPs compute the tokens of the largest micro-batch, one after another, to save
    memory (ALST, arXiv 2506.13996). Layers are then recomputed, and their MLPs once more; mixtures of experts
    are not tiled. auto: up to 8 for rows of 4,096 tokens or more, if nothing else fits."""
    mixed_precision: Precision = "auto"
    """Autocast data type. auto: bf16 if the device supports it, else fp16, and no on the CPU."""
    optimizer: Literal[tuple(OPTIMIZERS)] = Field(  # type: ignore[valid-type]
        default=DEFAULT, description=" ".join(each.says for each in OPTIMIZERS.values() if each.says)
    )
    kernels: Literal["auto", "own", *LAYERS] = Field(  # type: ignore[valid-type]
        default="auto",
        description="Implementation of norms, rotary embeddings and gated layers. own: SFT-Play's. "
        + " ".join(row.says for row in LAYERS.values())
        + " auto: own, or what the probe of a long enough run timed as faster on this machine.",
    )
    compile: bool | Auto = "auto"
    """Compile the decoder layers with torch.compile, in one process or with DDP or FSDP2: element-wise work
    is fused, after compiling for a minute or more. auto: on a GPU, if the probe finds them faster;
    it tries where compiling takes under 2% of the run, but not with FSDP2."""
    float8: bool = False
    """Multiply in float8 (torchao) instead of bf16 in the linear layers of compiled decoder layers, for
    full fine-tuning on Ada, Hopper and B200: less precise. Not yet benchmarked on a GPU."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0), NUMBER] = 0.0
    """Decoupled weight decay."""
    neftune_noise_alpha: PositiveFloat | None = None
    """NEFTune (arXiv 2310.05914): noise on the embeddings of the training rows, e.g. 5. Its scale depends on
    the length of a row, so rows are padded instead of joined."""
    router_aux_loss_coef: Annotated[FiniteFloat, Field(ge=0), NUMBER] = 0.0
    """Weight of the loss that balances the experts of a mixture, e.g. 0.001; it is computed per
    micro-batch, which counts by its supervised tokens. Reported losses do not include it."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum gradient norm; larger gradients are clipped."""
    max_skipped_steps: Count = 3
    """End the run after this many steps in a row whose loss or gradients are NaN or infinite. Such steps
    are skipped."""
    eval_steps: Count | None = None
    """Optimizer steps between evaluations. Default: at most ten evaluations per run, fewer if they would
    take more than a tenth of the time; the model is always evaluated at the start and at the end."""
    save_steps: Count | None = None
    """Optimizer steps between checkpoints, a multiple of `eval_steps`. Default: at each evaluation."""
    logging_steps: Count = 10
    """Optimizer steps between log lines."""
    keep_checkpoints: Count = 2
    """Number of the newest checkpoints to keep, at least two in case the newest is damaged. The best one is
    kept too."""
    early_stopping_patience: Count | None = None
    """Stop after this many evaluations without a lower validation loss."""
    seed: Annotated[int, Field(ge=0, lt=2**32), NUMBER] = 0
    """Seed of data order, held-out splits, adapter initialization and dropout."""
    probe: bool | Literal["search"] = True
    """Before training, run two steps and an evaluation on the largest batch and compare measured with
    predicted memory; in a long enough run, also time plans that may be faster. search: time all alternatives
    of the plan for up to a minute and use the fastest."""
    resume: PathText = "never"
    """never: start from scratch (an earlier run with this name is moved aside). auto: resume from the latest
    complete checkpoint, if any. Or the path of a checkpoint."""
    allow_changed: list[str] = []
    """Settings that may differ from the checkpoint's when a run is resumed, e.g. [train.learning_rate]."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    """Experiment trackers; metrics.jsonl is always written. All but tensorboard need their package, e.g.
    wandb. A resumed run continues its curves there."""

    @property
    def layer_kernels(self) -> str:
        """What `kernels` stands for where no others were timed: auto is own."""
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
        save, evaluate = self.save_steps, self.eval_steps
        if save and evaluate and (over := save % evaluate):
            raise ValueError(
                f"train.save_steps={save} is not a multiple of train.eval_steps={evaluate}, so the best "
                f"checkpoint could not be kept; set train.save_steps={save + evaluate - over}, or "
                f"train.eval_steps={save}"
            )
        if self.neftune_noise_alpha is not None and (self.packing or self.padding_free is True):
            joins = "packing" if self.packing else "padding_free"
            raise ValueError(
                f"train.{joins}=true joins rows, and NEFTune scales its noise by the length of a row; set "
                f"train.{joins}=false, or leave out train.neftune_noise_alpha"
            )
        asked, way = self.gradient_checkpointing, self.activations
        if "auto" not in (asked, way) and asked != (way != "keep"):
            raise ValueError(
                f"train.gradient_checkpointing={str(asked).lower()} contradicts train.activations={way}; "
                "set one of them to auto"
            )
        if self.asks_tiles and self.asked_activations == "keep":
            key = "activations=keep" if way == "keep" else "gradient_checkpointing=false"
            raise ValueError(
                f"{self.tiles_setting} computes the MLPs of recomputed layers in parts, but "
                f"train.{key} recomputes none; set one of them to auto"
            )
        return self

    @property
    def asks_compile(self) -> bool:
        """Whether layers are to be compiled, whatever a probe finds."""
        return self.compile is True

    @property
    def asks_tiles(self) -> bool:
        """Whether MLPs are to compute in tiles, whatever the plan."""
        return self.mlp_tiles not in ("auto", 1)

    @property
    def tiles_setting(self) -> str:
        """How many tiles are asked for, as a person types it."""
        return f"train.mlp_tiles={self.mlp_tiles}"

    @property
    def asked_activations(self) -> Literal["auto", "keep", "recompute", "offload"]:
        """What is to become of activations, by either setting."""
        if self.activations != "auto" or self.gradient_checkpointing == "auto":
            return self.activations
        return "recompute" if self.gradient_checkpointing else "keep"
