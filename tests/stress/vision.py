"""Images: the memory of random steps, and the speed of preparing and decoding, beside the libraries alone.

    python -m tests.stress.vision memory           # 60 steps; writes benchmarks/results/vision_memory_cpu.json
    python -m tests.stress.vision memory --seed 7
    python -m tests.stress.vision speed            # writes benchmarks/results/vision_speed.json

Steps are those of four small models with random weights: rows with up to five images of odd sizes and rows of
text, joined or padded, LoRA, QLoRA or all weights, what sees frozen or trained, layers recomputed or not. The
peak of each phase is predicted from sizes alone, and measured by the events of the CPU's allocator.

`prepare` finds files, reads sizes from their heads, renders and tokenizes. Beside it, load_dataset and
map render and tokenize, and let the image processor make the pixels, which is how they learn how many tokens
an image has. Decoding is that of one image at a time, for a micro-batch, beside Pillow and the processor
alone. All in one thread, alternating, by CPU seconds, which other work on the machine disturbs less.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import load_dataset
from PIL import Image
from transformers import AutoTokenizer

from benchmarks.cpu_meter import measure_step
from benchmarks.measurement_log import RESULTS, made_on, versions, write_result
from sft_play.config.schema import RunConfig
from sft_play.data.batching import padded_length
from sft_play.model.architecture.shape import know_multimodal
from sft_play.model.load import load_data
from sft_play.parts import RECOMPUTED, Activations
from sft_play.sizing.step import JoinedRows, PaddedRows, StepSpec
from sft_play.sizing.trace.trace import trace_step
from sft_play.vision.decoding import pixels
from sft_play.vision.types import pictures_of
from tests.pictures import odd_sizes, save
from tests.vision_built import LORA, ours
from tests.vision_models import config_of, model_folder, picture_rows

KINDS = ("qwen3_vl", "smolvlm", "gemma3", "qwen3_5")
WAYS = (("full", "full"), ("full", "frozen"), ("lora", "frozen"), ("lora", "lora"), ("qlora", "frozen"))
NEAR = 0.001  # of a peak
CPU = torch.device("cpu")
ROWS, ROUNDS = 200, 5  # of the speed


def random_step(rng: random.Random) -> tuple[str, StepSpec]:
    """A model's type, and a step on rows of which at least one has images."""
    kind, (mode, vision) = rng.choice(KINDS), rng.choice(WAYS)
    padded = kind == "qwen3_5" or (kind != "gemma3" and rng.random() < 0.4)
    images = [rng.randint(1, 5), *(rng.choice((0, 0, 1, 2, 3, 5)) for _ in range(rng.randrange(4)))]
    rng.shuffle(images)
    rows = picture_rows(kind, len(images), rng.randrange(2**32), images=images)
    lengths = tuple(rows["length"])
    fits = tuple(one.fit for cell in rows["pictures"] for one in pictures_of(cell))
    own = (0, 0) if padded else (sum(lengths), max(lengths))
    batch = PaddedRows(len(lengths), padded_length(max(lengths))) if padded else JoinedRows(own[0])
    spec = StepSpec(
        mode=mode,
        lora=LORA,
        vision=vision,
        batch=batch,
        longest=own[1] or None,
        lengths=() if padded else lengths,
        eval_lengths=() if padded else lengths,
        fits=fits,
        eval_fits=fits if rng.random() < 0.5 else (),
        activations=rng.choice((Activations(), RECOMPUTED)),
        accumulates=rng.random() < 0.5,
    )
    return kind, spec.on_this_cpu(1)


