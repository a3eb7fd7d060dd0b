"""What the source never does: run strings or pickles, trust code from elsewhere, listen to the network."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("sft_play", "scripts", "benchmarks", "tests/stress")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}


def name_of(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(name_of(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def argument(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


FORBIDDEN = {
    "eval", "exec", "compile", "__import__",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "dill.load",
    "dill.loads", "joblib.load", "marshal.load", "marshal.loads", "shelve.open", "tempfile.mktemp",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.unsafe_load_all", "os.chmod", "os.umask",
}  # fmt: skip


def problems(tree: ast.AST) -> list[str]:
    found = []
    for name, call in calls(tree):
        if name in FORBIDDEN:
            found.append(name)
        if name == "torch.load" and ast.unparse(argument(call, "weights_only") or call) != "True":
            found.append("torch.load without weights_only=True")
        if name.endswith(("np.load", "numpy.load")) and argument(call, "allow_pickle") is not None:
            found.append("numpy.load with allow_pickle")
        if name == "yaml.load" and argument(call, "Loader") is None:
            found.append("yaml.load without a safe loader")
        shell = argument(call, "shell")
        if shell is not None and ast.unparse(shell) != "False":
            found.append("shell=True")
        if name.endswith(".chmod") and int(ast.literal_eval(call.args[0])) & 0o077:
            found.append("a file opened to others")
        for keyword in call.keywords:
            if keyword.arg == "trust_remote_code":
                found.append("trust_remote_code")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            found.append("a listener on every interface")
    return found


def test_no_source_runs_text_or_opens_a_door():
    found = [f"{path}: {problem}" for path, tree in TREES.items() for problem in problems(tree)]
    assert len(TREES) > 100
    assert not found, "\n".join(found)


# how each kind of problem may be written
DOORS = [
    "eval('1')",
    "os.system('ls')",
    "pickle.loads(b'')",
    "torch.load(x)",
    "torch.load(x, weights_only=False)",
    "np.load(x, allow_pickle=True)",
    "yaml.load(x)",
    "subprocess.run('ls', shell=True)",
    "path.chmod(0o644)",
    "AutoModel.from_pretrained(x, trust_remote_code=True)",
    "server.bind(('0.0.0.0', 1))",
]


def test_the_search_finds_what_it_looks_for():
    missed = [text for text in DOORS if not problems(ast.parse(text))]
    assert not missed, "\n".join(missed)


def test_code_from_elsewhere_is_trusted_in_one_place_only():
    users = [path for path, tree in TREES.items() if "trust_remote_code" in ast.unparse(tree)]
    # files.py only tells such models from others, of which answers are kept
    assert users == ["sft_play/config/schema.py", "sft_play/model/load.py", "sft_play/model/weights/files.py"]


def test_every_yaml_loader_is_a_safe_one():
    import yaml

    from sft_play.config.load import _Loader

    assert issubclass(_Loader, yaml.SafeLoader)
    users = [path for path, tree in TREES.items() if "yaml.load(" in ast.unparse(tree)]
    catalogue = "sft_play/machine/catalogue.py"
    assert users == ["sft_play/config/load.py", catalogue]
    assert "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)" in ast.unparse(TREES[catalogue])
