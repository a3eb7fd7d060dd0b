from dataclasses import replace

import pytest

from sft_play.config.schema import RunConfig
from sft_play.plan import Memory
from sft_play.reasons.evidence import ran_out_before
from sft_play.sizing import step
from sft_play.sizing.estimate import corrections
from sft_play.sizing.estimate.corrections import (
    ProbeResult,
    RanOut,
    Record,
    corrected,
    corrected_estimator,
    ratios_of,
    read_overhead,
    read_record,
    reasons_of,
    record_path,
    records_of,
    run_ratios,
    write_overhead,
    write_ran_out,
    write_record,
)
from tests.plans import plan_with
from tests.unit.train.plans import PLAN

CONFIG = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "t"}})
MEMORY = Memory(
    budget_bytes=1000,
    peak_bytes=300,
    peak_phase="backward",
    phases={"load": 100, "forward": 200, "backward": 300, "evaluation": 250},
    terms={"weights": 100, "activations": 150, "temporaries": 50},
    reserved_bytes=320,
)
MEASURED = {"load": 101, "forward": 210, "backward": 340, "evaluation": 260}
PROBED = ProbeResult(phases=MEASURED, expected=MEMORY.phases)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _bytes_of_these_tests_count(monkeypatch):
    monkeypatch.setattr(corrections, "NOISE_BYTES", 0)


def test_a_correction_makes_the_prediction_what_was_measured():
    after = corrected(MEMORY, ratios_of(MEMORY, PROBED, {}))
    assert {phase: after.phases[phase] for phase in ("forward", "backward", "evaluation")} == {
        "forward": 210, "backward": 340, "evaluation": 260,
    }  # fmt: skip
    assert (after.peak_bytes, after.peak_phase, after.reserved_bytes) == (340, "backward", 360)
    assert sum(after.terms.values()) == 340
    assert corrected(MEMORY, {}) is MEMORY
    assert (MEMORY.origin, after.origin) == ("trace", "earlier run")


def test_the_terms_of_each_phase_add_up_to_it_also_after_a_correction():
    by_phase = {phase: {"weights": 100, "activations": size - 100} for phase, size in MEMORY.phases.items()}
    after = corrected(replace(MEMORY, phase_terms=by_phase), {"forward": 1.1, "backward": 0.5})
    assert {phase: sum(terms.values()) for phase, terms in after.phase_terms.items()} == after.phases
    assert after.phase_terms["backward"] == {"weights": 100, "activations": 200, "temporaries": -100}


def test_the_weights_are_not_stretched():
    assert corrected(MEMORY, {"forward": 2.0}).phases == {
        "load": 100,
        "forward": 300,
        "backward": 300,
        "evaluation": 250,
    }


def test_a_correction_of_a_corrected_prediction_starts_from_the_plain_one():
    result = replace(PROBED, reserved_bytes=400)
    first = ratios_of(MEMORY, result, {})
    corrected_once = corrected(MEMORY, first)
    result = replace(result, expected=corrected_once.phases)
    again = ratios_of(corrected_once, result, first)
    assert again == pytest.approx(first)


def test_reserved_bytes_are_corrected_by_what_was_reserved():
    result = replace(PROBED, reserved_bytes=400)
    assert corrected(MEMORY, ratios_of(MEMORY, result, {})).reserved_bytes == 400


def test_a_probe_is_compared_with_the_prediction_for_what_it_probed_alone():
    """Another micro-batch of the run has the highest peak: the prediction for it stays as it is."""
    smaller = replace(PROBED, phases=MEASURED | {"backward": 250}, expected=MEMORY.phases | {"backward": 250})
    assert corrected(MEMORY, ratios_of(MEMORY, smaller, {})).phases["backward"] == 300
    assert ratios_of(MEMORY, replace(PROBED, expected={}), {}) == {}  # what was probed is not known


