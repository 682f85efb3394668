"""`depthmix explore`: serve the page of a report with the token explorer first, and a box for new text.

It is one process with the standard library's server. A page of another site must not be able to use it, not even through a name
that the page's owner points at this machine. Requests therefore need this server's own Host and, if they have an Origin, its own.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import math
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from torch import Tensor

from depthmix.config import ExploreConfig
from depthmix.device import autocast, choose_device
from depthmix.errors import CHECKPOINT, DIVERGED, UserError
from depthmix.insight import document as doc
from depthmix.mixers.defaults import chosen_options
from depthmix.report.content import Content
from depthmix.report.model_data import explorer_data
from depthmix.report.page import make_page
from depthmix.runs.foreign import measured
from depthmix.runs.restore import Trained, load_model
from depthmix.train.generate import check_prompt
from depthmix.train.inspect import encode_text, losses_of_cut, text_by_token
from depthmix.values import check_at_least

START = "The sun had set, and the old man walked slowly home along the river."
# Bytes of a request: more than the context of any model here.
LONGEST = 1 << 16
# Seconds that a client may take to send the length it announced.
PATIENCE = 10.0
# Seconds to wait while another text is computed.
QUEUE = 60.0
TITLE = "What layers read from each other"
# Connections that may wait to be accepted. A browser opens several, and a page may be open in many windows.
BACKLOG = 128
TEXT_EXAMPLE = '{"text": "…"}'
CUT_EXAMPLE = '{"text": "…", "model": 0, "reader": 1, "source": 0}'


def explore(config: ExploreConfig, report: Callable[[Sequence[str]], Content | None] | None = None) -> None:
    """Serve until interrupted.

    Args:
        config: what to serve, and where.
        report: makes what the page says of the runs below the explorer.
    """
    _check(config)
    device = choose_device(config.device)
    runs = [run for run in (config.run, config.against) if run] or [""]
    models = Models([(run, load_model(run, device)) for run in runs], config.seq_len)
    first = models.documents(config.text) if config.text else models.documents_or_none(START)
    with listen(config, models, page(first, report and report(runs))) as server:
        if not (config.host == "localhost" or _is(config.host, "is_loopback")):
            warning = f"anyone who can reach port {server.port} of {config.host} can use this page and these models"
            print(f"depthmix: warning: {warning}", file=sys.stderr)
        print(f"Open {server.url} in a browser; Ctrl-C ends it.", flush=True)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            print("\nThe page is no longer served.")


def _check(config: ExploreConfig) -> None:
    if not 0 <= config.port <= 65535:
        raise UserError(f"port must be from 1 to 65535, or 0 for any free port, got {config.port}")
    if not config.host:
        raise UserError("host must not be empty: 127.0.0.1 serves this machine alone, 0.0.0.0 anyone who can reach it")
    check_at_least(config, 1, "seq_len")
    check_prompt(config.text, "text")


class Models:
    """The models of one or two runs, which compute what the explorer shows. They compute one text at a time."""

    def __init__(self, runs: Sequence[tuple[str, Trained]], seq_len: int | None = None) -> None:
        self.runs, self.seq_len, self.lock = runs, seq_len, threading.Lock()
        for run, trained in runs:
            if trained.tokenizer is None:
                raise UserError(f"{run} was trained on images: the explorer shows text", CHECKPOINT)
            trained.model = measured(trained.model, run)

    def documents(self, text: str) -> list[dict[str, Any]]:
        """Return the parts of `depthmix inspect`'s document that the explorer shows, for each model.

        Raises:
            UserError: the text cannot be shown.
        """
        _check_text(text)
        return [self._document(run, trained, text) for run, trained in self.runs]

    def losses_of_cut(self, text: str, model: int, reader: int, source: int) -> list[float | None]:
        """Return the losses of a text's tokens when a model's reader gets nothing of a source; None for the first token.

        Raises:
            UserError: the text cannot be shown, or there is no such model, reader or source.
        """
        _check_text(text)
        _check_index("model", model, len(self.runs))
        run, trained = self.runs[model]
        _check_index("reader", reader, trained.model.mixer.n_sites + 1)
        _check_index("source", source, reader + 1, f" at reader {reader}")
        ids, _ = self._encode(run, trained, text)
        with autocast(ids.device, trained.config.precision):
            losses = losses_of_cut(trained.model, ids, reader, source)
        _check_finite(run, losses[1:])
        return list(doc.rounded(losses))

    def room(self, text: str) -> tuple[int, int]:
        """Return the number of a text's tokens and the most that are possible, for the model with the least room.

        Raises:
            UserError: the text cannot be shown.
        """
        check_prompt(text, "the text")
        counts = []
        for _, trained in self.runs:
            n = len(trained.tokenizer.encode(text, add_special_tokens=False).ids)
            counts.append((n, self.seq_len or trained.config.seq_len))
        return max(counts, key=lambda count: count[0] / count[1])

    def documents_or_none(self, text: str) -> list[dict[str, Any]]:
        """Return the documents of a text, or none if the text is too long for a model."""
        try:
            return self.documents(text)
        except UserError as error:
            if error.exit_code == DIVERGED:
                raise
            return []

    def _encode(self, run: str, trained: Trained, text: str) -> tuple[Tensor, list[str]]:
        ids, pieces = encode_text(trained, text, self.seq_len)
        if not pieces:
            raise UserError(f"the tokenizer of {run} makes no tokens of this text")
        if len(pieces) == 1:
            raise UserError(f"the text is a single token of {run}, and nothing comes before it: write a sentence")
        return ids, pieces

    def _document(self, run: str, trained: Trained, text: str) -> dict[str, Any]:
        ids, pieces = self._encode(run, trained, text)
        with autocast(ids.device, trained.config.precision):
            text_document = text_by_token(trained.model, ids, pieces, trained.tokenizer)
        means = mean(text_document["weights"])
        _check_finite(run, [*text_document["losses"][1:], *(w for r in means for way in r for w in way)])
        over = f"the {len(pieces)} tokens of this text"
        document = {
            "run": run,
            "mixer": trained.config.mixer,
            "mixer_options": chosen_options(trained.config.mixer, trained.config.mixer_options),
            **doc.describe_mixer(trained.model.mixer),
            "mixing": {
                "tokens": len(pieces),
                "over": over,
                "mean": means,
                "contribution": mean(text_document["contributions"]),
            },
            "text": text_document,
        }
        return doc.rounded(document)


def _check_text(text: str) -> None:
    check_prompt(text, "the text")
    if not text.strip():
        raise UserError("the text is empty: write a sentence")


def _check_index(name: str, index: int, n: int, where: str = "") -> None:
    if not 0 <= index < n:
        raise UserError(f"{name} must be from 0 to {n - 1}{where}, got {index}")


def _check_finite(run: str, numbers: Sequence[float | None]) -> None:
    if not all(number is not None and math.isfinite(number) for number in numbers):
        what = f"the output of the model in {run} is not a number"
        raise UserError(f"{what}: this run has diverged, use an older checkpoint", DIVERGED)


def mean(weights: list[list[list[list[float]]]]) -> list[list[list[float]]]:
    """Average ragged weights [token][reader][way][source] over tokens."""
    by_reader = zip(*weights, strict=True)
    by_way = (zip(*reader, strict=True) for reader in by_reader)
    return [[[sum(source) / len(source) for source in zip(*way, strict=True)] for way in ways] for ways in by_way]


def page(documents: Sequence[dict[str, Any]], report: Content | None = None) -> bytes:
    """Return the whole page, encoded."""
    return make_page(report or Content(title=TITLE), live=documents).encode()


HEADERS = {
    # No other page may embed this one. The page's own policy says which scripts may run and what may be loaded.
    "Content-Security-Policy": "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Refused(Exception):
    """A request that is answered with an error sentence instead of a result."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Server(socketserver.ThreadingTCPServer):
    """A server with one thread per connection, since browsers open connections that they do not use."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int, models: Models, page: bytes) -> None:
        self.models, self.page, self.host = models, page, host.lower()
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        super().__init__((str(address[0]), port), Handler)
        self.port = int(self.server_address[1])
        shown = "127.0.0.1" if _is(host, "is_unspecified") else f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/"

    def is_own(self, host: str) -> bool:
        """Tell whether a Host header means this server.

        If the server listens on all addresses of the machine, any address will do: only names can be made to point here by others.
        """
        name, colon, port = host.rpartition(":")
        if not (colon and port.isdecimal()):
            name, port = host, "80"
        bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
        names = {self.host}
        if self.host == "localhost" or _is(self.host, "is_loopback"):
            names |= {"localhost", "127.0.0.1", "::1"}
        elif _is(self.host, "is_unspecified"):
            names |= {"localhost", socket.gethostname().lower()} | ({bare} if _is(bare, "version") else set())
        return int(port) == self.port and bare in names

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report every error except those of clients that have left."""
        if not isinstance(error := sys.exception(), OSError):
            _tell(error)


