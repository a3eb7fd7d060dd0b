"""The Makefile is documented, consistent, and does nothing under `make -n`."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.pip_install import shown

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Makefile").read_text()
TARGETS = dict(re.findall(r"^([a-zA-Z0-9][\w./-]*):(?!=)(.*)$", TEXT, re.MULTILINE))
PHONY = re.findall(r"^\.PHONY: (\S+)$", TEXT, re.MULTILINE)
SETTINGS = {
    "IN": "in.jsonl",
    "OUT": "out.jsonl",
    "STYLE": "Be brief.",
    "CONFIRM": "1",
    "RUN": "name",
    "RUNS": "one two",
    "NGPU": "2",
    "REPO": "user/name",
    "TASKS": "hellaswag",
}
WANTED = [
    "help", "install", "train", "train-distributed", "train-deepspeed", "train-tb", "train-distributed-tb",
    "train-deepspeed-tb", "train-fsdp", "train-fsdp-tb", "train-multinode", "train-slurm", "resume", "tensorboard", "tb-stop", "studio",
    "setup-accelerate", "gpu-info", "memory-check", "check", "prepare", "process", "style", "render", "plan",
    "probe", "eval", "eval-lm", "infer", "infer-batch", "merge", "merge-test", "report", "compare", "runs", "export", "push", "test", "test-changed", "test-gpu", "test-cluster", "test-faults",
    "check-code", "check-style", "lock", "audit", "bench-sizing", "bench-context", "bench-random", "bench-sizing-gpu", "bench-evidence", "bench-gpu", "gpu-proof", "bench-scaling",
    "bench-faults", "clean", "clean-cache", "clean-all",
]  # fmt: skip
GUIDES = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")) if path.is_file()]


def make(*words, dry=True, environment=None, **settings) -> subprocess.CompletedProcess:
    command = [
        "make",
        *(["-n"] if dry else []),
        *words,
        *(f"{name}={value}" for name, value in settings.items()),
    ]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in {"MAKEFLAGS", "MAKELEVEL", "CONFIG", "ARGS", "MODEL"}
    }
    values = {**inherited, **(environment or {})}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=values)


def recipe(target: str, **settings) -> str:
    done = make(target, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_target_is_documented():
    undocumented = [name for name, rest in TARGETS.items() if not re.search(r" ## \S", rest)]
    assert not undocumented
    assert set(WANTED) <= set(TARGETS)


def test_every_phony_name_has_a_rule_and_every_command_is_phony():
    assert sorted(PHONY) == sorted(TARGETS)


def test_help_lists_every_target_and_fits_80_columns():
    lines = make("help", dry=False).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert set(TARGETS) <= listed
    assert make(dry=False).stdout.splitlines() == lines  # help is the default


def test_make_n_shows_what_each_target_would_do_and_does_nothing(tmp_path):
    settings = {**SETTINGS, "VENV": str(tmp_path / "venv"), "RUNS": str(tmp_path / "runs")}
    shown = {target: make(target, **settings) for target in sorted(TARGETS)}
    failed = [f"{target}: {done.stderr}" for target, done in shown.items() if done.returncode]
    assert not failed, "\n".join(failed)
    silent = [target for target, done in shown.items() if not done.stdout.strip()]
    assert not silent, silent
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "setting"),
    [
        ("infer-batch", "IN"),
        ("style", "STYLE"),
        ("clean-all", "CONFIRM"),
        ("compare", "RUNS"),
        ("push", "REPO"),
        ("eval-lm", "TASKS"),
    ],
)
def test_a_required_setting_is_asked_for(target, setting):
    done = make(target, **{name: value for name, value in SETTINGS.items() if name != setting})
    assert done.returncode != 0 and setting in done.stderr


YES_NO = {
    "PUBLIC": ("push", "--public"),
    "CHAT": ("eval-lm", "--chat"),
    "WHY": ("plan", "--why"),
    "AUTO": ("setup-accelerate", "--auto"),
    "CONFIRM": ("clean-all", "rm -rf"),
    "FORCE": ("compare", "--force"),
}
OTHERS = {name: value for name, value in SETTINGS.items() if name != "CONFIRM"}


@pytest.mark.parametrize("setting", YES_NO)
def test_a_setting_that_is_yes_or_no_understands_both_and_refuses_the_rest(ready, setting):
    target, done_if_yes = YES_NO[setting]
    said = {
        word: make(target, VENV=ready, **OTHERS, **{setting: word})
        for word in ("1", "yes", "true", "0", "no", "false", "", "maybe", "1 0")
    }
    assert [word for word, done in said.items() if done_if_yes in done.stdout] == ["1", "yes", "true"]
    for word in ("maybe", "1 0"):
        assert said[word].returncode and f"{setting}={word} is neither yes" in said[word].stderr


@pytest.mark.parametrize("flag", [[], ["-e"]])
def test_what_publishes_deletes_or_overwrites_is_never_taken_from_the_environment(ready, flag):
    others = {"VENV": ready, "dry": True}
    everything = {"PUBLIC": "1", "CONFIRM": "1", "FORCE": "1", "REPO": "a/b", "OUT": "o.jsonl", "REMOVE": "a"}
    push = make(*flag, "push", REPO="user/name", environment=everything, **others)
    assert push.returncode == 0 and "--public" not in push.stdout
    assert "REPO=user/name is required" in make(*flag, "push", environment=everything, **others).stderr
    assert "add CONFIRM=1" in make(*flag, "clean-all", environment=everything, **others).stderr
    assert "--output" not in make(*flag, "merge", environment=everything, **others).stdout
    assert "remove" not in make(*flag, "runs", environment=everything, **others).stdout
    assert "--yes" not in make(*flag, "runs", REMOVE="a", environment=everything, **others).stdout


@pytest.mark.parametrize("setting", ["RUNS", "VENV"])
def test_clean_all_removes_no_folder_that_the_environment_names(setting):
    refused = make("clean-all", CONFIRM="1", environment={setting: "/data"})
    assert refused.returncode and f"no {setting} from the environment" in refused.stderr
    assert "'/data'" in recipe("clean-all", CONFIRM="1", **{setting: "/data"})


def test_runs_are_removed_by_name_after_asking_unless_that_is_confirmed(ready):
    typed = {"VENV": ready, "RUNS": "kept", "REMOVE": "one --yes"}
    python = f"'{ready}/bin/python' -m sft_play runs --runs 'kept'"
    assert recipe("runs", **typed).strip() == f"{python} -- remove 'one' '--yes'"  # names, not flags
    assert recipe("runs", CONFIRM="1", **typed).strip() == f"{python} --yes -- remove 'one' '--yes'"
    refused = make("runs", REMOVE="one", environment={"RUNS": "/data"})
    assert refused.returncode and "no RUNS from the environment" in refused.stderr


@pytest.fixture
def ready(tmp_path) -> str:
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".ready").write_text("")
    return str(venv)


def test_a_second_train_installs_nothing(ready):
    assert recipe("train", VENV=ready).splitlines() == [
        f"'{ready}/bin/python' -m sft_play train  --config 'configs/demo.yaml'"
    ]


def test_a_new_lock_installs_again(ready):
    os.utime(Path(ready) / ".ready", (0, 0))
    assert "pip_install" in recipe("train", VENV=ready)


@pytest.mark.parametrize(
    ("target", "settings", "words"),
    [
        (
            "train",
            {"CONFIG": "configs/x.yaml", "ARGS": "a.b=c d.e=f"},
            "train  --config 'configs/x.yaml' '--args=a.b=c d.e=f'",
        ),
        ("train", {"RUN": "mine"}, "'output.name=mine'"),
        ("train-distributed", {}, "--processes '0' --engine ddp"),
        ("train-distributed", {"NGPU": "2"}, "--processes '2' --engine ddp"),
        (
            "train-multinode",
            {"NODES": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "NGPU": "4", "ENGINE": "ddp"},
            "--nodes '2' --node-rank '1' --master-addr '10.0.0.1' --master-port '' --processes '4' "
            "--engine 'ddp'",
        ),
        (
            "train-slurm",
            {"NODES": "2", "NGPU": "4", "TIME": "1:00:00"},
            "--nodes '2' --gpus '4' --partition '' --time '1:00:00'",
        ),
        ("train-deepspeed-tb", {}, "--tensorboard --processes '0' --engine deepspeed_z2"),
        ("train-deepspeed-tb", {"ZERO": "3"}, "--tensorboard --processes '0' --engine deepspeed_z3"),
        ("train-deepspeed", {"ZERO": "3", "NGPU": "4"}, "--processes '4' --engine deepspeed_z3"),
        ("train-fsdp", {"NGPU": "4"}, "--processes '4' --engine fsdp2"),
        ("train-fsdp-tb", {}, "--tensorboard --processes '0' --engine fsdp2"),
        (
            "plan",
            {"GPU": "RTX 4090", "NGPU": "2"},
            "--gpu 'RTX 4090' --gpus '2' --config 'configs/demo.yaml'",
        ),
        ("plan", {"MODEL": "qwen3-8b", "ARGS": "a.b=c"}, "--model 'qwen3-8b'    '--args=a.b=c'"),
        ("plan", {"MODEL": "m", "CONFIG": "x.yaml"}, "--model 'm'   --config 'x.yaml'"),
        (
            "plan",
            {"MODEL": "m", "ZERO": "3", "OFFLOAD": "ram"},
            "'parallel.offload=ram' 'parallel.engine=deepspeed_z3'",
        ),
        ("check", {"ZERO": "3", "OFFLOAD": "ram"}, "'parallel.offload=ram' 'parallel.engine=deepspeed_z3'"),
        ("train-deepspeed", {"ZERO": "3", "NGPU": "1", "OFFLOAD": "ram"}, "'1' --engine deepspeed_z3"),
        ("plan", {"MODEL": "m", "MODE": "qlora"}, "--model 'm'    'tuning.mode=qlora'"),
        ("plan", {"GPU": "L4", "CONTEXT": "max"}, "--gpu 'L4'  --config 'configs/demo.yaml' --context 'max'"),
        ("plan", {"ROWS": "50", "TOKENS": "9"}, " --rows '50' --tokens '9'"),
        ("plan", {"ROWS": "50", "LENGTHS": "lognormal:9:20"}, " --rows '50' --lengths 'lognormal:9:20'"),
        ("plan", {"IMAGES": "2", "PIXELS": "1024x768"}, " --images '2' --pixels '1024x768'"),
        ("plan", {"GPU_HOUR": "2.5"}, " --gpu-hour '2.5'"),
        ("train", {"MODE": "full"}, "--config 'configs/demo.yaml' 'tuning.mode=full'"),
        (
            "train",
            {"ZERO": "3", "NGPU": "2"},
            "--processes '2' --config 'configs/demo.yaml' 'parallel.engine=deepspeed_z3'",
        ),
        (
            "resume",
            {"ZERO": "2", "RUN": "my"},
            "--config 'runs/my/config.resolved.yaml' 'parallel.engine=deepspeed_z2'",
        ),
        ("eval", {"SPLIT": "test", "LIMIT": "10"}, "eval --split 'test' --limit '10'"),
        (
            "eval-lm",
            {"TASKS": "a,b", "WHAT": "base", "IN": "my tasks", "SHOTS": "5", "CHAT": "1"},
            "eval-lm --tasks 'a,b' --what 'base' --input 'my tasks'  --shots '5' --chat --config",
        ),
        ("setup-accelerate", {"AUTO": "1"}, "setup-accelerate --auto"),
        ("prepare", {"SHOW": "3"}, "prepare --show '3'"),
        ("test", {"ARGS": '-k "a or b"'}, """PYTEST_ADDOPTS='-k "a or b"' """),
        ("bench-scaling", {"NGPU": "1 2"}, "-m benchmarks.scaling --processes '1 2'"),
        ("check-style", {"AGAINST": "main"}, "scripts/check_style.py --against 'main'"),
        ("tb-stop", {}, "tensorboard --runs 'runs' --stop"),
        ("studio", {"RUNS": "my runs"}, "studio --runs 'my runs'"),
        ("report", {}, "report --runs 'runs'"),
        ("runs", {"RUNS": "my runs"}, "runs --runs 'my runs'"),
        ("report", {"RUN": "a", "RUNS": "my runs"}, "report --runs 'my runs' 'a'"),
        ("compare", {"RUNS": "a b", "OUT": "c.html"}, "compare --output 'c.html' 'a' 'b'"),
    ],
)
def test_settings_become_flags(ready, target, settings, words):
    assert words in recipe(target, VENV=ready, **settings)


def test_the_command_line_understands_every_recipe(ready, capsys):
    from sft_play.cli import parse

    settings = {"AUTO": "1", "SHOW": "1", "SPLIT": "test", "LIMIT": "5", "DTYPE": "bfloat16", **SETTINGS}
    understood, refused = 0, []
    for target in sorted(TARGETS):
        for line in recipe(target, VENV=ready, **settings).splitlines():
            if "-m sft_play" not in line:
                continue
            words = shlex.split(line.split("-m sft_play", 1)[1])
            try:
                understood += parse(words).command == words[0]
            except SystemExit:
                refused.append(f"{target}: {capsys.readouterr().err}")
    assert not refused, "\n".join(refused)
    assert understood >= 30


NASTY = """a b'c"d\\ $(touch FILE) `touch FILE` ${HOME} $HOME $(shell touch FILE); touch FILE & # %s ü, *"""


