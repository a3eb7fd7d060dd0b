"""The speed benchmark without a GPU: both sides train the same rows for real; medians are computed."""

import pytest
import torch

from benchmarks import throughput, throughput_sides
from benchmarks.throughput import QUICK, make_rows, measure_side
from benchmarks.throughput_sides import SIDES, summary
from sft_play.choices.kernels import Option

CPU = torch.device("cpu")
LORA, _, FULL = QUICK


def test_rows_are_the_same_each_time_and_within_the_length_that_is_asked_for():
    rows = make_rows(LORA, 300)
    assert rows["input_ids"] == make_rows(LORA, 300)["input_ids"]
    assert len(rows) == LORA.rows * LORA.steps and max(rows["length"]) <= LORA.max_seq_len
    assert len(set(rows["length"])) > 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("course", "side"),
    [(LORA, "sft-play"), (LORA, "trl"), (FULL, "sft-play"),
     *(pytest.param(LORA, side, marks=pytest.mark.slow) for side in ("adamw_8bit", "compiled"))],
)  # fmt: skip
def test_all_sides_train_for_real(course, side):
    found = measure_side(course, side, CPU)
    assert found["problem"] is None and len(found["step_seconds"]) == course.steps
    timed = sum(found["step_seconds"][1:])
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / timed, rel=0.01)
    tokens = sum(make_rows(course, 300)["length"])
    assert 0 < found["tokens"] < tokens and found["mfu"] is None  # nobody knows the peak of this CPU
    assert found["settings"]["packing"] is (course is LORA and side != "trl")


def test_a_side_that_breaks_is_a_result(monkeypatch):
    def breaks(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(throughput, "our_side", breaks)
    assert measure_side(LORA, "sft-play", CPU) == {
        "problem": "OutOfMemoryError: CUDA out of memory. Tried to allocate"
    }


def test_medians_leave_out_what_broke():
    def turn(side, speed, problem=None):
        values = {"tokens_per_second": speed, "mfu": None, "peak_bytes": 10}
        return {"course": "a", "side": side, "problem": problem} | (values if problem is None else {})

    rows = [
        turn("sft-play", 30.0),
        turn("trl", 10.0),
        turn("sft-play", 50.0),
        turn("trl", 0.0, "broken"),
        turn("sft-play", 40.0),
    ]
    (entry,) = summary(rows)
    assert entry["sft-play"] == {"rounds": 3, "tokens_per_second": 40.0, "mfu": None, "peak_bytes": 10}
    assert entry["trl"]["rounds"] == 1 and entry["times_as_fast"] == 4.0
    assert summary([turn("trl", 0.0, "broken")])[0]["times_as_fast"] is None


def test_a_choice_is_compared_with_ours():
    def turn(side, speed):
        return {"course": "a", "side": side, "problem": None, "tokens_per_second": speed, "mfu": None,
                "peak_bytes": 10}  # fmt: skip

    (entry,) = summary([turn("sft-play", 20.0), turn("liger", 25.0)])
    assert entry["liger"]["times_as_fast"] == 1.25 and "adamw_8bit" not in entry


def test_a_choice_is_a_side_only_where_it_runs_and_the_others_say_why(monkeypatch):
    assert throughput_sides.sides("cpu", "full") == (*SIDES, "compiled", "adamw_8bit")
    monkeypatch.setattr(Option, "is_installed", lambda row: False)
    monkeypatch.setattr(throughput_sides, "is_installed", lambda row: "kernels" in row.modules)
    assert throughput_sides.left_out("cuda", (9, 0)) == {
        "liger": "run `make install EXTRAS=liger`",
        "float8": "run `make install EXTRAS=float8`",
        "flash_attention_2": "needs a package that has flash_attn",
    }
    assert throughput_sides.left_out("cuda", (8, 0))["float8"] == "has no kernels for this GPU"
    monkeypatch.setattr(Option, "is_installed", lambda row: True)
    assert throughput_sides.sides("cuda", "full", (9, 0)) == (
        *SIDES, "liger", "compiled", "float8", "flash_attention_3", "adamw_8bit",
    )  # fmt: skip
    assert throughput_sides.sides("cuda", "lora", (9, 0)) == (
        *SIDES, "liger", "compiled", "flash_attention_3", "adamw_8bit",
    )  # fmt: skip
    assert throughput_sides.sides("cuda", "qlora", (12, 0)) == (*SIDES, "liger", "adamw_8bit")
    assert throughput_sides.sides("cuda", "full", (6, 1)) == (*SIDES, "adamw_8bit")


@pytest.mark.parametrize("choice", throughput_sides.CHOICES)
def test_each_choice_is_a_config(choice, tmp_path):
    (course,) = (course for course in QUICK if course.mode == "full")
    rows = make_rows(course, 300)
    config = throughput.run_config(course, rows, tmp_path, **throughput_sides.CHOICES[choice])
    assert config != throughput.run_config(course, rows, tmp_path)
