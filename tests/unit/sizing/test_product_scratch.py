"""The rule of what a CPU's 16-bit products take: found from measurements, counted in the trace."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.steps import step_of
from sft_play.config.schema import RunConfig
from sft_play.planning.explain import scratch_reasons
from sft_play.sizing import step
from sft_play.sizing.meters import product_scratch
from sft_play.sizing.meters.product_scratch import LARGE, MEASURED, Product, ScratchRule, bounded, rule_of
from sft_play.sizing.step import JoinedRows
from sft_play.sizing.trace.trace import trace_step
from tests.plans import plan_with
from tests.unit.sizing.test_cpu_kernels import allocated, peak, recorded
from tests.unit.train.plans import PLAN

# A Xeon with AVX-512 but without its bf16 instructions: an fp32 accumulator, and 128 or 256 bytes.
CASCADE_LAKE = {(300, 96): 115_328, (64, 96): 24_704, (300, 1000): 1_200_256}
TOKENS = 1000


def test_accumulators_in_fp32_are_found():
    measured = [(Product(m, 64, n), size) for (m, n), size in CASCADE_LAKE.items()]
    rule = rule_of(measured)
    assert (rule.result, rule.first, rule.second) == (4, 0, 0) and rule.holds
    for sizes, size in measured:
        assert abs(rule.bytes(sizes) - size) <= 128


def test_any_mixture_of_copies_is_found_and_noise_of_cache_lines_is_no_matter():
    pick = random.Random(seed := random.randrange(10**6))
    for weights in ((0, 0, 0), (4, 0, 0), (0, 2, 2), (4, 2, 0), (2, 0, 4)):
        true = ScratchRule(*weights, constant=pick.choice((0, 128, 4096)))
        measured = [(sizes, true.bytes(sizes) + 64 * pick.randrange(3)) for sizes in MEASURED]
        found = rule_of(measured)
        assert (found.result, found.first, found.second) == weights and found.holds, f"seed {seed}"


def test_a_processor_that_follows_no_rule_says_by_how_much():
    rule = rule_of([(sizes, 7 * sizes.m * sizes.n**2) for sizes in MEASURED])
    assert not rule.holds and rule.worst > 0.1


def test_scratch_of_blocks_has_a_bound_and_that_of_whole_matrices_has_none():
    """Of blocks as on a Zen 4 with one thread, where 2 bytes for each element would count 32 MiB for a layer."""
    rule = ScratchRule(0, 2, 0, 17_470, worst=0.41)
    blocks = dict(zip(LARGE, ((132_096, 1_393_792), (1_721_472, 1_393_792)), strict=True))
    found = bounded(rule, [(sizes, taken) for sizes, both in blocks.items() for taken in both])
    assert found == replace(rule, most=1_721_472)
    assert found.bytes(Product(8192, 2048, 2048)) == 1_721_472
    assert found.bytes(MEASURED[0]) == rule.bytes(MEASURED[0])
    for weights in ((2, 0, 0), (0, 2, 0), (0, 0, 2)):
        copies = ScratchRule(*weights, constant=1000)
        assert bounded(rule, [(sizes, copies.bytes(sizes)) for sizes in LARGE]) == rule


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["mm", "addmm", "bmm"])
@pytest.mark.parametrize("sizes", [(190, 130, 270), (1500, 700, 1000)], ids=["small", "large"])
def test_products_on_this_processor_take_what_its_rule_says(name, sizes):
    """Of sizes that were not measured, in one thread; where nothing is needed, of AVX2 for example, nothing."""
    rules = product_scratch.product_scratch("bfloat16", 1)
    rule = dict(rules).get(name, ScratchRule(0, 0, 0, 0))
    m, k, n = sizes
    batch = (3,) if name == "bmm" else ()
    tensors = [torch.ones((*batch, *shape), dtype=torch.bfloat16) for shape in ((m, k), (k, n))]
    bias = [torch.ones(n, dtype=torch.bfloat16)] if name == "addmm" else []
    operation = getattr(torch, name)
    real = peak(allocated(operation, *bias, *tensors))
    traced = peak(recorded(operation, tensors=[*bias, *tensors], scratch=rules))
    if rule.holds:
        assert traced == pytest.approx(real, abs=512)
    elif rule.most is not None:
        assert traced == pytest.approx(real, abs=rule.most)
    else:
        pytest.skip(f"{name} follows no rule on this processor: off by {rule.worst:.0%}")


def test_the_trace_counts_the_scratch_of_a_rule():
    """As on the Xeon above, where 5% more was measured than is predicted without it."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256,
    )  # fmt: skip
    rules = tuple((name, ScratchRule(4, 0, 0, 128)) for name in ("mm", "addmm", "bmm"))

    def peaks(**changes) -> dict[str, int]:
        spec = step_of(mode="full", batch=JoinedRows(TOKENS), device="cpu", **changes)
        return {name: peak.bytes for name, peak in trace_step(config, spec).step.peaks().items()}

    plain, counted = peaks(mixed_precision="bf16"), peaks(mixed_precision="bf16", scratch=rules)
    for phase in ("backward", "evaluation"):  # a peak that moves to a product grows by less than it takes
        assert 0 < counted[phase] - plain[phase] <= 4 * TOKENS * config.intermediate_size + 128
    assert counted["load"] == plain["load"]
    assert peaks(scratch=rules) == peaks()  # products of fp32 take none


def test_nothing_is_measured_twice_and_another_level_of_onednn_is_another_processor(tmp_path, monkeypatch):
    monkeypatch.setenv("SFT_PLAY_CACHE", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    measured = []

    def found_out(dtype, threads):
        measured.append((dtype, threads))
        return {"mm": ScratchRule(4, 0, 0, 128)}

    monkeypatch.setattr(product_scratch, "_found", found_out)
    found = product_scratch.product_scratch("bfloat16", 2)
    assert found == (("mm", ScratchRule(4, 0, 0, 128)),)
    product_scratch._rules_in.cache_clear()
    assert product_scratch.product_scratch("bfloat16", 2) == found and len(measured) == 1
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    product_scratch.product_scratch("bfloat16", 2)
    product_scratch.product_scratch("float32", 2)
    assert len(measured) == 2
    assert step_of(mode="full", mixed_precision="bf16").on_this_cpu(2).scratch == found


def test_a_plan_says_that_no_rule_describes_the_products_of_its_cpu(monkeypatch):
    rules = (("mm", ScratchRule(4, 0, 0, 0, worst=0.004)), ("bmm", ScratchRule(0, 2, 0, 0, worst=0.3)))
    monkeypatch.setattr(step, "product_scratch", lambda dtype, threads: rules)
    config = RunConfig.model_validate({"model": {"name": "m"}, "data": {"train_path": "t"}})
    on_cpu = plan_with(PLAN, device="cpu", mixed_precision="bf16")
    assert tuple(map(str, scratch_reasons(config, on_cpu, 1))) == (
        "scratch of bfloat16 products follows no rule on this CPU, off by 30%",
    )
    blocks = (("mm", ScratchRule(0, 2, 0, 0, worst=0.3, most=3 * 2**20)),)
    monkeypatch.setattr(step, "product_scratch", lambda dtype, threads: blocks)
    assert tuple(map(str, scratch_reasons(config, on_cpu, 1))) == (
        "scratch of bfloat16 products follows no rule on this CPU; no product takes more than 3.00 MiB",
    )
    monkeypatch.setattr(step, "product_scratch", lambda dtype, threads: rules[:1])
    assert (
        scratch_reasons(config, on_cpu, 1) == scratch_reasons(config, replace(PLAN, device="cuda"), 1) == []
    )