@pytest.fixture
def words_of(tmp_path, ready):
    """Runs a target with a python that prints its arguments as JSON."""
    python = Path(ready) / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    python.chmod(0o755)

    def run(target, environment=None, **settings) -> list[str]:
        done = make(target, dry=False, VENV=ready, environment=environment, **settings)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


FREE = [
    "ACCOUNT",
    "CONFIG",
    "GPU",
    "IN",
    "MODEL",
    "OFFLOAD",
    "OUT",
    "PARTITION",
    "PROBE",
    "RANK",
    "RUN",
    "SBATCH",
    "STYLE",
    "TIME",
]
USERS = {
    "GPU": "plan",
    "MODEL": "plan",
    "IN": "infer-batch",
    "OUT": "merge",
    "STYLE": "style",
    "RANK": "train-multinode",
}
SLURM = {"ACCOUNT", "PARTITION", "SBATCH", "TIME"}


GIVEN = [(name, "argument") for name in FREE] + [(name, "environment") for name in FREE if name != "OUT"]


@pytest.mark.parametrize(("setting", "given_as"), GIVEN)
def test_no_setting_is_run_or_changed_by_make_or_the_shell(words_of, tmp_path, setting, given_as):
    text = NASTY.replace("FILE", str(tmp_path / "pwned"))
    target = "train-slurm" if setting in SLURM else USERS.get(setting, "train")
    if given_as == "argument":
        words = words_of(target, **{setting: text})
    else:
        words = words_of(target, environment={setting: text})
    assert sum(word == text or word.endswith(f"={text}") for word in words) == 1, words
    assert not (tmp_path / "pwned").exists()


