"""The structure holds: imports go down, importing does no work, light commands stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sft_play"

FLOORS = {
    "errors": 0, "units": 0, "__init__": 0,
    "config": 1, "runlog": 1, "host": 1,
    "hardware": 2, "data": 2, "report": 2,
    "sizing.memory": 3, "sizing.guard": 3, "sizing.planner": 3, "sizing.throughput": 3, "sizing.search": 3, "sizing.batch": 3,
    "launch": 4,
    "check": 5, "attention": 5, "scoring": 5, "builtin": 5, "answers": 5, "weights": 5,
    "model": 6, "demo": 6,
    "generation": 7, "sizing": 7,
    "planning": 8, "job": 9,
    "train": 10, "machines": 10,
    "evaluate": 11, "infer": 11, "merge": 11,
    "training": 12,
    "commands": 13, "cli": 14, "__main__": 15,
}  # fmt: skip
TORCH_LINE = 5  # modules below this floor must not import these
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int:
    while module not in FLOORS and "." in module:
        module = module.rpartition(".")[0]
    assert module in FLOORS, f"{module} has no floor: give it one in this test"
    return FLOORS[module]


def module_imports(path: Path) -> list[str]:
    """What a module imports when it is imported: not within functions, not for type checkers."""
    found: list[str] = []

    def walk(nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                found.extend(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.append(node.module)
                found.extend(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                continue
            elif isinstance(node, ast.If | ast.Try | ast.ClassDef | ast.With):
                walk(ast.iter_child_nodes(node))

    walk(ast.parse(path.read_text()).body)
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_down_the_floors(path):
    module = name_of(path) or "__init__"
    for imported in module_imports(path):
        if not imported.startswith("sft_play."):
            continue
        target = imported.removeprefix("sft_play.")
        if not (
            (PACKAGE / Path(*target.split("."))).is_dir() or (PACKAGE / Path(*target.split("."))).with_suffix(".py").is_file()
        ):
            continue  # a name within a module
        same_folder = target.split(".")[0] == module.split(".")[0]
        assert same_folder or floor_of(target) < floor_of(module), f"{module} imports {target} upwards"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_light_modules_do_not_import_heavy_libraries(path):
    module = name_of(path) or "__init__"
    if floor_of(module) < TORCH_LINE:
        heavy = {name.split(".")[0] for name in module_imports(path)} & HEAVY
        assert not heavy, f"{module} is above the torch line and imports {heavy}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} is {node.end_lineno - node.lineno + 1} lines long"


@pytest.mark.parametrize("command", [["gpu-info"], ["config-schema"], ["--help"]])
def test_light_commands_do_not_import_torch(command):
    script = (
        "import sys\nfrom sft_play.cli import main\n"
        f"try: main({command!r})\nexcept SystemExit: pass\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules))\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
