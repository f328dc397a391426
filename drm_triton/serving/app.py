"""The HTTP service behind `drm-triton serve`: recommendations from one fitted model, in JSON.

Responses equal the results of the model's methods to the bit; `drm_triton.serving.engine` computes them. Ids are query
parameters and not parts of the path, because a path cannot carry ids such as "a/b" or ".." safely.
"""

from collections import Counter
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from drm_triton._version import __version__
from drm_triton.data.ids import SHOWN
from drm_triton.names import Score
from drm_triton.recommender import FactorRecommender, Recommender
from drm_triton.serving.engine import Engine, ExternalId, UnknownIdError

MAX_BODY = 1 << 20  # bytes of a request body
ERRORS = {
    400: "bad request",
    404: "not found",
    405: "method not allowed",
    413: "too large",
    422: "invalid input",
    500: "internal error",
}

# -- requests and responses --------------------------------------------------------------------------------------------


def _from_json(value: object) -> object:
    """Convert 5.0 to the integer 5, which JSON does not distinguish, and reject half of a surrogate pair."""
    if isinstance(value, str):
        value.encode()  # raises a ValueError, which pydantic reports as invalid input
    return int(value) if isinstance(value, float) and value.is_integer() else value


FromJson = BeforeValidator(_from_json)
UnknownIds = Annotated[
    Literal["error", "popular"],
    Field(
        description="Handling of ids that the model does not know: return an error, or ignore them and return the "
        "most popular items if no known id is left."
    ),
]


class RankedItem(BaseModel):
    """One item of a ranking."""

    item: ExternalId
    title: str | None = Field(None, description="Present only if the data has titles.")
    score: float | None = Field(description="Null if the item was chosen for its popularity.")


class UserRecommendations(BaseModel):
    """The best items for a user, best first; fewer than k if fewer remain."""

    user: ExternalId
    items: list[RankedItem]


class NewUserRecommendations(BaseModel):
    """The best items for a new user, best first; fewer than k if fewer remain."""

    items: list[RankedItem]
    unknown: list[ExternalId] = Field(description="Liked ids that the model does not know.")


class SimilarItems(BaseModel):
    """The items most similar to an item, the most similar first."""

    item: ExternalId
    items: list[RankedItem]


class Health(BaseModel):
    """The model that is served."""

    status: Literal["ok"]
    model: str
    kind: str = Field(description="The kind of model, for example drm.")
    score: Score | None = Field(description="The score of the factors. None for an item-item model.")
    users: int
    items: int
    factors: int | None
    version: str


class Error(BaseModel):
    """The body of every error response."""

    error: str = Field(description="Kind of error: " + ", ".join(ERRORS.values()) + ".")
    detail: str = Field(description="The problem with this request.")


