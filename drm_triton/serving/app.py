"""The HTTP service behind `drm-triton serve`: recommendations from one fitted model, in JSON.

Responses equal the results of the model's methods to the bit; `drm_triton.serving.engine` computes them. Ids are query
parameters and not parts of the path, because a path cannot carry ids such as "a/b" or ".." safely.
"""

from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Annotated, Any, get_origin, get_type_hints
from urllib.parse import parse_qsl

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from starlette.types import ASGIApp, Receive, Scope, Send

from drm_triton._version import __version__
from drm_triton.errors import DrmError
from drm_triton.recommender import Recommender
from drm_triton.serving import schema
from drm_triton.serving.errors import add_error_handlers, described, error_response
from drm_triton.serving.metrics import Metrics
from drm_triton.serving.middleware import BodyLimit, Gate, HeadAsGet, LogLevel, Observed
from drm_triton.serving.pages import page
from drm_triton.serving.rounds import Member
from drm_triton.serving.service import Service

MAX_BODY = 1 << 20  # bytes of a request body
MAX_LISTS = 50_000  # opening brackets of a body: a MiB of nested lists takes five times as long as one of ids
MAX_FIELDS = 256  # fields of a query or a body: pydantic would describe each that does not exist
TOO_MANY_FIELDS = f"At most {MAX_FIELDS} fields are allowed"


