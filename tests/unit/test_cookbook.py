"""docs/reference/cookbook.md says what the plans say now."""

import pytest

from scripts.docs import longest_rows
from scripts.docs.cookbook import COOKBOOK, FEWEST, GPUS, LARGE, MACHINES, MODELS, fewest_rows, model_rows
from scripts.docs.longest_rows import LONGEST, PUBLISHED, long_cells


def rows_of(table):
    """The cells of a Markdown table, without its head."""
    return [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][2:]


@pytest.mark.thorough
def test_the_page_is_what_is_planned_now():
    tables = dict(table.split(" (", 1) for table in COOKBOOK.read_text().split(FEWEST)[0].split("\n## ")[1:])
    machines = (("RTX 4090", 1), ("RTX 4090", 2))
    for (name, gpus), cells in model_rows(MODELS[0], machines, ("lora",)).items():
        (row,) = (
            row for row in rows_of(tables[f"{gpus} x {name}" if gpus > 1 else name]) if row[0] == cells[0]
        )
        assert row[2] == cells[1], "run: make cookbook"


def test_every_machine_has_a_row_for_every_model():
    tables = COOKBOOK.read_text().split(FEWEST)[0].split("\n## ")[1:]
    assert len(tables) == len(MACHINES)
    for table in tables:
        assert [row[0] for row in rows_of(table)] == [model.partition("/")[2] for model in MODELS]


def test_the_fewest_gpus_have_a_row_for_every_model_and_method():
    rows = rows_of(COOKBOOK.read_text().split(FEWEST)[1].split(LONGEST)[0])
    assert [row[0] for row in rows] == [model.partition("/")[2] for model in LARGE for _ in range(3)]


@pytest.mark.slow
def test_the_fewest_gpus_are_what_is_planned_now():
    rows = rows_of(COOKBOOK.read_text().split(FEWEST)[1].split(LONGEST)[0])
    (planned,) = fewest_rows(LARGE[0], ("H100 80GB",), ("lora",))
    column = 2 + GPUS.index("H100 80GB")
    assert next(row for row in rows if row[:2] == planned[:2])[column] == planned[2], "run: make cookbook"


def test_the_longest_rows_have_a_row_for_every_machine_and_all_that_was_published():
    ours, published = COOKBOOK.read_text().split(LONGEST)[1].split("What others have published")
    names = [model.partition("/")[2] for model in longest_rows.MODELS]
    assert [row[0] for row in rows_of(ours)] == [name for name in names for _ in longest_rows.MACHINES]
    assert [row[3] for row in rows_of(published)] == [one.tokens for one in PUBLISHED]


@pytest.mark.slow
def test_the_longest_rows_are_what_is_planned_now():
    ours, _ = COOKBOOK.read_text().split(LONGEST)[1].split("What others have published")
    name = longest_rows.MODELS[0].partition("/")[2]
    cells = long_cells(longest_rows.MODELS[0], "RTX 4090", 1, ("qlora",))
    row = next(row for row in rows_of(ours) if row[:2] == [name, "RTX 4090"])
    assert row[4] == cells["qlora"], "run: make cookbook WHAT=longest"
