"""Each reason of a plan is one sentence, in the same words wherever it is read."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from inspect import isfunction
from itertools import product
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from sft_play.config.train import TrainConfig
from sft_play.plan import Device, HostMemory, Memory, Plan
from sft_play.reasons import choices, evidence, method
from sft_play.report.misfit import advice_text, misfit_text
from sft_play.units import GIB, MIB
from tests.plans import plan_with
from tests.unit.report.written_run import make_plan

HOST = HostMemory(
    budget_bytes=40 * GIB, processes=2, own_bytes=GIB, terms={"activations": 2 * GIB}, saved_bytes=0
)

PLAN = make_plan()
A100 = Device(kind="cuda", name="NVIDIA A100", bf16=True)
SCALED = TrainConfig(learning_rate=2e-4, lr_scaling="linear", reference_batch_size=8)
ZERO = dict(engine="ZeRO-2", principle="partitions optimizer states", trades_speed=True, world_size=4)
DDP = dict(engine="DDP", principle="each process holds the whole model", trades_speed=False, world_size=2)
MICRO = partial(choices.micro_batch, 2, timed=True)
LATER = "; the first run of 2 processes measures it"
SENTENCES = [
    (MICRO(), "micro-batch 2: the largest that the config allows"),
    (MICRO(fits=32), "micro-batch 2: up to 32 would fit, which is predicted to be slower"),
    (MICRO(fits=32, timed=False), "micro-batch 2: up to 32 would fit, which is not faster"),
    (MICRO(whole_step=True), "micro-batch 2: all rows of a step at once"),
    (
        MICRO(misfit=4, other=8, activations="recompute"),
        "micro-batch 2: 4 would not fit; with activations recomputed, up to 8 would, which is predicted to be "
        "slower",
    ),
    (
        MICRO(misfit=4, ran_out=True, other=8, engine="ZeRO-2", activations="keep"),
        "micro-batch 2: 4 would not fit, as an earlier run has shown; with ZeRO-2 and with activations kept, "
        "up to 8 would, which is predicted to be slower",
    ),
    (
        choices.recomputing(True, "exceed"),
        "gradient checkpointing on: stored activations would exceed the budget",
    ),
    (choices.recomputing(False, "config"), "gradient checkpointing off, as set in the config"),
    (
        choices.inputs_in_ram("cpu", "config"),
        "train.activations=offload: layers are recomputed from their inputs; a CPU has no other memory, so this "
        "saves no more than recompute",
    ),
    (
        choices.inputs_in_ram("cuda", "exceed", HOST),
        "gradient checkpointing on, with layer inputs in RAM (6.00 GiB of 40.00 GiB available; 1.00 GiB of it "
        "assumed for each of 2 processes), since nothing else fits: the time to copy them there and back has "
        "not been measured on a GPU",
    ),
    (
        choices.partly_recomputing(12, 32),
        "gradient checkpointing in 20 of 32 layers: stored activations of more than the last 12 would exceed the "
        "budget",
    ),
    (
        choices.tiles(16, 16_512, "exceed"),
        "MLPs in 16 tiles of 16,512 tokens, since nothing else fits: one tile of intermediates is held at a time, "
        "and recomputed in the backward pass",
    ),
    (
        choices.waiting(0.234, may_pack=True),
        "an average process waits 23% of a step for the one with the most tokens; a larger "
        "train.effective_batch_size, or train.packing=true, would even them out",
    ),
    (
        choices.waiting(0.1, may_pack=False),
        "an average process waits 10% of a step for the one with the most tokens; a larger "
        "train.effective_batch_size would even them out",
    ),
    (choices.engine(**DDP), "DDP over 2 processes"),
    (
        choices.engine(**DDP, other="ZeRO-2", more_bytes=-GIB),
        "DDP over 2 processes: each process holds the whole model; ZeRO-2 would save 1.00 GiB",
    ),
    (
        choices.engine(**DDP, other="ZeRO-2", more_bytes=MIB),
        "DDP over 2 processes: each process holds the whole model; ZeRO-2 would need 1.00 MiB more",
    ),
    (
        choices.engine(**ZERO, other="DDP", more_bytes=GIB),
        "ZeRO-2 over 4 processes: partitions optimizer states, which saves 1.00 GiB over DDP",
    ),
    (choices.unsized(given=True), "micro-batch as set in the config"),
    (method.precision("auto", "bf16", A100), "bf16 autocast, which NVIDIA A100 supports"),
    (
        method.master_weights("float32", GIB),
        "fp32 master weights: pure bf16 (model.dtype=bfloat16) would save 1.00 GiB of memory, but lose updates "
        "below 1/512 of a weight",
    ),
    (
        method.master_weights("bfloat16", GIB, "RAM"),
        "pure bf16 (model.dtype=bfloat16): saves 1.00 GiB of RAM over fp32 master weights, but loses updates "
        "below 1/512 of a weight",
    ),
    (
        method.learning_rate(TrainConfig(learning_rate=2e-4), 2e-4, 16),
        "learning rate 0.0002 as given, not scaled",
    ),
    (
        method.learning_rate(SCALED, 4e-4, 16),
        "learning rate 0.0002 x 2 = 0.0004: linear scaling from batch 8 to 16",
    ),
    (
        evidence.memory_limit(20, 16 * GIB),
        "each process may use 20 GiB (parallel.memory_gib), but only 16.00 GiB are free",
    ),
    (
        choices.states_on_disk("AdamW's states and frozen weights", "/fast", GIB),
        "AdamW's states and frozen weights in files in /fast, which saves 1.00 GiB of RAM; the predicted "
        "seconds do not include reading and writing them in each step",
    ),
    (
        evidence.prediction_errors(
            (8, 9), False, 1, {"allocated": (-0.0004, -0.0004), "reserved": (0.0, 0.05)}
        ),
        "prediction errors in 1 published run with 16-bit weights and fixed segments on compute capability 8.9: "
        "allocated -0.04%, reserved +0.00% to +5.00%",
    ),
    (
        evidence.communication(2, (), measured=True, measured_later=True),
        "communication: as measured between 2 processes here",
    ),
    (
        evidence.communication(2, (), measured=False, measured_later=True),
        f"communication: not counted, since the link between processes is unknown{LATER}",
    ),
    (
        evidence.communication(8, (9e11,), measured=False, measured_later=False),
        "communication: derived from the data sheet (900 GB/s between devices), not measured",
    ),
    (
        evidence.communication(16, (9e11, 5e10), measured=False, measured_later=False),
        "communication: derived from the data sheet (900 GB/s inside a machine, 50 GB/s between machines), "
        "not measured",
    ),
    (method.optimizer_states("lion", MIB, None), "lion: 1.00 MiB of optimizer states in each process"),
    (
        method.optimizer_states("paged_lion_32bit", MIB, 0),
        "paged_lion_32bit: 1.00 MiB of optimizer states, none of them paged: only those of large weights are",
    ),
    (
        evidence.only_while_busy("EPYC"),
        "EPYC was busy when measured: the result is not used, and it is measured again once idle",
    ),
    (
        evidence.ran_out_before(800, "more_free"),
        "in an earlier run of this kind, memory ran out with 800 tokens in a micro-batch, when less of it was "
        "free",
    ),
    (
        method.four_bit_base(0.82, MIB, 3 * MIB),
        "82% of the weights of the base are 4-bit (1.00 MiB in all, 3.00 MiB in 16 bit)",
    ),
    (method.Padded("attention", "eager"), "rows are padded: eager attention does not support row boundaries"),
    (method.Padded("config"), "rows are padded because train.padding_free=false"),
    (
        method.new_tokens(2, 1024, tied=False),
        "2 new tokens: 1,024 parameters of the embedding and output head are trained for them",
    ),
    (
        method.trained_whole(100, 1, ("lm_head",)),
        "100 parameters of 1 module are trained in full (tuning.lora.modules_to_save: lm_head)",
    ),
    (
        method.unproven("FlashAttention 3", "model.attention=flash_attention_3"),
        "FlashAttention 3 is off, not yet benchmarked on a GPU; model.attention=flash_attention_3 turns it on",
    ),
    (
        method.layer_kernels("liger", 97, None),
        "Liger's kernels are off until a run has timed them on this GPU (not with FSDP2 or ZeRO-3), or with train.kernels=liger",
    ),
    (
        method.NOT_COMPILED,
        "layers are not compiled: that takes a minute or more, which a run tries where it is under 2% of its time and gain more than it takes; train.compile=true always compiles",
    ),
    (
        method.compiled_layers("timed"),
        "layers are compiled, since steps timed on this device were faster; memory is predicted for layers that "
        "are not, seconds on a GPU with element-wise operations fused; the first step takes longer",
    ),
    (
        method.compiled_layers("on"),
        "layers are compiled, as set in the config; memory is predicted for layers that are not, seconds on a "
        "GPU with element-wise operations fused; the first step takes longer",
    ),
    (
        method.compiled_layers("on", "cpu"),
        "layers are compiled, as set in the config; memory is that of the code which the compiler generates, unless a "
        "warning says otherwise, seconds on a GPU with element-wise operations fused; the first step takes longer",
    ),
    (
        method.compiled_layers("on", "cuda"),
        "layers are compiled, as set in the config; memory is about that of the code which the compiler generates, "
        "unless a warning says otherwise (not compared with a run on a GPU yet; the plan fits without compiling too), "
        "seconds on a GPU with element-wise operations fused; the first step takes longer",
    ),
    (
        method.compiled_layers("float8"),
        "layers are compiled and multiply in float8, as set in the config; memory is predicted for layers that "
        "do neither, seconds on a GPU with element-wise operations fused; the first step takes longer",
    ),
]


@pytest.mark.parametrize(("reason", "expected"), SENTENCES)
def test_a_reason_is_one_sentence(reason, expected):
    assert str(reason) == expected


def test_the_equation_of_the_batch_holds_where_micro_batches_differ():
    plan = plan_with(
        PLAN, effective_batch_size=4, micro_batch_size=2, gradient_accumulation_steps=1, world_size=3
    )
    assert choices.effective_batch(plan) == (
        "effective batch 4 sequences = micro-batch 1.33 x accumulation 1 x 3 processes"
    )


def test_the_batch_is_an_equation_and_says_how_rows_lie():
    plan = plan_with(PLAN, padding_free=False, micro_batch_tokens=1234)
    equation = choices.effective_batch(plan)
    assert equation.startswith(f"effective batch {plan.batch.effective} sequences = micro-batch ")
    assert equation.endswith(
        f" x {plan.sharing.world_size} process{'es' if plan.sharing.world_size > 1 else ''}"
    )
    assert choices.rows_in_a_micro_batch(plan) == (
        "at most 1,234 tokens in a micro-batch: rows of similar length, padded to the longest"
    )


WHOLE = {Plan: PLAN, Device: A100, TrainConfig: SCALED}


def example(hint):
    """A value of an argument; of one that takes a few words, the first."""
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        return parts[0]
    if type(None) in parts:
        return None
    if get_origin(hint) is tuple:
        return tuple(example(part) for part in parts)
    if get_origin(hint) is Mapping:
        return {example(parts[0]): example(parts[1])}
    if parts:  # a list or a sequence
        return (example(parts[0]),)
    return {int: 2, float: 0.5, bool: True, str: "x", **WHOLE}[hint]


REASONS = [
    function
    for module in (choices, evidence, method)
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    if get_type_hints(function)["return"] is str
]


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.__name__)
def test_every_reason_has_words_for_all_that_it_may_say(reason):
    hints = {name: hint for name, hint in get_type_hints(reason).items() if name != "return"}
    facts = {name: example(hint) for name, hint in hints.items()}
    words = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    for chosen in product(*words.values()):
        said = reason(**facts | dict(zip(words, chosen, strict=True)))
        assert said and "{" not in said and not said.endswith(".")


def test_the_reasons_of_all_files_are_known():
    assert len(REASONS) > 30


MEMORY = Memory(
    budget_bytes=8 * GIB, peak_bytes=11 * GIB, peak_phase="backward", terms={"weights": 10 * GIB, "loss": GIB}
)


def test_a_misfit_says_by_how_much_and_of_what():
    smallest = plan_with(PLAN, memory=MEMORY, micro_batch_size=1, activations="recompute")
    first, parts = misfit_text(smallest).splitlines()
    assert first == (
        "this run does not fit: the smallest plan (micro-batch 1, gradient checkpointing) needs 11.00 GiB in "
        "the backward phase, 3.00 GiB more than the budget of 8.00 GiB"
    )
    assert parts == "largest parts: weights 10.00 GiB, loss 1.00 GiB"
    assert misfit_text(smallest, explain=False) == first


def test_advice_is_commands_each_with_its_plan():
    small = plan_with(
        PLAN, memory=replace(MEMORY, peak_bytes=4 * GIB), micro_batch_size=2, activations="keep"
    )
    heading, command, plan = advice_text([("make train", small, 1234.5)], gpus=True).splitlines()
    assert heading == "this makes it fit:" and command == "  make train"
    assert plan == "    4.00 GiB a process, micro-batch 2, activations kept, 1,234 tokens/s"
    two = advice_text([("make train", small, None)] * 2, gpus=True)
    assert two.startswith("any one of these makes it fit:") and "tokens/s" not in two
    assert "512 such GPUs" in advice_text([], gpus=True) and "GPU" not in advice_text([], gpus=False)
