"""Sizes without decoding, what is refused, and pixels equal to the processor's."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.image_utils import load_image

from sft_play.errors import DataError
from sft_play.vision.decoding import decoded, pixels, size_of
from sft_play.vision.types import Picture, picture_lists, pictures_of
from tests.packages import needs_tiles
from tests.pictures import CONFIGS, drawn, encoded, published_recipe, save

ROTATED = Image.Exif()
ROTATED[0x0112] = 6


def picture_at(path, recipe):
    content = path.read_bytes()
    height, width = size_of(content)
    return Picture(str(path), len(content), height, width, recipe.family.fit(height, width))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_the_size_is_read_from_the_file(kind):
    assert size_of(encoded(drawn(30, 70), kind)) == (30, 70)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_rotated_picture_has_the_size_as_it_is_shown(kind):
    content = encoded(drawn(30, 70), kind, exif=ROTATED)
    assert size_of(content) == (70, 30)
    assert decoded(content).size == (30, 70)


def test_a_png_whose_rotation_follows_its_pixels_is_rotated_too():
    content = encoded(drawn(30, 70), "PNG", exif=ROTATED)
    at = content.index(b"eXIf") - 4
    length = 12 + int.from_bytes(content[at : at + 4])
    chunk, end = content[at : at + length], content[-12:]
    moved = content[:at] + content[at + length : -12] + chunk + end
    assert size_of(moved) == (70, 30)
    assert decoded(moved).size == (30, 70)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", "RGBA"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "1"), ("JPEG", "CMYK"), ("JPEG", "L")],
)
def test_pixels_are_those_that_transformers_loads(tmp_path, kind, mode):
    image = drawn(40, 60).convert("RGB").convert(mode)
    path = tmp_path / "picture"
    path.write_bytes(encoded(image, kind, exif=ROTATED))
    assert np.array_equal(np.asarray(decoded(path.read_bytes())), np.asarray(load_image(str(path))))


@pytest.mark.parametrize("kind", CONFIGS)
def test_pixels_equal_the_processor_of_the_model(tmp_path, kind):
    recipe = published_recipe(CONFIGS[kind])
    path = save(tmp_path / "a.jpg", 90, 170)
    picture = picture_at(path, recipe)
    found = pixels(picture, recipe, tmp_path)
    processor = getattr(transformers, recipe.processor)(**json.loads(recipe.settings))
    expected = processor(images=[[load_image(str(path))]], return_tensors="np")["pixel_values"]
    assert found.dtype == np.float32
    assert len(found) == picture.fit.units
    assert np.array_equal(found, np.asarray(expected).reshape(found.shape))
    assert found.std() > 0.05


def truncated(content):
    return content[: len(content) * 2 // 3]


ANIMATED = dict(save_all=True, append_images=[drawn(20, 20, 1), drawn(20, 20, 2)])
REFUSED = {
    "no picture": (b"not a picture", "no picture that can be read"),
    "nothing": (b"", "no picture that can be read"),
    "a cut JPEG": (truncated(encoded(drawn(90, 90), "JPEG", quality=95)), "damaged"),
    "a cut PNG": (truncated(encoded(drawn(90, 90))), "damaged"),
    "a cut WebP": (truncated(encoded(drawn(90, 90), "WEBP")), "damaged"),
    "an animated GIF": (encoded(drawn(20, 20), "GIF", **ANIMATED), "3 frames"),
    "an animated WebP": (encoded(drawn(20, 20), "WEBP", **ANIMATED), "3 frames"),
    "an animated PNG": (encoded(drawn(20, 20), "PNG", **ANIMATED), "3 frames"),
    "pages": (encoded(drawn(20, 20), "TIFF", **ANIMATED), "3 frames or pages"),
    "16 bits": (encoded(Image.fromarray(np.full((9, 9), 40000, np.uint16))), "more than 8 bits"),
    "PostScript": (encoded(drawn(20, 20), "EPS"), "no picture that can be read"),
    "a bomb": (encoded(Image.new("1", (20_000, 20_000))), "more than 67,108,864 pixels"),
    "a smaller bomb": (encoded(Image.new("1", (9000, 9000))), "more than 67,108,864 pixels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_a_sentence(name):
    content, said = REFUSED[name]
    with pytest.raises(ValueError, match=said) as found:
        size_of(content)
    assert "\n" not in str(found.value)


def test_a_picture_of_a_camera_with_another_behind_it_is_its_first():
    camera = encoded(drawn(30, 70), "MPO", save_all=True, append_images=[drawn(10, 10, 1)])
    assert size_of(camera) == (30, 70)
    assert decoded(camera).size == (70, 30)


def test_a_jpeg_with_something_behind_it_is_whole():
    assert size_of(encoded(drawn(30, 70), "JPEG") + bytes(5000)) == (30, 70)


def test_a_jpeg_is_not_decoded_for_its_size(monkeypatch):
    content = encoded(drawn(30, 70), "JPEG")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert size_of(content) == (30, 70)


def test_a_file_that_changed_after_it_was_prepared_is_an_error(tmp_path):
    recipe = published_recipe(CONFIGS["qwen"])
    path = save(tmp_path / "a.png", 90, 170)
    picture = picture_at(path, recipe)
    save(path, 100, 170)
    with pytest.raises(DataError, match=r"a\.png cannot be used: it has changed since"):
        pixels(picture, recipe, tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.png cannot be used"):
        pixels(picture, recipe, tmp_path)


def test_a_picture_of_the_prepared_folder_is_found_wherever_it_is(tmp_path):
    recipe = published_recipe(CONFIGS["gemma"])
    save(tmp_path / "pictures" / "ab.png", 90, 170)
    picture = picture_at(tmp_path / "pictures" / "ab.png", recipe)
    moved = Picture("pictures/ab.png", *list(vars(picture).values())[1:])
    assert np.array_equal(pixels(moved, recipe, tmp_path), pixels(picture, recipe, tmp_path / "elsewhere"))


@needs_tiles
def test_pictures_survive_their_column():
    recipe = published_recipe(CONFIGS["smolvlm"])
    one, other = (
        Picture(f"{size}.png", 5, *size, recipe.family.fit(*size)) for size in ((90, 170), (60, 60))
    )
    rows = [[], [one, other], [other], []]
    column = picture_lists(rows)
    assert [pictures_of(cell) for cell in column.to_pylist()] == rows
    assert pictures_of([asdict(one)]) == [one]
