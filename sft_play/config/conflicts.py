"""Settings of different sections that exclude each other."""

from sft_play.choices.engines import SEVERAL, Traits
from sft_play.config.parallel import ParallelConfig
from sft_play.config.train import TrainConfig


def compiler_problem(mode: str, use_dora: bool, train: TrainConfig, parallel: ParallelConfig) -> str | None:
    """Why layers cannot be compiled, or not multiply in float8; None if they can, or nobody asks for it."""
    if train.float8 and mode != "full":
        return (
            f"train.float8=true needs full fine-tuning (found tuning.mode={mode}, whose frozen weights have "
            "no gradients to compute in float8); set tuning.mode=full, or train.float8=false"
        )
    if train.float8 and not train.asks_compile:
        return (
            "train.float8=true needs compiled layers: without them, it writes fp32 copies of all inputs and "
            "weights; set train.compile=true, or train.float8=false"
        )
    if train.asks_compile and (found := _not_compiled(use_dora, train, parallel)):
        asked = "train.float8" if train.float8 else "train.compile"
        able = " or ".join(row.name for row in SEVERAL.values() if computes(row, train))
        return (
            f"{asked}=true does not work with {found}: layers are compiled for full fine-tuning, "
            "LoRA and QLoRA (not DoRA), with train.kernels=own, activations kept or recomputed, in one "
            f"process or with parallel.engine={able}; change it, or set {asked}=false"
        )
    return None


def computes(engine: Traits, train: TrainConfig) -> bool:
    """Whether layers that an engine wraps can be compiled and multiply in float8, as far as is asked for."""
    return (engine.compiles_layers or not train.asks_compile) and not (train.float8 and engine.shards_weights)


def _not_compiled(use_dora: bool, train: TrainConfig, parallel: ParallelConfig) -> str | None:
    """The setting with which layers cannot be compiled; None if there is none."""
    settings = {
        "tuning.lora.use_dora=true": use_dora,
        f"train.kernels={train.kernels}": train.layer_kernels != "own",
        "train.activations=offload": train.activations == "offload",
        train.tiles_setting: train.asks_tiles,
        f"parallel.engine={parallel.engine}": parallel.engine != "auto"
        and not computes(SEVERAL[parallel.engine], train),
        f"parallel.offload={parallel.offload}": parallel.offload == "ram",
        f"parallel.sequence_parallel_size={parallel.sequence_parallel_size}": parallel.sequence_parallel,
    }
    return next((setting for setting, excluded in settings.items() if excluded), None)


def not_gathered(parallel: ParallelConfig) -> str | None:
    """A setting of how weights are gathered that the engine does not have; None if there is none."""
    able_by = {"reshard_after_forward": "can_keep_gathered", "defer_exchange": "can_defer"}
    for name, trait in able_by.items():
        able = [row.name for row in SEVERAL.values() if getattr(row, trait)]
        if getattr(parallel, name) != "auto" and parallel.engine not in ("auto", *able):
            return (
                f"parallel.{name}={str(getattr(parallel, name)).lower()} does not work with "
                f"parallel.engine={parallel.engine}, only with {' or '.join([*able, 'auto'])}; leave it "
                f"out, or set parallel.engine={able[0]}"
            )
    return None


def needs_whole_rows(train: TrainConfig) -> str | None:
    """What a process cannot do with a part of a row; None if nothing."""
    if train.neftune_noise_alpha is not None:
        return f"the noise of train.neftune_noise_alpha={train.neftune_noise_alpha:g} needs all of them"
    if train.router_aux_loss_coef:
        return f"train.router_aux_loss_coef={train.router_aux_loss_coef:g} balances experts over all of them"
    if train.padding_free is False and not train.packing:
        return "train.padding_free=false does not join rows"
    return None