def memory(cases: int, seed: int, out: Path) -> None:
    """Measures so many random steps, and writes how far their predictions are off."""
    found = []
    for number in range(cases):
        kind, spec = random_step(random.Random(f"{seed}/{number}"))
        know_multimodal(config_of(kind))
        predicted = trace_step(config_of(kind), spec).step.peaks()
        measured = measure_step(ours(kind, spec.mode, spec.vision), spec).phases
        errors = {phase: predicted[phase].bytes / size - 1 for phase, size in measured.items()}
        how = {"model": kind, "method": spec.mode, "vision": spec.vision, "joined": spec.joined}
        sizes = {"tokens": spec.tokens, "images": len(spec.fits), "peak_bytes": max(measured.values())}
        rounded = {phase: round(error, 6) for phase, error in errors.items()}
        found.append(how | {"recomputes": spec.activations.recomputes} | sizes | {"errors": rounded})
        print(f"{number + 1}/{cases} {found[-1]}", flush=True)
    near = sum(max(map(abs, one["errors"].values())) <= NEAR for one in found)
    record = {
        "what": __doc__.partition("\n")[0],
        "command": f"python -m tests.stress.vision memory --cases {cases} --seed {seed}",
        "made_on": made_on(CPU),
        "versions": versions(),
        "within_0.1_percent": f"{near} of {cases}",
    }
    write_result(out, record, {"steps": found})
    print(f"seed {seed}: {near} of {cases} within {NEAR:.1%}; {out}")


def rows_with_images(folder: Path, number: int) -> Path:
    """A file of rows with an image each; another `number` gives other texts for the same images."""
    lines = []
    for at, (height, width) in enumerate(odd_sizes(ROWS, 1, 1200)):
        path = folder / f"{at}.jpg"
        if not path.exists():
            save(path, max(height, 200), max(width, 200), seed=at)
        talk = [("user", f"<image>what is {at}?"), ("assistant", f"it is {number}")]
        messages = [{"role": role, "content": text} for role, text in talk]
        lines.append(json.dumps({"messages": messages, "images": [path.name]}))
    file = folder / f"rows-{number}.jsonl"
    file.write_text("\n".join(lines))
    return file


def alternating(sides: dict[str, Callable[[int], object]]) -> dict[str, list[float]]:
    """CPU seconds of each side in each round, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, run in sides.items():
            began = time.process_time()
            run(number)
            if number:
                seconds[name].append(round(time.process_time() - began, 4))
    return seconds


def speed(out: Path) -> None:
    """Times both sides, and writes rows and images per CPU second, the median of all rounds."""
    kept: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = model_folder("qwen", folder / "model")
        tokenizer, processor = AutoTokenizer.from_pretrained(base), None
        files = [rows_with_images(folder, number) for number in range(ROUNDS + 1)]
        processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(base)

        def prepare(number: int) -> None:
            data = {"train_path": str(files[number]), "val_fraction": 0}
            config = RunConfig.model_validate({"model": {"name": str(base)}, "data": data})
            kept["rows"] = load_data(config, progress=False).rows

        def pixels_of(path: Path) -> Any:
            return processor(images=[[Image.open(path).convert("RGB")]])

        def encode(row: dict[str, Any]) -> dict[str, Any]:
            made = pixels_of(folder / row["images"][0])
            tokens = int(made["image_grid_thw"].prod()) // 4
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            return tokenizer(text.replace("<image>", "<|image_pad|>" * tokens), add_special_tokens=False)

        def mapped(number: int) -> None:
            rows = load_dataset("json", data_files=str(files[number]), split="train", cache_dir=str(folder))
            kept["mapped"] = rows.map(encode, remove_columns=rows.column_names)

        def decode(_: int) -> None:
            data = kept["rows"]
            for cell in data.train["pictures"]:
                for picture in pictures_of(cell):
                    pixels(picture, data.recipe, data.cache_path)

        def alone(_: int) -> None:
            for at in range(ROWS):
                pixels_of(folder / f"{at}.jpg")

        found = alternating({"prepare": prepare, "load_dataset and map": mapped})
        found |= alternating({"decoding": decode, "Pillow and processor": alone})
    rates = [
        {"side": side, "per_cpu_second": round(ROWS / statistics.median(each), 1), "cpu_seconds": each}
        for side, each in found.items()
    ]
    record = {
        "what": __doc__.partition("\n")[0],
        "command": "python -m tests.stress.vision speed",
        "made_on": made_on(CPU),
        "versions": versions(),
        "images": ROWS,
    }
    write_result(out, record, {"sides": rates})
    print("\n".join(f"{one['side']}: {one['per_cpu_second']:,} per CPU second" for one in rates))


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("memory", "speed"))
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "memory":
        memory(args.cases, args.seed, args.out or RESULTS / "vision_memory_cpu.json")
    else:
        speed(args.out or RESULTS / "vision_speed.json")


if __name__ == "__main__":
    main()
