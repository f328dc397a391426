"""The errors and warnings of the library. Each message says what is wrong, where, and what to do.

Messages name options and parameters by their Python names in backticks. The command line prints them as flags.
"""

import os
import sys
import warnings

_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


class DrmError(Exception):
    """A failure at run time. The command line exits with code 1."""

    exit_code = 1


class HeldOutWarning(UserWarning):
    """Recommendations come from a model that has not learned from all interactions."""


class InputError(DrmError, ValueError):
    """A file, an option or an argument cannot be used. The command line exits with code 2."""

    exit_code = 2


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line outside this package that made the call."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
