"""The error of the emulator."""


class EmulatorError(Exception):
    """A kernel did what it must not do, or an instruction is unknown. The message names the source line."""
