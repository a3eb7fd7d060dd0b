"""Every setting of a run: its meaning, unit, default and limits. Nothing here reads files or imports torch."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PositiveInt, model_validator
from typing_extensions import Self

Auto = Literal["auto"]
PositiveFloat = Annotated[FiniteFloat, Field(gt=0)]
Fraction = Annotated[FiniteFloat, Field(ge=0, lt=1)]


def _no_number_from_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number or 'auto', not true/false")
    return value


def _above_zero(value: object) -> object:
    if isinstance(value, (int, float)) and not value > 0:
        raise ValueError("expected a number above 0, or 'auto'")
    return value


def _text_of_switch(value: object) -> object:
    return {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value


AutoOrCount = Annotated[PositiveInt | Auto, BeforeValidator(_no_number_from_bool)]
AutoOrAmount = Annotated[PositiveFloat | Auto, BeforeValidator(_above_zero), BeforeValidator(_no_number_from_bool)]


class Section(BaseModel):
    """A part of the config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())


class ModelConfig(Section):
    """Which model, and how it is held in memory."""

    name: str = Field(min_length=1)
    """Hub name ("Qwen/Qwen3-0.6B"), a local folder, or a small model made on the spot ("builtin:demo", "builtin:tiny")."""
    max_seq_len: AutoOrCount = "auto"
    """Longest row in tokens. auto: the longest row of the data, at most what the model allows."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights. auto: for adapters bf16 where the device has it, else fp16, on the CPU fp32; for full
    fine-tuning fp32 master weights (autocast computes in 16 bit)."""
    attention: Literal["auto", "varlen_sdpa", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention kernel. auto: FlashAttention 2 where it is installed and the device can, else varlen_sdpa (PyTorch's own
    kernel, called per sequence, so that neither padding nor packing costs a mask)."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run on this machine."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""


class DataConfig(Section):
    """Which rows, how they become text, and which tokens are learned."""

    train_path: str = Field(min_length=1)
    """JSONL, JSON, Parquet or CSV file, a folder of them, a hub data set name, or "builtin:demo"."""
    val_path: str | None = None
    """Validation rows; without it val_fraction of the training rows is held out."""
    test_path: str | None = None
    """Test rows; without it test_fraction of the training rows is held out."""
    val_fraction: Fraction = 0.05
    """Share of train_path that is held out for validation when val_path is not given."""
    test_fraction: Fraction = 0.0
    """Share of train_path that is held out for testing when test_path is not given."""
    format: Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "question_answer", "system_user_assistant", "text"
    ] = "auto"
    """Row format. auto: told from the keys of the first row; every other row must then have it too."""
    chat_template: str = "auto"
    """auto: the tokenizer's own, else the shipped "plain". Or "plain", "chatml", or the path of a Jinja file."""
    system_prompt: str | None = None
    """Put in front of each conversation that has no system message of its own."""
    supervise: Literal["assistant", "last", "all"] = "assistant"
    """Which tokens carry loss: all assistant turns, the last assistant turn, or every token."""
    overlong: Literal["drop", "truncate", "error"] = "drop"
    """What happens to rows longer than model.max_seq_len; always counted and shown."""
    dedup: bool = False
    """Drop rows whose conversation repeats an earlier one exactly."""
    limit: PositiveInt | None = None
    """Use only the first so many rows of each file."""
    num_workers: AutoOrCount = "auto"
    """Processes that tokenise. auto: the CPU cores, at most 8, one for small data."""

    @model_validator(mode="after")
    def _fractions_leave_rows(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError("val_fraction + test_fraction must be below 1, so that rows are left to train on")
        return self


class LoraSettings(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

    r: PositiveInt = 16
    """Rank of the update."""
    alpha: PositiveFloat = 32
    """Scale: the update is multiplied by alpha / r (rsLoRA: alpha / sqrt(r))."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input."""
    target_modules: Literal["auto"] | tuple[str, ...] = "auto"
    """Module names that get an adapter. auto: every linear layer but the output head."""
    use_rslora: bool = False
    """Rank-stabilised scale (arXiv 2312.03732)."""
    use_dora: bool = False
    """Weight-decomposed adapters (arXiv 2402.09353)."""


class TuningConfig(Section):
    """What is trained."""

    mode: Literal["full", "lora", "qlora"] = "lora"
    """All weights, adapters on a 16-bit base, or adapters on a 4-bit (NF4, double-quantised) base."""
    lora: LoraSettings = LoraSettings()


class TrainConfig(Section):
    """The optimisation, and how often it reports."""

    epochs: PositiveFloat = 1.0
    """Passes over the training rows; max_steps overrides it."""
    max_steps: PositiveInt | None = None
    """Optimizer steps."""
    learning_rate: Annotated[FiniteFloat, Field(gt=0, le=1)] = 2e-4
    """Peak learning rate. Adapters want about ten times that of full fine-tuning."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up."""
    warmup_ratio: Fraction = 0.03
    """Share of the steps over which the learning rate rises from 0."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """How learning_rate follows the effective batch, against reference_batch_size."""
    reference_batch_size: PositiveInt | None = None
    """The effective batch at which learning_rate was found; needed by lr_scaling."""
    effective_batch_size: PositiveInt | None = None
    """Sequences (packed: tokens) per optimizer step over all devices. Default 16 sequences, packed 16 x max_seq_len tokens."""
    batch_size: AutoOrCount = "auto"
    """Sequences (packed: tokens) that one device processes at once."""
    grad_accum: AutoOrCount = "auto"
    """Micro-batches that one device adds up before an optimizer step."""
    packing: bool = False
    """Join rows into full sequences of max_seq_len tokens; attention stays inside each row."""
    group_by_length: bool = True
    """Put rows of similar length into one step, so that less is padded (no effect when packed)."""
    gradient_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass: less memory, about a third more compute. auto: as the plan needs."""
    mixed_precision: Annotated[Literal["auto", "bf16", "fp16", "no"], BeforeValidator(_text_of_switch)] = "auto"
    """Autocast type. auto: bf16 where the device has it, else fp16, on the CPU no."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW (fused where the device has it), or bitsandbytes' with 8-bit state."""
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    eval_steps: PositiveInt | None = None
    """Optimizer steps between evaluations. Default: up to ten times in the run, as often as costs less than a tenth of the
    time; start and end are always evaluated."""
    save_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints. Default: with each evaluation."""
    logging_steps: PositiveInt = 10
    """Optimizer steps between two lines of metrics."""
    keep_checkpoints: PositiveInt = 2
    """Checkpoints that stay on disk, besides the best one."""
    early_stopping_patience: PositiveInt | None = None
    """Stop after so many evaluations without a lower validation loss."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seeds data order, split, adapter initialisation and dropout."""
    probe: bool | Literal["search"] = True
    """Before training, two steps and an evaluation batch at the largest batch: measured memory against predicted. search: also
    time the plan's alternatives, for at most a minute, and take the fastest."""
    resume: str = "never"
    """never: start anew (an earlier run of the name is moved aside). auto: from the newest complete checkpoint if there
    is one. Or the path of a checkpoint."""
    report_to: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ["tensorboard"]
    """Trackers besides metrics.jsonl, which is always written."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ValueError(f"lr_scaling={self.lr_scaling} needs reference_batch_size, the batch learning_rate was found at")
        if self.lr_scaling == "none" and self.reference_batch_size is not None:
            raise ValueError("reference_batch_size has no effect with lr_scaling=none; set lr_scaling to sqrt or linear")
        return self


class ParallelConfig(Section):
    """How several processes work together; how many there are is a matter of the launch (NGPU=)."""

    engine: Literal["auto", "ddp", "deepspeed_z2"] = "auto"
    """auto: DDP, or ZeRO-2 where it saves memory that the plan needs."""
    memory_gib: AutoOrAmount = "auto"
    """What each process may take of its GPU (without GPUs: of the RAM), in GiB, CUDA context included. auto: what is free."""
    timeout_s: PositiveInt = 600
    """Seconds after which a collective that does not complete ends the run."""


class EvalConfig(Section):
    """How the model is judged after training, and by `make eval`."""

    batch_size: AutoOrCount = "auto"
    """Rows per forward pass. auto: the micro-batch of the plan (generation: 8)."""
    limit: PositiveInt = 100
    """Rows that answers are generated for; loss and token accuracy always use them all."""
    max_new_tokens: PositiveInt = 256
    """Longest generated answer."""
    answer_pattern: str | None = None
    """Regular expression whose first group (last match) is compared for exact match, e.g. '#### *(\\S+)'. Default: the
    whole answer, white space folded."""
    generate: bool = True
    """Whether the run ends with generated answers of the model before and after training."""
    samples: Annotated[int, Field(ge=0, le=20)] = 3
    """Answers shown on the closing screen."""


class OutputConfig(Section):
    """Where results go."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """The run directory is <dir>/<name>."""
    dir: str = "runs"
    """Folder of all runs."""


class RunConfig(Section):
    """One run, complete."""

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
            raise ValueError("tuning.lora has no effect with tuning.mode=full; remove it, or set tuning.mode to lora")
        return self
