"""The HTTP service behind `drm-triton serve`: lists from one fitted model, JSON in and out.

Every answer is what the methods of the model give, to the bit; see `drm_triton.serving.engine` for how. Ids are query
parameters and not parts of the path: some, such as "a/b" or "..", no path can carry safely.
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
from drm_triton.model import DRM
from drm_triton.names import Score
from drm_triton.serving.engine import Id, Service, UnknownIdError

MAX_BODY = 1 << 20  # bytes of a request
ERRORS = {
    400: "bad request",
    404: "not found",
    405: "method not allowed",
    413: "too large",
    422: "invalid input",
    500: "internal error",
}

# -- what goes in and out ----------------------------------------------------------------------------------------------


def _from_json(value: object) -> object:
    """Take JSON at its word: 5.0 is the integer 5, and half of a surrogate pair is no text."""
    if isinstance(value, str):
        value.encode()  # its error is a ValueError, so it is the request that is wrong
    return int(value) if isinstance(value, float) and value.is_integer() else value


FromJson = BeforeValidator(_from_json)
Unknown = Annotated[
    Literal["error", "popular"],
    Field(
        description="What to do about ids that the model does not know: refuse, or do without them and list the most "
        "popular items where nothing else is left."
    ),
]


class Listed(BaseModel):
    """An item of a list, the best first."""

    item: Id
    title: str | None = Field(None, description="Only where the data has titles.")
    score: float | None = Field(description="Null for an item that is listed because it is popular.")


class Recommended(BaseModel):
    """The best items of a user; fewer than k where fewer remain."""

    user: Id
    items: list[Listed]


class FoldedIn(BaseModel):
    """The best items for someone with these likes; fewer than k where fewer remain."""

    items: list[Listed]
    unknown: list[Id] = Field(description="Those of the liked ids that the model does not know.")


class Similar(BaseModel):
    """The items most similar to an item."""

    item: Id
    items: list[Listed]


class Health(BaseModel):
    """What is being served."""

    status: Literal["ok"]
    model: str
    score: Score
    users: int
    items: int
    factors: int
    version: str


class Error(BaseModel):
    """Every error has this form."""

    error: str = Field(description="What kind: " + ", ".join(ERRORS.values()) + ".")
    detail: str = Field(description="What is wrong with this request.")


async def _given_once(request: Request) -> None:
    """Refuse a query that gives a parameter twice: of the two values one would be taken in silence."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    repeated = [
        {"type": "repeated", "loc": ("query", name), "msg": "Given more than once"}
        for name in counts
        if counts[name] > 1
    ]
    if repeated:
        raise RequestValidationError(repeated)


ONCE = [Depends(_given_once)]

# -- the application ---------------------------------------------------------------------------------------------------


