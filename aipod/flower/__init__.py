"""The same algorithms across real machines, on Flower (the extra `flower`).

A client runs the solver's own step on its own data, and asks the server for every average over
clients. `docs/flower.md` says how to operate a federation.
"""

from aipod._misc.extras import install as _install
from aipod._misc.signatures import make_readable as _make_readable
from aipod.flower._local import Client as Client
from aipod.flower._local import client_of as client_of
from aipod.flower._model import Model as Model
from aipod.flower._model import load as load
from aipod.flower._privacy import Privacy as Privacy
from aipod.flower._server import Start as Start

try:
    from aipod.flower._apps import make_client_app as make_client_app
    from aipod.flower._apps import make_server_app as make_server_app
except ImportError as error:
    raise ImportError(
        f"aipod.flower needs the flower extra ({error}); to add it: {_install('flower')}"
    ) from error

_make_readable([value for name, value in globals().items() if not name.startswith("_")], {})
