"""All errors that a user can act on: one exception class for each exit code, printed without a traceback.

A message says what was requested, what was found, what is allowed, and the next command to run.
"""


class SftPlayError(Exception):
    """Base of every error that the user can act on; the CLI prints it without a traceback."""

    exit_code = 1


class ConfigError(SftPlayError):
    """A config value, a flag or the environment is invalid."""

    exit_code = 2


class UntraceableModel(ConfigError):
    """The model's training step cannot be executed on fake tensors; only a real step shows its memory."""


class DataError(SftPlayError):
    """The data cannot be used; the message names file, line and key."""

    exit_code = 3


class DoesNotFitError(SftPlayError):
    """No plan fits the memory budget, or memory ran out at micro-batch 1."""

    exit_code = 4


class OutOfMemory(DoesNotFitError):
    """Memory ran out in the middle of training; a smaller plan may go on from the last checkpoint."""


class NonFiniteError(SftPlayError):
    """Loss or gradients became NaN or infinite."""

    exit_code = 5


class StorageError(SftPlayError):
    """The disk is full, read-only or faulty."""

    exit_code = 6


class RunInUseError(SftPlayError):
    """Another process is using the run directory."""

    exit_code = 7


class CheckpointError(SftPlayError):
    """A usable checkpoint or adapter is needed, and there is none."""

    exit_code = 8


class LaunchError(SftPlayError):
    """A launcher, a rank or a device failed."""

    exit_code = 9


class Interrupted(SftPlayError):
    """Stopped by a signal after a checkpoint was saved, so that the run can be resumed."""

    exit_code = 75


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; the name of its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def kind_of(value: object) -> str:
    """What a value of a YAML or JSON file is, for a message: "a list" rather than Python's name for it."""
    if value is None:
        return "nothing"
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return kinds.get(type(value), "an object")