def test_args_are_words_that_nobody_runs(words_of, tmp_path):
    from sft_play.cli import parse

    file = tmp_path / "pwned"
    words = words_of(
        "train", ARGS=f"""a.b="c d" e.f='$(touch {file})' g.h=`touch {file}` i.j=$(shell touch {file})"""
    )
    args = parse(words[2:])
    assert list(args.overrides[:2]) == ["a.b=c d", f"e.f=$(touch {file})"] and not file.exists()
    bench = words_of("bench-faults", ARGS=f"--only $(touch {file}) 'x'")
    assert (
        bench == ["-m", "tests.stress.faults", "--only", "$(touch", f"{file})", "'x'"] and not file.exists()
    )
    runs = words_of("compare", RUNS=f"one $(touch {file}) `touch {file}` $(shell touch {file})")
    assert runs[3:6] == ["one", "$(touch", f"{file})"] and not file.exists()


@pytest.mark.parametrize("target", ["resume", "eval", "infer", "merge", "merge-test", "export"])
def test_a_run_that_there_is_stands_for_its_settings(words_of, target):
    for run in ("one", "runs/one", "runs/one/"):
        assert words_of(target, RUN=run)[-2:] == ["--config", "runs/one/config.resolved.yaml"]
    assert words_of(target, RUN="/data/one", ARGS="a=b")[-2:] == [
        "/data/one/config.resolved.yaml",
        "--args=a=b",
    ]
    assert words_of(target, RUN="one", CONFIG="c.yaml")[-3:] == ["--config", "c.yaml", "output.name=one"]
    assert words_of("train", RUN="one")[-1] == "output.name=one"


