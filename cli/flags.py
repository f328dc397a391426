"""Commands and groups whose help shows no type beside a flag."""

from typing import Any

import typer.core


class _PlainFlags:
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return params


class Command(_PlainFlags, typer.core.TyperCommand):
    """A command."""


class Group(_PlainFlags, typer.core.TyperGroup):
    """A group of commands."""
