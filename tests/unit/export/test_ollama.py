"""The Modelfile gives the prompts that the chat template gives, or no template at all."""

import itertools
import json
import re
import shutil
import subprocess

import pytest

from sft_play.data.template import SHIPPED
from sft_play.export.ollama import modelfile, turns_of
from tests.unit.export import folders

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% else %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)
QWEN_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe Qwen.<|im_end|>\n{% endif %}"
    + folders.CHATML
)
THINKING_OFF = folders.CHATML.replace(
    "assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}"
)
KNOWN = {
    "an empty thought": THINKING_OFF,
    "chatml": folders.CHATML,
    "gemma": folders.GEMMA,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen": QWEN_DEFAULT,
    "shipped chatml": (SHIPPED / "chatml.jinja").read_text(),
    "shipped plain": (SHIPPED / "plain.jinja").read_text(),
}
WITHOUT_SYSTEM = {"mistral"}


@pytest.fixture(scope="module")
def tokenizer():
    return folders.piece_tokenizer()


def conversations(system: bool) -> list[list[dict]]:
    roles = itertools.cycle(("user", "assistant"))
    turns = [
        {"role": role, "content": text}
        for role, text in zip(roles, ("one?", "Two.", 'say "three"', "4", "5"), strict=False)
    ]
    found = [turns[:1], turns[:3], turns]
    return found + [[{"role": "system", "content": "Rules."}, *found[1]]] * system


def in_go(template: str, messages: list[dict]) -> str:
    """What Go's text/template prints for the few constructs in ours, read from its definition."""
    out, first = [], True
    opening, loop = template.split("{{ $first := true }}{{ range $i, $_ := .Messages }}")
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if opening.startswith("{{ if .System }}"):
        given, otherwise = (
            opening.removeprefix("{{ if .System }}").removesuffix("{{ end }}").split("{{ else }}")
        )
        opening = given if system else otherwise
    user = loop.removeprefix('{{ if eq .Role "user" }}').partition('{{ else if eq .Role "assistant" }}')[0]

    def printed(text: str, content: str) -> str:
        text = re.sub(r'{{ ("(?:[^"\\]|\\.)*") }}', lambda found: json.loads(found[1]), text)
        return text.replace("{{ .System }}", system).replace("{{ .Content }}", content)

    out.append(printed(opening, ""))
    between, rest = re.fullmatch(
        r"{{ if not \$first }}(.*?){{ end }}(.*){{ \$first = false }}", user
    ).groups()
    for number, message in enumerate(messages):
        if message["role"] == "user":
            branch = re.search(
                r"{{ if eq \(len \(slice \$\.Messages \$i\)\) 1 }}(.*?){{ else }}(.*?){{ end }}", rest
            )
            after = rest
            if branch:
                chosen = branch[1] if number == len(messages) - 1 else branch[2]
                after = rest.replace(branch[0], chosen)
            out.append(printed(after if first else between + after, message["content"]))
            first = False
        elif message["role"] == "assistant":
            out.append(message["content"])
    return "".join(out)


@pytest.mark.parametrize("name", KNOWN)
def test_the_template_in_go_gives_the_same_prompts(tokenizer, name):
    tokenizer.chat_template = KNOWN[name]
    turns = turns_of(tokenizer, adds_bos=True)
    assert (turns.system is None) == (name in WITHOUT_SYSTEM)
    for messages in conversations(turns.system is not None):
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert in_go(turns.in_go(), messages) == wanted.removeprefix(tokenizer.bos_token)


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
        turns = turns_of(tokenizer, adds_bos=True)
        for messages in conversations(turns.system is not None):
            system = messages[0]["content"] if messages[0]["role"] == "system" else ""
            cases.append({"Template": turns.in_go(), "System": system, "Messages": messages})
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


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}{% endfor %}",  # numbers the turns
        "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}",  # changes the texts
        "{% for m in messages %}{% if loop.last %}S{% endif %}<{{ m.content }}>{% endfor %}",  # marks the last turn
        "{{ messages[-1].content }}",  # forgets the others
        "{{ messages.nothing.at_all }}",  # cannot be rendered
        None,
    ],
)
def test_a_template_that_does_more_is_not_invented(tokenizer, template):
    tokenizer.chat_template = template
    assert turns_of(tokenizer, adds_bos=True) is None
    text = modelfile("m.gguf", None, ["<end_of_turn>"], None)
    assert "TEMPLATE " not in text.replace("add a TEMPLATE.", "") and "does more than can be written" in text


def test_the_modelfile_names_file_stop_tokens_and_system_prompt(tokenizer):
    tokenizer.chat_template = folders.CHATML
    text = modelfile(
        "m-F16.gguf", turns_of(tokenizer, adds_bos=True), ["<|im_end|>", "</s>"], "Be brief.\nBe kind."
    )
    assert text.splitlines()[1] == "FROM ./m-F16.gguf"
    assert 'PARAMETER stop "<|im_end|>"\nPARAMETER stop "</s>"\n' in text
    assert text.endswith('SYSTEM """Be brief.\nBe kind."""\n')
    assert text.count("TEMPLATE") == 1