def test_a_file_of_prompts_is_answered_by_both_targets(words_of):
    typed = dict(IN="in.jsonl", OUT="out.jsonl", FORCE="1", RUN="one")
    assert words_of("infer", **typed) == words_of("infer-batch", **typed)
    assert "--input" not in words_of("infer", RUN="one")


def test_args_that_are_no_words_are_refused(capsys):
    from sft_play.cli import parse

    with pytest.raises(SystemExit) as error:
        parse(["train", "--config", "x", "--args=a.b='c"])
    assert error.value.code == 2 and "no closing quotation" in capsys.readouterr().err


def test_a_setting_of_two_lines_is_refused(ready):
    done = make("train", VENV=ready, RUN="one\ntwo")
    assert done.returncode != 0 and "more than one line: output.name=one" in done.stderr


@pytest.mark.parametrize("settings", [{"GPUS": "4"}, {"config": "configs/x.yaml"}, {"MODELS": "qwen3-8b"}])
def test_a_setting_that_does_not_exist_is_refused(ready, settings):
    done = make("plan", VENV=ready, **settings)
    assert done.returncode != 0 and f"no such setting: {next(iter(settings))}" in done.stderr


def test_variables_of_the_environment_can_be_given_to_make(ready):
    assert recipe("train", VENV=ready, CUDA_VISIBLE_DEVICES="0", HF_HOME="/data", SHELL="/bin/bash")


