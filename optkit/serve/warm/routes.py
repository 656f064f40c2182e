"""``/v1/cache/warm``: POST computes a prefix, GET lists what is pinned, DELETE drops a pin."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from optkit.serve.app_state import AppState, arrival_of
from optkit.serve.http.body import read_body
from optkit.serve.http.disconnect import until_disconnect
from optkit.serve.shutdown import shutting_down
from optkit.serve.warm.protocol import WarmRequest, parse_warm
from optkit.serve.warm.service import WarmService

PATH = "/v1/cache/warm"


def add_warm_routes(app: FastAPI, state: AppState) -> None:
    """Add the routes to ``app``."""
    service = WarmService(state)

    @app.api_route(
        PATH, methods=["GET", "HEAD", "POST"]
    )  # one route: a 405 names the methods of the first that fits
    async def warm(http: Request) -> Response:
        if http.method != "POST":
            state.check_engine()
            return JSONResponse(await service.listing(http.state.tenant))
        arrival = arrival_of(http)
        if app.state.draining:
            raise shutting_down()
        body = await read_body(http, state.settings.max_body_bytes, state.settings.body_timeout)
        request = parse_warm(body)
        service.check(request)
        return await _answer(service, http, request, arrival)

    @app.delete(f"{PATH}/{{name}}")
    async def drop(http: Request, name: str) -> Response:
        state.check_engine()
        return JSONResponse(await service.drop(name, http.state.tenant))


async def _answer(service: WarmService, http: Request, request: WarmRequest, arrival: float) -> Response:
    """The answer; a client's disconnect ends the work."""
    body = await until_disconnect(_limited(service, http, request, arrival), http.receive)
    return Response(status_code=499) if body is None else JSONResponse(body)  # 499: nobody reads it


async def _limited(
    service: WarmService, http: Request, request: WarmRequest, arrival: float
) -> dict[str, Any]:
    """The body of the answer, within the server's time for a request."""
    state = service.state
    try:
        async with state.requests.limit(state.deadline(arrival)):
            return await service.warm(request, http.state.tenant, arrival)
    except TimeoutError as error:
        raise state.failure(error) from None
