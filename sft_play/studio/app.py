"""The pages of the studio as a WSGI application: runs, a run, a comparison, the plan explorer.

It answers GET and HEAD alone, to browsers that call it by a name of this machine, and reads nothing but the
runs of its folder.
"""

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from werkzeug.exceptions import BadRequest, HTTPException, InternalServerError, NotFound
from werkzeug.routing import Map, Rule
from werkzeug.wrappers import Request, Response

from sft_play.report.compare_page import compare_page
from sft_play.report.html import Page, render
from sft_play.report.plots import COLOURS
from sft_play.report.run_page import run_page
from sft_play.report.runs_page import TEMPLATE as RUNS
from sft_play.report.runs_page import heads, runs_page, selected
from sft_play.studio.explorer import explore
from sft_play.studio.folder import Recent, RunsFolder, Version, planned
from sft_play.studio.planner import Planner
from sft_play.ui.screen import write_stderr
from sft_play.units import capitalized

STUDIO = "studio.html.j2"
SCRIPT = Path(__file__).with_name("live.js")
HOSTS = ("127.0.0.1", "localhost")  # on any port, since a browser may come through ssh
UPDATED_S = 5  # how often a page asks for what is new
KEPT_PAGES = 16
DRAWN = ("run", "compare", "plan")  # endpoints; the list goes on meanwhile
TITLES = {  # of pages that say why there is no other: HTTP's own words are for programs
    400: "This cannot be shown",
    403: "Not from another site",
    404: "Not found",
    405: "The studio only shows",
    500: "Something went wrong",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser asks each time, and is told when nothing has changed
}
ROUTES = Map(
    [
        Rule("/", endpoint="list", methods=["GET"]),
        Rule("/runs/<name>", endpoint="run", methods=["GET"]),
        Rule("/compare", endpoint="compare", methods=["GET"]),
        Rule("/plan", endpoint="plan", methods=["GET"]),
        Rule("/live.js", endpoint="script", methods=["GET"]),
        Rule("/favicon.ico", endpoint="icon", methods=["GET"]),
    ],
    merge_slashes=False,
)


class Studio:
    """The application, for a folder of runs."""

    def __init__(self, runs: Path, planner: Planner) -> None:
        self._folder, self._planner = RunsFolder(runs), planner
        self._pages = Recent(KEPT_PAGES)
        self._drawing = threading.Lock()  # matplotlib draws one page at a time

    def __call__(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        """Answers a request, as WSGI has it."""
        request = Request(environ)
        request.trusted_hosts = list(HOSTS)
        response = self._respond(request)
        response.headers.update(HEADERS)
        if response.status_code == 200:
            response.add_etag()
            response.make_conditional(request)
        return response(environ, start_response)

    def _respond(self, request: Request) -> Response:
        pages: dict[str, Callable[..., Response]] = {
            "list": self._list,
            "run": self._run,
            "compare": self._compare,
            "plan": self._plan,
            "script": _script,
            "icon": _icon,
        }
        try:
            _ = request.host  # raises an error for a name of another site, pointed at this machine
            endpoint, values = ROUTES.bind_to_environ(request).match()
            with self._drawing if endpoint in DRAWN else contextlib.nullcontext():
                return pages[endpoint](request, **values)
        except HTTPException as error:
            return _failed(error)
        except Exception as error:  # noqa: BLE001 - the server goes on
            write_stderr("".join(traceback.format_exception(error)))
            return _failed(InternalServerError("this is a bug in SFT-Play; please report what was printed"))

    def _list(self, request: Request) -> Response:
        found = self._folder.rows()
        rows = [row for row, _ in found]
        find, sort = (request.args.get(name, "") for name in ("find", "sort"))
        shown = selected(rows, find, sort)
        page = runs_page(rows, str(self._folder.path), len(shown))
        columns = heads(rows[0], find, sort) if rows else []
        parts = {"rows": [found[index][1] for index in shown], "heads": columns, "find": find, "sort": sort}
        return _html(render(page, RUNS, seconds=UPDATED_S, here="/", **parts))

    def _run(self, request: Request, name: str) -> Response:
        version = self._version(name)

        def draw() -> str:
            run = self._folder.read(version)
            assert run is not None
            return render(run_page(run), STUDIO, seconds=UPDATED_S if run.activity else 0, here="")

        return _html(self._pages.get(version, draw))

    def _compare(self, request: Request) -> Response:
        names = list(dict.fromkeys(request.args.getlist("run")))
        if not 2 <= len(names) <= COLOURS:
            raise BadRequest(f"mark 2 to {COLOURS} runs in the list to compare them; marked: {len(names)}")
        # the earliest first: the others are compared with it
        versions = tuple(sorted(map(self._version, names), key=planned))

        def draw() -> str:
            runs = [run for run in map(self._folder.read, versions) if run]
            active = any(run.activity for run in runs)
            return render(compare_page(runs), STUDIO, seconds=UPDATED_S if active else 0, here="")

        return _html(self._pages.get(versions, draw))

    def _plan(self, request: Request) -> Response:
        # Only a page of this server, or an address that was typed, makes this machine work.
        own = request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        return _html(explore(request.args, self._planner, may_start=own))

    def _version(self, name: str) -> Version:
        version = self._folder.version(name)
        if version is None:
            raise NotFound(f"there is no run {name} in {self._folder.path}")
        return version


def _html(text: str) -> Response:
    return Response(text.encode(errors="replace"), mimetype="text/html")


def _script(request: Request) -> Response:
    return Response(SCRIPT.read_bytes(), mimetype="text/javascript")


def _icon(request: Request) -> Response:
    return Response(status=204)


def _failed(error: HTTPException) -> Response:
    said = (error.description or error.name).rstrip(".")
    if said == NotFound.description.rstrip("."):
        said = "the studio has no page at this address"
    title = TITLES.get(error.code or 500, error.name)
    page = Page(title, "", [], status=f"{capitalized(said)}.")
    response = _html(render(page, STUDIO, seconds=0, here=""))
    response.status_code = error.code or 500
    if allowed := getattr(error, "valid_methods", None):
        response.headers["Allow"] = ", ".join(allowed)
    return response