def test_only_a_whole_run_lowers_a_prediction():
    low = replace(PROBED, phases=dict.fromkeys(MEASURED, 150), reserved_bytes=150)
    assert corrected(MEMORY, ratios_of(MEMORY, low, {})) is MEMORY
    ratios = run_ratios(MEMORY, 240, 250, {})
    after = corrected(MEMORY, ratios)
    assert after.phases == {"load": 100, "forward": 200, "backward": 240, "evaluation": 240}
    assert after.reserved_bytes == 250
    assert corrected(MEMORY, run_ratios(after, 300, 320, ratios)) == after  # it raises none
    assert corrected(MEMORY, ratios_of(after, replace(low, expected=after.phases), ratios)) == after
    higher = replace(PROBED, expected=after.phases)
    assert corrected(MEMORY, ratios_of(after, higher, ratios)).phases["backward"] == 340


def test_next_to_nothing_corrects_nothing(monkeypatch):
    monkeypatch.setattr(corrections, "NOISE_BYTES", 50)
    assert ratios_of(MEMORY, PROBED, {}) == {}
    for times, found in ((1.004, []), (1.006, ["backward", "evaluation", "forward"])):
        large = {name: 10_000 * size for name, size in MEMORY.phases.items()}
        measured = {name: round(times * size) for name, size in large.items()}
        result = ProbeResult(phases=measured, expected=large)
        assert sorted(ratios_of(replace(MEMORY, phases=large), result, {})) == found


@pytest.mark.parametrize(
    ("reserved", "overhead", "fits"),
    [(None, None, True), (900, 50, True), (900, 150, False), (950, None, True), (960, None, False)],
)
def test_what_fits_is_the_process_and_on_a_cpu_the_tensors(reserved, overhead, fits):
    memory = replace(MEMORY, terms=MEMORY.terms | {"context": 45})
    result = replace(PROBED, reserved_bytes=reserved, overhead_bytes=overhead)
    assert result.fits(replace(PLAN, memory=memory)) == fits
    assert not replace(result, ran_out=True).fits(replace(PLAN, memory=memory))


def test_what_a_probe_measured_corrects_the_next_prediction_of_its_kind_alone(tmp_path, monkeypatch):
    plan = replace(PLAN, memory=MEMORY)
    path = record_path("{}", "card", CONFIG, plan)
    write_record(path, plan, PROBED)
    ask = corrected_estimator(lambda run, p, complete=False: MEMORY, records_of("{}", "card"))
    assert ask(CONFIG, plan_with(plan, micro_batch_size=1, gradient_accumulation_steps=64)).peak_bytes == 340
    assert ask(CONFIG, plan_with(plan, activations="recompute")).peak_bytes == 300
    assert record_path("{}", "another card", CONFIG, plan) != path
    assert record_path('{"layers": 2}', "card", CONFIG, plan) != path
    monkeypatch.setattr(step, "SOURCES", (tmp_path,))  # another predictor
    assert record_path("{}", "card", CONFIG, plan) != path


def test_without_a_prediction_or_a_measurement_no_ratio_is_kept(tmp_path):
    write_record(tmp_path / "a.json", replace(PLAN, memory=None), PROBED)
    write_record(tmp_path / "b.json", replace(PLAN, memory=MEMORY), ProbeResult(ran_out=True))
    assert read_record(tmp_path / "a.json") == read_record(tmp_path / "b.json") == Record()


