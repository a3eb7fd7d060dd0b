"""What one training step is: everything that its memory depends on, besides the model's architecture."""

from dataclasses import dataclass, replace

from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.sizing.planner import Plan
from sft_play.units import BYTES_PER_ELEMENT

LOSS_TILE = 4096  # TOKEN_CHUNK_SIZE of trl.kernels.chunked_logprob
PADDED_TO = 8  # the padding collator rounds rows up to this
SIXTEEN_BIT = {"bf16": "bfloat16", "fp16": "float16"}


def padded(tokens: int) -> int:
    """What the padding collator makes of a longest row."""
    return -(-tokens // PADDED_TO) * PADDED_TO


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One micro-batch of a run, and what is done with it."""

    mode: str  # full, lora or qlora
    lora: LoraSettings = LoraSettings()
    dtype: str = "float32"  # of the weights
    mixed_precision: str = "no"  # autocast type: bf16, fp16 or no
    attention: str = "varlen_sdpa"
    gradient_checkpointing: bool = False
    packing: bool = False
    rows: int = 1
    row_tokens: int = 128
    accumulates: bool = True  # gradients of an earlier micro-batch are alive during forward and backward
    device: str = "cpu"  # the device that is costed, not the one that costs
    optimizer: str = "adamw"
    supervised_share: float = 1.0  # of the tokens: a GPU's loss head works on these alone
    eval_rows: int | None = None  # rows of an evaluation batch, always padded; default `rows`
    eval_row_tokens: int | None = None  # of the longest row there; default `row_tokens`
    all_in_dtype: bool = False  # adapters too: DeepSpeed casts the whole model instead of computing under autocast
    one_by_one: bool = False  # packed rows are attended in pieces of row_tokens, for models whose attention has a window

    @property
    def tokens(self) -> int:
        """Tokens in the micro-batch, padding counted."""
        return self.rows * self.row_tokens

    @property
    def eval_shape(self) -> tuple[int, int]:
        """Rows and tokens of an evaluation batch."""
        return self.eval_rows or self.rows, self.eval_row_tokens or self.row_tokens

    @property
    def sequence_lengths(self) -> tuple[int, ...]:
        """Tokens of each packed sequence. Two stand for any number: how a row is divided changes no more than rounding.

        Only a window makes a difference, since its mask grows with the square of the sequence.
        """
        if self.one_by_one:
            return (self.row_tokens,) * self.rows
        return (self.tokens // 2, self.tokens - self.tokens // 2)

    @property
    def kinks(self) -> tuple[int, int]:
        """Equal for steps whose sizes are lines in the rows: which side of a tile of TRL's loss head their tokens are on."""
        eval_rows, eval_row_tokens = self.eval_shape
        eval_tokens = eval_rows * eval_row_tokens
        if self.device == "cuda":
            heads = (self.supervised(self.tokens), self.supervised(eval_tokens))
        else:
            heads = (self.tokens - (1 if self.packing else self.rows), eval_tokens - eval_rows)
        return heads[0] > LOSS_TILE, heads[1] > LOSS_TILE

    @property
    def trained_element_bytes(self) -> int:
        """Of a trained parameter and its gradient: adapters are fp32 unless everything is cast."""
        return BYTES_PER_ELEMENT[self.dtype] if self.mode == "full" or self.all_in_dtype else 4

    def supervised(self, tokens: int) -> int:
        """How many of the tokens carry loss."""
        return max(1, round(self.supervised_share * tokens))

    @classmethod
    def of(cls, config: RunConfig, plan: Plan, supervised_share: float = 1.0, eval_row_tokens: int | None = None) -> "StepSpec":
        """The step that `plan` describes, at its largest: every row has max_seq_len tokens.

        Args:
            config: the run.
            plan: how it is carried out.
            supervised_share: of the tokens, at most.
            eval_row_tokens: of the longest row that is evaluated; default max_seq_len.
        """
        spec = cls(
            mode=config.tuning.mode,
            lora=config.tuning.lora,
            dtype=plan.dtype,
            mixed_precision=plan.mixed_precision,
            attention=plan.attention,
            gradient_checkpointing=plan.gradient_checkpointing,
            packing=plan.packing,
            rows=plan.rows_per_micro_batch,
            row_tokens=plan.max_seq_len if plan.packing else padded(plan.max_seq_len),
            # On several processes gradients live in the engine's buffers from the start.
            accumulates=plan.gradient_accumulation_steps > 1 or plan.engine != "none",
            device=plan.device,
            optimizer=config.train.optimizer,
            supervised_share=supervised_share,
            eval_rows=None if config.eval.batch_size == "auto" else config.eval.batch_size,
            eval_row_tokens=padded(eval_row_tokens or plan.max_seq_len),
        )
        if plan.engine == "deepspeed_z2" and plan.mixed_precision in SIXTEEN_BIT:
            return replace(spec, dtype=SIXTEEN_BIT[plan.mixed_precision], mixed_precision="no", all_in_dtype=True)
        return spec
