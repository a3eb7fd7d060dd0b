"""Which profile a device has: measured once, then from the cache; shipped; else from the data sheet."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console

from sft_play.config.schema import RunConfig
from sft_play.machine.gpus import Machine, what_if
from sft_play.machine.host import Host
from sft_play.plan import EARLIER
from sft_play.planning.explain import profile_reasons
from sft_play.planning.speed import devices, measurement
from sft_play.planning.speed.profile import Curve, derived_from_data_sheet
from sft_play.reasons.evidence import SECONDS_OF_EARLIER_RUN, communication, only_while_busy

HOST = Host(
    cpu_model="Some CPU @ 2 GHz", cpu_cores=2, cpu_bf16=None, ram_total_bytes=None, ram_free_bytes=None, ram_limited=False
)  # fmt: skip
CPU = Machine(gpus=(), note="", host=HOST)
IMAGINED = what_if("H100 80GB", 8)
H100S = replace(IMAGINED, what_if=False)  # as if they were here


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def made(name, threads=None):
    return replace(
        derived_from_data_sheet(name, "cpu", 40e9, 8e9), measured=True, source="measured", threads=threads
    )


def test_the_second_time_the_cache_answers(monkeypatch):
    calls = []
    monkeypatch.setattr(measurement, "measure", lambda *args, **_: calls.append(args) or made(*args))
    first, second = (devices.saved_profile(CPU, 1) for _ in range(2))
    assert first == second and calls == [("Some CPU @ 2 GHz", 2)]
    assert devices.profile_of(CPU, 1) == first
    devices.saved_profile(CPU, 2)  # other threads are another device
    devices.saved_profile(CPU, 1, again=True)
    assert len(calls) == 3


def test_what_was_measured_on_a_busy_machine_counts_in_no_plan_and_is_measured_again_once_it_is_idle(
    monkeypatch,
):
    shares, percent = iter([0.4, 0.0]), 60.0
    monkeypatch.setattr(measurement, "measure", lambda *args, **_: replace(made(*args), busy=next(shares)))
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: percent)
    assumed, busy = devices.derived_profile(CPU, 1), only_while_busy("Some CPU @ 2 GHz")
    profile = "seconds from the profile of Some CPU @ 2 GHz, "
    for _ in range(2):  # the second time it is still busy
        assert devices.saved_profile(CPU, 1).busy == 0.4
        assert devices.profile_of(CPU, 1) == assumed
        assert devices.profile_of(CPU, 2) == devices.derived_profile(CPU, 2)  # nor is it shared by processes
        assert profile_reasons(CPU, 1) == [f"{profile}assumed, not measured", busy]
        assert profile_reasons(CPU, 1, EARLIER) == [SECONDS_OF_EARLIER_RUN, busy]
        assert busy in profile_reasons(CPU, 2)
    percent = 2.0
    assert devices.saved_profile(CPU, 1).busy == 0.0
    assert devices.profile_of(CPU, 1) == devices.read_profile("Some CPU @ 2 GHz", 2) != assumed
    assert profile_reasons(CPU, 1) == [f"{profile}measured"]
    assert busy not in profile_reasons(CPU, 2)


def test_a_gpu_of_unknown_speed_that_was_measured_while_busy_has_no_seconds_and_the_plan_says_why():
    unknown = replace(H100S, gpus=(replace(H100S.gpus[0], tflops=None),))
    name = devices.device_name(unknown)
    devices.write_profile(name, None, replace(made(name), busy=0.4))
    assert devices.profile_of(unknown, 1) is None
    assert profile_reasons(unknown, 1) == [only_while_busy(name)]


def test_a_program_beside_the_measurement_is_noticed():
    count = max(1, (psutil.cpu_count() or 1) // 2)
    other = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        psutil.cpu_percent()
        began = measurement.now()
        time.sleep(0.5)
        assert measurement.used_by_others(began) > devices.BUSY
    finally:
        for each in other:
            each.kill()
            each.wait()


def without_sixteen_bit(profile):
    return replace(profile, products={"float32": profile.products["float32"]})


@pytest.mark.parametrize("busy", [0.0, 0.5])
def test_products_of_16_bit_numbers_are_measured_for_the_first_run_that_computes_in_them(monkeypatch, busy):
    grid = made("").products["bfloat16"]

    def measure(*args, sixteen_bit):
        return made(*args) if sixteen_bit else without_sixteen_bit(made(*args))

    def run(precision):
        sections = {
            "model": {"name": "m"},
            "data": {"train_path": "x"},
            "train": {"mixed_precision": precision},
        }
        return RunConfig.model_validate(sections)

    monkeypatch.setattr(measurement, "measure", measure)
    monkeypatch.setattr(measurement, "measured_products", lambda *_: grid)
    monkeypatch.setattr(measurement, "POOL_BYTES", {"cpu": 1 << 20})
    devices.ensure_profile(run("auto"), CPU, 1)
    first = devices.profile_of(CPU, 1)
    monkeypatch.setattr(measurement, "used_by_others", lambda began: busy)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval=None: 100 * busy)
    devices.ensure_profile(run("bf16"), CPU, 1)
    whole = replace(first, products={**first.products, "bfloat16": grid})
    assert set(first.products) == {"float32"}
    assert devices.profile_of(CPU, 1) == (devices.derived_profile(CPU, 1) if busy else whole)


def test_what_was_not_measured_for_several_processes_comes_from_one():
    name, whole = "Some CPU @ 2 GHz", made("Some CPU @ 2 GHz", 2)
    own = without_sixteen_bit(made(name, 1))
    for profile in (whole, own):
        devices.write_profile(name, profile.threads, profile)
    found = devices.profile_of(CPU, 2).products
    assert found == own.products | {
        kind: whole.shared_by(2).products[kind] for kind in ("bfloat16", "float16")
    }


def test_processes_with_less_than_a_core_each_are_slower_by_as_much():
    name = "Some CPU @ 2 GHz"
    own = made(name, 1)
    devices.write_profile(name, 1, own)
    host = replace(CPU.host, cpu_cores=2)
    two, four = (devices.profile_of(replace(CPU, host=host), count) for count in (2, 4))
    assert two == own
    assert four.step_s == 2 * own.step_s and four.call_forward_s == 2 * own.call_forward_s
    assert four.products["float32"].seconds == tuple(2 * each for each in own.products["float32"].seconds)


def test_without_a_measurement_the_data_sheet_counts_and_says_so():
    found = devices.profile_of(CPU, 1)
    assert not found.measured and "not measured" in found.source
    unknown = replace(H100S.gpus[0], tflops=None)
    assert devices.profile_of(replace(CPU, gpus=(unknown,)), 1) is None


def test_what_others_have_measured_counts_before_the_data_sheet():
    sheet, seen = (
        devices.derived_profile(replace(H100S, gpus=(gpu,)), 1)
        for gpu in (replace(H100S.gpus[0], matmul_tflops=None), replace(H100S.gpus[0], matmul_tflops=800))
    )
    large = np.array([8192])
    rates = [2 * 8192**3 / found.products["bfloat16"].at(large, large, large)[0] for found in (sheet, seen)]
    assert rates == pytest.approx([0.7 * 989.5e12, 0.9 * 800e12], rel=0.01)
    assert devices.peak_flops(H100S) == 989.5e12 and devices.peak_flops(CPU) is None


def test_processes_share_what_was_measured_for_one():
    whole = made("Some CPU @ 2 GHz", 2)
    devices.write_profile("Some CPU @ 2 GHz", 2, whole)
    assert devices.profile_of(CPU, 2) == whole.shared_by(2)


def measured(seconds):
    curve = Curve((1e4, 1e6), (seconds, seconds))
    return devices.Collectives(curve, curve, curve)


def test_communication_is_as_measured_for_that_many_processes_else_as_the_data_sheet_says(monkeypatch):
    assert devices.collectives_of(CPU, 2) is None
    assert not devices.collectives_of(H100S, 2).measured
    for name in (devices.device_name(CPU), devices.device_name(H100S)):
        devices.write_collectives(name, 4, measured(0.4))
        devices.write_collectives(name, 2, measured(0.2))
    assert devices.collectives_of(H100S, 2) == measured(0.2) == devices.collectives_of(CPU, 2)
    assert devices.collectives_of(CPU, 4) == measured(0.4)
    assert devices.collectives_of(CPU, 8) is None and devices.collectives_of(H100S, 1) is None
    assert not devices.collectives_of(H100S, 8).measured and not devices.collectives_of(IMAGINED, 2).measured
    assert devices.read_collectives(devices.device_name(CPU)) == {2: measured(0.2), 4: measured(0.4)}
    monkeypatch.setattr(measurement, "measure", lambda *args, **_: made(*args))
    devices.saved_profile(CPU, 1, again=True)
    assert devices.read_collectives(devices.device_name(CPU)) == {}


@pytest.mark.parametrize("text", ["{", '{"2": 1}'])
def test_damaged_measurements_are_none(text):
    for path in (devices.collectives_path("x"), devices.profile_path("x", 1)):
        path.parent.mkdir()
        path.write_text(text)
    assert devices.read_collectives("x") == {} and devices.read_profile("x", 1) is None


def test_the_plan_says_where_the_seconds_of_communication_come_from():
    alone, pair = profile_reasons(CPU, 1), profile_reasons(CPU, 2)
    assert len(alone) == 1
    assert pair[1] == communication(2, (), measured=False, measured_later=True)
    devices.write_collectives(devices.device_name(CPU), 2, measured(0.2))
    assert profile_reasons(CPU, 2)[1] == "communication: as measured between 2 processes here"
    sheet = profile_reasons(what_if("H100 80GB", 8), 8)[1]
    assert re.fullmatch(r"communication: derived from the data sheet \(.* GB/s .*\), not measured", sheet)


def test_this_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(measurement, "GRID_S", 0.2)
    monkeypatch.setattr(measurement, "STRETCHES", (1 << 14, 1 << 20))
    monkeypatch.setattr(measurement, "LENGTHS", (64, 128, 256))
    monkeypatch.setattr(measurement, "used_by_others", lambda began: 0.43)
    found = measurement.measure("this one", 1)
    assert found.measured and found.threads == 1
    assert found.source == "measured while busy, so no plan uses it" and found.busy == 0.43
    assert found.call_forward_s > 0 and found.update_element_s > 0 and found.unpack_s > 0
    assert set(found.products) == {"float32", "bfloat16"}
    from sft_play.report.profile import profile_report

    console = Console(width=100, record=True)
    curve = {"sizes": [1 << 14, 1 << 18], "seconds": [0.001, 0.0125]}
    pairs = {"2": {"all_reduce": curve, "all_gather": curve, "reduce_scatter": curve}}
    console.print(profile_report(json.loads(found.to_json()) | {"collectives": pairs}))
    said = console.export_text()
    assert (
        "43% of the CPU" in said
        and "this one" in said
        and "all-reduce between 2 processes" in said
        and "12.50" in said
        and "one side 8" in said
        and "64 tokens" in said
    )


@pytest.mark.parametrize(("kind", "free"), [("cpu", 1 << 30), ("cpu", 1 << 40), ("cuda", None)])
def test_the_pool_of_operands_holds_the_largest_product_and_the_longest_stretch(kind, free):
    largest = measurement.SIDES[kind][-1]
    assert measurement.pool_bytes(kind, free) >= max(3 * largest**2 * 4, measurement.STRETCHES[-1])


def test_operands_of_any_size_come_from_the_smallest_pool(monkeypatch):
    monkeypatch.setattr(measurement, "POOL_SHARE", 0.0)
    operands = measurement.Operands(torch.device("cpu"))
    side = measurement.SIDES["cpu"][-1]
    for dtype in (torch.float32, torch.bfloat16):
        turn = operands.turns(dtype, (side, side), (side, side), (side, side))
        assert [tensor.shape for tensor in turn()] == [(side, side)] * 3
    turn = operands.turns(torch.float32, (8, 8))
    assert turn()[0].data_ptr() != turn()[0].data_ptr()  # each call has another place
