"""Draft plans: every plan that a config allows, before memory is estimated. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from sft_play.choices.engines import WHOLE
from sft_play.choices.optimizers import OPTIMIZERS
from sft_play.config.schema import RunConfig
from sft_play.engines.base import Engine
from sft_play.engines.registry import engine_of, engines_for, offload_problem
from sft_play.errors import ConfigError
from sft_play.parts import Batch, Kernels, Precision, Rows, Schedule, Sharing, ways
from sft_play.plan import Device, Plan
from sft_play.planning.candidates.batch import BatchSplit, batch_choices, count_steps, scaled_learning_rate
from sft_play.reasons import method
from sft_play.units import AUTOCAST

# (split, optimizer steps of the run) -> the most tokens, and the most supervised tokens, of a micro-batch
LargestMicroBatch = Callable[[BatchSplit, int], tuple[int, int]]


def choose_precision(config: RunConfig, device: Device) -> tuple[str, str]:
    """The dtype of the weights, and the autocast type.

    Raises:
        ConfigError: the config sets a precision that the device or the tuning mode does not support.
    """
    asked, dtype = config.train.mixed_precision, config.model.dtype
    if (asked == "bf16" or dtype == "bfloat16") and not device.bf16:
        key = "train.mixed_precision=bf16" if asked == "bf16" else "model.dtype=bfloat16"
        raise ConfigError(
            f"{key}: {device.name} does not support bf16; use fp16, or auto to use what is supported"
        )
    if asked == "fp16" and device.kind == "cpu":
        raise ConfigError(
            "train.mixed_precision=fp16: fp16 training is not supported on the CPU; use auto, bf16 or no"
        )
    autocast: str = asked
    if asked == "auto":
        autocast = "no" if device.kind == "cpu" else "bf16" if device.bf16 else "fp16"
    chosen: str = dtype
    if dtype == "auto" and (device.kind == "cpu" or config.tuning.mode == "full"):
        chosen = "float32"
    elif dtype == "auto":
        chosen = AUTOCAST.get(autocast, "float32")
    if config.tuning.mode == "full" and chosen == "float16":
        raise ConfigError(
            "model.dtype=float16 with tuning.mode=full: small weight updates are lost in fp16; "
            "use float32 or bfloat16"
        )
    return chosen, autocast


def leanest(drafts: Sequence[Plan]) -> list[Plan]:
    """Those with the fewest rows in a micro-batch that keep no more activations than they have to.

    With MLPs in tiles, if that may be.
    """
    fewest = min(draft.rows_per_micro_batch for draft in drafts)
    small = [draft for draft in drafts if draft.rows_per_micro_batch == fewest]
    lean = [draft for draft in small if draft.activations.policy != "keep"] or small
    return [draft for draft in lean if draft.activations.in_tiles] or lean


def precision_reason(config: RunConfig, device: Device) -> str:
    """The autocast type in words, and why; raises what `choose_precision` does."""
    return method.precision(config.train.mixed_precision, choose_precision(config, device)[1], device)


def draft_reasons(config: RunConfig, device: Device, draft: Plan) -> list[str]:
    """What all drafts of a run share: the precision and the learning rate."""
    train, effective = config.train, draft.batch.effective
    rate = method.learning_rate(train, scaled_learning_rate(train, effective), effective)
    return [precision_reason(config, device), rate]


def require_possible(config: RunConfig, device: Device) -> None:
    """Checks that the methods agree with each other, also where the mode was changed, and with the device.

    Raises:
        ConfigError: two exclude each other, or the optimizer's states are to be paged without a GPU.
    """
    try:
        config.require_compatible()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    asked, unpaged = config.parallel.engine, OPTIMIZERS[config.train.optimizer].unpaged
    problem = engine_of(asked).problem(config) if asked != "auto" else None
    problem = problem or offload_problem(config, device.kind, choose_precision(config, device)[1])
    if asked != "auto" and engine_of(asked).joins_trained:
        problem = problem or _several_types(config, device)
    if problem:
        raise ConfigError(problem)
    if unpaged and device.kind == "cpu":
        raise ConfigError(
            f"train.optimizer={config.train.optimizer}: states can be paged on a GPU only, and this is "
            f"{device.name}; use {unpaged}"
        )


def _several_types(config: RunConfig, device: Device) -> str | None:
    """Why what is trained cannot be joined; None if all of it has one type."""
    dtype, autocast = choose_precision(config, device)
    whole = config.tuning.lora.modules_to_save if config.tuning.mode != "full" else ()
    if not whole or dtype == "float32" or autocast != "no":
        return None
    return (
        f"parallel.engine={config.parallel.engine} needs one data type for all trained weights, but without "
        f"autocast tuning.lora.modules_to_save ({', '.join(whole)}) stay in {dtype} beside adapters "
        f"in float32; set train.mixed_precision=bf16, model.dtype=float32 or parallel.engine={WHOLE.name}"
    )


def draft_plans(
    config: RunConfig,
    *,
    device: Device,
    world_size: int,
    machines: int = 1,
    rows: int,
    max_seq_len: int,
    attention: str,
    padding_free: bool = True,
    largest: LargestMicroBatch | None = None,
) -> list[Plan]:
    """Every plan that the config allows, in preferred order.

    Sorted by engine, then without checkpointing before with it, then by micro-batch from small to large. With
    train.packing, `rows` are packed sequences. Without `largest`, every row of a micro-batch is assumed to be
    the longest, of `max_seq_len` tokens.

    Raises:
        ConfigError: settings contradict each other or are not supported by the device.
    """
    require_possible(config, device)
    train = config.train
    unit = max_seq_len if train.packing else 1
    kinds = Rows(max_seq_len=max_seq_len, packing=train.packing, joined=padding_free)
    dtype, autocast = choose_precision(config, device)
    splits = batch_choices(train, config.parallel.divided(world_size), max_seq_len if train.packing else None)
    rate = scaled_learning_rate(train, splits[0].effective * unit)
    per_epoch, total = count_steps(train, rows, splits[0].effective)
    largest = largest or (lambda split, steps: (split.micro * max_seq_len,) * 2)
    most = {split: largest(split, total) for split in splits}
    return [
        Plan(
            batch=Batch(
                micro=split.micro * unit, accumulation=split.accumulation, effective=split.effective * unit
            ),
            sharing=sharing,
            rows=replace(kinds, most_tokens=most[split][0], most_supervised=most[split][1]),
            activations=activations,
            precision=Precision(autocast=autocast, dtype=dtype),
            kernels=Kernels(attention=attention, layers=train.layer_kernels, compiled=train.asks_compile),
            schedule=Schedule(learning_rate=rate, steps_per_epoch=per_epoch, total_steps=total),
            device=device.kind,
            compute_capability=device.compute_capability,
        )
        for sharing, activations, split in product(
            _sharings(config, device, world_size, machines), ways(train, device.kind), splits
        )
    ]


def by_offload(
    config: RunConfig,
    drafts: list[Plan],
    seconds_of: Callable[[Plan], float | None],
    worth: Callable[[list[Plan]], list[Plan]],
) -> Iterator[list[Plan]]:
    """The drafts that are looked at first, and those of which each group waits until nothing else fits.

    Of each, those that are `worth` it by then. What nobody asked for, and takes longer by nobody knows how
    much, is left out.
    """
    auto, chosen = config.train.asked_activations == "auto", not config.train.asks_tiles

    def last_resorts(draft: Plan) -> tuple[bool, ...]:
        in_ram = auto and draft.activations.policy == "offload"
        return draft.sharing.offloads, in_ram, chosen and draft.activations.in_tiles

    for resorts in product((False, True), repeat=3):
        group = worth([draft for draft in drafts if last_resorts(draft) == resorts])
        if not (resorts[1] and group and seconds_of(group[0]) is None):
            yield group


def _sharings(config: RunConfig, device: Device, world_size: int, machines: int) -> Iterator[Sharing]:
    """How processes may share the work."""
    # a CPU has no other memory than RAM, and gradients of fp16 are scaled on the GPU
    offload = device.kind == "cuda" and choose_precision(config, device)[1] != "fp16"
    engines = engines_for(config, world_size, offload=offload)
    several, keeps = _several_types(config, device), config.parallel.reshard_after_forward is False
    waits = config.parallel.defer_exchange is True
    for engine, place in (each for each in engines if not (several and each[0].joins_trained)):
        for count in _replicas(engine, world_size, machines):
            yield Sharing(
                world_size=world_size,
                engine=engine.name,
                machines=machines,
                sequence_ranks=config.parallel.sequence_ranks,
                replicas=count,
                offload=place,
                defers_exchange=waits and engine.can_defer and place == "none",
                reshard_after_forward=not (keeps and engine.can_keep_gathered),
            )


def _replicas(engine: Engine, world_size: int, machines: int) -> tuple[int, ...]:
    """How often the model may be held: on each machine, since the network is slow, before once on all."""
    can_divide = engine.replicates and world_size % machines == 0 and world_size // machines > 1
    return (machines, 1) if can_divide and machines > 1 else (1,)
