"""The Modelfile gives the prompts of a shipped chat template, or no template at all."""

import itertools
import json
import re
import shutil
import subprocess

import pytest

from sft_play.data.template import SHIPPED, shipped_templates
from sft_play.export.ollama import modelfile, template_in_go
from tests.unit.export import folders

KNOWN = {name: (SHIPPED / f"{name}.jinja").read_text() for name in ("chatml", "plain")}


@pytest.fixture(scope="module")
def tokenizer():
    return folders.piece_tokenizer()


def conversations() -> list[list[dict]]:
    roles = itertools.cycle(("user", "assistant"))
    turns = [
        {"role": role, "content": text}
        for role, text in zip(roles, ("one?", "Two.", 'say "three"', "4", "5"), strict=False)
    ]
    found = [turns[:1], turns[:3], turns]
    return [*found, [{"role": "system", "content": "Rules."}, *found[1]]]


def in_go(template: str, messages: list[dict]) -> str:
    """What Go's text/template prints for the few constructs in ours, read from its definition."""
    opening, loop = template.split("{{ range .Messages }}")
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if not system:
        opening = opening.partition("{{ if .System }}")[0]
    user, assistant = loop.removesuffix("{{ end }}{{ end }}").split('{{ else if eq .Role "assistant" }}')
    pieces = {"user": user.removeprefix('{{ if eq .Role "user" }}'), "assistant": assistant, "system": ""}

    def printed(text: str, content: str) -> str:
        text = re.sub(r"{{ (if .System|end) }}", "", text)
        text = re.sub(r'{{ ("(?:[^"\\]|\\.)*") }}', lambda found: json.loads(found[1]), text)
        return text.replace("{{ .System }}", system).replace("{{ .Content }}", content)

    return printed(opening, "") + "".join(printed(pieces[m["role"]], m["content"]) for m in messages)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_template_in_go_gives_the_same_prompts(tokenizer, name, adds_bos):
    tokenizer.chat_template = KNOWN[name]
    template = template_in_go(tokenizer, adds_bos=adds_bos)
    for messages in conversations():
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert in_go(template, messages) == (wanted.removeprefix(tokenizer.bos_token) if adds_bos else wanted)


GO = """package main
import ("encoding/json"; "os"; "text/template")
type Message struct { Role, Content string }
type Case struct { Template, System string; Messages []Message }
func main() {
    var cases []Case
    if json.NewDecoder(os.Stdin).Decode(&cases) != nil { os.Exit(2) }
    for _, c := range cases {
        if template.Must(template.New("").Parse(c.Template)).Execute(os.Stdout, c) != nil { os.Exit(3) }
        os.Stdout.WriteString("\\x00")
    }
}
"""


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go (apt-get install golang-go)")
def test_go_itself_prints_them(tokenizer, tmp_path):
    cases, wanted = [], []
    for template in KNOWN.values():
        tokenizer.chat_template = template
        written = template_in_go(tokenizer, adds_bos=True)
        for messages in conversations():
            system = messages[0]["content"] if messages[0]["role"] == "system" else ""
            cases.append({"Template": written, "System": system, "Messages": messages})
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            wanted.append(text.removeprefix(tokenizer.bos_token))
    (tmp_path / "main.go").write_text(GO)
    done = subprocess.run(
        ["go", "run", str(tmp_path / "main.go")],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\0")[:-1] == wanted


@pytest.mark.parametrize("template", [folders.CHATML + "\n", folders.GEMMA, None])
def test_another_template_is_not_written(tokenizer, template):
    tokenizer.chat_template = template
    assert template_in_go(tokenizer, adds_bos=True) is None
    text = modelfile("m.gguf", None, ["<end_of_turn>"], None)
    assert "TEMPLATE " not in text.replace("add a TEMPLATE.", "") and "not written for Ollama here" in text


def test_every_shipped_template_is_written(tokenizer):
    assert KNOWN.keys() == set(shipped_templates())


def test_the_modelfile_names_file_stop_tokens_and_system_prompt(tokenizer):
    tokenizer.chat_template = KNOWN["chatml"]
    template = template_in_go(tokenizer, adds_bos=True)
    text = modelfile("m-F16.gguf", template, ["<|im_end|>", "</s>"], "Be brief.\nBe kind.")
    assert text.splitlines()[1] == "FROM ./m-F16.gguf"
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\n' in text
    assert text.endswith('SYSTEM """Be brief.\nBe kind."""\n')
    assert text.count("TEMPLATE") == 1 and "tools and their replies are not rendered" in text
