"""`depthmix explore`: who may ask, what may be asked, and that the answer is the library's."""

import _thread
import contextlib
import dataclasses
import http.client
import json
import math
import re
import socket
import threading
import time

import pytest
import torch

from depthmix import Decoder, DecoderConfig
from depthmix.cli import main
from depthmix.config import ExploreConfig, TrainConfig
from depthmix.data.tokenizer import train_tokenizer
from depthmix.errors import CHECKPOINT, DIVERGED, USAGE
from depthmix.report import serve
from depthmix.report.model_data import explorer_data
from depthmix.report.serve import LONGEST, Models, Server, listen, mean, page
from depthmix.runs.folder import RunFolder
from depthmix.runs.restore import Trained
from depthmix.train.inspect import encode_text, text_by_token
from train.refused import refused

TEXT = "the sea é"
TOKENS = 24  # the longest sequence


def trained(mixer="attnres", **options):
    """A model that nobody has trained, with the pieces a run would have."""
    tokenizer = train_tokenizer(["the sea is deep and the sky is blue"] * 4, vocab_size=265)
    config = DecoderConfig(vocab_size=265, dim=16, n_blocks=2, n_heads=2, mixer=mixer, mixer_options=options)
    model = Decoder(config).eval()
    with torch.no_grad():
        for p in model.mixer.parameters():
            p += 0.3 * torch.randn_like(p)
    recipe = TrainConfig(dim=16, n_blocks=2, n_heads=2, seq_len=TOKENS, mixer=mixer, mixer_options=options)
    return Trained(model, tokenizer, recipe, 0, RunFolder("."))


