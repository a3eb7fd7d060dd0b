"""The contestants, and the settings with which all of them do the same work.

What the work does not specify is left at each toolkit's default: micro-batch, checkpointing, attention, order
of rows. Evaluation, intermediate checkpoints and trackers are turned off.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.peers import work as model_of_work
from benchmarks.peers.work import Row, Work

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
# Default micro-batches; torchtune's is that of its 1B LoRA recipe.
TORCHTUNE_ROWS, LITGPT_ROWS, TRAINER_ROWS = 4, 1, 8


@dataclass(frozen=True)
class Script:
    """Commands to run, as (program, arguments ...); the program is from the contestant's environment."""

    train: tuple[str, ...]
    trained: Path
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contestant:
    """A toolkit in one of its modes."""

    name: str
    environment: str
    prepare: Callable[[Work, Path, bool], Script]
    variant: bool = False  # packed; for the bare loop, batches by length


def split(work: Work, default_rows: int, *, packed: bool) -> tuple[int, int]:
    """Rows (or packs) per micro-batch, and micro-batches per step."""
    step = max(1, work.tokens_per_step // work.max_tokens) if packed else work.rows_per_step
    micro_batch = min(default_rows, step)
    return micro_batch, step // micro_batch


def messages(row: Row) -> dict[str, Any]:
    """A row as a conversation."""
    turns = [{"role": "user", "content": row.question}, {"role": "assistant", "content": row.answer}]
    return {"messages": turns}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """Writes a JSONL file; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_yaml(path: Path, config: dict[str, Any]) -> str:
    """Writes a YAML file; returns its path."""
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return str(path)


def sft_play(work: Work, folder: Path, packed: bool) -> Script:
    """This project; it plans for itself."""
    config = {
        "model": {"name": str(work.model), "max_seq_len": work.max_tokens, "dtype": "float32"},
        "data": {
            "train_path": write_lines(folder / "rows.jsonl", [messages(row) for row in work.rows]),
            "val_fraction": 0,
        },
        "tuning": {"mode": "lora", "lora": {"r": work.rank, "alpha": work.alpha}},
        "train": {
            "effective_batch_size": work.tokens_per_step if packed else work.rows_per_step,
            "packing": packed,
            "learning_rate": work.learning_rate,
            "warmup_ratio": work.warmup_steps * work.rows_per_step / len(work.rows),
            "mixed_precision": "no",
            "save_steps": 1_000_000,
            "seed": work.seed,
            "report_to": [],
        },
        "eval": {"generate": False},
        "output": {"name": "run", "dir": str(folder)},
    }
    words = ("python", "-m", "sft_play", "train", "--config", write_yaml(folder / "config.yaml", config))
    return Script(words, folder / "run" / "adapter")


def _trainer_settings(work: Work, folder: Path, packed: bool) -> dict[str, Any]:
    """Settings of the transformers Trainer, for all toolkits that use it."""
    micro_batch, accumulation = split(work, TRAINER_ROWS, packed=packed)
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 1,
        "learning_rate": work.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": work.warmup_steps,
        "seed": work.seed,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
    }


def trl(work: Work, folder: Path, packed: bool) -> Script:
    """TRL's command line."""
    rows = [{"prompt": row.prompt, "completion": row.completion} for row in work.rows]
    data = Path(write_lines(folder / "data" / "train.jsonl", rows)).parent
    config = _trainer_settings(work, folder, packed) | {
        "model_name_or_path": str(work.model),
        "dataset_name": str(data),
        "dtype": "float32",
        "max_length": work.max_tokens,
        "packing": packed,
        "use_peft": True,
        "lora_r": work.rank,
        "lora_alpha": work.alpha,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
    }
    return Script(("trl", "sft", "--config", write_yaml(folder / "config.yaml", config)), folder / "out")


def llama_factory(work: Work, folder: Path, packed: bool) -> Script:
    """LLaMA-Factory; without a template it uses the tokenizer's."""
    rows = [row._asdict() for row in work.rows]
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    about = {"rows": {"file_name": "rows.json", "columns": {"prompt": "question", "response": "answer"}}}
    (folder / "dataset_info.json").write_text(json.dumps(about), encoding="utf-8")
    config = _trainer_settings(work, folder, packed) | {
        "model_name_or_path": str(work.model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_rank": work.rank,
        "lora_alpha": work.alpha,
        "lora_target": "all",
        "dataset_dir": str(folder),
        "dataset": "rows",
        "cutoff_len": work.max_tokens,
        "neat_packing": packed,
    }
    words = ("llamafactory-cli", "train", write_yaml(folder / "config.yaml", config))
    return Script(words, folder / "out")


def torchtune(work: Work, folder: Path, packed: bool) -> Script:
    """The single-device LoRA recipe of torchtune."""
    micro_batch, accumulation = split(work, TORCHTUNE_ROWS, packed=packed)
    config = {
        "output_dir": str(folder / "out"),
        "model": _torchtune_model(work),
        "tokenizer": {
            "_component_": "torchtune_tokenizer.ChatTokenizer",
            "path": str(work.model / "tokenizer.json"),
            "max_seq_len": work.max_tokens,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(work.model),
            "checkpoint_files": ["model.safetensors"],
            "output_dir": str(folder / "out"),
            "model_type": "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": True,
        "dataset": {
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": write_lines(folder / "rows.jsonl", [messages(row) for row in work.rows]),
            "conversation_column": "messages",
            "conversation_style": "openai",
            "split": "train",
            "packed": packed,
        },
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "weight_decay": 0.0,
            "lr": work.learning_rate,
        },
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": work.warmup_steps,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "logs"),
        },
        "batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "seed": work.seed,
        "shuffle": True,
        "compile": False,
        "device": "cpu",
        "dtype": "fp32",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
    }
    config_path = write_yaml(folder / "config.yaml", config)
    words = ("tune", "run", "lora_finetune_single_device", "--config", config_path)
    return Script(words, folder / "out" / "epoch_0")


def _torchtune_model(work: Work) -> dict[str, Any]:
    return {
        "_component_": "torchtune.models.llama3.lora_llama3",
        "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
        "apply_lora_to_mlp": True,
        "lora_rank": work.rank,
        "lora_alpha": work.alpha,
        "vocab_size": model_of_work.VOCABULARY,
        "num_layers": model_of_work.LAYERS,
        "num_heads": model_of_work.HEADS,
        "num_kv_heads": model_of_work.HEADS,
        "embed_dim": model_of_work.HIDDEN,
        "intermediate_dim": model_of_work.INTERMEDIATE,
        "max_seq_len": 2 * work.max_tokens,
        "rope_base": 10_000,
    }


def litgpt(work: Work, folder: Path, packed: bool) -> Script:
    """LitGPT, which has no packing for fine-tuning; its validation is outside the timed steps."""
    micro_batch, _ = split(work, LITGPT_ROWS, packed=False)
    rows = [{"instruction": row.prompt, "output": row.answer} for row in work.rows]
    data, checkpoint = folder / "data", folder / "checkpoint"
    write_lines(data / "train.jsonl", rows)
    write_lines(data / "val.jsonl", rows[:2])
    linear = ("query", "key", "value", "projection", "mlp")
    config = {
        "checkpoint_dir": str(checkpoint),
        "out_dir": str(folder / "out"),
        "precision": "32-true",
        "lora_r": work.rank,
        "lora_alpha": work.alpha,
        "lora_dropout": 0.0,
        **{f"lora_{name}": True for name in linear},
        "data": {
            "class_path": "litgpt.data.JSON",
            "init_args": {
                "json_path": str(data),
                "mask_prompt": True,
                "prompt_style": {"class_path": "litgpt.prompts.Default"},
                "seed": work.seed,
            },
        },
        "train": {
            "save_interval": None,
            "global_batch_size": work.rows_per_step,
            "micro_batch_size": micro_batch,
            "lr_warmup_steps": work.warmup_steps,
            "epochs": 1,
            "max_seq_length": work.max_tokens,
        },
        "eval": {"interval": 1_000_000, "max_new_tokens": 1, "final_validation": False},
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": work.learning_rate, "weight_decay": 0.0},
        },
        "seed": work.seed,
    }
    return Script(
        ("litgpt", "finetune_lora", "--config", write_yaml(folder / "config.yaml", config)),
        folder / "converted" / "model.pth",
        before=("python", str(HERE / "litgpt_checkpoint.py"), str(work.model), str(checkpoint)),
        after=("litgpt", "convert_from_litgpt", str(folder / "out" / "final"), str(folder / "converted")),
    )


