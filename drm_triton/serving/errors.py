"""Every error response of the service is a JSON `Error`."""

import difflib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from drm_triton.data.ids import SHOWN
from drm_triton.errors import InputError
from drm_triton.serving.engine import UnknownIdError
from drm_triton.serving.schema import ERRORS, Error


def described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI descriptions of error responses. They are JSON, also where the good response is not."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Error.__name__}"}}}
    return {status: {"description": ERRORS[status].capitalize(), "content": content} for status in statuses}


def error_response(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return an error response."""
    return JSONResponse({"error": ERRORS.get(status, "error"), "detail": detail}, status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make every error response a JSON `Error`."""

    @app.exception_handler(UnknownIdError)
    async def unknown_id(request: Request, error: UnknownIdError) -> JSONResponse:
        return error_response(404, str(error))

    @app.exception_handler(InputError)
    async def bad_rule(request: Request, error: InputError) -> JSONResponse:
        return error_response(422, str(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        if error.status_code == 404:
            return error_response(404, f"there is no path {path[:80]}; /openapi.json lists the paths")
        if error.status_code == 405:  # Starlette lists only the methods of the first route of a path
            routes = [route for route in app.routes if getattr(route, "path", None) == path]
            allowed = {method for route in routes for method in getattr(route, "methods", None) or ()}
            methods = ", ".join(sorted(allowed | {"HEAD"} if "GET" in allowed else allowed))
            return error_response(405, f"{path} allows {methods}, not {request.method[:20]}", {"Allow": methods})
        return error_response(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid_input(request: Request, error: RequestValidationError) -> JSONResponse:
        problems = error.errors()
        more = f"; and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        names = _names(request.scope.get("endpoint"))
        return error_response(422, "; ".join(_describe(problem, names) for problem in problems[:SHOWN]) + more)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> JSONResponse:
        return error_response(500, "the service failed; see its log for the reason")


def _names(endpoint: Callable[..., Any] | None) -> list[str]:
    """Return the names of the fields that a request may have: those of the models that its function takes."""
    parameters = inspect.signature(endpoint).parameters.values() if endpoint is not None else ()
    models = [getattr(parameter.annotation, "__origin__", parameter.annotation) for parameter in parameters]
    return [name for model in models for name in getattr(model, "model_fields", ())]


def _describe(problem: dict[str, Any], names: Sequence[str]) -> str:
    """Return one validation problem as text: where it is, and what it is. `names` are the fields that exist."""
    place, *inside = problem["loc"]
    where = ".".join(str(part)[:80] for part in inside) or place
    if problem["type"] == "extra_forbidden" and names:
        near = difflib.get_close_matches(where, names, n=1)
        advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
        return f"{where}: There is no such field, {advice}"
    return f"{where}: {problem['msg']}"