def test_every_command_is_one_visible_line():
    for line in re.findall(r"^\t(.*)$", TEXT, re.MULTILINE):
        assert not line.startswith("@") or line.startswith(("@awk", "@echo")), line
        assert "|| true" not in line and "$(MAKE)" not in line


TAKEN_AS_IT_IS = (
    "$(foreach name,$(TYPED),$(if $(filter-out undefined,$(origin $(name))),"
    "$(eval override $(name) := $$(value $(name)))))"
)


def test_nothing_runs_when_the_makefile_is_read_and_old_make_can_read_it():
    assert "$(shell" not in TEXT
    assert re.findall(r"^.*:=.*$", TEXT, re.MULTILINE) == [".DEFAULT_GOAL := help", TAKEN_AS_IT_IS]
    assert not re.search(r"^\.(ONESHELL|SHELLFLAGS|RECIPEPREFIX)|!=|&:|\$\(file ", TEXT, re.MULTILINE)


def commands_in(text: str) -> set[str]:
    """Targets of `make ...` within code: fenced blocks and spans, not prose."""
    code = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    words = re.findall(r"(?:^|[\s`;&])make((?:[ \t]+-?[\w./-]+(?:=\S*)?)*)", "\n".join(code), re.MULTILINE)
    return {
        word for group in words for word in group.split()[:1] if "=" not in word and not word.startswith("-")
    }


