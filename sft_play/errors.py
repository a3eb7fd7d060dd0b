"""What can go wrong, as a tree of exceptions: one exit code each, no traceback for the user's own mistakes.

A message says what was asked, what was found, what is allowed, and the next command to type.
"""


class SftPlayError(Exception):
    """Base of every error that the user can act on; the CLI prints it without a traceback."""

    exit_code = 1


class ConfigError(SftPlayError):
    """A config value, a flag or the environment is wrong."""

    exit_code = 2


class DataError(SftPlayError):
    """The data cannot be trained on: says file, line and key."""

    exit_code = 3


class DoesNotFitError(SftPlayError):
    """No plan fits the memory budget, or memory ran out at micro-batch 1."""

    exit_code = 4


class NonFiniteError(SftPlayError):
    """Loss or gradients became NaN or infinite."""

    exit_code = 5


class StorageError(SftPlayError):
    """The disk is full, read-only or failing."""

    exit_code = 6


class RunInUseError(SftPlayError):
    """Another process holds the run directory."""

    exit_code = 7


class CheckpointError(SftPlayError):
    """There is no usable checkpoint or adapter where one is needed."""

    exit_code = 8


class LaunchError(SftPlayError):
    """A launcher, a rank or a device failed."""

    exit_code = 9


class Interrupted(SftPlayError):
    """Stopped by a signal after saving a checkpoint: the same command goes on from there."""

    exit_code = 75