def create_app(
    model: Recommender[Any],
    name: str = "model",
    max_k: int = 100,
    max_liked: int = 1000,
    max_exclude: int = 10_000,
    token: str | None = None,
    host_names: Collection[str] | None = None,
    log: LogLevel = "none",
    load: Callable[[], Recommender[Any]] | None = None,
    metrics: Metrics | None = None,
    member: Member | None = None,
) -> FastAPI:
    """Create the ASGI application that serves a fitted model.

    Parameters
    ----------
    model : any fitted model; its files, if it has any, must not change (see `drm_triton.serving.loading`)
    name : name of the model in `/health`
    max_k : largest k of a request
    max_liked, max_exclude : largest number of liked and of excluded items in a request
    token : token that requests must carry, except for `/health`, `/ready` and the pages; None for no token
    host_names : allowed names in the Host header, besides addresses; None for all
    log : requests that are logged, to the logger `drm_triton.serving`
    load : loads a new model for `POST /reload`, which exists only with a token
    metrics : counts to add to; its own by default
    member : the part of this process in the reloads of several workers; None if it is alone

    Returns
    -------
    FastAPI application for any ASGI server; the kernels are already compiled. `app.state.service` is its `Service`
    """
    metrics = metrics or Metrics()
    service = Service(model, name, metrics, load, member)
    app = FastAPI(
        title="drm-triton",
        version=__version__,
        description="Top-K recommendations from one trained model.",
        docs_url=None,  # these pages load scripts from other hosts; /docs is our own
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    answers: dict[str, Answer] = {}
    app.add_middleware(Direct, answers=answers)
    app.add_middleware(BodyLimit, limit=MAX_BODY)
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, token=token, host_names=host_names)
    app.add_middleware(Observed, metrics=metrics, level=log)
    add_error_handlers(app)
    refused = (400,) if token is None else (400, 401)
    K = Annotated[int, Field(ge=1, le=max_k, description="Maximum number of items to return.")]

    class UserQuery(BaseModel):
        model_config = ConfigDict(extra="forbid")
        user: str = Field(description="Id of a user of the training data.")
        k: K = 10
        exclude_seen: bool = Field(True, description="Leave out items that the user has.")
        unknown: schema.UnknownIds = "error"
        only: list[str] = Field([], max_length=schema.MAX_IN_QUERY, description=schema.ONLY)
        exclude: list[str] = Field([], max_length=schema.MAX_IN_QUERY, description="Ids of items to leave out.")
        where: schema.Conditions = []
        at_most: schema.Limits = []
        diversity: schema.Diversity = 0.0

    class ItemQuery(BaseModel):
        model_config = ConfigDict(extra="forbid")
        item: str = Field(description="Id of an item of the training data.")
        k: K = 10

    class TextQuery(BaseModel):
        model_config = ConfigDict(extra="forbid")
        query: str = Field(
            "", max_length=schema.MAX_QUERY, description="Part of a title or id; empty for the most popular items."
        )
        k: K = 10

    class NewUser(BaseModel):
        model_config = ConfigDict(extra="forbid", strict=True)
        liked: schema.ids(1, max_liked) = Field(description="Ids of items that the new user likes.")  # type: ignore[valid-type]
        k: Annotated[K, schema.FromJson] = 10
        exclude: schema.ids(0, max_exclude) = Field([], description="Ids of items to leave out besides the liked ones.")  # type: ignore[valid-type]
        only: schema.ids(0, max_exclude) = Field([], description=schema.ONLY)  # type: ignore[valid-type]
        unknown: schema.UnknownIds = "error"
        where: schema.Conditions = []
        at_most: schema.Limits = []
        diversity: schema.Diversity = 0.0

    # FastAPI does not validate a JSONResponse, which saves time. The response models only describe it; the tests check
    # that the description is true.

    # `model` adds the schema of all errors to the description.
    @app.get("/health", response_model=schema.Health, responses={**described(400), 500: {"model": schema.Error}})
    async def check_health() -> JSONResponse:
        """Return the model that is served."""
        return JSONResponse(service.health)

    @app.get("/ready", response_model=schema.Ready, responses=described(400, 500, 503))
    async def check_readiness() -> JSONResponse:
        """Return whether new requests should be sent here: not when the service is about to stop."""
        if service.draining:
            return error_response(503, "the service is about to stop")
        return JSONResponse({"status": "ready"})

    async def recommend(query: Annotated[UserQuery, Query()]) -> JSONResponse:
        """Return the best items for a user of the training data."""
        rules = schema.rules_of(query)
        choice = query.only, query.exclude
        answer = await service.engine.recommend(query.user, query.k, query.exclude_seen, query.unknown, rules, *choice)
        return JSONResponse(answer)

    async def similar(query: Annotated[ItemQuery, Query()]) -> JSONResponse:
        """Return the items most similar to an item, never the item itself."""
        return JSONResponse(await service.engine.similar(query.item, query.k))

    async def find_items(query: Annotated[TextQuery, Query()]) -> JSONResponse:
        """Return items whose title or id contains a text, whatever its case and accents."""
        return JSONResponse(await service.engine.find(query.query, query.k))

    for path, endpoint, response, statuses in (
        ("/recommendations", recommend, schema.UserRecommendations, (404, 422, 500)),
        ("/similar", similar, schema.SimilarItems, (404, 422, 500)),
        ("/items", find_items, schema.FoundItems, (422, 500)),
    ):
        app.router.add_api_route(
            path,
            endpoint,
            response_model=response,
            responses=described(*refused, *statuses),
            route_class_override=QueryRoute,
        )
        answers[path] = answer_of(endpoint)

    async def recommend_from(user: NewUser) -> JSONResponse:
        """Return the best items for a new user, who is not in the training data, from the items the user likes."""
        rules = schema.rules_of(user)
        answer = await service.engine.recommend_from(user.liked, user.k, user.exclude, user.unknown, rules, user.only)
        return JSONResponse(answer)

    app.router.add_api_route(
        "/recommendations",
        recommend_from,
        methods=["POST"],
        response_model=schema.NewUserRecommendations,
        responses=described(*refused, 404, 413, 422, 500),
        route_class_override=JsonRoute,
    )

    @app.get("/metrics", response_class=PlainTextResponse, responses=described(*refused, 500))
    async def show_metrics() -> PlainTextResponse:
        """Return the counts of the service for Prometheus."""
        return PlainTextResponse(metrics.text(service.health), media_type="text/plain; version=0.0.4; charset=utf-8")

    if load is not None and token is not None:

        @app.post("/reload", response_model=schema.Health, responses=described(*refused, 500))
        async def reload() -> JSONResponse:
            """Load the model again, in all workers, and return what is served then."""
            try:
                await service.reload_all()
            except DrmError as error:
                return error_response(500, f"the old model is still served, for the new one cannot be loaded: {error}")
            return JSONResponse(service.health)

    for path in ("/", "/docs"):
        content, headers = page(path)
        answer = HTMLResponse(content, headers=headers)
        app.router.add_route(path, _always(answer), methods=["GET"], include_in_schema=False)
    return app


