"""Number formats of factor tables. A table is float32, float64, or bfloat16, which is computed in float32.

A bfloat16 is the upper half of a float32: sign, 8 bits of exponent and 7 of the fraction.
"""

import torch
from torch import Tensor

from drm_triton.names import BackendName, Precision


def table_type(precision: Precision, backend: BackendName) -> torch.dtype:
    """Return the type of the tables of a training. Those of `cpu` are float32 with values of bfloat16."""
    return torch.bfloat16 if precision == "bfloat16" and backend != "cpu" else torch.float32


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a table are computed."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def widened(x: Tensor) -> Tensor:
    """Return a tensor in the type in which it is computed: itself, or a copy of bfloat16 in float32."""
    return x.to(arithmetic(x.dtype))
