"""docs/reference/cookbook.md says what the plans say now."""

from benchmarks.cookbook import MACHINES, MODELS, PAGE, model_rows


def rows_of(table):
    """The cells of a Markdown table, without its head."""
    return [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")][2:]


def test_the_page_is_what_is_planned_now():
    tables = dict(table.split(" (", 1) for table in PAGE.read_text().split("\n## ")[1:])
    machines = (("RTX 4090", 1), ("RTX 4090", 2))
    for (name, gpus), cells in model_rows(MODELS[0], machines, ("lora",)).items():
        (row,) = (
            row for row in rows_of(tables[f"{gpus} x {name}" if gpus > 1 else name]) if row[0] == cells[0]
        )
        assert row[2] == cells[1], "run: make cookbook"


def test_every_machine_has_a_row_for_every_model():
    tables = PAGE.read_text().split("\n## ")[1:]
    assert len(tables) == len(MACHINES)
    for table in tables:
        assert [row[0] for row in rows_of(table)] == [model.partition("/")[2] for model in MODELS]
