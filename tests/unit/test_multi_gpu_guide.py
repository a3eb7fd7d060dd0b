"""The guide's numbers are the planner's, and what it names exists."""

import re
from pathlib import Path

from sft_play.config.schema import RunConfig, TrainConfig
from sft_play.planning.batch import batch_choices, count_steps, scaled_learning_rate

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "MULTI_GPU_GUIDE.md").read_text()
ROWS = 29_500


def table(head: str) -> list[list[str]]:
    """The cells below a header line."""
    lines = TEXT[TEXT.index(head) :].splitlines()[2:]
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append([cell.strip().replace(",", "") for cell in line.strip("|").split("|")])
    return cells


def test_the_effective_batch_stays_as_the_table_says():
    train = TrainConfig(effective_batch_size=64, batch_size=4)
    rows = table("| GPUs | micro-batch |")
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8]
    for row in rows:
        (cut,) = batch_choices(train, int(row[0]), None)
        steps, _ = count_steps(train, ROWS, cut.effective)
        assert list(map(int, row[1:5])) == [cut.micro, cut.accumulation, cut.effective, steps]


def test_the_batch_grows_and_the_learning_rate_follows_as_the_table_says():
    rows = table("| GPUs | effective batch |")
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8]
    for row in rows:
        train = TrainConfig(batch_size=4, grad_accum=1)
        (cut,) = batch_choices(train, int(row[0]), None)
        assert list(map(int, row[1:3])) == [cut.effective, count_steps(train, ROWS, cut.effective)[0]]
        for scaling, cell in zip(("none", "sqrt", "linear"), row[3:], strict=True):
            reference = None if scaling == "none" else 4
            scaled = TrainConfig(learning_rate=1e-4, lr_scaling=scaling, reference_batch_size=reference)
            assert f"{scaled_learning_rate(scaled, cut.effective)[0]:.1e}".replace("e-0", "e-") == cell


def test_files_that_are_named_exist():
    names = sorted(set(re.findall(r"\b(?:configs|scripts)/[\w/]+\.\w+", TEXT)))
    missing = [name for name in names if not (ROOT / name).is_file()]
    assert names and not missing, missing


def test_settings_that_are_named_exist():
    names = sorted(
        set(re.findall(rf"(?<![/\w])({'|'.join(RunConfig.model_fields)})\.([a-z_]+)(?=[=`])", TEXT))
    )
    unknown = [
        f"{section}.{key}"
        for section, key in names
        if key not in RunConfig.model_fields[section].annotation.model_fields
    ]
    assert names and not unknown, unknown


def test_links_lead_somewhere():
    for file, anchor in re.findall(r"\]\(([\w.]+)#([\w-]+)\)", TEXT):
        titles = re.findall(r"^#+ (.*)$", (ROOT / file).read_text(), re.MULTILINE)
        assert anchor in [title.lower().replace(" ", "-") for title in titles]