def test_every_target_named_in_the_guides_exists():
    unknown = [
        f"{path.name}: make {word}"
        for path in GUIDES
        for word in sorted(commands_in(path.read_text()) - set(TARGETS))
    ]
    assert not unknown, "\n".join(unknown)


def test_the_guide_test_sees_commands():
    assert commands_in("Run `make train CONFIG=x`, make sure.\n```bash\nmake plan\nA=1 make eval\n```") == {
        "train",
        "plan",
        "eval",
    }


def test_ci_calls_the_targets_that_a_person_types():
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    called = re.findall(r"^make (\S+)", ci.read_text(), re.MULTILINE)
    assert called == ["check-code", "test", "test-thorough", "test-cluster"] and set(called) <= set(TARGETS)


def lock(name: str = "requirements.lock") -> dict[str, list[Requirement]]:
    pins: dict[str, list[Requirement]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            pin = Requirement(line.removesuffix("\\"))
            pins.setdefault(pin.name.lower().replace("_", "-"), []).append(pin)
    return pins


LOCKS = [
    "requirements.lock",
    "requirements-source.lock",
    *(f"locks/{path.name}" for path in (ROOT / "locks").iterdir()),
]
TORCH = re.search(r"^TORCH = (\S+)$", TEXT, re.MULTILINE)[1]


def test_the_locks_name_one_exact_version_of_everything_that_is_needed():
    pins = lock() | lock("requirements-source.lock") | {"torch": [Requirement(f"torch=={TORCH}")]}
    for name, found in pins.items():
        assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) for pin in found), name
        for python in ("3.11", "3.12", "3.13"):
            assert (
                sum(pin.marker is None or pin.marker.evaluate({"python_version": python}) for pin in found)
                <= 1
            ), name
    for text in importlib.metadata.requires("sft-play") or []:
        wanted = Requirement(text)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": extra}) for extra in ("", "dev")):
            continue  # an extra that is not locked
        here = [
            pin
            for pin in pins[wanted.name.lower().replace("_", "-")]
            if pin.marker is None or pin.marker.evaluate()
        ]
        assert here and wanted.specifier.contains(str(here[0].specifier).removeprefix("==")), text


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes_and_no_lock_names_an_index(name):
    text = (ROOT / name).read_text()
    for pin in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        assert pin.startswith("#") or not pin.strip() or "--hash=sha256:" in pin, pin
    assert not re.search(r"://|--(extra-)?index|--find-links|--trusted", text)


def test_the_lock_has_wheels_for_other_pythons_than_this_one():
    hashes = (ROOT / "requirements.lock").read_text().split("numpy==")[1].split("==")[0].count("--hash=")
    assert hashes > 20  # one wheel for each Python and platform


def test_torch_and_what_is_built_are_in_no_lock_of_wheels():
    assert not {"torch", "deepspeed", "rouge-score"} & set(lock())
    assert set(lock("requirements-source.lock")) == {"deepspeed", "rouge-score"}


def test_packages_are_installed_by_hash_and_the_locked_tools_build_what_has_no_wheel(tmp_path):
    python = f"'{tmp_path}/bin/python'"
    installs = [
        line.split(" scripts/pip_install.py ")[1]
        for line in recipe("install", VENV=str(tmp_path)).splitlines()
        if "pip_install" in line
    ]
    assert installs == [
        "--no-deps --require-hashes --only-binary :all: --requirement requirements.lock",
        f"torch=={TORCH} $({python} -m scripts.torch_index)",
        "--no-deps --require-hashes --no-build-isolation --use-pep517 --requirement requirements-source.lock",
        "--no-deps --no-build-isolation --editable .",
        "--no-deps --require-hashes --no-build-isolation --use-pep517 --requirement locks/liger.lock; fi",
    ]


