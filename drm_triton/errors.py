"""The errors a user may meet. Each message says what is wrong, where, and what to do about it."""


class DrmError(Exception):
    """Something failed at run time; the command line exits with code 1."""

    exit_code = 1


class InputError(DrmError, ValueError):
    """What the user gave (a file, an option, an argument) cannot be used; the command line exits with code 2."""

    exit_code = 2
