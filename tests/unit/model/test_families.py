"""Rows of families are of models that transformers has."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from sft_play.export.architecture import FAMILIES as GGUF
from sft_play.model.architecture.families import FAMILIES, PLAIN, Family, family_of


def test_each_row_is_of_a_family_that_transformers_knows():
    assert not (FAMILIES.keys() | GGUF.keys()) - CONFIG_MAPPING_NAMES.keys()


def test_a_family_without_a_row_has_no_oddity():
    assert family_of(CONFIG_MAPPING["llama"]()) == PLAIN == Family()


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.renames])
def test_what_is_renamed_is_a_setting(name):
    assert all(hasattr(CONFIG_MAPPING[name](), given) for given in FAMILIES[name].renames)
