"""The description of a training step: all that its memory depends on, besides the model's architecture."""

import json
import math
from dataclasses import dataclass, replace

from sft_play.choices.optimizers import DEFAULT
from sft_play.config.schema import LoraSettings, RunConfig
from sft_play.data.batching import padded_length
from sft_play.engines.registry import engine_of
from sft_play.fingerprints import PACKAGE, installed_versions, sources_digest
from sft_play.model.attention.table import same_kernels
from sft_play.parts import Activations, Kernels, Precision, Sharing
from sft_play.plan import Plan
from sft_play.sizing.meters.product_scratch import Rules, product_scratch
from sft_play.units import AUTOCAST, BYTES_PER_ELEMENT
from sft_play.vision.types import Fit

# Tokens of a tile of the output head: TOKEN_CHUNK_SIZE of trl.kernels.chunked_logprob, TILE of layers/cpu.py
LOSS_TILES = {"cuda": 4096, "cpu": 256}
SHARES = 20  # where rows are not known one by one, the supervised share is rounded up to a twentieth
ASSUMED_CAPABILITY = (8, 0)  # of a GPU that does not say: flash attention, as on all that have bf16
TOKEN_BYTES = 24  # of a batch: id, label and position, as 64-bit integers
OWN_TOKEN = 10  # a token of the micro-batch itself takes more memory than so many of batches that wait
SHARED = ("parts.py", "plan.py", "timeline.py", "units.py", "work.py")
ROOMS = ("choices", "engines", "sizing", "model", "upstream", "vision")
SOURCES = tuple(PACKAGE / name for name in (*ROOMS, *SHARED))


def step_code() -> str:
    """A key for what memory depends on besides the step: our code and the versions of the libraries."""
    return f"{sources_digest(*SOURCES)} {json.dumps(installed_versions())}"


@dataclass(frozen=True)
class PaddedRows:
    """A batch of rows that are padded to one length: tensors of [rows, row_tokens]. It grows by rows."""

    rows: int
    row_tokens: int

    @property
    def size(self) -> int:
        """What it grows by: its rows."""
        return self.rows

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of its tensors."""
        return self.rows, self.row_tokens

    def of_size(self, rows: int) -> "PaddedRows":
        """A batch of as many rows of the same length."""
        return PaddedRows(rows, self.row_tokens)


@dataclass(frozen=True)
class JoinedRows:
    """A batch of sequences end to end, without padding: tensors of [1, tokens]. It grows by tokens."""

    tokens: int

    @property
    def size(self) -> int:
        """What it grows by: its tokens."""
        return self.tokens

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of its tensors."""
        return 1, self.tokens

    def of_size(self, tokens: int) -> "JoinedRows":
        """A batch of as many tokens."""
        return JoinedRows(tokens)


Batch = PaddedRows | JoinedRows


