"""Compiler options that depend on the GPU."""

import torch


def register_limit(limit: int) -> dict[str, int]:
    """Return the launch option that lets a thread use up to `limit` registers on NVIDIA GPUs.

    Without a limit, NVIDIA's assembler may spill a few values to fit one more block on a multiprocessor. With a limit
    it does not. AMD's compiler has no such option.
    """
    return {} if torch.version.hip else {"maxnreg": limit}
