import json
from dataclasses import replace

import pytest

from sft_play.config.parallel import ParallelConfig
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError
from sft_play.plan import Device, Plan
from sft_play.planning.candidates.batch import batch_choices, count_steps, scaled_learning_rate
from sft_play.planning.candidates.drafts import choose_precision, draft_plans, require_possible
from sft_play.planning.search.choice import choose_plan

CPU = Device(kind="cpu", name="the CPU", bf16=True)
AMPERE = Device(kind="cuda", name="NVIDIA A100", bf16=True)
TURING = Device(kind="cuda", name="Tesla T4", bf16=False)


def config(mode: str = "lora", model: dict | None = None, **train) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name": "m", **(model or {})},
            "data": {"train_path": "d"},
            "tuning": {"mode": mode},
            "train": train,
        }
    )


def plan_of(world_size: int = 1, rows: int = 100, engine: str = "auto", **train) -> Plan:
    run = config(**train)
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"engine": engine})})
    drafts = draft_plans(
        run, device=CPU, world_size=world_size, rows=rows, max_seq_len=128, attention="varlen_sdpa"
    )
    return choose_plan(run, drafts, None, None)[0]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_effective_batch_stays_what_was_asked_on_any_number_of_processes(world_size):
    plan = plan_of(world_size, effective_batch_size=32)
    assert plan.batch.micro * plan.batch.accumulation * world_size == plan.batch.effective == 32


def test_numbers_given_by_hand_are_taken_and_the_effective_batch_grows():
    plan = plan_of(4, batch_size=2, grad_accum=3)
    assert (plan.batch.micro, plan.batch.accumulation, plan.batch.effective) == (2, 3, 24)


@pytest.mark.parametrize(
    ("given", "micro", "accumulation"), [({"batch_size": 4}, 4, 4), ({"grad_accum": 8}, 2, 8)]
)
def test_one_number_given_by_hand_makes_the_other_follow(given, micro, accumulation):
    plan = plan_of(2, effective_batch_size=32, **given)
    assert (plan.batch.micro, plan.batch.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    ("world_size", "train", "message"),
    [
        (
            4,
            {"effective_batch_size": 10, "batch_size": 2},
            "is not divisible by 4 processes.*nearest: 8 or 12",
        ),
        (4, {"effective_batch_size": 3}, "is 3 sequences, fewer than the 4 processes; set it to 4 or more"),
        (2, {"effective_batch_size": 16, "batch_size": 3}, "allowed: 1, 2, 4, 8"),
        (2, {"effective_batch_size": 16, "grad_accum": 5}, "allowed: 1, 2, 4, 8"),
        (2, {"effective_batch_size": 16, "batch_size": 4, "grad_accum": 4}, r"contradicts .* = 32"),
        (
            1,
            {"packing": True, "effective_batch_size": 200},
            r"a multiple of 128 \(one sequence\); nearest: 128 or 256",
        ),
        (1, {"packing": True, "effective_batch_size": 16}, "nearest: 128; for 16 sequences: 2048"),
        (2, {"packing": True, "effective_batch_size": 128}, "is 1 packed sequence, fewer .* 1 process$"),
    ],
)
def test_contradicting_batch_sizes_are_refused_with_the_nearest_valid_ones(world_size, train, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(world_size, **train)


def test_packed_batches_count_tokens():
    plan = plan_of(2, packing=True, effective_batch_size=1024, batch_size=256)
    assert (plan.batch.micro, plan.batch.accumulation, plan.batch.effective) == (
        256,
        2,
        1024,
    )
    assert (plan.rows_per_micro_batch, plan.rows_per_step) == (2, 8)


def test_every_split_of_the_batch_is_offered_smallest_first():
    splits = batch_choices(config(effective_batch_size=24).train, 2, None)
    assert [split.accumulation for split in splits] == [12, 8, 6, 4, 3, 2, 1]
    assert [split.micro for split in splits] == [1, 2, 2, 3, 4, 6, 12]  # on average, rounded up
    assert {split.effective for split in splits} == {24}


@pytest.mark.parametrize("world_size", [3, 5, 7, 16])
def test_the_effective_batch_need_not_be_divisible_by_the_processes(world_size):
    plan = plan_of(world_size)
    assert plan.batch.effective == plan.rows_per_step == 16


@pytest.mark.parametrize(("scaling", "expected"), [("none", 1e-4), ("sqrt", 2e-4), ("linear", 4e-4)])
def test_learning_rate_follows_the_batch_as_asked(scaling, expected):
    reference = {} if scaling == "none" else {"reference_batch_size": 16}
    train = config(learning_rate=1e-4, lr_scaling=scaling, **reference).train
    assert scaled_learning_rate(train, 64) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"epochs": 1}, (13, 13)),
        ({"epochs": 2.5}, (13, 33)),
        ({"max_steps": 5}, (13, 5)),
        ({"epochs": 0.01}, (13, 1)),
    ],
)
def test_steps_of_an_epoch_and_of_the_run(train, expected):
    assert count_steps(config(**train).train, 100, 8) == expected


@pytest.mark.parametrize(
    ("mode", "device", "expected"),
    [
        ("lora", CPU, ("float32", "no")),
        ("lora", AMPERE, ("bfloat16", "bf16")),
        ("qlora", TURING, ("float16", "fp16")),
        ("full", AMPERE, ("float32", "bf16")),
        ("full", TURING, ("float32", "fp16")),
    ],
)
def test_automatic_precision_is_what_the_device_has(mode, device, expected):
    assert choose_precision(config(mode), device) == expected


