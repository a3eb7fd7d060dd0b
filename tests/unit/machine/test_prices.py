"""Prices of a GPU hour: two tables of the user's, read strictly."""

import re

import pytest

from sft_play.errors import ConfigError
from sft_play.machine.prices import price_of
from sft_play.resources import CONFIGS


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A function that writes the user's and the project's prices.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    def write(own="", project=""):
        for folder, text in (("home/sft-play", own), ("configs", project)):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "prices.yaml").write_text(text)

    return write


def test_a_project_s_price_wins_over_the_user_s(tables):
    assert price_of("RTX 4090") is None
    tables(own="RTX 4090: 0.4\nH100: 2\n", project="# mine\nNVIDIA GeForce RTX 4090: 0.5\n")
    assert (price_of("RTX 4090"), price_of("NVIDIA H100 80GB HBM3")) == (0.5, 2)
    assert price_of("T4") is price_of("a GPU that nobody knows") is None


def test_nothing_has_a_price_as_shipped(tables):
    tables(project=(CONFIGS / "prices.yaml").read_text())
    assert price_of("RTX 4090") is price_of("H100 80GB") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("T4: 1\nRTX 4090: -1", "line 2: RTX 4090: expected the price of an hour, a number above 0"),
        ("RTX 4090: 0", "line 1: RTX 4090: expected .* found '0'"),
        ("RTX 4090: .nan", "line 1: RTX 4090: expected .* found '.nan'"),
        ("RTX 4090: nan", "line 1: RTX 4090: expected .* found 'nan'"),
        ("RTX 4090: .inf", "line 1: .* found '.inf'"),
        ("RTX 4090: cheap", "line 1: RTX 4090: expected .* found 'cheap'"),
        ("RTX 4090: '1'", "line 1: RTX 4090: expected"),
        ("RTX 4090:", "line 1: RTX 4090: expected .* found ''"),
        ("RTX 4090: [1, 2]", "line 1: .* found a list or a table"),
        ("\nRTX 4900: 1", 'line 2: GPU "RTX 4900" is unknown; closest: .*RTX 4090.*hardware.yaml'),
        ("[1]: 1", "line 1: GPU .* is unknown"),
        ("RTX 4090: 1\nGeForce RTX 4090: 2", "line 2: GeForce RTX 4090 has a price further up; keep one"),
        ("- RTX 4090", "line 1: expected lines such as `RTX 4090: 0.4`"),
        ("RTX 4090: {", "line 1: not valid YAML; expected lines such as"),
        ("RTX 4090: *x", "line 1: not valid YAML"),
    ],
)
def test_a_bad_price_names_its_file_and_line(tables, text, said):
    tables(project=text)
    with pytest.raises(ConfigError) as error:
        price_of("RTX 4090")
    assert re.search(f"configs/prices.yaml, {said}", str(error.value)), error.value
