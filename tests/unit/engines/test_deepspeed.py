import json

import pytest

from sft_play.engines.deepspeed import check_config, checked_config, config_file, read_config
from sft_play.errors import ConfigError
from tests.plans import plan_of, plan_with

PLAN = plan_of(
    micro_batch_size=2,
    gradient_accumulation_steps=4,
    effective_batch_size=16,
    world_size=2,
    engine="deepspeed_z2",
    max_seq_len=128,
    packing=False,
    activations="keep",
    mixed_precision="bf16",
    dtype="bfloat16",
    attention="sdpa",
    learning_rate=1e-4,
    steps_per_epoch=10,
    total_steps=10,
    device="cuda",
)


CONFIG = config_file(2)


def changed(**values):
    return {**read_config(CONFIG), **values}


@pytest.mark.parametrize(("stage", "other"), [(2, 3), (3, 2)])
def test_the_shipped_file_fits_any_plan_of_its_stage_alone(stage, other):
    plan = plan_with(PLAN, engine=f"deepspeed_z{stage}")
    check_config(read_config(config_file(stage)), plan, stage, max_grad_norm=1.0)
    said = rf"stage is {other}, but must be {stage} \(the engine deepspeed_z{stage} is ZeRO"
    with pytest.raises(ConfigError, match=said):
        check_config(read_config(config_file(other)), plan, stage, max_grad_norm=1.0)


def test_numbers_that_agree_with_the_plan_are_allowed():
    agreed = dict(
        train_batch_size=8,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
    )
    check_config(changed(**agreed), PLAN, 2, max_grad_norm=1.0)
    for name, value in agreed.items():
        with pytest.raises(ConfigError, match=f"{name} is {3 * value}"):
            check_config(changed(**agreed | {name: 3 * value}), PLAN, 2, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"train_batch_size": 16},
            r"train_batch_size is 16, but must be 8 \(1 x 4 x 2 processes\) or \"auto\"",
        ),
        (
            {"train_micro_batch_size_per_gpu": "2"},
            'train_micro_batch_size_per_gpu: "2" is a string; write the number',
        ),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1, but must be 4"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping is 0.5, but must be 1.0 \(train.max_grad_norm\)"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True, but must be False"),
        ({"zero_optimization": {"stage": 3}}, "stage is 3, but must be 2"),
        ({"zero_optimization": {}}, "stage is missing"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
            'reduce_bucket_size: "5e8" is a string',
        ),
        ({"optimizer": {"type": "Adam"}}, "remove this section and set train.optimizer"),
        (
            {
                "zero_optimization": {
                    "stage": 2,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"},
                }
            },
            "/nowhere is not a folder",
        ),
    ],
)
def test_what_contradicts_the_plan_is_refused_before_the_launch(values, message):
    with pytest.raises(ConfigError, match=message):
        check_config(changed(**values), PLAN, 2, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offload_param", {"device": "cpu"}, "remove it; parallel.offload=ram does that"),
        ("zero_hpz_partition_size", 8, "remove it; no plan knows"),
    ],
)
def test_what_zero3_could_do_and_no_plan_knows_is_refused(name, value, message):
    tree = read_config(config_file(3))
    tree["zero_optimization"][name] = value
    with pytest.raises(ConfigError, match=message):
        check_config(tree, plan_with(PLAN, engine="deepspeed_z3"), 3, max_grad_norm=1.0)


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        check_config(changed(train_batch_size=16, gradient_clipping="1"), PLAN, 2, max_grad_norm=1.0)
    assert str(caught.value).count("\n") == 2


def test_buckets_are_no_larger_than_what_is_trained():
    zero = checked_config(CONFIG, PLAN, 2, max_grad_norm=1.0, trainable_parameters=1000)["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"], zero["stage"]) == (1000, 1000, 2)
    whole = checked_config(CONFIG, PLAN, 2, max_grad_norm=1.0, trainable_parameters=10**12)[
        "zero_optimization"
    ]
    assert whole == json.loads(CONFIG.read_text())["zero_optimization"] and whole["overlap_comm"]
    assert not zero["overlap_comm"]  # there is nothing to overlap with, and it would cost a second bucket


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "expected a JSON object")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(path)