@pytest.mark.parametrize(
    ("run", "device", "message"),
    [
        (config(mixed_precision="bf16"), TURING, "Tesla T4 does not support bf16"),
        (config(model={"dtype": "bfloat16"}), TURING, "model.dtype=bfloat16"),
        (config(mixed_precision="fp16"), CPU, "fp16 training is not supported"),
        (config("full", model={"dtype": "float16"}), AMPERE, "small weight updates are lost"),
    ],
)
def test_precision_that_the_device_lacks_is_refused(run, device, message):
    with pytest.raises(ConfigError, match=message):
        choose_precision(run, device)


@pytest.mark.parametrize("mode", ["lora", "qlora"])
@pytest.mark.parametrize("engine", ["deepspeed_z2", "deepspeed_z3", "ddp", "auto"])
def test_an_engine_that_joins_what_is_trained_needs_it_in_one_type(mode, engine):
    def engines(**changes) -> set[str]:
        lora = {"use_dora": mode == "lora", "modules_to_save": ["lm_head"]}
        tree = {"dtype": "bfloat16", "mixed_precision": "no"} | changes
        run = RunConfig.model_validate(
            {
                "model": {"name": "m", "dtype": tree["dtype"]},
                "data": {"train_path": "d"},
                "tuning": {"mode": mode, "lora": lora},
                "train": {"mixed_precision": tree["mixed_precision"]},
                "parallel": {"engine": engine},
            }
        )
        drafts = draft_plans(
            run, device=AMPERE, world_size=2, rows=99, max_seq_len=128, attention="varlen_sdpa"
        )
        return {draft.sharing.engine for draft in drafts}

    usual = engines(mixed_precision="bf16")
    assert engines(dtype="float32") == usual and (engine == "auto" or usual == {engine})
    if engine.startswith("deepspeed"):
        message = rf"parallel.engine={engine} needs one data type.*\(lm_head\) stay in bfloat16.*mixed_precision=bf16"
        with pytest.raises(ConfigError, match=message):
            engines()
    else:
        assert engines() == {name for name in usual if not name.startswith("deepspeed")} != set()
        assert engine == "ddp" or engines() < usual


def test_plan_survives_json():
    plan = replace(plan_of(2, engine="deepspeed_z2"), why=("a reason", "another"))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    older = json.loads(json.dumps(plan.to_json()))
    assert (
        older["plan"].pop("activations") == plan.activations.policy and older["plan"].pop("kept_layers") == 0
    )
    assert Plan.from_json(older) == plan  # as plans were written before
    assert plan.sharing.engine == "deepspeed_z2"


def offloaded(device: Device, engine: str = "auto", **train) -> list[Plan]:
    """The drafts of a run of one process that offloads to RAM."""
    run = config(**train)
    run = run.model_copy(
        update={"parallel": run.parallel.model_copy(update={"engine": engine, "offload": "ram"})}
    )
    return draft_plans(run, device=device, world_size=1, rows=100, max_seq_len=128, attention="varlen_sdpa")


@pytest.mark.parametrize(
    ("device", "settings", "said"),
    [
        (CPU, {"engine": "ddp"}, r"offload=ram does not work with parallel.engine=ddp.*fsdp2"),
        (CPU, {"optimizer": "adafactor"}, r"offload=ram: train.optimizer=adafactor.*adamw"),
        (AMPERE, {"mixed_precision": "fp16"}, r"offload=ram does not work with fp16.*=no"),
    ],
)
def test_offloading_that_cannot_be_is_refused(device, settings, said):
    with pytest.raises(ConfigError, match=said):
        offloaded(device, **settings)


def test_gradients_that_are_to_wait_on_the_gpu_are_not_offloaded():
    run = config()
    for place, waits in (("ram", "auto"), ("ram", False), ("auto", True)):
        changed = {"engine": "fsdp2", "offload": place, "defer_exchange": waits}
        require_possible(run.model_copy(update={"parallel": run.parallel.model_copy(update=changed)}), CPU)
    changed = {"offload": "ram", "defer_exchange": True}
    parallel = run.parallel.model_copy(update=changed)
    with pytest.raises(ConfigError, match=r"defer_exchange=true does not work with parallel.offload=ram, "):
        require_possible(run.model_copy(update={"parallel": parallel}), CPU)


def test_offloading_to_disk_says_what_works_instead():
    with pytest.raises(
        ValueError, match=r"nvme cannot hold everything; set OFFLOAD=ram, .* parallel.nvme_path="
    ):
        ParallelConfig(offload="nvme")
    run = config()
    parallel = run.parallel.model_copy(update={"nvme_path": "/fast"})
    with pytest.raises(ConfigError, match=r"parallel.nvme_path needs parallel.offload=ram \(found auto\)"):
        require_possible(run.model_copy(update={"parallel": parallel}), CPU)


def test_one_process_offloads_with_an_engine_that_divides():
    for asked, engine in (("auto", "fsdp2"), ("fsdp2", "fsdp2"), ("deepspeed_z3", "deepspeed_z3")):
        found = offloaded(CPU, engine=asked)
        assert {
            (draft.sharing.engine, draft.sharing.offload, draft.sharing.world_size) for draft in found
        } == {(engine, "ram", 1)}
