"""Names of training methods, and which of them exclude each other; no torch here."""

METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}  # tuning.mode -> its label


def lighter_modes(mode: str, init: str) -> list[str]:
    """The values of tuning.mode that need less memory and agree with tuning.lora.init."""
    decomposes = init != "default"
    return {"full": ["lora", "qlora"], "lora": [] if decomposes else ["qlora"], "qlora": []}[mode]


def initialization_problem(mode: str, init: str, use_dora: bool) -> str | None:
    """Why adapters cannot start from `init`, and what to set; None if they can."""
    setting = f"tuning.lora.init={init}"
    if init == "default":
        return None
    if mode == "qlora":
        return f"{setting} changes the base weights, which are 4-bit with tuning.mode=qlora; set it to lora"
    if use_dora:
        return f"{setting} and tuning.lora.use_dora=true both decompose the base weights; use one of them"
    return None