def bare(work: Work, folder: Path, by_length: bool) -> Script:
    """A bare loop with PyTorch and PEFT."""
    rows = [{"prompt": row.prompt, "completion": row.completion} for row in work.rows]
    told = work.settings() | {"model": str(work.model), "adapter": str(folder / "adapter"), "rows": rows}
    (folder / "work.json").write_text(json.dumps(told), encoding="utf-8")
    words = ("python", "-m", "benchmarks.peers.bare", str(folder / "work.json"))
    return Script((*words, *(["--by-length"] if by_length else [])), folder / "adapter")


OWN = "project"  # the environment that runs the benchmark
REFERENCE = "sft-play"
CONTESTANTS = (
    Contestant(REFERENCE, OWN, sft_play),
    Contestant("sft-play packed", OWN, sft_play, True),
    Contestant("trl", OWN, trl),
    Contestant("trl packed", OWN, trl, True),
    Contestant("llama-factory", "llamafactory", llama_factory),
    Contestant("llama-factory packed", "llamafactory", llama_factory, True),
    Contestant("torchtune", "torchtune", torchtune),
    Contestant("torchtune packed", "torchtune", torchtune, True),
    Contestant("litgpt", "litgpt", litgpt),
    Contestant("bare loop", OWN, bare),
    Contestant("bare loop by length", OWN, bare, True),
)
