"""The structure holds: imports go down, importing does no work, light commands stay light."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx
import pytest

from scripts.check_style import imported_names, read_modules

PACKAGE = Path(__file__).resolve().parents[2] / "sft_play"
FOLDERS = ("sft_play", "benchmarks", "scripts", "tests")

# The ground floor first. A package is named whole, or module by module where it spans two floors.
FLOORS = [
    ["spelling", "secrets"],
    ["__init__", "errors", "extras", "resources", "start", "units"],
    ["files"],
    ["choices", "parts", "rows"],
    ["fingerprints"],
    ["config", "cache", "manifest"],
    ["hooks", "plan", "runlog", "ui", "work"],
    ["reasons", "timeline", "upstream"],
    ["engines"],
    ["machine", "model.attention.table", "hub"],
    ["libraries", "vision"],
    ["data", "model.architecture.published"],
    ["data.prepare", "report"],
    ["data.show"],
    ["sizing.meters.product_scratch", "sizing.step", "sizing.estimate.allocator", "sizing.estimate.budget", "sizing.estimate.memory"],
    ["planning.candidates.batch", "planning.candidates.drafts", "planning.candidates.tiles", "planning.search", "planning.speed.profile"],
    ["launch"],
    ["studio"],
    ["engines.stored", "vision.batches", "vision.models", "vision.prompts"],
    ["engines.shards", "engines.state", "engines.on_disk", "engines.whole", "engines.zero2_state", "engines.zero3_parts", "model", "builtin.converted", "builtin.models", "builtin.shapes", "builtin.wheel", "builtin.world"],
    ["builtin.replies"],
    ["builtin.demo", "export"],
    ["sizing"],
    ["planning"],
    ["job", "results"],
    ["train"],
    ["commands"],
    ["cli", "given"],
    ["api"],
    ["__main__", "scripts"],
]  # fmt: skip
# the modules of this floor and of those above it may import torch, directly or through others
TORCH_LINE = "engines.stored"
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES if path.name != "__init__.py" or path.parent == PACKAGE}


def floor_of(module: str) -> int:
    while True:
        for number, names in enumerate(FLOORS):
            if module in names:
                return number
        assert "." in module, f"{module} has no floor: give it one in this test"
        module = module.rpartition(".")[0]


@cache
def imports_of(path: Path) -> list[str]:
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


def own_imports(module: str) -> set[str]:
    """Modules of this package that a module imports."""
    names = {
        name.removeprefix("sft_play.") for name in imports_of(NAMES[module]) if name.startswith("sft_play.")
    }
    return names & set(NAMES)


def path_to_heavy(module: str, seen: set[str]) -> list[str]:
    """The chain of imports from a module to a heavy library; [] if there is none."""
    heavy = {name.split(".")[0] for name in imports_of(NAMES[module])} & HEAVY
    if heavy:
        return [module, *sorted(heavy)]
    for imported in sorted(own_imports(module) - seen):
        seen.add(imported)
        rest = path_to_heavy(imported, seen)
        if rest:
            return [module, *rest]
    return []


def goes_down(module: str, imported: str) -> bool:
    """Within a package the same floor will do."""
    same_package = imported.split(".")[0] == module.split(".")[0]
    return floor_of(imported) < floor_of(module) + same_package


def test_imports_go_down_the_floors():
    upwards = [
        f"{module} imports {imported} upwards"
        for module in NAMES
        for imported in sorted(own_imports(module))
        if not goes_down(module, imported)
    ]
    assert not upwards, "\n".join(upwards)


def test_modules_above_the_torch_line_do_not_reach_heavy_libraries():
    light = [module for module in NAMES if floor_of(module) < floor_of(TORCH_LINE)]
    chains = [path_to_heavy(module, {module}) for module in light]
    heavy = [" -> ".join(chain) for chain in chains if chain]
    assert len(light) > 50
    assert not heavy, "torch is imported above the torch line:\n" + "\n".join(heavy)


def test_the_torch_line_is_followed_through_other_modules():
    assert path_to_heavy("job", {"job"})[-1] in HEAVY  # it imports torch through others alone
    assert "torch" not in {name.split(".")[0] for name in imports_of(NAMES["job"])}


def test_a_plan_imports_heavy_libraries_only_where_it_needs_them():
    assert path_to_heavy("commands.plan", {"commands.plan"}) == []


def imports_of_all() -> dict[str, set[str]]:
    """Module -> modules of these folders that it imports, also within functions and under TYPE_CHECKING."""
    found = {
        f"{folder}.{module.name}".rstrip("."): imported_names(module, "")
        for folder in FOLDERS
        for module in read_modules(PACKAGE.parent / folder)
    }
    return {name: (imported & found.keys()) - {name} for name, imported in found.items()}


def folders_of(modules: dict[str, set[str]], depth: int) -> dict[str, set[str]]:
    """Folder -> folders that its modules import; within the package and the tests, their own to this depth."""

    def folder(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:depth] if parts[0] in (PACKAGE.name, "tests") else parts[:1])

    graph: dict[str, set[str]] = {}
    for name, imported in modules.items():
        graph.setdefault(folder(name), set()).update(map(folder, imported))
    return graph


def test_neither_modules_nor_packages_import_each_other_in_a_circle():
    """Nor within functions or under TYPE_CHECKING, where Python would not mind."""
    modules = imports_of_all()
    assert {name.partition(".")[0] for name in modules} == set(FOLDERS)
    assert "benchmarks.small_models" in modules["tests.unit.sizing.test_trace"]  # a look across folders
    rooms = folders_of(modules, 3)  # a module beside rooms, as model/build.py, is one of its own
    assert "sft_play.model.attention" in rooms["sft_play.model.layers"]
    graphs = map(networkx.DiGraph, (modules, folders_of(modules, 2), rooms))
    parts = [part for graph in graphs for part in networkx.strongly_connected_components(graph)]
    circles = [part for part in parts if len(part) > 1]
    assert not circles, "\n".join(", ".join(sorted(circle)) for circle in circles)


def test_folders_beside_the_package_import_only_those_before_them():
    """Also within functions: sft_play runs from a wheel, which has no other folder."""
    folders = ["sft_play", "benchmarks", "scripts", "tests"]
    wrong = []
    for number, folder in enumerate(folders):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
            names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            wrong += [f"{path}: {name}" for name in names if name.split(".")[0] in folders[number + 1 :]]
    assert not wrong, "\n".join(wrong)


def test_packages_do_nothing_when_they_are_imported():
    assert [
        path for path in MODULES if path.parent != PACKAGE and path.name == "__init__.py" and path.read_text()
    ] == []


def test_no_package_is_empty_at_its_floor():
    listed = {name for names in FLOORS for name in names}
    known = set(NAMES) | {name.rpartition(".")[0] for name in NAMES}
    assert not listed - known, f"no such modules: {sorted(listed - known)}"


def too_long(path: Path) -> list[str]:
    text = path.read_text()
    found = [f"{path}: {lines} lines"] if (lines := text.count("\n")) > 400 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            found += [f"{path}:{node.lineno}: {node.name} is {lines} lines long"] if lines > 60 else []
    return found


def test_files_and_functions_stay_short():
    found = [line for path in MODULES for line in too_long(path)]
    assert not found, "\n".join(found)


def test_the_api_and_the_package_are_imported_without_heavy_libraries():
    script = (
        f"import sys, sft_play, sft_play.api\nassert not {HEAVY!r} & set(sys.modules), sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["gpu-info"],
        ["config-schema"],
        ["--help"],
        ["report", "none"],
        ["compare", "one", "none"],
        ["train", "--config", "configs/run_lora.yaml", "data.train_path=none.jsonl"],
    ],
    ids=lambda words: words[0],
)
def test_light_commands_do_not_import_torch(command):
    script = (
        "import sys\nfrom sft_play.cli import main\n"
        f"try: main({command!r})\nexcept SystemExit: pass\n"
        f"heavy = sorted({HEAVY!r} & set(sys.modules))\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
