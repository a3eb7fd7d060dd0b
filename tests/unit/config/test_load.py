import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sft_play.config.aliases import ALIASES, REMOVED
from sft_play.config.load import as_override, dump_resolved, json_schema, load_config, parse_yaml
from sft_play.errors import CheckpointError, ConfigError
from sft_play.resources import CATALOGUES

MINIMAL = "model: {name: some/model}\ndata: {train_path: rows.jsonl}\n"


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_every_problem_is_reported_at_once_with_its_dotted_name(tmp_path):
    path = write(
        tmp_path, "model: {nam: x}\ndata: {train_path: a}\ntrain: {learning_rate: -1e-4, batch_size: 0}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "4 problems" in text
    for line in (
        "model.name: is required",
        "did you mean model.name?",
        "train.learning_rate: ",
        "train.batch_size: expected",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("{'(': 4}", r"'\(' is not a regular expression: .* \(found \"\(\"\)"),
        ("{'(?i)Q': 4}", r"'\(\?i\)Q' is not a regular expression: global flags not at the start"),
        ("{q_proj: 0}", r"input should be greater than 0 \(found 0\)"),
        ("{q_proj: x}", r'input should be a valid integer, .* \(found "x"\)'),
    ],
)
def test_of_a_mapping_the_entry_is_named_that_is_wrong(tmp_path, override, said):
    with pytest.raises(ConfigError, match=f"tuning.lora.rank_pattern: {said}"):
        load_config(write(tmp_path, MINIMAL), [f"tuning.lora.rank_pattern={override}"])


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.learning_rat=1", "did you mean train.learning_rate?"),
        ("train.dedup=true", "did you mean data.dedup?"),
        ("train.fp8=true", "did you mean train.float8?"),
        ("train.mixed_precision=fp8", "train.mixed_precision: .*bf16"),
        ("train.lr=1", "did you mean train.learning_rate?"),
        ("train.gradient_accumulation_steps=4", "did you mean train.grad_accum?"),
        ("data.dataset_path=x", "did you mean data.train_path?"),
        ("optim.lr=1", "unknown key"),
        ("tuning.lora.rank=4", "unknown key; allowed: r, alpha"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(tmp_path, override, hint):
    with pytest.raises(ConfigError, match=hint.replace("?", r"\?")):
        load_config(write(tmp_path, MINIMAL), [override])


def test_names_of_other_tools_stand_for_settings_that_there_are():
    settings = {setting.partition("=")[0] for setting in ALIASES.values()}
    assert settings <= load_config("configs/demo.yaml").origins.keys()
    assert not any("." in name or name in origin.split(".") for name in ALIASES for origin in settings)
    written = {("--lr", "1e-4"): "train.learning_rate=1e-4", ("--lora-r", "8"): "tuning.lora.r=8"}
    written |= {
        ("--bf16", "true"): "train.mixed_precision=bf16",
        ("--use_dora", "1"): "tuning.lora.use_dora=1",
    }
    written |= {("seed", ""): "train.seed", ("--frobnicate", "1"): None}
    assert {typed: as_override(*typed) for typed in written} == written


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-4", 2e-4),
        ("1E5", 1e5),
        ("0.5", 0.5),
        ("010", 10),
        ("no", "no"),
        ("on", "on"),
        ("null", None),
        ("true", True),
        ("-3", -3),
    ],
)
def test_yaml_reads_values_as_people_write_them(text, value):
    parsed = parse_yaml(f"key: {text}", "test")["key"]
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2", "duplicate key .*first on line 1"),
        ("a: !!python/object/apply:os.system ['true']", "not allowed"),
        ("a: &x [1]\nb: *x", "aliases"),
        ('a: [b, "<\\ud83d>"]', "line 1: '<\\\\ud83d>' has an unpaired surrogate"),
        ("a: [1", "not valid YAML"),
        ("a: 1\nb: " + "[" * 50_000, "test.yaml: line 2: nested more than 20 levels deep"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(400)), "line 21: nested more than 20 levels deep"),
        ("a: 1\n? [b, c]\n: 1", "line 2: expected the name of a setting as the key, found a list"),
        ("a: 1\n2: 1", "line 2: expected the name of a setting as the key, found '2'"),
    ],
)
def test_yaml_that_could_surprise_is_refused_with_its_place(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_yaml(text, "test.yaml")


def test_include_lies_under_the_file_and_overrides_lie_on_top_with_origins(tmp_path):
    base = write(tmp_path, MINIMAL + "train: {epochs: 3, seed: 5}\n", "base.yaml")
    path = write(tmp_path, "include: base.yaml\ntrain: {epochs: 2}\n")
    resolved = load_config(path, ["train.learning_rate=1e-3"])
    train, origins = resolved.config.train, resolved.origins
    assert (train.epochs, train.seed, train.learning_rate) == (2, 5, 1e-3)
    assert origins["train.epochs"] == str(path)
    assert origins["train.seed"] == str(base)
    assert origins["train.learning_rate"] == "override"
    assert origins["train.packing"] == "default"


def test_an_include_cycle_is_found(tmp_path):
    with pytest.raises(ConfigError, match="does a file include itself"):
        load_config(write(tmp_path, "include: run.yaml\n"))


@pytest.mark.parametrize("value", ["3", "{a: b}", "[[a]]", "[1]", "''", "null"])
def test_an_include_that_is_no_file_name_is_refused(tmp_path, value):
    path = write(tmp_path, f"# run\n\ninclude: {value}\n{MINIMAL}")
    with pytest.raises(
        ConfigError, match="run.yaml, line 3: include: expected a file name or a list of them, found "
    ):
        load_config(path)


def test_an_include_whose_name_is_too_long_does_not_exist(tmp_path):
    with pytest.raises(ConfigError, match="xxx does not exist"):
        load_config(write(tmp_path, f"include: {'x' * 5000}\n"))


@pytest.mark.parametrize("key", ["train.max_steps", "model.max_seq_len", "eval.limit", "data.num_workers"])
def test_numbers_that_no_run_can_mean_are_refused(tmp_path, key):
    with pytest.raises(ConfigError, match=key):
        load_config(write(tmp_path, MINIMAL), [f"{key}=100000000000"])


@pytest.mark.parametrize(
    "override",
    [
        "train.learning_rate=.nan",
        "train.learning_rate=1e30",
        "train.learning_rate=-1",
        "train.epochs=0",
        "train.epochs=.inf",
        "train.max_steps=-5",
        "model.max_seq_len=0",
        "model.max_seq_len=-1",
        "tuning.lora.r=0",
        "train.warmup_ratio=1e999",
        "model.rope_scaling={rope_type: yarn, factor: 1e300}",
    ],
)
def test_numbers_outside_their_range_are_refused(tmp_path, override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(write(tmp_path, MINIMAL), [override])


def numeric_settings(schema: dict, node: dict, name: str = "") -> Iterator[str]:
    """Dotted names of the settings that take a number."""
    kinds = [each for kind in (node, *node.get("anyOf", ())) for each in (kind, referred(schema, kind))]
    types = {each.get("type") for each in kinds}
    if types & {"number", "integer"} and "boolean" not in types:
        yield name
    for kind in kinds:
        for key, each in kind.get("properties", {}).items():
            yield from numeric_settings(schema, each, f"{name}.{key}".lstrip("."))


def referred(schema: dict, node: dict) -> dict:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else {}


def test_true_is_no_number(tmp_path):
    path, names = write(tmp_path, MINIMAL), list(numeric_settings(json_schema(), json_schema()))
    assert len(names) > 35 and "model.rope_scaling.factor" in names
    for name in names:
        for value in ("true", "false"):
            with pytest.raises(ConfigError, match=f"{name}: expected a number.*, not true/false"):
                load_config(path, [f"{name}={value}"])
    sources = "data.train_path=[{path: a.jsonl, weight: true}]"
    with pytest.raises(ConfigError, match="weight"):
        load_config(path, [sources])
    with pytest.raises(ConfigError, match="rank_pattern: expected a number, not true/false"):
        load_config(path, ["tuning.lora.rank_pattern={q_proj: true}"])


def test_an_empty_folder_for_weights_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="parallel.nvme_path"):
        load_config(write(tmp_path, MINIMAL), ["parallel.nvme_path=''"])


def test_a_file_that_is_no_config_is_refused_by_its_size(tmp_path):
    with pytest.raises(ConfigError, match="has 50000000 bytes; the limit is 100000"):
        load_config(write(tmp_path, "a: b # " + "x" * (50_000_000 - 7)))


@pytest.mark.parametrize("value", ["x" * 256, "a/" + "x" * 256, '"a\\0b"'])
@pytest.mark.parametrize("key", ["model.name", "data.train_path", "data.chat_template", "output.dir"])
def test_a_path_that_no_disk_could_have_is_refused(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"{key}: not a usable path"):
        load_config(write(tmp_path, MINIMAL), [f"{key}={value}"])


def test_dumped_config_loads_back_to_the_same_config(tmp_path):
    resolved = load_config(write(tmp_path, MINIMAL), ["tuning.lora.r=8", "train.mixed_precision=no"])
    again = load_config(
        write(tmp_path, dump_resolved(resolved), "dumped.yaml"),
        [f"output.name={resolved.config.output.name}"],
    )
    assert again.config == resolved.config


@pytest.mark.parametrize(("name", "value"), REMOVED.items())
def test_the_resolved_config_of_an_earlier_version_loads_unless_a_removed_setting_did_something(
    tmp_path, name, value
):
    section, key = name.split(".")
    kept = write(tmp_path, f"{MINIMAL}{section}: {{{key}: {value}}}\n")
    assert not hasattr(getattr(load_config(kept).config, section), key)
    changed = write(tmp_path, f"{MINIMAL}{section}: {{{key}: other}}\n")
    with pytest.raises(ConfigError, match=f"{name}: no longer a setting; leave it out"):
        load_config(changed)


@pytest.mark.parametrize("name", ["../x", "/abs", "-rf", "$(cmd)", "a b", "a\n", "x" * 101, ""])
def test_run_names_that_could_leave_the_folder_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="output.name: expected up to 100 of a-z"):
        load_config(write(tmp_path, MINIMAL + f"output: {{name: {json.dumps(name)}}}\n"))


