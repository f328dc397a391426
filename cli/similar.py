"""`drm-triton similar`: items like an item, users like a user."""

from pathlib import Path
from typing import Annotated

import typer

from drm_triton.cli.complete import RunArgument
from drm_triton.cli.output import Format, check_output, with_titles, write
from drm_triton.errors import InputError


def similar(
    run: RunArgument,
    item: Annotated[
        list[str] | None, typer.Option("--item", "-i", help="Id of an item; may be repeated.", show_default=False)
    ] = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", "-u", help="Id of a user; may be repeated.", show_default=False)
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="How many for each.")] = 10,
    form: Annotated[
        Format | None,
        typer.Option("--format", help=r"How to write \[by the ending of --out, or table].", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file.", show_default=False)] = None,
) -> None:
    """Print what is most similar to an item or a user, by the factors that the model has learnt.

    The score is the cosine of the factors for a model with dot scores, and minus their squared distance with l2.

    Examples:

      drm-triton similar runs/melon --item 1043 --k 5

      drm-triton similar runs/melon --user 12 --user 99 --format json
    """
    if (item is None) == (user is None):
        raise InputError("say what to compare: --item ID or --user ID (each may be repeated), not both")
    form = check_output(form, out)

    from drm_triton.model import DRM

    model = DRM.load(run)
    if item is not None:
        frame = with_titles(model.similar_items(item, k), model.interactions, "similar")
    else:
        frame = model.similar_users(user or [], k)
    write([frame], form, out)