def create_app(model: DRM, name: str = "model", max_k: int = 100, max_liked: int = 1000) -> FastAPI:
    """Make the ASGI application that serves a fitted model.

    Parameters
    ----------
    model : DRM, fitted
    name : what `/health` calls it
    max_k : the longest list that may be asked for
    max_liked : the most liked items in one request

    Returns
    -------
    FastAPI, for any ASGI server; its kernels are compiled already
    """
    service = Service(model)
    app = FastAPI(
        title="drm-triton",
        version=__version__,
        description="Top-K recommendations from one trained model.",
        docs_url=None,  # those pages load scripts from elsewhere; any viewer can read /openapi.json
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(BodyLimit, limit=MAX_BODY)
    app.add_middleware(HeadAsGet)
    _answer_errors_in_json(app)
    Length = Annotated[int, Field(ge=1, le=max_k, description="Items in the list, at most.")]

    class OfUser(BaseModel):
        model_config = ConfigDict(extra="forbid")
        user: str = Field(description="Id of a user of the training data.")
        k: Length = 10
        exclude_seen: bool = Field(True, description="Leave out the items that the user already has.")
        unknown: Unknown = "error"

    class OfItem(BaseModel):
        model_config = ConfigDict(extra="forbid")
        item: str = Field(description="Id of an item of the training data.")
        k: Length = 10

    class Likes(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        liked: list[Annotated[Id, FromJson]] = Field(
            min_length=1, max_length=max_liked, description="Items that the person likes."
        )
        k: Annotated[Length, FromJson] = 10
        exclude: list[Annotated[Id, FromJson]] = Field([], description="Items to leave out besides the liked ones.")
        unknown: Unknown = "error"

    health = Health(
        status="ok",
        model=name,
        score=model.config.score,
        users=len(service.U),
        items=len(service.V),
        factors=service.V.shape[1],
        version=__version__,
    )

    # The answers are JSONResponse, which FastAPI sends as they are: the models above describe them, and the tests hold
    # them to it.

    @app.get("/health", response_model=Health, responses=_errors(500))
    async def check_health() -> JSONResponse:
        """Tell what is being served."""
        return JSONResponse(health.model_dump())

    @app.get("/recommendations", response_model=Recommended, responses=_errors(404, 422, 500), dependencies=ONCE)
    async def recommend(asked: Annotated[OfUser, Query()]) -> JSONResponse:
        """List the best items of a user of the training data."""
        return JSONResponse(await service.recommend(asked.user, asked.k, asked.exclude_seen, asked.unknown))

    @app.post("/recommendations", response_model=FoldedIn, responses=_errors(400, 404, 413, 422, 500))
    async def recommend_from(asked: Likes) -> JSONResponse:
        """List the best items for someone who was not in the training data, from the items the person likes."""
        return JSONResponse(await service.recommend_from(asked.liked, asked.k, asked.exclude, asked.unknown))

    @app.get("/similar", response_model=Similar, responses=_errors(404, 422, 500), dependencies=ONCE)
    async def similar(asked: Annotated[OfItem, Query()]) -> JSONResponse:
        """List the items most similar to an item, never the item itself."""
        return JSONResponse(await service.similar(asked.item, asked.k))

    return app


class HeadAsGet:
    """Answers HEAD as GET, headers and all, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope.get("method") != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, send_without_body)


class BodyLimit:
    """Refuses a request body as soon as it is known to be too large: by its header, or else as it comes in."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with a `receive` that counts."""
        announced = dict(scope.get("headers", ())).get(b"content-length", b"")
        refused = announced.isdigit() and int(announced) > self.limit
        received = 0

        async def counted() -> Message:
            nonlocal received
            if not refused:
                message = await receive()
                received += len(message.get("body", b""))
            if refused or received > self.limit:
                raise HTTPException(413, f"the body of a request may have {self.limit:,} bytes")
            return message

        await self.app(scope, counted, send)


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of an operation, for OpenAPI."""
    return {status: {"model": Error, "description": ERRORS[status].capitalize()} for status in statuses}


def _answer_errors_in_json(app: FastAPI) -> None:
    def answer(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": ERRORS.get(status, "error"), "detail": detail}, status, headers)

    @app.exception_handler(UnknownIdError)
    async def unknown(request: Request, error: UnknownIdError) -> JSONResponse:
        return answer(404, str(error))

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> JSONResponse:
        path = request.url.path
        if error.status_code == 404:
            return answer(404, f"there is no {path[:80]} here; /openapi.json tells what there is")
        if error.status_code == 405:  # Starlette names the methods of the first route of the path only
            here = [route for route in app.routes if getattr(route, "path", None) == path]
            taken = {method for route in here for method in getattr(route, "methods", None) or ()}
            methods = ", ".join(sorted(taken | {"HEAD"} if "GET" in taken else taken))
            return answer(405, f"{path} takes {methods}, not {request.method}", {"Allow": methods})
        return answer(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        more = f"; and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        return answer(422, "; ".join(_problem(problem) for problem in problems[:SHOWN]) + more)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return answer(500, "the service failed; its log tells why")


def _problem(problem: dict[str, Any]) -> str:
    """Say what is wrong, and where."""
    place, *inside = problem["loc"]
    if problem["type"] == "json_invalid":
        return f"the body is not JSON: {problem['ctx']['error']} at character {inside[0]}"
    return f"{'.'.join(map(str, inside)) or place}: {problem['msg']}"
