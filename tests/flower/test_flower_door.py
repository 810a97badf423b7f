"""The door for nodes: what passes, and what does not."""

import socket
import ssl
import threading
import time

import pytest

pytest.importorskip("flwr")

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from aipod.flower._door import make_door, serve
from aipod.flower._keys import make_certificates


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(app, folder, port):
    """A server with TLS in a thread of its own."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        ssl_certfile=str(folder / "server.crt"),
        ssl_keyfile=str(folder / "server.key"),
        log_level="error",
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return server, thread


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def federation(certificates):
    """A stand-in for a SuperLink, which says what it heard, and the door before it."""
    heard = []

    async def answer(request):
        body = await request.body()
        heard.append((request.method, request.url.path, dict(request.headers), body))
        return Response(body[::-1], 207, {"x-own": "kept", "content-type": "application/protobuf"})

    methods = ["GET", "POST", "PUT"]
    link = Starlette(routes=[Route("/{path:path}", answer, methods=methods)])
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    ports = free_port(), free_port()
    servers = [
        started(link, certificates, ports[0]),
        started(make_door(f"https://127.0.0.1:{ports[0]}", trust), certificates, ports[1]),
    ]
    with httpx.Client(
        base_url=f"https://127.0.0.1:{ports[1]}", verify=trust, trust_env=False
    ) as client:
        yield client, heard, servers
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


def test_what_a_node_asks_for_passes_whole(federation):
    client, heard, _ = federation
    body = bytes(range(256)) * 5_000
    reply = client.post("/v1/fleet/pull-messages", content=body, headers={"x-signature": "abc"})
    assert (reply.status_code, reply.content) == (207, body[::-1])
    assert reply.headers["x-own"] == "kept"
    method, path, headers, came = heard.pop()
    assert (method, path, came) == ("POST", "/v1/fleet/pull-messages", body)
    assert headers["x-signature"] == "abc"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/register-node"),
        ("POST", "/v1/control/list-nodes"),
        ("POST", "/v1/runtime/anything"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1/fleet/..%2fcontrol%2fstart-run"),
        ("POST", "//v1/control/start-run"),
        ("POST", "/v1/fleet/"),
        ("POST", "/v1/fleet/pull-messages/../../control/start-run"),
        ("POST", "/v1/FLEET/pull-messages"),
        ("GET", "/v1/fleet/pull-messages"),
        ("PUT", "/v1/fleet/pull-messages"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/"),
    ],
)
def test_nothing_else_passes(federation, method, path):
    """Also not when the path is written so that two programs may read it differently."""
    client, heard, _ = federation
    heard.clear()
    # As it stands: httpx would tidy the path up.
    url = client.base_url.copy_with(raw_path=path.encode())
    assert client.request(method, url, content=b"x").status_code == 404
    assert heard == []


def test_a_superlink_that_is_down_makes_nodes_try_again(certificates):
    trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    port = free_port()
    server, thread = started(
        make_door(f"https://127.0.0.1:{free_port()}", trust), certificates, port
    )
    try:
        url = f"https://127.0.0.1:{port}/v1/fleet/pull-messages"
        assert httpx.post(url, verify=trust, content=b"", trust_env=False).status_code == 503
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.mark.parametrize(
    ("listen", "link", "message"),
    [
        ("9443", "127.0.0.1:8000", "listen must be a host and a port"),
        ("0.0.0.0:9443", "192.168.0.1:8000", "must be on this machine"),
        ("0.0.0.0:9443", "0.0.0.0:8000", "must be on this machine"),
    ],
)
def test_doors_that_would_not_close_are_refused(listen, link, message):
    with pytest.raises(ValueError, match=message):
        serve(listen, link, certificate="c", key="k")
