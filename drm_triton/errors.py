"""The errors of the library. Each message says what is wrong, where, and what to do.

Messages name options and parameters by their Python names in backticks. The command line prints them as flags.
"""


class DrmError(Exception):
    """A failure at run time. The command line exits with code 1."""

    exit_code = 1


class HeldOutWarning(UserWarning):
    """Recommendations come from a model that has not learned from all interactions."""


class InputError(DrmError, ValueError):
    """A file, an option or an argument cannot be used. The command line exits with code 2."""

    exit_code = 2
