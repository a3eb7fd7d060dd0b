import json

import numpy as np
from PIL import Image

from sft_play.builtin import models, shapes
from sft_play.config.schema import RunConfig
from sft_play.model.load import load_data
from tests.packages import needs_tiles

COUNTS = {"train": 30, "val": 4}


def test_the_same_pictures_are_drawn_again_and_have_their_colours_in_the_middle(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        shapes.write_rows(tmp_path / name, COUNTS, seed=0)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) == sum(COUNTS.values()) + len(COUNTS)
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    seen = set()
    for line in (tmp_path / "one" / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        answer = row["messages"][1]["content"]
        colour = np.asarray(Image.open(tmp_path / "one" / row["images"][0]))[
            shapes.SIDE // 2, shapes.SIDE // 2
        ]
        assert tuple(colour) == shapes.COLOURS[answer.split()[0]]
        seen.add(answer)
    assert seen <= set(shapes.texts()) and len(seen) > 10


@needs_tiles
def test_the_model_of_shapes_sees_each_picture_as_four_tokens(tmp_path):
    shapes.write_rows(tmp_path, COUNTS, seed=0)
    folder = tmp_path / "model"
    assert models.make_shapes_model(folder, shapes.texts(), seed=0)["parameters"] < 300_000
    data = {f"{split}_path": str(tmp_path / f"{split}.jsonl") for split in COUNTS}
    config = RunConfig.model_validate({"model": {"name": str(folder)}, "data": data})
    rows = load_data(config, progress=False).rows
    assert len(rows.train) == 30 and rows.stats["train"]["pictures"] == 30
    assert {picture["fit"]["tokens"] for row in rows.train for picture in row["pictures"]} == {4}
    assert all(row["input_ids"].count(rows.recipe.image_token_id) == 4 for row in rows.train)