def part_of(tokens: int, ranks: int) -> int:
    """The tokens of each of so many processes that divide them."""
    return -(-tokens // ranks)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a run, or a batch of its evaluation: all that its memory depends on."""

    batch: Batch
    supervised: int  # tokens
    lengths: tuple[int, ...] = ()  # tokens of each sequence, if they are joined
    first: bool = False  # of its optimizer step, so that there are no gradients yet
    last: bool = True  # of its optimizer step; a first one is so only if it is alone
    held: int = 0  # tokens of the other batches that the trainer holds meanwhile
    place: int | None = None  # among those of the run, or of an evaluation, in order; None if unknown
    fits: tuple[Fit, ...] = ()  # of the pictures of its rows, in order
    held_units: int = 0  # patches or tiles of the other batches that the trainer holds meanwhile

    @property
    def tokens(self) -> int:
        """Padding included."""
        return math.prod(self.batch.shape)

    @property
    def units(self) -> int:
        """Patches or tiles that a tower sees."""
        return sum(fit.units for fit in self.fits)

    @property
    def squares(self) -> int:
        """The sum of the squares of the sequence lengths."""
        return sum(length**2 for length in self.lengths)

    def covers(self, other: "MicroBatch") -> bool:
        """Whether its step takes no less than another one's, but for what is held beside them.

        Where pictures begin in their rows, which changes little, is left out.
        """
        if (self.first, self.last) != (other.first, other.last):
            return False
        own, others = (
            (*each.batch.shape, each.supervised, each.units, each.squares) for each in (self, other)
        )
        return all(size >= less for size, less in zip(own, others, strict=True))

    def of_rank(self, ranks: int) -> "MicroBatch":
        """What one of so many processes has of it, if they divide its joined tokens.

        Its supervised tokens are those of one process already, or all, if it is not known whose they are.
        """
        if ranks == 1 or not isinstance(self.batch, JoinedRows):
            return self
        own, missing = part_of(self.batch.tokens, ranks), -self.batch.tokens % ranks
        return replace(
            self,
            batch=JoinedRows(own),
            supervised=min(self.supervised, own),
            lengths=self.lengths + ((missing,) if self.lengths and missing else ()),
            held=part_of(self.held, ranks),
        )

    @property
    def carried(self) -> int:
        """More than another one's, if with as many supervised tokens it has the higher peak."""
        return OWN_TOKEN * self.tokens + self.held


@dataclass(frozen=True)
class RunBatches:
    """The batches of a run of which one has the highest peak; () where they are not known."""

    train: tuple[MicroBatch, ...] = ()
    evaluation: tuple[MicroBatch, ...] = ()
    held: int = 0  # the most tokens of batches that the trainer holds at the end of an optimizer step
    held_units: int = 0  # as many patches or tiles
    token_bytes: int = TOKEN_BYTES  # of a token of a batch
    unit_bytes: int = 0  # of a patch or tile
    # Tokens with padding of the busiest process, over those without of an average one: where the others wait
    # for it at the end of each step, and of each micro-batch.
    busiest: tuple[float, float] = (1.0, 1.0)

    def bytes_of(self, tokens: int, units: int) -> int:
        """Of batches with so many tokens and patches or tiles."""
        return self.token_bytes * tokens + self.unit_bytes * units

    @property
    def most_fits(self) -> tuple[Fit, ...]:
        """The pictures of the micro-batch of which a tower sees most."""
        return max(self.train, key=lambda each: each.units).fits if self.train else ()

    def of_rank(self, ranks: int) -> "RunBatches":
        """As `MicroBatch.of_rank`."""
        train = tuple(each.of_rank(ranks) for each in self.train)
        evaluation = tuple(each.of_rank(ranks) for each in self.evaluation)
        return replace(self, train=train, evaluation=evaluation, held=part_of(self.held, ranks))


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One micro-batch of a run, and how the model is trained on it."""

    mode: str  # "full", "lora" or "qlora"
    lora: LoraSettings = LoraSettings()
    new_tokens: int = 0  # whose rows of a frozen embedding are trained beside the adapters
    vision: str = "frozen"  # or how what sees is trained, as `tuning.vision` says
    precision: Precision = Precision()
    kernels: Kernels = Kernels()  # compiled: layers allocate as their compiled code does
    activations: Activations = Activations()
    mlp_tile: int = 0  # tokens that an MLP computes at a time; 0: all
    batch: Batch = PaddedRows(1, 128)  # the micro-batch
    longest: int | None = None  # tokens of the longest sequence; default: of a row of the batch
    sequence_tokens: int | None = None  # of an average sequence, if rows are joined; default `longest`
    accumulates: bool = True  # gradients of an earlier micro-batch are live during forward and backward
    device: str = "cpu"  # the device whose memory is predicted, not the one that predicts
    compute_capability: tuple[int, int] = ASSUMED_CAPABILITY  # of that device, if it is a GPU: its kernels
    threads: int = 1  # of a process, if it is a CPU: its kernels
    scratch: Rules = ()  # and what its products take, by operation (sizing/meters/product_scratch.py)
    optimizer: str = DEFAULT
    neftune: bool = False  # noise on the embeddings
    balanced: bool = False  # a loss balances the experts
    supervised_share: float = 1.0  # of the tokens; the loss is computed for these only
    eval_batch: Batch | None = None  # the largest batch of an evaluation; default `batch`
    cast_adapters: bool = False  # adapters have `dtype` too: the engine casts the model and does not autocast
    sharing: Sharing = Sharing(engine="", world_size=1)  # as traced; `batch` is the part of one process
    regathers: bool = False  # what belongs to no layer is freed after the forward pass, and gathered again
    exchanges: bool = True  # or else another micro-batch of the step follows, until which they wait
    cut_at_longest: bool = False  # joined sequences are all of the longest kind: for attention with a window
    lengths: tuple[int, ...] = ()  # of the sequences that are joined, where they matter and are known
    eval_share: float | None = None  # supervised tokens of the evaluation batch; default `supervised_share`
    eval_lengths: tuple[int, ...] = ()  # as `lengths`
    fits: tuple[Fit, ...] = ()  # of the pictures of the micro-batch
    eval_fits: tuple[Fit, ...] = ()  # of the evaluation batch

    @property
    def uncompiled(self) -> "StepSpec":
        """The same with layers that are not compiled."""
        return replace(self, kernels=replace(self.kernels, compiled=False))

    @property
    def method(self) -> tuple[str, LoraSettings, int, str]:
        """What decides which weights are trained."""
        return self.mode, self.lora, self.new_tokens, self.vision

    @property
    def joined(self) -> bool:
        """Whether rows are joined without padding."""
        return isinstance(self.batch, JoinedRows)

    @property
    def tokens(self) -> int:
        """Tokens in the micro-batch, padding included."""
        return math.prod(self.batch.shape)

    @property
    def evaluated(self) -> Batch:
        """The largest batch of an evaluation."""
        return self.eval_batch or self.batch

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence in it."""
        return self.longest or self.batch.shape[1]

    def sequence_lengths(self, tokens: int) -> tuple[int, ...]:
        """Tokens of each of the sequences of which this process has `tokens` tokens.

        Two sequences stand for any number: how the tokens are divided changes memory only by rounding, and
        by what `sequence_tokens` says. The exception is a sliding window, whose mask grows with the square
        of the sequence length.
        """
        tokens *= self.sharing.sequence_ranks
        if self.cut_at_longest:
            whole, rest = divmod(tokens, self.longest_sequence)
            return (self.longest_sequence,) * whole + ((rest,) if rest else ())
        return (tokens // 2, tokens - tokens // 2)

    @property
    def loss_tiles(self) -> tuple[int, int]:
        """Tiles of the output head for the micro-batch and for the evaluation batch; 3: three or more."""
        tile = LOSS_TILES[self.device]
        counts = self.supervised(self.batch), self.eval_supervised
        first, second = (min(3, -(-count // tile)) for count in counts)
        return first, second

    @property
    def is_linear(self) -> bool:
        """Whether block sizes of larger micro-batches follow from those of smaller ones.

        Not those of certain rows, nor what products take up to a bound. The autocast of a CPU keeps a cast of
        each tile of the output head, the last of which may be smaller.
        """
        if self.lengths or self.eval_lengths or self.fits or self.eval_fits:
            return False
        if any(rule.most is not None for _, rule in self.scratch):
            return False
        return self.device == "cuda" or self.precision.autocast == "no" or 3 not in self.loss_tiles

    @property
    def is_alone(self) -> bool:
        """Whether no step of another size tells what it computes: they have other tiles, or pictures."""
        return bool(self.mlp_tile or self.fits)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of the output head and of an MLP: block sizes are linear among steps with as many."""
        batches = self.tokens, math.prod(self.evaluated.shape)
        return (*self.loss_tiles, *(-(-count // self.mlp_tile) for count in batches if self.mlp_tile))

    @property
    def trained_element_bytes(self) -> int:
        """Bytes per element of a trained parameter and its gradient; adapters are fp32 unless cast."""
        return BYTES_PER_ELEMENT[self.precision.dtype] if self.mode == "full" or self.cast_adapters else 4

    @property
    def eval_supervised(self) -> int:
        """How many tokens of the evaluation batch are scored."""
        return self.supervised(self.evaluated, self.eval_share)

    def supervised(self, batch: Batch, share: float | None = None) -> int:
        """How many tokens of such a batch contribute to the loss: never the first one of a row.

        A part of a row may have the next token of each of its own.
        """
        rows, row_tokens = batch.shape
        if self.sharing.sequence_parallel:
            return max(1, round((self.supervised_share if share is None else share) * row_tokens))
        tokens, share = rows * row_tokens, self.supervised_share if share is None else share
        return max(1, min(round(share * tokens), tokens - rows))

    def on_this_cpu(self, threads: int) -> "StepSpec":
        """The step on so many threads of this machine's CPU."""
        return replace(self, threads=threads, scratch=product_scratch(self.precision.computed_in, threads))

    def without_lengths(self) -> "StepSpec":
        """The step in which few sequences stand for those that are joined."""
        return replace(self, lengths=(), eval_lengths=())

    @classmethod
    def of(
        cls,
        config: RunConfig,
        plan: Plan,
        micro: MicroBatch | None = None,
        evaluated: MicroBatch | None = None,
    ) -> "StepSpec":
        """A step of a plan.

        Args:
            config: the run's config.
            plan: the run's plan.
            micro: its micro-batch; default one with the most tokens and the most supervised tokens.
            evaluated: a batch of its evaluation; default one as the micro-batch.
        """
        shared, engine = plan.sharing, engine_of(plan.sharing.engine)
        several, joined = plan.batch.accumulation > 1, plan.rows.joined
        later = several and not (micro and micro.first)
        waits = several and engine.shards_weights and (shared.defers_exchange or shared.replicated)
        early = engine.makes_gradients_early and not (several and engine.keeps_gradients)
        spec = cls(
            mode=config.tuning.mode,
            lora=config.tuning.lora,
            new_tokens=0 if config.tuning.mode == "full" else len(config.model.new_tokens),
            vision=config.tuning.vision,
            precision=plan.precision,
            kernels=plan.kernels,
            activations=plan.activations.traced(plan.device),
            mlp_tile=plan.mlp_tile,
            accumulates=later or early,
            device=plan.device,
            compute_capability=same_kernels(plan.compute_capability or ASSUMED_CAPABILITY),
            optimizer=config.train.optimizer,
            neftune=config.train.neftune_noise_alpha is not None,
            balanced=config.train.router_aux_loss_coef > 0,
            sharing=shared.traced(divides=engine.shards_weights),
            regathers=engine.regathers,
            exchanges=not (waits and micro and (micro.first or not micro.last)),
            batch=micro.batch if micro else _largest(plan),
            supervised_share=_share(micro) if micro else _supervised_share(plan),
            lengths=micro.lengths if micro else (),
            fits=micro.fits if micro else (),
            eval_batch=evaluated.batch if evaluated else None,
            eval_share=_share(evaluated) if evaluated else None,
            eval_lengths=evaluated.lengths if evaluated else (),
            eval_fits=evaluated.fits if evaluated else (),
            longest=plan.rows.max_seq_len if joined else None,
            sequence_tokens=(plan.rows.sequence_tokens or None) if joined and plan.device == "cuda" else None,
        )
        compared = plan.device == "cpu" or (joined and plan.kernels.layers == "own")
        if shared.world_size > 1 or config.train.float8 or not compared:
            spec = spec.uncompiled  # nobody has compared what is generated with what runs
        if engine.casts_model and plan.precision.autocast in AUTOCAST:
            cast = Precision(dtype=AUTOCAST[plan.precision.autocast])
            return replace(spec, precision=cast, cast_adapters=True)
        return spec


def _supervised_share(plan: Plan) -> float:
    """The share of the largest micro-batch, assuming that it also has the most supervised tokens."""
    if not plan.rows.most_supervised:
        return 1.0
    own = plan.rows.most_tokens / plan.sharing.sequence_ranks  # of which all may be supervised
    return min(1.0, math.ceil(SHARES * plan.rows.most_supervised / own) / SHARES)


def _largest(plan: Plan) -> Batch:
    if plan.rows.joined:
        return JoinedRows(part_of(plan.rows.most_tokens, plan.sharing.sequence_ranks))
    width = padded_length(plan.rows.max_seq_len)
    return PaddedRows(max(1, -(-plan.rows.most_tokens // width)), width)


def _share(micro: MicroBatch) -> float:
    return min(1.0, micro.supervised / max(1, micro.tokens))
