"""The door for nodes: it passes on what SuperNodes ask of a SuperLink, and nothing else.

Flower's SuperLink answers on one port. Nodes that fetch their messages sign with a registered key,
but whoever reaches the port may also submit an app, which then runs on every node, or register a
key: without Flower's enterprise edition nobody is asked for a name. So the SuperLink listens on its
own machine alone, and nodes come through this door, which knows the paths of nodes and no others.
"""

import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

# What a node asks for, by name; anything else is not there.
_FLEET = re.compile(r"/v1/fleet/[a-z]+(-[a-z]+)*")
# Headers that belong to one connection, and are not passed on.
_OWN = {
    *("connection", "host", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
    *("trailer", "transfer-encoding", "upgrade", "forwarded", "x-forwarded-for"),
}


def make_door(link: str, trust: ssl.SSLContext | bool) -> Starlette:
    """The door before a SuperLink.

    **Arguments:**

    - `link`: where the SuperLink is, such as `https://127.0.0.1:8000`.
    - `trust`: how to know it.
    """
    # As the environment has it, a proxy would be asked for an address of this machine.
    client = httpx.AsyncClient(base_url=link, verify=trust, timeout=None, trust_env=False)

    async def pass_on(request: Request) -> Response:
        path = request.scope["path"]
        if request.method != "POST" or _FLEET.fullmatch(path) is None:
            return PlainTextResponse("not for nodes\n", 404)
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _OWN]
        onward = client.build_request("POST", path, headers=headers, content=request.stream())
        try:
            reply = await client.send(onward, stream=True)
        except httpx.TransportError:
            # A node tries again then.
            return PlainTextResponse("the SuperLink does not answer\n", 503)
        back = {k: v for k, v in reply.headers.items() if k.lower() not in _OWN}
        return StreamingResponse(_until_closed(reply), status_code=reply.status_code, headers=back)

    @asynccontextmanager
    async def open_client(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    every = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", pass_on, methods=every)], lifespan=open_client)


async def _until_closed(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in reply.aiter_raw():
            yield part
    finally:
        await reply.aclose()


def serve(
    listen: str, link: str, *, certificate: str, key: str, authority: str | None = None
) -> None:
    """Keeps the door until it is ended.

    **Arguments:**

    - `listen`: host and port for nodes, such as `0.0.0.0:9443`.
    - `link`: host and port of the SuperLink, on this machine.
    - `certificate`, `key`: files of the certificate that nodes see.
    - `authority`: the file with what the SuperLink's own certificate is checked against; by
        default the system's authorities.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"listen must be a host and a port, such as 0.0.0.0:9443, got {listen!r}.")
    if link.rpartition(":")[0] not in ("127.0.0.1", "localhost", "[::1]"):
        raise ValueError(
            f"the SuperLink must be on this machine, such as 127.0.0.1:8000, got {link!r}: "
            "everybody who reaches it can run code on all nodes."
        )
    trust = ssl.create_default_context(cafile=authority)
    uvicorn.run(
        make_door(f"https://{link}", trust),
        host=host.strip("[]"),
        port=int(port),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        log_level="warning",
        server_header=False,
    )
