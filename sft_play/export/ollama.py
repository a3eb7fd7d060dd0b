"""The Modelfile by which Ollama runs a GGUF file with the chat template that the model was trained with.

Ollama's templates are in Go's language; it uses the Jinja template of a GGUF file only if it recognizes it.
Those that come with this package are written in Go here. With any other, the Modelfile gets no template.
"""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sft_play.data.template import shipped_templates, template_text


def template_in_go(tokenizer: PreTrainedTokenizerBase, *, adds_bos: bool) -> str | None:
    """The chat template in Go's language, for Ollama's messages; None unless it is one of the shipped ones.

    `adds_bos`: the GGUF file says that the token that begins a text is added, so it is left out here: Ollama
    adds it to whatever the template has written.
    """
    bos = "" if adds_bos or not tokenizer.bos_token else str(tokenizer.bos_token)
    # name -> what begins a text, who speaks, what ends a question, what ends an answer
    marks = {
        "chatml": ("", "<|im_start|>{}\n", "<|im_end|>\n", "<|im_end|>\n"),
        "plain": (bos, "### {}:\n", "\n\n", f"{tokenizer.eos_token}\n\n"),
    }
    names = [name for name in shipped_templates() if template_text(name) == tokenizer.chat_template]
    if not names or (adds_bos and names[0] == "chatml" and tokenizer.bos_token == "<|im_start|>"):
        return None  # of the latter, each later turn begins with that token too
    opening, speaker, asked, answered = marks[names[0]]
    roles = ("system", "user", "assistant") if names[0] == "chatml" else ("System", "User", "Assistant")
    system, user, assistant = (_go(speaker.format(role)) for role in roles)
    return "".join(
        [
            _go(opening),
            f"{{{{ if .System }}}}{system}{{{{ .System }}}}{_go(asked)}{{{{ end }}}}",
            "{{ range .Messages }}",
            f'{{{{ if eq .Role "user" }}}}{user}{{{{ .Content }}}}{_go(asked)}{assistant}',
            f'{{{{ else if eq .Role "assistant" }}}}{{{{ .Content }}}}{_go(answered)}',
            "{{ end }}{{ end }}",
        ]
    )


def _go(text: str) -> str:
    """A piece of a Go template that prints `text`."""
    return f"{{{{ {_quoted(text)} }}}}" if text else ""


def _quoted(text: str) -> str:
    """A string as Go writes it, which is as JSON does."""
    return json.dumps(text, ensure_ascii=False)


def modelfile(file_name: str, template: str | None, stops: Sequence[str], system: str | None) -> str:
    """The text of a Modelfile beside the GGUF file `file_name`; without a template in Go it has none.

    `stops` end an answer. The system prompt must not contain three quotes in a row.
    """
    lines = [f"# ollama create <name> -f Modelfile\nFROM ./{file_name}"]
    if template is None:
        lines.append(
            "# The chat template of this model is its own, which is not written for Ollama here. Ollama may\n"
            "# recognize the one inside the GGUF file, or not: compare its prompts, or add a TEMPLATE."
        )
    else:
        lines.append("# For system, user and assistant messages: tools and their replies are not rendered.")
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    if system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"
