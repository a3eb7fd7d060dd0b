"""docs/cookbook.md says what the plans say now."""

from benchmarks.cookbook import MACHINES, MODELS, PAGE, line, model_rows


def test_the_page_is_what_is_planned_now():
    machines = (("RTX 4090", 1), ("H100 80GB", 8))
    sections = PAGE.read_text().split("\n## ")
    for (name, gpus), cells in model_rows(MODELS[0], machines).items():
        title = f"{gpus} x {name} (" if gpus > 1 else f"{name} ("
        (section,) = (part for part in sections if part.startswith(title))
        assert line(cells) in section.splitlines(), "run: make cookbook"


def test_every_machine_has_a_row_for_every_model():
    tables = PAGE.read_text().split("\n## ")[1:]
    assert len(tables) == len(MACHINES)
    for table in tables:
        names = [row.split(" | ")[0].strip("| ") for row in table.splitlines() if row.startswith("| ")][2:]
        assert names == [model.partition("/")[2] for model in MODELS]
