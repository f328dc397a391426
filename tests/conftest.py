"""Set up before any test module is imported: without a GPU, Triton kernels run in its interpreter on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is decorated; later is too late
