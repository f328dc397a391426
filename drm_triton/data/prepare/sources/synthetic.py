"""Generated interactions with planted structure; see `drm_triton.data.prepare.synthetic` for the model."""

from __future__ import annotations

from drm_triton.data.prepare.columns import Raw
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.prepare.tables import Reading
from drm_triton.errors import InputError


def read(inputs: Inputs, how: Reading) -> Raw:
    """Refuse: there is nothing to read."""
    raise InputError("source synthetic generates its data: leave --raw out, and give --users, --items, --interactions")


SYNTHETIC = Source(
    name="synthetic",
    summary="generated data with planted structure (--users --items --interactions --seed)",
    origin="generated",
    licence="none needed",
    layout="clustered tastes, Zipf item popularity, log-normal user activity, noise",
    read=read,
)