def _always(response: Response) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def respond(request: Request) -> Response:
        return response

    return respond


Answer = Callable[[bytes], Coroutine[Any, Any, Response]]  # maps the query of a request to its response


def answer_of(endpoint: Callable[[Any], Coroutine[Any, Any, Response]]) -> Answer:
    """Return the function that validates a query as the model of the endpoint's one parameter, and answers it.

    FastAPI's general way through dependencies takes longer than the ranking. A parameter that is given twice is
    rejected; FastAPI would silently use one of the two values.
    """
    model: type[BaseModel] = get_type_hints(endpoint)["query"]
    lists = {name for name, field in model.model_fields.items() if get_origin(field.annotation) is list}

    async def answer(query_string: bytes) -> Response:
        try:
            pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError:
            raise RequestValidationError([_problem(TOO_MANY_FIELDS)]) from None
        values: dict[str, Any] = dict(pairs)
        if len(values) < len(pairs):
            counts = Counter(name for name, _ in pairs if name not in lists)
            repeated = [_problem("Given more than once", name) for name in counts if counts[name] > 1]
            if repeated:
                raise RequestValidationError(repeated)
        values.update({name: [value for other, value in pairs if other == name] for name in lists & values.keys()})
        try:
            query = model.model_validate(values)
        except ValidationError as error:
            problems = [{**problem, "loc": ("query", *problem["loc"])} for problem in error.errors()]
            raise RequestValidationError(problems) from None
        return await endpoint(query)

    return answer


class QueryRoute(APIRoute):
    """A route whose one parameter is the model of its query. It describes requests, and answers those with errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        answer = answer_of(self.endpoint)

        async def respond(request: Request) -> Response:
            return await answer(request.scope["query_string"])

        return respond


class JsonRequest(Request):
    """A request whose body is JSON in UTF-8. Starlette would guess other encodings, and fail on deep nesting."""

    async def json(self) -> Any:
        """Return the body."""
        text = await self.body()
        if text.count(b"[") > MAX_LISTS:
            raise HTTPException(422, f"body: At most {MAX_LISTS:,} opening brackets are allowed")
        try:
            body = from_json(text, allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(422, f"the body is not JSON in UTF-8: {error}") from None
        if isinstance(body, dict) and len(body) > MAX_FIELDS:
            raise HTTPException(422, f"body: {TOO_MANY_FIELDS}")
        return body


class JsonRoute(APIRoute):
    """A route whose requests are `JsonRequest`s."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        answer = super().get_route_handler()

        async def respond(request: Request) -> Response:
            return await answer(JsonRequest(request.scope, request.receive))

        return respond


class Direct:
    """Answers queries without the routing of FastAPI, which takes longer than the ranking.

    A request that something is wrong with goes on to FastAPI, where the error becomes a response.

    Parameters
    ----------
    app : the application
    answers : path -> its answer to GET
    """

    def __init__(self, app: ASGIApp, answers: dict[str, Answer]) -> None:
        self.app, self.answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        answer = self.answers.get(scope["path"]) if scope.get("method") == "GET" else None
        found: ASGIApp = self.app
        if answer is not None:
            with suppress(RequestValidationError, DrmError):
                found = await answer(scope["query_string"])
        await found(scope, receive, send)


def _problem(text: str, *name: str) -> dict[str, Any]:
    """Return what is wrong with a query, or with its field of this name, in the form of pydantic."""
    return {"type": "value_error", "loc": ("query", *name), "msg": text}
