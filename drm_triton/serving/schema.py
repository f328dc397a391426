"""Requests and responses of the service, as its OpenAPI description shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field
from pydantic_core import PydanticCustomError

from drm_triton.names import Score
from drm_triton.ranking.limits import parse_limits
from drm_triton.ranking.rules import Rules
from drm_triton.serving.engine import NO_RULES, ExternalId

ERRORS = {
    400: "bad request",
    401: "unauthorized",
    404: "not found",
    405: "method not allowed",
    413: "too large",
    422: "invalid input",
    500: "internal error",
    503: "not available",
}
MAX_QUERY = 200  # characters of a search for items


# -- requests ----------------------------------------------------------------------------------------------------------


def _from_json(value: object) -> object:
    """Convert 5.0 to the integer 5, which JSON does not distinguish."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _at_most(length: int) -> Callable[[object], object]:
    """Return a check of the length of a list before its elements are validated.

    Pydantic's own limit counts only valid elements, so that a long list of invalid ones would cost seconds.
    """

    def check(value: object) -> object:
        if isinstance(value, list) and len(value) > length:
            context = {"max_length": length, "actual_length": len(value)}
            raise PydanticCustomError(
                "too_long", "List should have at most {max_length} items, not {actual_length}", context
            )
        return value

    return check


def ids(at_least: int, at_most: int) -> Any:
    """Return the type of a list of ids in a JSON body. Validation ends at the first bad id."""
    return Annotated[
        list[Annotated[ExternalId, FromJson]],
        FailFast(),
        Field(min_length=at_least, max_length=at_most),
        BeforeValidator(_at_most(at_most)),
    ]


FromJson = BeforeValidator(_from_json)
UnknownIds = Annotated[
    Literal["error", "popular"],
    Field(
        description="Handling of ids that the model does not know: return an error, or ignore them and return the "
        "most popular items if no known id is left."
    ),
]


MAX_IN_QUERY = 100  # ids of items in a query; a header has a limit, too
ONLY = "Ids of items to choose from; all if there are none."
MAX_RULES, MAX_RULE = 8, 200  # conditions or limits of a request, and their characters
Rule = Annotated[str, Field(min_length=1, max_length=MAX_RULE)]
Conditions = Annotated[
    list[Rule],
    Field(max_length=MAX_RULES, description="Conditions on the attributes of items, for example price<=20."),
]
Limits = Annotated[
    list[Rule],
    Field(max_length=MAX_RULES, description="Most items of a category in the list, for example genre=2."),
]
Diversity = Annotated[
    float,
    Field(ge=0, lt=1, allow_inf_nan=False, description="Weight of diversity: 0 ranks by the score alone."),
]


def rules_of(request: Any) -> Rules:
    """Return the rules of a request with the fields `where`, `at_most` and `diversity`. Most requests have none."""
    if not (request.where or request.at_most or request.diversity):
        return NO_RULES
    return Rules.of(request.where, parse_limits(request.at_most), request.diversity)


# -- responses ---------------------------------------------------------------------------------------------------------


class RankedItem(BaseModel):
    """One item of a ranking."""

    item: ExternalId
    title: str | None = Field(None, description="Present only if the data has titles.")
    score: float | None = Field(description="Null if the item was chosen for its popularity.")
    cold: bool | None = Field(
        None,
        description="Whether the score is predicted from the item's attributes, because nobody has it. Present only if "
        "there are such items.",
    )


class UserRecommendations(BaseModel):
    """The best items for a user, best first; fewer than k if fewer remain."""

    user: ExternalId
    items: list[RankedItem]
    cold: bool | None = Field(
        None, description="True if the user has no items, and the scores are predicted from the user's attributes."
    )


class NewUserRecommendations(BaseModel):
    """The best items for a new user, best first; fewer than k if fewer remain."""

    items: list[RankedItem]
    unknown: list[ExternalId] = Field(description="Liked ids that the model does not know.")


class SimilarItems(BaseModel):
    """The items most similar to an item, the most similar first."""

    item: ExternalId
    items: list[RankedItem]


class FoundItem(BaseModel):
    """One item that a search found."""

    item: ExternalId
    title: str | None = Field(None, description="Present only if the data has titles.")


class FoundItems(BaseModel):
    """Items whose title or id contains the text: those that begin with it first, then the more popular first."""

    items: list[FoundItem]


class Health(BaseModel):
    """The model that is served."""

    status: Literal["ok"]
    model: str
    kind: str = Field(description="The kind of model, for example drm.")
    score: Score | None = Field(description="The score of the factors. None for an item-item model.")
    users: int
    items: int
    factors: int | None
    loaded: str = Field(description="When this process loaded the model, in UTC.")
    version: str


class Ready(BaseModel):
    """Whether new requests should be sent here."""

    status: Literal["ready"]


class Error(BaseModel):
    """The body of every error response."""

    error: str = Field(description="Kind of error: " + ", ".join(ERRORS.values()) + ".")
    detail: str = Field(description="The problem with this request.")
