import dataclasses
import http.server
import importlib.metadata
import importlib.util
import json
import shutil
import threading
from pathlib import Path

import pytest
import yaml

from sft_play.cli import main
from sft_play.commands import check
from sft_play.commands.check import ERROR, OK, WARNING, Finding, exit_code
from sft_play.config.load import load_config
from sft_play.machine import cuda
from sft_play.machine.gpus import GpuProcess, Machine, detect_host, what_if
from sft_play.units import GIB

CPU_ONLY = Machine(gpus=(), note="no driver", host=detect_host())


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def config(tmp_path, model):
    """Writes a config with changes and returns its path."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "2"}\n')

    def write(**changes) -> str:
        tree = {
            "model": {"name": str(model)},
            "data": {"train_path": str(rows)},
            "output": {"dir": str(tmp_path / "runs")},
        }
        for name, value in changes.items():
            section, key = name.split("__")
            tree.setdefault(section, {})[key] = value
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    return write


def errors(findings, level=ERROR) -> str:
    return "\n".join(f"{f.topic}: {f.what} -> {f.fix}" for f in findings if f.level == level)


@pytest.mark.thorough
def test_a_run_that_can_start_has_no_errors(config, tiny_model):
    findings = check.check(config(model__name=str(tiny_model)), machine=CPU_ONLY)
    assert errors(findings) == "" and exit_code(findings) == 0
    assert {"config", "data", "model", "method", "disk", "plan", "device", "versions"} == {
        finding.topic for finding in findings
    }
    (planned,) = (finding for finding in findings if finding.topic == "plan")
    assert (
        planned.level == OK
        and planned.what.startswith("fits 1 process: ")
        and " per process predicted" in planned.what
    )


@pytest.mark.thorough
def test_a_run_that_does_not_fit_is_an_error_with_what_would_help(config, tiny_model, tmp_path):
    """Its weights alone take 15 TB."""
    folder = tmp_path / "large"
    shutil.copytree(tiny_model, folder)
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(tree | {"num_hidden_layers": 80, "intermediate_size": 2**24})
    )
    findings = check.check(config(model__name=str(folder)), machine=CPU_ONLY)
    assert "plan: this run does not fit: the smallest plan (micro-batch 1" in errors(findings)
    assert "no single setting makes it fit" in errors(findings) and exit_code(findings) == 2


def test_a_broken_row_behind_the_first_is_found(config, tiny_model, tmp_path):
    path = config(model__name=str(tiny_model))
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 3 + "{broken\n")
    findings = check.check(path, machine=CPU_ONLY)
    assert "rows.jsonl:4" in errors(findings) and exit_code(findings) == 3


def test_the_fix_of_a_wrong_source_is_one_that_can_be_typed(config, tmp_path):
    wrong = str(tmp_path / "nowhere.jsonl")
    said = errors(check.check(config(data__train_path=wrong), machine=CPU_ONLY))
    assert 'correct the file, or use another one: ARGS="data.train_path=<file>"' in said
    several = config(data__train_path=None, data__sources=[{"path": wrong}])
    assert "data.sources[0] in the config" in errors(check.check(several, machine=CPU_ONLY))


def test_a_misspelt_key_is_an_error_and_the_machine_is_still_looked_at(config):
    findings = check.check(config(train__learning_rat=1), machine=CPU_ONLY)
    assert "did you mean train.learning_rate" in errors(findings) and exit_code(findings) == 2
    assert any(finding.topic == "versions" for finding in findings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"question": 5, "answer": "x"}\n', "rows.jsonl:1"),
        ("", "rows.jsonl"),
        ("not json\n", "rows.jsonl:1"),
        ('{"colour": "red"}\n', "rows.jsonl:1"),
        (None, "does not exist"),
    ],
)
def test_data_that_cannot_be_read_has_the_exit_code_of_data(config, tmp_path, text, words):
    path = config()
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text) if text is not None else rows.unlink()
    findings = check.check(path, machine=CPU_ONLY)
    assert words in errors(findings) and exit_code(findings) == 3


def test_a_row_that_teaches_nothing_is_a_warning(config, tmp_path):
    path = config()
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": " "}\n')
    findings = check.check(path, machine=CPU_ONLY)
    assert "first row is dropped" in errors(findings, WARNING)


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("model.safetensors", None, "no *.safetensors"),
        ("model.safetensors", "pytorch_model.bin", "only *.bin"),
        ("tokenizer.json", None, "has no tokenizer"),
        (None, "model.safetensors.index.json", "lacks model-00002.safetensors"),
    ],
)
def test_a_model_folder_must_hold_config_weights_and_tokenizer(config, model, remove, add, words):
    if remove:
        (model / remove).unlink()
    if add:
        (model / add).write_text(json.dumps({"weight_map": {"w": "model-00002.safetensors"}}))
    findings = check.check(config(), machine=CPU_ONLY)
    assert words in errors(findings) and exit_code(findings) == 2


def test_without_a_gpu_it_is_said_which_models_are_reasonable():
    (found,) = check.device_findings(CPU_ONLY)
    assert (
        found.level == WARNING and found.fix.startswith("fine for small models") and "make plan" in found.fix
    )


def test_an_index_that_lists_a_pickled_file_is_an_error(config, model):
    index = json.dumps({"weight_map": {"w": "pytorch_model.bin"}})
    (model / "model.safetensors.index.json").write_text(index)
    findings = check.check(config(), machine=CPU_ONLY)
    assert "lists 'pytorch_model.bin'" in errors(findings) and exit_code(findings) == 2


def test_wrong_data_and_a_wrong_model_together_count_as_wrong_config(config, model):
    shutil.rmtree(model)
    assert exit_code(check.check(config(data__train_path="/no/such.jsonl"), machine=CPU_ONLY)) == 2


def test_builtin_models_and_data_need_nothing(config):
    built_in = load_config(config(model__name="builtin:tiny", data__train_path="builtin:demo")).config
    findings = [*check.data_findings(built_in), *check.model_findings(built_in)]
    assert errors(findings) == ""
    assert sum("is built in" in finding.what for finding in findings) == 2


@pytest.mark.parametrize(
    ("gpu", "precision", "words"),
    [
        ("T4", "bf16", "does not support bf16"),
        ("T4", "auto", ""),
        ("L4", "bf16", ""),
        (None, "fp16", "fp16 training is not supported"),
    ],
)
def test_precision_that_the_device_lacks_is_refused(config, gpu, precision, words):
    machine = what_if(gpu) if gpu else CPU_ONLY
    found = errors(
        check.method_findings(check.load_config(config(train__mixed_precision=precision), []).config, machine)
    )
    assert words in found and bool(words) == bool(found)


@pytest.mark.parametrize(
    ("changes", "package"),
    [
        ({"tuning__mode": "qlora"}, "bitsandbytes"),
        ({"train__optimizer": "adamw_8bit"}, "bitsandbytes"),
        ({"parallel__engine": "deepspeed_z2"}, "deepspeed"),
    ],
)
def test_a_method_whose_package_is_missing_is_refused(config, monkeypatch, changes, package):
    resolved = check.load_config(config(**changes), []).config
    assert errors(check.method_findings(resolved, CPU_ONLY)) == ""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    assert f"needs {package}, which is not installed -> run `make install`" in errors(
        check.method_findings(resolved, CPU_ONLY)
    )


class Hub(http.server.BaseHTTPRequestHandler):
    """Speaks as much of the hub as the check asks for."""

    def do_GET(self):
        name = self.path.split("?")[0].rpartition("/")[2]
        status, code = {"known": (200, None), "gated": (403, "GatedRepo"), "missing": (404, "RepoNotFound")}[
            name
        ]
        body = json.dumps({"id": f"org/{name}", "siblings": []}).encode() if status == 200 else b"{}"
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [
        ("org/known", OK, "is on the Hub"),
        ("org/gated", ERROR, "is gated"),
        ("org/missing", ERROR, "does not exist locally or on the Hub"),
    ],
)
def test_a_hub_name_is_asked_for(config, hub, name, level, words):
    (finding,) = check.model_findings(check.load_config(config(model__name=name), []).config)
    assert finding.level == level and words in finding.what


def test_a_model_that_is_neither_here_nor_to_be_had_is_an_error(config, hub):
    hub.shutdown()
    hub.server_close()
    (finding,) = check.model_findings(check.load_config(config(model__name="org/known"), []).config)
    assert finding.level == ERROR and "the Hub is not reachable" in finding.what


def test_offline_nothing_is_to_be_had_and_a_hub_data_set_is_told_from_a_file(config, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    findings = check.check(config(model__name="org/model", data__train_path="org/rows"), machine=CPU_ONLY)
    assert exit_code(findings) == 2 and errors(findings).count("HF_HUB_OFFLINE is set") == 2
    assert exit_code(check.check(config(data__train_path="data/rows.jsonl"), machine=CPU_ONLY)) == 3


def test_rows_that_are_left_out_are_counted(config, tiny_model, tmp_path):
    path = config(model__name=str(tiny_model), data__bad_rows="drop")
    rows = (tmp_path / "rows.jsonl").read_text() * 30
    (tmp_path / "rows.jsonl").write_text(f"{rows}garbage\n")
    findings = check.check(path, machine=CPU_ONLY)
    assert not errors(findings)
    assert "data: data.bad_rows=drop: 1 row left out as not valid: see " in errors(findings, WARNING)


@pytest.mark.parametrize(
    ("settings", "count", "where"),
    [
        ({"train__grad_accum": 1, "train__effective_batch_size": 8}, 3, "fits 1 GPU: "),  # 3 do not divide it
        ({"parallel__engine": "fsdp2"}, 3, "fits 3 GPUs: "),
        ({"parallel__sequence_parallel_size": 2}, 4, "fits 4 GPUs: "),
    ],
)
def test_on_several_gpus_a_run_is_planned_on_one_unless_it_asks_for_more(
    config, tiny_model, settings, count, where
):
    findings = check.check(config(model__name=str(tiny_model), **settings), machine=what_if("L4", count))
    (plan,) = (finding for finding in findings if finding.topic == "plan")
    assert plan.what.startswith(where)


def test_a_gpu_in_use_and_gpus_that_differ_are_warned_of():
    machine = what_if("L4", 2)
    busy = dataclasses.replace(
        machine.gpus[1], name="NVIDIA L40", processes=(GpuProcess(7, "python", 20 * GIB),)
    )
    found = errors(check.device_findings(dataclasses.replace(machine, gpus=(machine.gpus[0], busy))), WARNING)
    assert (
        "GPU 1 is in use by other processes: 7 python 20.00 GiB" in found
        and "the GPUs are different models" in found
    )


def test_a_disk_that_is_full_or_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 0, "total": 100 * GIB})
    for free, level in ((GIB // 2, ERROR), (5 * GIB, WARNING), (50 * GIB, OK)):
        usage.free = free
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        assert [finding.level for finding in check.disk_findings(tmp_path / "not" / "yet")] == [level]
    monkeypatch.setattr(check.os, "access", lambda path, mode: False)
    assert "is not writable" in errors(check.disk_findings(tmp_path))


def test_packages_outside_their_ranges_are_named(monkeypatch):
    assert [finding.level for finding in check.version_findings(CPU_ONLY)] == [OK]
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "1.0" if name == "transformers" else real(name)
    )
    assert "transformers 1.0 (needs " in errors(check.version_findings(CPU_ONLY))


def test_new_tokens_are_shown_with_their_pieces_or_refused(config, tiny_model):
    def said(name: str, *tokens: str) -> list[str]:
        asked = load_config(config(model__name=name, model__new_tokens=list(tokens))).config
        return [finding.what for finding in check.token_findings(asked)]

    assert said(str(tiny_model), "w1 w2", "<tool>") == [
        "w1 w2 is new, token 256; was 'w1' + 'w2'",
        "<tool> is new, token 257; was unknown to the tokenizer",
    ]
    path = config(model__name=str(tiny_model), model__new_tokens=["w7"])
    assert "tokens: model.new_tokens: 'w7' is already a token" in errors(check.check(path, machine=CPU_ONLY))
    assert said("builtin:tiny", "<tool>") == []  # whose tokenizer is not made yet


def test_a_cpu_build_of_torch_beside_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(cuda, "installed_build", lambda: cuda.Build("2.13.0+cpu", None, False))
    assert "is a CPU build, but this machine has a GPU" in errors(check.version_findings(what_if("L4")))


def test_errors_of_data_alone_have_a_code_of_their_own():
    wrong = [Finding(ERROR, "data", "x"), Finding(WARNING, "disk", "x")]
    assert exit_code(wrong) == 3
    assert exit_code([*wrong, Finding(ERROR, "disk", "x")]) == 2
    assert exit_code([Finding(OK, "data", "x")]) == 0


def test_the_json_has_every_line_and_the_table_too(config, capfd):
    path = str(config(train__mixed_precision="fp16"))
    code = main(["check", "--config", path, "--json"])
    tree = json.loads(capfd.readouterr().out)
    assert tree["exit_code"] == code and any(finding["level"] == "ok" for finding in tree["findings"])
    assert main(["check", "--config", path]) == code
    text = capfd.readouterr().out
    assert all(finding["topic"] in text for finding in tree["findings"])