async def _reject_repeated_parameters(request: Request) -> None:
    """Reject a query that gives a parameter twice; FastAPI would silently use one of the two values."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    repeated = [
        {"type": "repeated", "loc": ("query", name), "msg": "Given more than once"}
        for name in counts
        if counts[name] > 1
    ]
    if repeated:
        raise RequestValidationError(repeated)


NO_REPEATS = [Depends(_reject_repeated_parameters)]

# -- the application ---------------------------------------------------------------------------------------------------


def create_app(model: Recommender[Any], name: str = "model", max_k: int = 100, max_liked: int = 1000) -> FastAPI:
    """Create the ASGI application that serves a fitted model.

    Parameters
    ----------
    model : any fitted model
    name : name of the model in `/health`
    max_k : largest k of a request
    max_liked : largest number of liked items in a request

    Returns
    -------
    FastAPI application for any ASGI server; the kernels are already compiled
    """
    engine = Engine(model)
    app = FastAPI(
        title="drm-triton",
        version=__version__,
        description="Top-K recommendations from one trained model.",
        docs_url=None,  # these pages load scripts from other hosts; any OpenAPI viewer can read /openapi.json
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(BodyLimit, limit=MAX_BODY)
    app.add_middleware(HeadAsGet)
    _add_error_handlers(app)
    K = Annotated[int, Field(ge=1, le=max_k, description="Maximum number of items to return.")]

    class UserQuery(BaseModel):
        model_config = ConfigDict(extra="forbid")
        user: str = Field(description="Id of a user of the training data.")
        k: K = 10
        exclude_seen: bool = Field(True, description="Leave out items that the user has interacted with.")
        unknown: UnknownIds = "error"

    class ItemQuery(BaseModel):
        model_config = ConfigDict(extra="forbid")
        item: str = Field(description="Id of an item of the training data.")
        k: K = 10

    class NewUser(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        liked: list[Annotated[ExternalId, FromJson]] = Field(
            min_length=1, max_length=max_liked, description="Ids of items that the new user likes."
        )
        k: Annotated[K, FromJson] = 10
        exclude: list[Annotated[ExternalId, FromJson]] = Field(
            [], description="Ids of items to leave out besides the liked ones."
        )
        unknown: UnknownIds = "error"

    health = Health(
        status="ok",
        model=name,
        kind=model.config.model,
        score=model.score_name if isinstance(model, FactorRecommender) else None,
        users=model.interactions.n_users,
        items=model.interactions.n_items,
        factors=model.item_factors.shape[1] if isinstance(model, FactorRecommender) else None,
        version=__version__,
    )

    # FastAPI does not validate a JSONResponse, which saves time. The response models above only describe it; the tests
    # check that the description is true.

    @app.get("/health", response_model=Health, responses=_errors(500))
    async def check_health() -> JSONResponse:
        """Return the model that is served."""
        return JSONResponse(health.model_dump())

    @app.get(
        "/recommendations",
        response_model=UserRecommendations,
        responses=_errors(404, 422, 500),
        dependencies=NO_REPEATS,
    )
    async def recommend(query: Annotated[UserQuery, Query()]) -> JSONResponse:
        """Return the best items for a user of the training data."""
        return JSONResponse(await engine.recommend(query.user, query.k, query.exclude_seen, query.unknown))

    @app.post("/recommendations", response_model=NewUserRecommendations, responses=_errors(400, 404, 413, 422, 500))
    async def recommend_from(user: NewUser) -> JSONResponse:
        """Return the best items for a new user, who is not in the training data, from the items the user likes."""
        return JSONResponse(await engine.recommend_from(user.liked, user.k, user.exclude, user.unknown))

    @app.get("/similar", response_model=SimilarItems, responses=_errors(404, 422, 500), dependencies=NO_REPEATS)
    async def similar(query: Annotated[ItemQuery, Query()]) -> JSONResponse:
        """Return the items most similar to an item, never the item itself."""
        return JSONResponse(await engine.similar(query.item, query.k))

    return app


class HeadAsGet:
    """Answers HEAD like GET, with the same headers and without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope.get("method") != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, send_without_body)


class BodyLimit:
    """Rejects a request body that is too large, by its Content-Length header or else while it is received."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and count the bytes that it receives."""
        content_length = dict(scope.get("headers", ())).get(b"content-length", b"")
        too_large = content_length.isdigit() and int(content_length) > self.limit
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            if not too_large:
                message = await receive()
                received += len(message.get("body", b""))
            if too_large or received > self.limit:
                raise HTTPException(413, f"the body of a request may have at most {self.limit:,} bytes")
            return message

        await self.app(scope, receive_counted, send)


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses."""
    return {status: {"model": Error, "description": ERRORS[status].capitalize()} for status in statuses}


def _add_error_handlers(app: FastAPI) -> None:
    """Make every error response a JSON `Error`."""

    def respond(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": ERRORS.get(status, "error"), "detail": detail}, status, headers)

    @app.exception_handler(UnknownIdError)
    async def unknown_id(request: Request, error: UnknownIdError) -> JSONResponse:
        return respond(404, str(error))

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        path = request.url.path
        if error.status_code == 404:
            return respond(404, f"there is no path {path[:80]}; /openapi.json lists the paths")
        if error.status_code == 405:  # Starlette lists only the methods of the first route of a path
            routes = [route for route in app.routes if getattr(route, "path", None) == path]
            allowed = {method for route in routes for method in getattr(route, "methods", None) or ()}
            methods = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))
            return respond(405, f"{path} allows {methods}, not {request.method}", {"Allow": methods})
        return respond(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid_input(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        more = f"; and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        return respond(422, "; ".join(_describe(problem) for problem in problems[:SHOWN]) + more)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return respond(500, "the service failed; see its log for the reason")


def _describe(problem: dict[str, Any]) -> str:
    """Return one validation problem as text: where it is, and what it is."""
    place, *inside = problem["loc"]
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {inside[0]}"
    return f"{'.'.join(map(str, inside)) or place}: {problem['msg']}"
