"""What installs an extra: by make from a clone, by pip where the package is installed."""

import sys

import pytest

from sft_play import extras


@pytest.mark.parametrize(
    ("make", "extra", "command"),
    [
        (True, "wandb", "make install EXTRAS=wandb"),
        (False, "wandb", f'{sys.executable} -m pip install "wandb'),
        (True, "trackio", f'{sys.executable} -m pip install "trackio'),
        (True, "unknown", "make install"),
    ],
)
def test_an_extra_is_installed_by_make_where_it_has_a_lock(monkeypatch, make, extra, command):
    monkeypatch.setattr(extras, "by_make", lambda: make)
    assert extras.install_command(extra).startswith(command)
