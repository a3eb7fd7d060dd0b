import subprocess
import sys
import types
from contextlib import contextmanager

import pytest

from sft_play.errors import ConfigError
from sft_play.upstream.patching import lasting, loaded_within, patched, undone


class Base:
    name = "of the base"


class Derived(Base):
    pass


def test_a_name_is_patched_and_put_back_also_after_an_error():
    with pytest.raises(ZeroDivisionError), patched(Base, "name", "other"):
        assert Base.name == "other"
        raise ZeroDivisionError
    assert Base.name == "of the base"


def test_an_inherited_name_is_inherited_again():
    with patched(Derived, "name", "other"):
        assert (Derived.name, Base.name) == ("other", "of the base")
    assert "name" not in vars(Derived)


def test_a_builtin_is_patched_where_a_module_looks_it_up():
    module = types.ModuleType("module")
    exec("def count(n): return list(range(n))", module.__dict__)
    with patched(module, "range", lambda n: "ab", builtin=True):
        assert module.count(5) == ["a", "b"]
    assert module.count(2) == [0, 1]


@pytest.mark.parametrize("builtin", [False, True])
def test_a_name_that_is_not_there_is_named_with_what_lacks_it(builtin):
    with pytest.raises(ConfigError, match=r"Base has no renamed, .*SFT-Play replaces.*make install"):
        with patched(Base, "renamed", 1, builtin=builtin):
            pytest.fail("patched nothing")
    assert not hasattr(Base, "renamed")


def test_what_lasts_ends_with_the_innermost_block_even_after_an_error():
    with undone():
        lasting(patched, Base, "name", "outer")
        with pytest.raises(ZeroDivisionError), undone():
            lasting(patched, Base, "name", "inner")
            assert Base.name == "inner"
            lasting(patched, Base, "name", "outer")  # which lasts already
            assert Base.name == "inner"
            raise ZeroDivisionError
        assert Base.name == "outer"
    assert Base.name == "of the base"


def test_what_lasts_until_the_end_of_the_process_is_undone_before_modules_are():
    script = (
        "import os\nfrom contextlib import contextmanager\nfrom sft_play.upstream.patching import lasting\n"
        "@contextmanager\ndef change():\n    yield\n    os.write(1, b'undone')\n"
        "lasting(change)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("undone", "")


def test_one_module_is_loaded_within_a_change_and_only_in_the_block(tmp_path, monkeypatch):
    (tmp_path / "changed_module.py").write_text("seen = ['executed']\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)

    @contextmanager
    def change(module):
        found = [module.__name__]
        yield
        module.seen += found

    with loaded_within("changed_module", change):
        import changed_module

        assert sys.meta_path[0].find_spec("json", None) is None
    assert changed_module.seen == ["executed", "changed_module"] and sys.meta_path == before
