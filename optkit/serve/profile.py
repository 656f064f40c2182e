"""``POST /start_profile`` and ``POST /stop_profile``, as at vLLM: profiles of a server's own steps.

A profile takes a bounded number of steps of each phase, while the server goes on serving. The files go to the
directory of ``--profile-dir`` alone; without the option both paths are refused.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from optkit.runtime.process.ipc import Profiled
from optkit.serve.app_state import AppState
from optkit.serve.http.errors import ApiError

START, STOP = "/start_profile", "/stop_profile"
STEPS, MOST_STEPS = 3, 100  # of each phase


def add_profile_routes(app: FastAPI, state: AppState) -> None:
    """Add the routes to ``app``."""
    directory = state.settings.profile_dir
    if directory is None:
        refuse_profiles(app)
        return

    @app.post(START)
    async def start_profile(http: Request) -> JSONResponse:
        state.check_engine()
        steps = number_of_steps(http.query_params.get("num_steps"))
        checked(await state.engine.start_profile(steps))
        return JSONResponse({"status": "started", "num_steps": steps})

    @app.post(STOP)
    async def stop_profile() -> JSONResponse:
        state.check_engine()
        done = checked(await state.engine.stop_profile(directory))
        return JSONResponse({"status": "stopped", "steps": done.steps, "files": list(done.files)})


def refuse_profiles(app: FastAPI) -> None:
    """Add routes that refuse profiles to ``app``, of a server without a directory for them."""

    async def refuse() -> JSONResponse:
        message = "profiles are off; start the server with --profile-dir DIR"
        raise ApiError(message, code="profiling_disabled", status=404)

    for path in (START, STOP):
        app.add_api_route(path, refuse, methods=["POST"])


def number_of_steps(text: str | None) -> int:
    """The steps of each phase to record.

    Raises:
        ApiError: 400, no number in range.
    """
    if text is None:
        return STEPS
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MOST_STEPS):
        message = f"num_steps must be a number from 1 to {MOST_STEPS}"
        raise ApiError(message, param="num_steps", code="invalid_value")
    return int(text)


def checked(answer: Profiled) -> Profiled:
    """``answer`` without an error.

    Raises:
        ApiError: 409 in the wrong order, 503 without an engine or with a full disk.
    """
    if answer.error is None:
        return answer
    if answer.is_conflict:
        raise ApiError(answer.error, code="profile_conflict", status=409)
    raise ApiError(answer.error, code="profile_failed", status=503)
