"""Compiler options that differ between GPUs."""

import torch


def registers(limit: int) -> dict[str, int]:
    """Launch option that lets a thread use up to `limit` registers, for NVIDIA; AMD's compiler takes no such option.

    Left alone, NVIDIA's assembler may spill a few values to fit one more block on a multiprocessor; told a limit, it
    does not.
    """
    return {} if torch.version.hip else {"maxnreg": limit}
