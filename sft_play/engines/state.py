"""AdamW's state in the one form that all engines share: full tensors in fp32, by the name of the parameter.

Files are memory-mapped and read parameter by parameter; nothing is rewritten.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps for each parameter, besides the number of steps

# parameter name -> {"weight", "exp_avg", "exp_avg_sq"} in the parameter's shape, fp32, and "step", a scalar
StateOf = Callable[[str], dict[str, Tensor]]
Load = Callable[[Path], Any]  # of a file of tensors, memory-mapped


def read_whole(checkpoint: Path, names: Sequence[str], load: Load) -> StateOf:
    """The state that is saved whole, by the first process.

    It is keyed by the parameter's index in the optimizer, which is the same in every engine.
    """
    state = load(checkpoint / "optimizer.pt")["state"]
    if len(state) != len(names):
        raise KeyError(f"optimizer state for {len(state)} parameters, but this run trains {len(names)}")
    numbers = {name: number for number, name in enumerate(names)}
    weight_of = saved_weights(checkpoint)

    def state_of(name: str) -> dict[str, Tensor]:
        own = state[numbers[name]]
        return {
            "weight": weight_of(name).float(),
            "step": own["step"],
            **{key: own[key] for key in MOMENTS},
        }

    return state_of


def saved_weights(checkpoint: Path) -> Callable[[str], Tensor]:
    """A function that gives the whole trained weight of a parameter's name, as a checkpoint has it."""
    files = [safe_open(path, "pt") for path in checkpoint.glob("*model*.safetensors")]
    found = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - not a dictionary

    def weight_of(name: str) -> Tensor:
        # PEFT leaves out the adapter's name, and that a module is trained whole
        saved = name if name in found else name.replace(".modules_to_save", "").replace(".default", "")
        saved = saved if saved in found else saved.removesuffix(".weight")
        return found[saved].get_tensor(saved)

    return weight_of


def set_whole(optimizer: Any, parameters: Mapping[str, Tensor], state_of: StateOf) -> None:
    """Sets parameters of any shape, and their states of the same shape in torch's own AdamW."""
    whole = optimizer.state_dict()
    for number, (name, parameter) in enumerate(parameters.items()):
        state = state_of(name)
        parameter.data.copy_(state.pop("weight"))
        # copied, so that nothing refers to the mapped file
        whole["state"][number] = {key: value.clone() for key, value in state.items()}
    optimizer.load_state_dict(whole)