@contextlib.contextmanager
def serving(*runs, host="127.0.0.1"):
    models = Models([(f"runs/{i}", run) for i, run in enumerate(runs)])
    with Server(host, 0, models, page(models.documents(TEXT))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server():
    with serving(trained(ways=3)) as server:
        yield server


def ask(server, method="POST", path="/text", body=None, headers=()):
    """Status, headers and answer of one request; headers come on top of a good one's, None takes one away."""
    body = json.dumps({"text": TEXT}) if body is None and method == "POST" else body
    body = body.encode() if isinstance(body, str) else body
    given = {"Host": f"127.0.0.1:{server.port}"}
    given |= {"Content-Type": "application/json", "Content-Length": str(len(body))} if body is not None else {}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in [*(given | dict(headers)).items()]:
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                connection.putheader(name, each)
    connection.endheaders(body)
    answer = connection.getresponse()
    found = answer.read()
    connection.close()
    return answer.status, answer.headers, found


def said(server, status, *words, **request):
    """The sentence a request is refused with."""
    found, headers, body = ask(server, **request)
    assert found == status, body
    assert headers["Content-Type"] == "application/json"
    sentence = json.loads(body)["error"]
    assert sentence.endswith(".")
    for hidden in ("Traceback", ".py", "File "):
        assert hidden not in sentence
    for word in words:
        assert word in sentence
    return sentence


def test_the_page_and_the_answer_come_with_a_policy(server):
    status, headers, body = ask(server, "GET", "/")
    assert status == 200
    assert b'id="words-form"' in body
    (meta,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', body.decode())
    sent, said = (
        dict(part.strip().split(" ", 1) for part in text.split(";"))
        for text in (headers["Content-Security-Policy"], meta)
    )
    assert sent["frame-ancestors"] == said["default-src"] == said["base-uri"] == "'none'"
    assert said["connect-src"] == "'self'"
    assert all(part.startswith("'sha256-") for part in said["script-src"].split())
    for answer in (headers, ask(server)[1]):
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert answer["Cache-Control"] == "no-store"
        assert not {"Access-Control-Allow-Origin", "Set-Cookie"} & set(answer)


def test_the_answer_is_the_librarys(server):
    status, _, body = ask(server)
    assert status == 200
    (found,) = json.loads(body)["models"]
    run = server.models.runs[0][1]
    expected = text_by_token(run.model, *encode_text(run, TEXT), run.tokenizer)
    (model,) = explorer_data(run_documents := server.models.documents(TEXT))
    assert found == json.loads(json.dumps(model))
    text = found["text"]
    assert text["tokens"] == expected["tokens"]
    assert "".join(text["tokens"]) == TEXT
    assert text["losses"][0] is None
    assert text["losses"][1:] == pytest.approx(expected["losses"][1:], rel=1e-4)
    for reader, own in zip(text["share"][3], expected["contributions"][3], strict=True):
        for way, shares in zip(reader, own, strict=True):
            assert way == pytest.approx([1000 * share for share in shares], abs=1.01)
    (document,) = run_documents
    last = [token[-1][0] for token in expected["weights"]]
    means = [sum(w) / len(w) for w in zip(*last, strict=True)]
    assert document["mixing"]["mean"][-1][0] == pytest.approx(means, rel=1e-4)
    assert found["label"] == "attnres:ways=3"


CUT = {"text": TEXT, "model": 1, "reader": 4, "source": 1}


def test_a_cut_is_the_librarys():
    with serving(trained("residual"), trained(ways=3)) as server:
        status, _, body = ask(server, path="/cut", body=json.dumps(CUT))
        assert status == 200
        (first, *losses) = json.loads(body)["losses"]
        assert first is None
        run = server.models.runs[1][1]
        ids, pieces = encode_text(run, TEXT)
        text = text_by_token(run.model, ids, pieces, run.tokenizer, cuts=True)
        rises = [token[4][1] for token in text["cuts"][:-1]]
        expected = [loss + rise for loss, rise in zip(text["losses"][1:], rises, strict=True)]
        assert losses == pytest.approx(expected, rel=1e-3)
        assert losses != pytest.approx(text["losses"][1:], rel=1e-3)


def test_tokens_are_counted_without_waiting_for_a_text(server):
    with server.models.lock:
        status, _, body = ask(server, path="/count", body=json.dumps({"text": TEXT}))
    run = server.models.runs[0][1]
    assert (status, json.loads(body)) == (200, {"tokens": len(run.tokenizer.encode(TEXT).ids), "most": TOKENS})
    said(server, 400, "Send", path="/count", body="{}")
    said(server, 422, path="/count", body='{"text": "\\ud800"}')
    said(server, 403, "other sites", path="/count", headers={"Origin": "http://evil.example"})


def test_fifty_connections_may_wait(server):
    """They are made before any is accepted: more than the library's backlog of five would not be made at all."""
    with Server("127.0.0.1", 0, server.models, b"a page") as waiting:
        clients = [socket.create_connection(("127.0.0.1", waiting.port), timeout=5) for _ in range(50)]
        for client in clients:
            client.sendall(f"GET / HTTP/1.0\r\nHost: 127.0.0.1:{waiting.port}\r\n\r\n".encode())
        thread = threading.Thread(target=waiting.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            answers = [client.makefile("rb").read() for client in clients]
        finally:
            waiting.shutdown()
            thread.join()
            for client in clients:
                client.close()
        assert all(b" 200 " in answer and answer.endswith(b"a page") for answer in answers)


def test_the_mean_keeps_the_shape():
    assert mean([[[[1.0]], [[0.0, 2.0], [4.0, 4.0]]], [[[3.0]], [[1.0, 0.0], [4.0, 0.0]]]]) == [
        [[2.0]],
        [[0.5, 1.0], [4.0, 2.0]],
    ]


# Who asks.


@pytest.mark.parametrize(
    "host", ["evil.example:{}", "127.0.0.1:1", "127.0.0.1", "localhost.:{}", "10.0.0.1:{}", "", None]
)
def test_another_host_is_refused(server, host):
    name = host and host.format(server.port)
    for request in ({"method": "GET", "path": "/"}, {}):
        said(server, 421, "answers to no other name", headers={"Host": name}, **request)


def test_two_hosts_are_refused(server):
    own = f"127.0.0.1:{server.port}"
    said(server, 421, headers={"Host": [own, "evil.example"]})
    said(server, 421, headers={"Host": ["evil.example", own]})


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "[::1]"])
def test_names_of_this_machine_alone_are_its_own(server, name):
    host = f"{name}:{server.port}"
    assert ask(server, headers={"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"})[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{}", "http://127.0.0.1:1", ""])
def test_pages_of_other_sites_are_refused(server, origin):
    said(server, 403, "other sites", headers={"Origin": origin.format(server.port)})
    said(server, 403, method="GET", path="/", headers={"Origin": origin.format(server.port)})


def test_what_the_browser_says_of_the_site_counts(server):
    for site in ("cross-site", "same-site"):
        said(server, 403, headers={"Sec-Fetch-Site": site})
    assert ask(server, "GET", "/", headers={"Sec-Fetch-Site": "cross-site"})[0] == 200  # a link to it


def test_on_all_addresses_any_address_is_its_own_and_no_name():
    with serving(trained("residual"), host="0.0.0.0") as server:
        assert server.url == f"http://127.0.0.1:{server.port}/"
        assert ask(server, "GET", "/", headers={"Host": f"192.168.7.7:{server.port}"})[0] == 200
        said(server, 421, headers={"Host": f"evil.example:{server.port}"})


# What is asked.


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 404) for path in ("/favicon.ico", "/a", "/?a", "/../../etc/passwd", "http://evil.example/")),
        ("GET", "/text", 405),
        ("GET", "/cut", 405),
        ("POST", "/", 405),
        *((method, "/text", 405) for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")),
        ("BREW", "/text", 501),
    ],
)
def test_nothing_else_is_served(server, method, path, status):
    sentence = said(server, status, method=method, path=path)
    assert status == 501 or sentence == "Only GET /, and POST to /text, /cut and /count are served here."
    if status == 405:
        assert ask(server, method, path)[1]["Allow"] == ("GET" if path == "/" else "POST")