@pytest.mark.parametrize("cuda", ["13.0", None])
def test_liger_comes_along_with_a_cuda_build_of_torch(tmp_path, cuda):
    """With a `torch` of that build, and a `pip` that says what it would install."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import version\n")
    (tmp_path / "torch" / "version.py").write_text(f"cuda = {cuda!r}\n")
    (tmp_path / "pip.py").write_text("import sys\nprint(sys.argv[-1])\n")
    (line,) = (line for line in recipe("install", VENV=str(tmp_path)).splitlines() if "torch.version" in line)
    line = line.replace(f"'{tmp_path}/bin/python'", f"'{sys.executable}'")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "V": "1"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ("locks/liger.lock\n" if cuda else "")


def test_no_lock_names_what_torch_pins():
    """PyTorch 2.13 needs triton 3.7.1, cuda-bindings, cuda-toolkit and nvidia-... of its own CUDA."""
    needed = [Requirement(text) for text in importlib.metadata.requires("torch") or []]
    pinned = {wanted.name for wanted in needed if str(wanted.specifier).startswith("==")} | {"triton"}
    for name in LOCKS:
        found = [pin for pin in lock(name) if pin in pinned or re.match(r"cuda-|nvidia-(?!ml-py)", pin)]
        assert not found, (name, found)


def test_the_floor_is_the_lowest_version_of_each_range():
    script = ROOT / "scripts" / "floor_requirements.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    floor = {Requirement(line).name: Requirement(line) for line in done.stdout.splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert list(floor) == [Requirement(text).name for text in wanted]
    for requirement in map(Requirement, wanted):
        exact = str(floor[requirement.name].specifier)
        assert exact == "" or f">={exact.removeprefix('==')}" in str(requirement.specifier).split(",")
    assert str(floor["torch"]) == "torch==2.11" and str(floor["types-PyYAML"]) == "types-PyYAML"


def test_every_range_ends_and_holds_what_the_locks_have():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = lock() | lock("requirements-source.lock") | {"torch": [Requirement(f"torch=={TORCH}")]}
    for requirement in map(Requirement, project["dependencies"]):
        assert any(part.operator == "<" for part in requirement.specifier), requirement
        (pin,) = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(str(pin.specifier).removeprefix("==")), requirement


DEVELOPER_SCRIPTS = {
    "audit.py",
    "changed_tests.py",
    "check_style.py",
    "floor_requirements.py",
    "pip_install.py",
    "requirements_of.py",
    "torch_index.py",
}  # programs with tests of their own
SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.py") if path.name not in DEVELOPER_SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_thin_and_explain_themselves(path):
    assert len(path.read_text().splitlines()) < 30
    done = subprocess.run([sys.executable, str(path), "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "--config" in done.stdout


@pytest.mark.parametrize(
    ("words", "processes", "rest"),
    [([], "0", ""), (["2"], "2", ""), (["2", "a.b=c d"], "2", " a.b=c d"), (["a.b=c"], "0", " a.b=c")],
)
def test_the_shell_script_is_the_make_target(words, processes, rest):
    script = [str(ROOT / "scripts" / "train_multi_gpu.sh"), *words]
    done = subprocess.run(
        script, capture_output=True, text=True, env={**os.environ, "PYTHON": "echo", "CONFIG": "x.yaml"}
    )
    assert done.stdout == f"-m sft_play train --config x.yaml --processes {processes}{rest}\n"


def test_variables_of_a_launcher_do_not_reach_a_command():
    theirs = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
    command = ["make", "-s", "--eval", "show: ; @env", "show", "VENV=none"]
    shown = subprocess.run(
        command, cwd=ROOT, env=os.environ | theirs, capture_output=True, text=True, check=True
    )
    assert "PIP_DISABLE_PIP_VERSION_CHECK=1" in shown.stdout
    assert not [name for name in theirs if f"\n{name}=" in f"\n{shown.stdout}"]


def test_the_script_of_a_slurm_step_says_what_starts_it():
    alone = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    script = ROOT / "scripts" / "train_slurm_multi_node.sh"
    done = subprocess.run(["bash", script], env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: srun ") and "sbatch configs/slurm/train.sbatch" in done.stderr


EXTRAS = re.search(r"^LOCKED_EXTRAS = (.*)$", TEXT, re.MULTILINE)[1].split()


def test_every_extra_has_a_lock_of_what_it_adds():
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*EXTRAS, "dev", "mlflow", "trackio"} == set(optional)
    assert sorted(EXTRAS) == sorted(path.stem for path in (ROOT / "locks").iterdir())
    base = lock() | lock("requirements-source.lock")
    for name in EXTRAS:
        added = lock(f"locks/{name}.lock")
        assert not {"torch", *base} & set(added), name
        for wanted in map(Requirement, optional[name]):
            (pin, *_) = (base | added)[wanted.name.lower().replace("_", "-")]
            assert wanted.specifier.contains(str(pin.specifier).removeprefix("==")), wanted


def test_extras_are_installed_by_hash_each_once(tmp_path):
    lines = recipe("install", VENV=str(tmp_path), EXTRAS="export,lm-eval").splitlines()
    for name in ("export", "lm-eval"):
        installed = (
            f"--no-deps --require-hashes --no-build-isolation --use-pep517 --requirement locks/{name}.lock"
        )
        assert sum(line.endswith(installed) for line in lines) == 1
        assert f"touch '{tmp_path}/.ready-{name}'" in lines
    refused = make("install", EXTRAS="export,exprot")
    assert (
        refused.returncode and "no such extra: exprot; there are: browser documents export" in refused.stderr
    )


def test_a_target_that_does_not_exist_is_an_error_that_names_the_nearest(tmp_path):
    done = make("trian", dry=False, CONFIG="x.yaml")
    assert done.returncode and not done.stdout
    assert "error: there is no target trian; did you mean `make train`? `make help` lists" in done.stderr
    assert "error: there is no target xyz; `make help` lists" in make("xyz", dry=False).stderr
    nasty = make(f"$(touch {tmp_path}/a); touch {tmp_path}/b '", dry=False)
    assert nasty.returncode and "there is no target" in nasty.stderr and not list(tmp_path.iterdir())


def test_commands_are_shown_only_if_asked_for(ready):
    python = Path(ready) / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    assert make("gpu-info", dry=False, VENV=ready).stdout == ""
    assert make("gpu-info", dry=False, VENV=ready, V="1").stdout == f"'{python}' -m sft_play gpu-info\n"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("Collecting one==1 (from -r requirements.lock)", "2 packages: one"),
        ("Downloading torch-2.13.0-cp311.whl (180.0 MB)", "2 packages: downloading torch (180.0 MB)"),
        ("Building wheel for deepspeed (pyproject.toml): started", "building deepspeed"),
        ("Installing collected packages: one, two", "installing 2 packages"),
        ("Using cached one-1.whl", ""),
    ],
)
def test_what_pip_does_is_said_while_it_takes_long(line, text):
    assert shown(line, 2) == text


@pytest.mark.parametrize(
    ("lines", "code", "text"),
    [
        (["Collecting one==1", "Processing /wheels/two-2.whl", "done"], 0, "2 packages, 0 s"),
        (["Obtaining file:///here", "Building wheels"], 0, "1 package, 0 s"),
        (["Collecting one", "ERROR: no"], 1, ""),
    ],
)
def test_pip_is_summed_up_unless_it_fails(tmp_path, lines, code, text):
    """With a `pip` that says these lines."""
    (tmp_path / "pip.py").write_text(f"print({chr(10).join(lines)!r})\nraise SystemExit({code})\n")
    script = ROOT / "scripts" / "pip_install.py"
    runs = {
        word: subprocess.run(
            [sys.executable, script, "x"],
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(tmp_path), "V": word},
        )
        for word in ("", "1")
    }
    assert all(done.returncode == code for done in runs.values())
    assert runs["1"].stdout.splitlines() == lines
    assert runs[""].stdout == ""
    assert runs[""].stderr.strip() == text if code == 0 else runs[""].stderr.splitlines() == lines
