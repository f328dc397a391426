"""`drm-triton similar`: the items most similar to an item, or the users most similar to a user."""

from typing import Annotated

import typer

from drm_triton.cli.complete import RunArgument, VerifyOption
from drm_triton.cli.messages import QuietOption
from drm_triton.cli.output import (
    FormatOption,
    OutOption,
    OverwriteOption,
    check_output,
    with_titles,
    write,
)
from drm_triton.errors import InputError


def similar(
    run: RunArgument,
    item: Annotated[
        list[str] | None,
        typer.Option("--item", "-i", help="Id of an item. May be repeated.", show_default=False),
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option("--user", "-u", help="Id of a user. May be repeated.", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option("--k", "-k", help="Number of similar items or users to print for each.")] = 10,
    form: FormatOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    verify: VerifyOption = False,
    quiet: QuietOption = False,
) -> None:
    """Print the items most similar to an item, or the users most similar to a user, with scores.

    The score is the cosine of their factors (cosine and dot models), their negative squared distance (l2 models), or
    the weight from the first item to the second (item-item models).

    Examples:

      drm-triton similar runs/melon --item 1043 --k 5

      drm-triton similar runs/melon --user 12 --user 99 --format json
    """
    if (item is None) == (user is None):
        raise InputError("give either --item ID or --user ID; both may be repeated")
    form = check_output(form, out, overwrite)

    from drm_triton.cli.messages import first_word

    with first_word(quiet):
        from drm_triton.models import load
        from drm_triton.recommender import FactorRecommender

        model = load(run, verify=verify)
    if item is not None:
        frame = with_titles(model.similar_items(item, k), model.interactions, "similar")
    elif isinstance(model, FactorRecommender):
        frame = model.similar_users(user or [], k)
    else:
        raise InputError(f"{run}: {model.config.model} has no vectors of users to compare; give --item")
    write([frame], form, out)
