"""Options that `evaluate` and `compare` have in common: what a model is measured on, and with which cut-offs."""

from typing import Annotated

import typer

from drm_triton.base_config import CUT_OFF, MAX_CUT_OFF
from drm_triton.errors import InputError
from drm_triton.names import CUT_OFFS

OnOption = Annotated[str, typer.Option(help="Split part to measure on: valid or test.")]
CutOffsOption = Annotated[str, typer.Option("--k", help="Cut-offs K of the metrics, separated by commas.")]
MinTrainOption = Annotated[int, typer.Option(help="Leave out users with fewer training items than this.")]

DEFAULT_CUT_OFFS = ",".join(map(str, CUT_OFFS))


def parse_cut_offs(text: str) -> list[int]:
    """Parse cut-offs that are separated by commas."""
    given = [cut_off.strip() for cut_off in text.split(",")]
    ks = sorted({int(cut_off) for cut_off in given}) if all(map(CUT_OFF.fullmatch, given)) else []
    if not ks or max(ks) > MAX_CUT_OFF:
        raise InputError(
            f"--k must be cut-offs from 1 to {MAX_CUT_OFF} separated by commas, for example 10,50; got {text!r}"
        )
    return ks


def check_min_train(min_train: int) -> None:
    """Refuse a negative number of training items."""
    if min_train < 0:
        raise InputError(f"--min-train must be at least 0, got {min_train}")