def test_settings_without_effect_are_errors(tmp_path):
    for override, message in (
        ("train.lr_scaling=sqrt", "needs reference_batch_size"),
        ("train.reference_batch_size=8", "no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(write(tmp_path, MINIMAL), [override])
    with pytest.raises(ConfigError, match="no effect with tuning.mode=full"):
        load_config(write(tmp_path, MINIMAL), ["tuning.mode=full", "tuning.lora.r=4"])


@pytest.mark.parametrize(
    ("asked", "way", "means"),
    [
        ("auto", "auto", "auto"),
        ("auto", "offload", "offload"),
        ("true", "auto", "recompute"),
        ("false", "auto", "keep"),
        ("true", "recompute", "recompute"),
        ("true", "offload", "offload"),
        ("false", "keep", "keep"),
        ("true", "keep", None),
        ("false", "recompute", None),
        ("false", "offload", None),
    ],
)
def test_two_settings_say_what_becomes_of_activations(tmp_path, asked, way, means):
    overrides = [f"train.gradient_checkpointing={asked}", f"train.activations={way}"]
    if means:
        assert load_config(write(tmp_path, MINIMAL), overrides).config.train.asked_activations == means
    else:
        with pytest.raises(ConfigError, match=" contradicts ".join(overrides)):
            load_config(write(tmp_path, MINIMAL), overrides)


@pytest.mark.parametrize("key", ["model.new_tokens", "tuning.lora.modules_to_save"])
@pytest.mark.parametrize(
    ("value", "message"),
    [('["<a>", ""]', "'' is empty or only whitespace"), ('[" \\t"]', "is empty or only whitespace"),
     ('["<a>", "<b>", "<a>"]', "'<a>' is listed twice")],
)  # fmt: skip
def test_new_tokens_and_modules_to_save_are_distinct_words(tmp_path, key, value, message):
    with pytest.raises(ConfigError, match=f"{key}.*{message}"):
        load_config(write(tmp_path, MINIMAL), [f"{key}={value}"])


@pytest.mark.parametrize("word", ["x" * 5000, " " * 5000])
def test_a_wrong_word_is_cut_in_the_message(tmp_path, word):
    with pytest.raises(ConfigError, match="model.new_tokens") as error:
        load_config(write(tmp_path, MINIMAL), [f'model.new_tokens=["{word}", "{word}"]'])
    assert len(str(error.value)) < 600


def test_an_answer_pattern_that_is_no_expression_is_a_problem_beside_the_others(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, MINIMAL), ["eval.answer_pattern=(", "train.epochs=-1"])
    assert "2 problems" in str(error.value) and "train.epochs" in str(error.value)
    assert "eval.answer_pattern: not a regular expression: missing ) at position 1" in str(error.value)


def test_missing_config_file_names_the_shipped_ones():
    with pytest.raises(ConfigError, match=r"nowhere.yaml does not exist.*configs/demo.yaml"):
        load_config("configs/nowhere.yaml")


def test_a_folder_is_no_config_file_and_is_said_to_be_one():
    with pytest.raises(ConfigError, match=r"configs is a folder.*configs/demo.yaml"):
        load_config("configs")


def test_a_misspelt_config_file_is_recognized_and_files_that_are_no_runs_are_not_listed():
    with pytest.raises(
        ConfigError, match=r"configs/dmeo.yaml does not exist; did you mean configs/demo.yaml"
    ):
        load_config("configs/dmeo.yaml")
    with pytest.raises(ConfigError, match=r"did you mean configs/run_lora.yaml\?"):
        load_config("run_lora")
    with pytest.raises(ConfigError) as error:
        load_config("nowhere.yaml")
    assert "configs/run_lora.yaml" in str(error.value) and "hardware" not in str(error.value)


def test_an_override_without_its_section_is_told_where_it_belongs():
    with pytest.raises(ConfigError, match=r"the form section.key=value, e.g. tuning.mode=qlora$"):
        load_config("configs/demo.yaml", ["mode=qlora"])


def test_every_setting_is_described_in_the_schema():
    schema = json_schema()
    for section in schema["$defs"].values():
        for key, field in section["properties"].items():
            assert field.get("description") or "$ref" in str(field), key


CONFIGS = sorted(Path(__file__).resolve().parents[3].glob("configs/*.yaml"))
RUN_CONFIGS = [path for path in CONFIGS if path.name not in CATALOGUES]


def test_all_shipped_configs_are_found():
    assert {path.stem for path in RUN_CONFIGS} == {
        "demo", "demo_vision", "gsm8k", "run_lora", "run_qlora", "run_full", "run_distributed",
        "run_gemma27b_distributed", "run_llama70b_qlora", "smollm2", "starter",
    }  # fmt: skip


@pytest.mark.parametrize("path", RUN_CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_and_says_what_it_is_for(path):
    load_config(path)
    head = path.read_text().split("model:")[0]
    assert head.startswith("# yaml-language-server: $schema=schema.json\n")
    assert "Hardware:" in head and "Command:" in head and "make train" in head


def test_shipped_schema_is_the_code_s():
    shipped = json.loads((CONFIGS[0].parent / "schema.json").read_text())
    assert shipped == json_schema(), "run: make docs"


def test_a_file_beside_it_may_have_been_meant(tmp_path):
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match=r"mine.yml does not exist; did you mean .*mine.yaml\?"):
        load_config(tmp_path / "mine.yml")


def test_a_run_that_does_not_exist_is_named_with_those_that_do(tmp_path):
    asked = tmp_path / "runs" / "typo" / "config.resolved.yaml"
    with pytest.raises(CheckpointError, match="there is no run .*typo; runs there: none"):
        load_config(asked)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / asked.name).touch()
    with pytest.raises(CheckpointError, match="there is no run .*typo; runs there: demo"):
        load_config(asked)