def of_tokens(tokens: int):
    return plan_with(PLAN, micro_batch_tokens=tokens, memory=MEMORY)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"ratios": {"forward": "x"}}', '{"ratios": 3}', '{"ratios": {"forward": -1}}']
)
def test_a_record_that_cannot_be_read_corrects_nothing(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    assert read_record(tmp_path / "r.json").ratios == {}


def test_the_highest_rank_counts():
    ranks = [
        ProbeResult(phases={"forward": 1, "backward": 5}, step_seconds=1.0),
        ProbeResult(phases={"forward": 2}, step_seconds=3.0),
    ]
    whole = ProbeResult.of_all(ranks)
    assert (whole.phases, whole.step_seconds, whole.ran_out) == ({"forward": 2}, 3.0, False)
    assert ProbeResult.of_all([*ranks, ProbeResult(ran_out=True)]).ran_out


def test_a_plan_fits_if_the_peak_is_within_the_budget_and_memory_did_not_run_out():
    plan = replace(PLAN, memory=MEMORY)
    assert ProbeResult(phases={"forward": 1000}).fits(plan)
    assert not ProbeResult(phases={"forward": 1001}).fits(plan)
    assert not ProbeResult(ran_out=True).fits(plan)
    assert ProbeResult(phases={"forward": 10**12}).fits(replace(plan, memory=None))


def test_only_a_correction_of_the_peak_is_talked_about():
    assert reasons_of(Record(), PLAN, MEMORY) == []
    assert reasons_of(Record({"forward": 1.1}), PLAN, MEMORY) == []  # the peak is in the backward pass
    assert reasons_of(Record({"backward": 1.1}), PLAN, MEMORY) == [
        "corrected by an earlier probe of such a step: memory beyond the weights x 1.100"
    ]


def test_what_a_gpu_takes_beside_tensors_is_kept_by_gpu_driver_and_whether_there_is_a_communicator():
    assert read_overhead("card", "580", 1) is None
    write_overhead("card", "580", 1, 500)
    write_overhead("card", "580", 1, 400)
    assert read_overhead("card", "580", 1) == 500
    for other in (("card", "580", 2), ("other", "580", 1), ("card", "590", 1), ("card", None, 1)):
        assert read_overhead(*other) is None
    write_overhead("card", "580", 8, 900)
    assert read_overhead("card", "580", 2) == 900


def with_budget(size: int):
    return replace(MEMORY, budget_bytes=size)


def test_memory_that_ran_out_is_a_verdict_on_such_plans_and_adds_nothing_to_what_they_need(tmp_path):
    path = tmp_path / "r.json"
    plan = of_tokens(1000)
    write_ran_out(path, plan)
    record = read_record(path)
    ask = corrected_estimator(lambda run, p, complete=False: MEMORY, lambda run, p: record)
    assert ask(CONFIG, plan) == ask(CONFIG, of_tokens(2000)) == replace(MEMORY, ran_out=True)
    assert MEMORY.fits and not ask(CONFIG, plan).fits and ask(CONFIG, plan).within_budget
    assert ask(CONFIG, of_tokens(999)) == MEMORY
    write_record(path, of_tokens(500), PROBED)
    assert read_record(path).ran_out == RanOut(1000, 1000) and read_record(path).ratios


@pytest.mark.parametrize(("budget", "applies"), [(500, True), (1000, True), (1050, True), (1200, False)])
def test_the_verdict_holds_until_clearly_more_memory_is_free(budget, applies):
    assert RanOut(1000, 1000).applies_to(of_tokens(1000), with_budget(budget)) == applies


def test_the_smallest_micro_batch_that_ran_out_counts(tmp_path):
    path = tmp_path / "r.json"
    write_record(path, of_tokens(500), PROBED)
    for tokens, used in ((1000, 0), (800, 1500), (900, 0)):
        write_ran_out(path, of_tokens(tokens), used)
    assert read_record(path).ran_out == RanOut(800, 1500) and read_record(path).ratios


def test_what_ran_out_with_clearly_more_memory_is_news_also_of_a_larger_micro_batch(tmp_path):
    path = tmp_path / "r.json"
    for tokens, budget in ((800, 1000), (900, 5000)):
        write_ran_out(path, replace(of_tokens(tokens), memory=with_budget(budget)))
    assert read_record(path).ran_out == RanOut(900, 5000)


@pytest.mark.parametrize(
    ("tokens", "memory", "outcome"),
    [
        (500, MEMORY, "smaller"),
        (800, with_budget(5000), "more_free"),
        (800, replace(MEMORY, ran_out=True), "again"),
    ],
)
def test_a_plan_says_what_it_makes_of_memory_that_ran_out(tokens, memory, outcome):
    record = Record(ran_out=RanOut(800, 1000))
    assert reasons_of(record, of_tokens(tokens), memory) == [ran_out_before(800, outcome)]
    assert reasons_of(Record(), of_tokens(tokens), memory) == []


def test_without_a_budget_nothing_is_known_of_what_ran_out(tmp_path):
    write_ran_out(tmp_path / "r.json", replace(of_tokens(1000), memory=None))
    assert read_record(tmp_path / "r.json").ran_out is None


@pytest.mark.parametrize("text", ["", "[]", '{"ran_out": 3}', '{"ran_out": {"micro_batch_tokens": "x"}}'])
def test_a_record_of_running_out_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    assert read_record(tmp_path / "r.json").ran_out is None
