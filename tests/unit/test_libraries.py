"""An error inside a library names the library, the model and the settings; one of ours stays a bug."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sft_play.cli import explained, main, report_error
from sft_play.commands.command_line import Arguments
from sft_play.config.load import load_config
from sft_play.config.schema import RunConfig
from sft_play.errors import ConfigError, DataError
from sft_play.libraries import library_failure
from sft_play.units import format_bytes

CONFIG = RunConfig.model_validate({"model": {"name": "org/base"}, "data": {"train_path": "rows.jsonl"}})


def typed(**common):
    """What was typed, of some command."""
    return Arguments("train", int, {}, **common)


def raised_by(call) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011 - of any class
        call()
    return caught.value


@pytest.fixture(scope="module")
def inside_transformers(tiny_model) -> BaseException:
    """What a real call raises that transformers cannot do."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sft_play.model.generation import generate

    model, tokenizer = (kind.from_pretrained(tiny_model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    return raised_by(lambda: generate(model, tokenizer, [[5]], max_new_tokens=-1))


def test_it_names_the_library_the_model_the_settings_and_what_to_change(inside_transformers, tmp_path):
    text = str(library_failure(inside_transformers, CONFIG))
    assert text.startswith("transformers ") and " failed in generation/" in text
    assert f"{type(inside_transformers).__name__}: {inside_transformers}".splitlines()[0] in text
    assert "in use: model.name=org/base, model.attention=auto, train.padding_free=auto" in text
    assert "One of these may avoid it: model.attention=eager, train.padding_free=false" in text
    assert "Traceback" in Path(text.rpartition(" in ")[2]).read_text()


def test_what_is_set_already_is_not_proposed(inside_transformers):
    config = RunConfig.model_validate(
        CONFIG.model_dump() | {"model": {"name": "org/base", "attention": "eager"}}
    )
    assert "avoid it: train.padding_free=false" in str(library_failure(inside_transformers, config))


def test_without_a_config_it_names_the_library_alone(inside_transformers):
    text = str(library_failure(inside_transformers, None))
    assert "failed in generation/" in text and "in use" not in text


def test_the_command_line_does_not_call_it_a_bug(inside_transformers, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model: {name: org/base}\ndata: {train_path: rows.jsonl}\n")
    args = typed(config=str(tmp_path / "run.yaml"), overrides=("tuning.mode=full",))
    assert load_config(args.config, args.overrides).config.tuning.mode == "full"
    assert report_error(explained(inside_transformers, args)) == ConfigError.exit_code
    said = capsys.readouterr().err
    assert (
        said.startswith("error: transformers ") and "bug in SFT-Play" not in said and "Traceback" not in said
    )


def test_an_error_of_our_own_stays_a_bug(capsys):
    error = raised_by(lambda: format_bytes("many"))
    assert library_failure(error, CONFIG) is None
    assert report_error(explained(error, typed())) == 1
    assert "this is a bug in SFT-Play" in capsys.readouterr().err


def test_a_package_that_is_missing_is_no_bug_unless_nobody_declared_it():
    for name, said in (("torch", "error: the package torch is not installed"), ("sft_play.gone", "bug")):
        error = explained(ModuleNotFoundError(f"No module named '{name}'", name=name), typed())
        assert (f"error: {error}" if isinstance(error, ConfigError) else "bug").startswith(said)


def test_what_others_hook_into_a_library_is_not_its_failure(tiny_model):
    """As a callback does, or a wrapper that injects a fault."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sft_play.model.generation import generate

    model, tokenizer = (kind.from_pretrained(tiny_model) for kind in (AutoModelForCausalLM, AutoTokenizer))
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    error = raised_by(lambda: generate(model, tokenizer, [[5]], max_new_tokens=1))
    assert isinstance(error, ZeroDivisionError) and library_failure(error, CONFIG) is None


def test_errors_that_say_what_to_do_are_left_as_they_are():
    error = DataError("no rows")
    assert explained(error, typed(config="x")) is error


def test_a_wrong_flag_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["eval", "--config", "x.yaml", "--splits", "all"])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "sft-play eval: error: No such option '--splits'" in said


def test_a_driver_that_cannot_make_segments_grow_is_said_with_what_to_set(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    refused = RuntimeError("CUDA driver error: operation not supported")
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in str(library_failure(refused, None))
    assert library_failure(RuntimeError("CUDA driver error: out of memory"), None) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    assert library_failure(refused, None) is None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("TORCH_LOGS=nonsense", "TORCH_LOGS=nonsense: PyTorch does not know this setting; unset TORCH_LOGS"),
        ("PYTHONOPTIMIZE=2", "PYTHONOPTIMIZE=2 (python -OO) removes the docstrings that transformers reads"),
    ],
)
def test_a_variable_with_which_a_library_cannot_be_imported_is_named(variable, said, tmp_path):
    name, value = variable.split("=")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{name: {tmp_path}}}\ndata: {{train_path: {rows}}}\n")
    command = [sys.executable, "-m", "sft_play", "prepare", "--config", str(config)]
    done = subprocess.run(command, env=os.environ | {name: value}, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