def test_a_head_has_no_body(server):
    status, _, body = ask(server, "HEAD", "/")
    assert (status, body) == (405, b"")


@pytest.mark.parametrize(
    ("status", "words", "request_"),
    [
        (400, "not JSON in UTF-8", {"body": b'{"text": "\xff"}'}),
        (400, "not JSON in UTF-8", {"body": "text"}),
        (400, "not JSON in UTF-8", {"body": "[" * 60000}),
        (400, 'Send {"text": "…"}', {"body": "[]"}),
        (400, 'Send {"text": "…"}', {"body": '{"text": 1}'}),
        (411, "Content-Length", {"headers": {"Content-Length": None}}),
        (411, "Content-Length", {"headers": {"Content-Length": "-1"}}),
        (411, "Content-Length", {"headers": {"Content-Length": ["5", "6"]}}),
        (411, "Content-Length", {"headers": {"Transfer-Encoding": "chunked"}}),
        (413, f"{LONGEST:,} bytes", {"body": b" " * (LONGEST + 1)}),
        (413, f"{LONGEST:,} bytes", {"body": b" " * (20 * LONGEST)}),
        (415, "application/json", {"headers": {"Content-Type": "text/plain"}}),
        (422, "The text is empty", {"body": '{"text": ""}'}),
        (422, "The text is empty", {"body": '{"text": " \\n"}'}),
        (422, "UTF-8", {"body": '{"text": "\\ud800"}'}),
        (422, f"51 tokens and the model's sequences {TOKENS}", {"body": json.dumps({"text": "x" * 51})}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_looked_into_is_refused(server, status, words, request_):
    said(server, status, words, **request_)


@pytest.mark.parametrize(
    ("status", "words", "changes"),
    [
        (400, 'Send {"text": "…", "model": 0, "reader": 1, "source": 0}', {"reader": None}),
        (400, 'Send {"text": "…", "model": 0,', {"source": "1"}),
        (400, 'Send {"text": "…", "model": 0,', {"source": 1.0}),
        (400, 'Send {"text": "…", "model": 0,', {"model": False}),
        (400, 'Send {"text": "…", "model": 0,', {"text": 5}),
        (422, "The text is empty", {"text": " "}),
        (422, f"51 tokens and the model's sequences {TOKENS}", {"text": "x" * 51}),
        (422, "Model must be from 0 to 0, got 1", {"model": 1}),
        (422, "Reader must be from 0 to 4, got 5", {"reader": 5}),
        (422, "Reader must be from 0 to 4, got -1", {"reader": -1}),
        (422, "Source must be from 0 to 2 at reader 2, got 3", {"reader": 2, "source": 3}),
    ],
    ids=str,
)
def test_what_cannot_be_cut_is_refused(server, status, words, changes):
    said(server, status, words, path="/cut", body=json.dumps(CUT | {"model": 0} | changes))


def test_a_cut_is_refused_as_a_text_is(server):
    body, own = json.dumps(CUT | {"model": 0}), {"path": "/cut"}
    said(server, 421, "answers to no other name", headers={"Host": "evil.example"}, body=body, **own)
    said(server, 403, "other sites", headers={"Origin": "http://evil.example"}, body=body, **own)
    said(server, 403, headers={"Sec-Fetch-Site": "cross-site"}, body=body, **own)
    said(server, 411, "Content-Length", headers={"Content-Length": None}, **own)
    said(server, 413, f"{LONGEST:,} bytes", body=b" " * (LONGEST + 1), **own)
    said(server, 415, "application/json", headers={"Content-Type": "text/plain"}, body=body, **own)
    said(server, 400, "not JSON in UTF-8", body="{", **own)


def test_a_request_that_promises_more_than_it_sends_is_answered_at_once(server):
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        head = f"POST /text HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 99999999999999999999\r\n\r\n".encode())
        assert b" 413 " in client.recv(1000)
    assert time.monotonic() - begun < 5


def test_what_is_no_http_gets_no_echo(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"<script>alert(1)</script>\r\n\r\n")
        answer = client.recv(1000)
    assert b"Bad Request" in answer
    assert b"script" not in answer.split(b"\r\n\r\n")[-1]


def test_a_client_that_leaves_is_not_worth_a_word(server, capfd):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


# The models.


def test_outputs_that_are_no_numbers_are_said():
    run = trained("residual")
    with serving(run) as server:
        with torch.no_grad():
            run.model.head.weight.fill_(float("nan"))
        said(server, 500, "of the model in runs/0 is not a number", "has diverged")
        cut = json.dumps(CUT | {"model": 0})
        said(server, 500, "of the model in runs/0 is not a number", path="/cut", body=cut)
        refused(lambda: server.models.documents_or_none(TEXT), "diverged", code=DIVERGED)


def test_a_bug_is_told_here_and_not_there(server, monkeypatch, capfd):
    def broken(text):
        raise RuntimeError("of some\nkind")

    monkeypatch.setattr(server.models, "documents", broken)
    assert "kind" not in said(server, 500, "the terminal")
    assert capfd.readouterr().err == "depthmix: RuntimeError: of some kind\n"
    assert not server.models.lock.locked()


def test_one_text_at_a_time(server, monkeypatch):
    running, most, own = [], [], server.models.documents

    def slow(text):
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return own(text)

    monkeypatch.setattr(server.models, "documents", slow)
    threads = [threading.Thread(target=ask, args=(server,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]
    monkeypatch.setattr(serve, "QUEUE", 0.01)
    with server.models.lock:
        said(server, 503, "Another text")
        said(server, 503, "Another text", path="/cut", body=json.dumps(CUT | {"model": 0}))


# The command.


@pytest.fixture
def folders(monkeypatch):
    """Runs by name, without a disk."""
    found = {"a": trained(), "b": trained("residual")}
    monkeypatch.setattr(serve, "load_model", lambda run, device: found[run])
    return found


def test_ctrl_c_ends_it(folders, capsys):
    """And until then it serves, which it says once it does."""
    seen = []

    def visit():
        try:
            while not (line := capsys.readouterr().out):
                time.sleep(0.01)
            seen.append(line)
            port = int(line.split(":")[2].split("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/")
            seen.append(connection.getresponse().read())
        finally:
            _thread.interrupt_main()

    visitor = threading.Thread(target=visit)
    visitor.start()
    code = main(["explore", "a", "b", "--text", "the sky", "--device", "cpu"])
    visitor.join()
    assert code == 0
    assert seen[0].startswith("Open http://127.0.0.1:")
    assert seen[0].endswith("/ in a browser; Ctrl-C ends it.\n")
    assert b'"label":"attnres"' in seen[1]
    assert b'"label":"residual"' in seen[1]
    assert b'" sky"' in seen[1] or b'" s"' in seen[1]
    assert capsys.readouterr().out == "\nThe page is no longer served.\n"


@pytest.mark.parametrize(
    ("flags", "words", "code"),
    [
        (["--port", "65536"], "port must be from 1 to 65535, or 0", USAGE),
        (["--host", ""], "host must not be empty", USAGE),
        (["--host", "no such host"], "no address of this machine", USAGE),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:0", USAGE),
        (["--seq-len", "0"], "seq_len must be at least 1", USAGE),
        (["--text", "x" * 51], "tokens and the model's sequences 24", USAGE),
        (["--text", "x" * 51, "--seq-len", "30"], "tokens and the model's sequences 30", USAGE),
    ],
    ids=str,
)
def test_what_the_command_refuses(folders, capsys, flags, words, code):
    assert main(["explore", "a", "--device", "cpu", *flags]) == code
    found = capsys.readouterr()
    assert found.err.startswith("depthmix: ")
    assert found.err.count("\n") == 1
    assert words in found.err
    assert found.out == ""


def test_a_port_that_is_taken_is_said(server):
    config = ExploreConfig(port=server.port)
    refused(lambda: listen(config, server.models, b""), f"port {server.port} is taken", "--port", code=USAGE)


def test_a_run_that_is_none_is_said(capsys):
    assert main(["explore", "/nowhere"]) == CHECKPOINT
    assert "'/nowhere' does not exist" in capsys.readouterr().err
    assert main(["explore"]) == USAGE
    assert "run is needed" in capsys.readouterr().err


def test_another_address_comes_with_a_warning(folders, capsys, monkeypatch):
    def interrupted(self, poll_interval):
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupted)
    for host, warned in (("0.0.0.0", True), ("localhost", False)):
        assert main(["explore", "a", "--host", host, "--device", "cpu"]) == 0
        assert ("warning: anyone who can reach port" in capsys.readouterr().err) == warned


def test_a_model_too_short_for_the_first_sentence_begins_with_an_empty_box():
    run = trained("residual")
    run.config.seq_len = 3
    models = Models([("a", run)])
    assert models.documents_or_none(serve.START) == []
    assert b"<textarea" in page([])


def test_a_model_of_another_library_is_refused():
    run = dataclasses.replace(trained("residual"), model=torch.nn.Identity())
    refused(
        lambda: Models([("there", run)]), "there holds a model without a rule for mixing over depth", code=CHECKPOINT
    )


# In a browser.


def test_typing_a_text_shows_the_librarys_numbers(open_page):
    from playwright.sync_api import expect

    with serving(trained(ways=2), trained("residual")) as server:
        shown = open_page(server.url)
        assert shown.input_value("textarea") == TEXT
        shown.fill("textarea", "deep <b>sky")
        expect(shown.locator("#words-count")).to_have_text(re.compile(rf"^\d+ of at most {TOKENS} tokens$"))
        shown.get_by_role("button", name="Show").click()
        expect(shown.locator(".tokens").first).to_contain_text("<b>sky")
        run = server.models.runs[0][1]
        expected = text_by_token(run.model, *encode_text(run, "deep <b>sky"), run.tokenizer)
        shown.locator(".tokens button").nth(2).click()
        chance = float(shown.locator(".chance").first.inner_text().split("1 in ")[1].replace(",", ""))
        assert chance == pytest.approx(math.exp(expected["losses"][2]), rel=0.05)
        # A cut is computed by the server.
        shown.locator(".depth-map").first.focus()
        shown.keyboard.press("Enter")
        shown.get_by_role("button", name="Cut it").click()
        expect(shown.locator(".chance").first).to_contain_text("cut")
        after = float(shown.locator(".chance .after").first.inner_text().split("1 in ")[1].replace(",", ""))
        (loss,) = server.models.losses_of_cut("deep <b>sky", 0, 4, 0)[2:3]
        assert after == pytest.approx(math.exp(loss), rel=0.05)
        # The first map is on the first screen.
        assert shown.locator(".depth-map").first.bounding_box()["y"] < 600
        assert shown.locator(".side select").count() == 2
        assert shown.problems == []

        shown.fill("textarea", "x" * 51)
        shown.keyboard.press("Control+Enter")
        expect(shown.locator("#words-status")).to_contain_text(f"sequences {TOKENS}")
        assert shown.locator(".river").count() == 0  # the maps of the earlier text are gone
        assert "422" in shown.problems.pop()
    shown.fill("textarea", "the")
    shown.get_by_role("button", name="Show").click()
    expect(shown.locator("#words-status")).to_contain_text("still running?")
    shown.problems.clear()
