"""What other tools call our settings: flags and keys of transformers, TRL, Axolotl and LLaMA-Factory.

They are not accepted, since some mean something slightly different there; messages name ours instead. And
what earlier versions had: the resolved config of a run lists all settings of the version that wrote it.
"""

from sft_play.choices.engines import SEVERAL

# Settings that are gone, with the value that does what is done today; any other value is refused.
REMOVED = {"parallel.prefetch_layers": 1}

# Where a value of theirs would mean nothing here, the entry has the value too.
ALIASES = {
    "model_name_or_path": "model.name",
    "model_name": "model.name",
    "model_id": "model.name",
    "base_model": "model.name",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "max_length": "model.max_seq_len",
    "max_seq_length": "model.max_seq_len",
    "cutoff_len": "model.max_seq_len",
    "sequence_len": "model.max_seq_len",
    "dataset": "data.train_path",
    "dataset_name": "data.train_path",
    "dataset_path": "data.train_path",
    "data_path": "data.train_path",
    "train_file": "data.train_path",
    "validation_file": "data.val_path",
    "eval_file": "data.val_path",
    "test_file": "data.test_path",
    "val_set_size": "data.val_fraction",
    "val_size": "data.val_fraction",
    "load_in_4bit": "tuning.mode=qlora",
    "use_lora": "tuning.mode=lora",
    "use_qlora": "tuning.mode=qlora",
    "lora_r": "tuning.lora.r",
    "lora_rank": "tuning.lora.r",
    "lora_alpha": "tuning.lora.alpha",
    "lora_dropout": "tuning.lora.dropout",
    "lora_target_modules": "tuning.lora.target_modules",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "lr": "train.learning_rate",
    "lr_scheduler": "train.lr_schedule",
    "lr_scheduler_type": "train.lr_schedule",
    "warmup_steps": "train.warmup_ratio=<share of all steps>",
    "global_batch_size": "train.effective_batch_size",
    "train_batch_size": "train.effective_batch_size",
    "micro_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "gradient_accumulation": "train.grad_accum",
    "gradient_accumulation_steps": "train.grad_accum",
    "sample_packing": "train.packing",
    "bf16": "train.mixed_precision=bf16",
    "fp16": "train.mixed_precision=fp16",
    "fp8": "train.float8",
    "enable_float8": "train.float8",
    "float8_training": "train.float8",
    "optim": "train.optimizer",
    "gradient_clipping": "train.max_grad_norm",
    "save_total_limit": "train.keep_checkpoints",
    "resume_from_checkpoint": "train.resume=auto",
    **{alias: f"parallel.engine={row.name}" for row in SEVERAL.values() for alias in row.aliases},
    "per_device_eval_batch_size": "eval.batch_size",
    "output_dir": "output.dir",
    "run_name": "output.name",
}