class Handler(BaseHTTPRequestHandler):
    """GET / returns the page, POST /text computes a text, POST /cut its losses with one connection cut, and POST /count its tokens.

    Everything else is refused with a sentence.
    """

    server: Server
    timeout = PATIENCE
    # Bytes of the request that have not been read yet.
    unread = 0

    def _serve(self) -> None:
        try:
            self._check_sender()
            if (self.command, self.path) == ("GET", "/"):
                self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")
            elif (self.command, self.path) == ("POST", "/text"):
                text = self._sent({"text": str}, TEXT_EXAMPLE)["text"]
                models = self._compute(lambda: explorer_data(self.server.models.documents(text)))
                self._answer(HTTPStatus.OK, {"models": models})
            elif (self.command, self.path) == ("POST", "/cut"):
                cut = self._sent({"text": str, "model": int, "reader": int, "source": int}, CUT_EXAMPLE)
                losses = self._compute(lambda: self.server.models.losses_of_cut(**cut))
                self._answer(HTTPStatus.OK, {"losses": losses})
            elif (self.command, self.path) == ("POST", "/count"):
                text = self._sent({"text": str}, TEXT_EXAMPLE)["text"]
                try:
                    tokens, most = self.server.models.room(text)
                except UserError as error:
                    raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, str(error)) from None
                self._answer(HTTPStatus.OK, {"tokens": tokens, "most": most})
            else:
                known = self.path in ("/", "/text", "/cut", "/count")
                status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
                raise Refused(status, "only GET /, and POST to /text, /cut and /count are served here")
        except Refused as refused:
            self._answer(refused.status, {"error": _sentence(refused)})

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_TRACE = do_CONNECT = _serve

    def _check_sender(self) -> None:
        """Refuse requests under another host name, and requests from pages of other sites."""
        host, *more_hosts = (value.strip().lower() for value in self.headers.get_all("Host", [""]))
        origins = {value.strip().lower() for value in self.headers.get_all("Origin", [])}
        length = self.headers.get("Content-Length", "")
        self.unread = int(length) if length.isdecimal() else 0
        if more_hosts or not self.server.is_own(host):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST, f"this server is {self.server.url} and answers to no other name"
            )
        fetch_site = self.headers.get("Sec-Fetch-Site", "none")
        if origins - {f"http://{host}"} or (self.command != "GET" and fetch_site not in ("none", "same-origin")):
            raise Refused(HTTPStatus.FORBIDDEN, "pages of other sites may not use this server")

    def _sent(self, fields: Mapping[str, type], example: str) -> dict[str, Any]:
        """Return the fields of the JSON object that was sent, each of its type."""
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) != 1 or not lengths[0].isdecimal() or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long the text is, in Content-Length")
        # No form on another page can send this type.
        if self.headers.get_content_type() != "application/json":
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send {example} as application/json")
        if self.unread > LONGEST:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a text may take {LONGEST:,} bytes, and this is longer")
        body = self.rfile.read(self.unread)
        whole, self.unread = len(body) == self.unread, 0
        try:
            sent = json.loads(body.decode())
        except (ValueError, RecursionError):
            raise Refused(HTTPStatus.BAD_REQUEST, "this is not JSON in UTF-8") from None
        # JSON's true and false are no numbers, though Python's are.
        if (
            not whole
            or not isinstance(sent, dict)
            or any(type(sent.get(name)) is not kind for name, kind in fields.items())
        ):
            raise Refused(HTTPStatus.BAD_REQUEST, f"send {example}")
        return {name: sent[name] for name in fields}

    def _compute(self, compute: Callable[[], Any]) -> Any:
        """Return the result of a computation, which waits for its turn."""
        models = self.server.models
        if not models.lock.acquire(timeout=QUEUE):
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "another text is still being computed: try again later")
        try:
            return compute()
        except UserError as error:
            broken = error.exit_code == DIVERGED
            status = HTTPStatus.INTERNAL_SERVER_ERROR if broken else HTTPStatus.UNPROCESSABLE_ENTITY
            raise Refused(status, str(error)) from None
        except Exception as error:
            _tell(error)
            message = "this text could not be computed: the terminal of depthmix explore says why"
            raise Refused(HTTPStatus.INTERNAL_SERVER_ERROR, message) from None
        finally:
            models.lock.release()

    def _answer(self, status: HTTPStatus, answer: Any) -> None:
        self._send(status, json.dumps(answer, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET" if self.path == "/" else "POST")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.connection.settimeout(1.0)
        # Read what is still coming: a client that is still sending would otherwise see a broken connection and no answer.
        n_unread = min(self.unread, 64 * LONGEST)
        while n_unread > 0 and (part := self.rfile.read1(min(n_unread, LONGEST))):
            n_unread -= len(part)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP. The library's own error pages would repeat the request."""
        self._answer(HTTPStatus(code), {"error": f"{HTTPStatus(code).phrase}."})

    def version_string(self) -> str:
        return "depthmix"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for single requests."""


def listen(config: ExploreConfig, models: Models, page: bytes) -> Server:
    """Return a server that takes requests.

    Raises:
        UserError: the address is taken, or is none of this machine.
    """
    address = f"{config.host}:{config.port}"
    try:
        return Server(config.host, config.port, models, page)
    except socket.gaierror:
        raise UserError(f"host {config.host!r} is no address of this machine") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = f"port {config.port} is taken: give another with --port, or 0 for any free port"
            raise UserError(message) from None
        raise UserError(f"cannot listen on {address}: {error.strerror or error}") from None


def _is(host: str, property_name: str) -> bool:
    """Tell whether an address has a property of `ipaddress`. A name has none."""
    try:
        return bool(getattr(ipaddress.ip_address(host), property_name))
    except ValueError:
        return False


def _sentence(error: Exception) -> str:
    said = " ".join(str(error).split()).rstrip(".")
    return f"{said[:1].upper()}{said[1:]}."


def _tell(error: BaseException | None) -> None:
    print(f"depthmix: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
