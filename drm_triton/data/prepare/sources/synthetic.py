"""Generated interactions with planted structure. `drm_triton.data.prepare.synthetic` describes the model."""

from __future__ import annotations

from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions
from drm_triton.data.prepare.sources.base import Source
from drm_triton.errors import InputError


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Refuse to read: there are no files."""
    raise InputError(
        "source synthetic generates its data: leave out `raw`, and give `users`, `items` and `interactions`"
    )


SYNTHETIC = Source(
    name="synthetic",
    summary="generated data with a known structure, of any size",
    origin="generated",
    licence="none needed",
    layout="clustered tastes, Zipf item popularity, log-normal user activity, noise",
    read=read,
)
