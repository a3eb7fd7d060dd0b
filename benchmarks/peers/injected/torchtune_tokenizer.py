"""A tokenizer from a tokenizer.json for torchtune, whose recipes only know those of certain models."""

from tokenizers import Tokenizer


class ChatTokenizer:
    """Turns a conversation into the tokens of the benchmark's chat template."""

    def __init__(self, path: str, max_seq_len: int):
        self.tokenizer = Tokenizer.from_file(path)
        self.max_seq_len = max_seq_len
        self.pad_id = self.tokenizer.token_to_id("<|pad|>")
        self.eos_id = self.tokenizer.token_to_id("<|end|>")

    def __call__(self, sample, inference: bool = False):
        """Adds tokens and mask (True: no loss) to a sample with messages."""
        tokens, mask = [], []
        for message in sample.pop("messages"):
            head = self.tokenizer.encode(f"<|{message.role}|>").ids
            body = self.tokenizer.encode(f"{message.text_content}<|end|>").ids
            tokens += head + body
            mask += [True] * len(head) + [message.masked] * len(body)
        return sample | {"tokens": tokens[: self.max_seq_len], "mask": mask[: self.max_seq_len]}
