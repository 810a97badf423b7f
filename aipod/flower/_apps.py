"""The two apps of a Flower federation: that of its clients and that of its server."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from aipod._misc.files import private_folder
from aipod.algorithms import Alternating
from aipod.flower._averages import average_of
from aipod.flower._client import Session
from aipod.flower._gate import failure
from aipod.flower._local import Client
from aipod.flower._post import EXCHANGE, HELLO, GridPost, received, reply_to
from aipod.flower._privacy import Privacy, with_floor
from aipod.flower._progress import Terms
from aipod.flower._server import Places, Start, lead
from aipod.flower._sums import Wish
from aipod.solving import Solution

Solver = Alternating | Callable[[Context], Alternating]

_log = logging.getLogger("flwr")
# How many runs a process that stays keeps in memory; all of them are on disk.
_SESSIONS = 8


def make_client_app(
    load_client: Callable[[Context], Client],
    solver: Solver,
    *,
    privacy: Callable[[Context], Privacy | None] = lambda context: None,
    cache: bool = True,
) -> ClientApp:
    """The ClientApp of a federation; it computes what the simulation computes for this client.

    Node configuration: `state-dir`, a folder for what must survive a restart of the node; by
    default `$AIPOD_STATE`, or else `.aipod/flower` in the home folder.

    **Arguments:**

    - `load_client`: context -> `Client`, the losses and the data of this node.
    - `solver`: a solver, or context -> solver; the same as the server's.
    - `privacy`: context -> `Privacy`, or None to send everything as it is. The node configuration
        can make it stricter, and nothing can make it laxer than that: `privacy-noise`,
        `privacy-clip`, `privacy-epsilon`, `privacy-delta`.
    - `cache`: keep compiled programs on disk, since Flower starts a process for every message.

    !!! example
        ```python
        app = aipod.flower.make_client_app(load_client, aipod.E3AiPOD())
        ```
    """
    app = ClientApp()
    sessions: dict[tuple[int, int], Session] = {}

    def reply(message: Message, context: Context) -> Message:
        place = (context.run_id, context.node_id)
        try:
            if place not in sessions:
                while len(sessions) >= _SESSIONS:
                    sessions.pop(next(iter(sessions)))
                folder = _state_folder(context)
                if cache:
                    _keep_programs(folder / "programs")
                wanted = with_floor(privacy(context), context.node_config)
                sessions[place] = Session(
                    load_client(context),
                    _made(solver, context),
                    folder,
                    wanted,
                    Wish.of(context.node_config),
                )
            answer = sessions[place].handle(received(message))
        except Exception as error:
            # The text of an exception may hold data. It stays here; Flower would send it.
            _log.error("aipod: %s", error, exc_info=True)
            known = sessions.get(place)
            floor = any(str(name).startswith("privacy") for name in context.node_config)
            answer = failure(error, floor or (known is not None and known.gate.private))
        return reply_to(message, answer)

    app.train(EXCHANGE)(reply)
    app.query(HELLO)(reply)
    return app


def make_server_app(
    solver: Solver,
    load_start: Callable[[Context], Start],
    *,
    on_finish: Callable[[Solution], object] = lambda solution: None,
) -> ServerApp:
    """The ServerApp of a federation. It leads the run, and never sees data.

    Run configuration: `outer-steps`, `every`, `seed`, `min-nodes` (0 for all), `round-timeout` and
    `wait` (seconds), `clients`, `weights` and `nodes` (numbers with commas between),
    `weight-ratio`, `average`, `cut`, `secure`, `run-dir`, `checkpoint-dir`, `resume-from`; see
    docs/flower.md.

    **Arguments:**

    - `solver`: a solver, or context -> solver.
    - `load_start`: context -> `Start`, the starting point and what to measure.
    - `on_finish`: called on the `Solution` when the run has ended, however that was, and everything
        is saved. Its x and y have a client axis of length 1.

    !!! example
        ```python
        app = aipod.flower.make_server_app(aipod.E3AiPOD(), lambda context: Start(x0, y0))
        ```
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        terms, places = settings(context.run_config, context.run_id)
        post = GridPost(grid)
        solution = lead(
            post,
            _made(solver, context),
            load_start(context),
            terms,
            places,
            traffic=lambda: (post.up, post.down, post.aside),
            log=lambda line: _log.info("aipod: %s", line),
        )
        on_finish(solution)
        if solution.result.name != "completed":
            raise RuntimeError(solution.message)

    return app


def settings(config: Any, run: int) -> tuple[Terms, Places]:
    """The run that a run configuration describes; `ValueError` when it makes no sense."""
    if "outer-steps" not in config:
        raise ValueError("the run configuration lacks outer-steps, how many outer steps to make.")
    defaults = Terms(1)

    def number(name: str, default: Any, kind: type) -> Any:
        value = config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
            whole = "a whole number" if kind is int else "a number"
            raise ValueError(f"run configuration: {name} must be {whole}, got {value!r}.")
        return kind(value)

    terms = Terms(
        steps=number("outer-steps", None, int),
        every=number("every", 1, int),
        seed=number("seed", 0, int),
        min_nodes=number("min-nodes", 0, int) or None,
        round_timeout=number("round-timeout", defaults.round_timeout, float),
        wait=number("wait", defaults.wait, float),
        clients=number("clients", 0, int) or None,
        weights=_numbers(config, "weights", float),
        weight_ratio=number("weight-ratio", defaults.weight_ratio, float),
        nodes=_numbers(config, "nodes", int),
        average=average_of(str(config.get("average", ""))),
        cut=number("cut", defaults.cut, float),
        secure=_flag(config, "secure"),
    )
    paths = [str(config.get(name, "")) for name in ("run-dir", "checkpoint-dir", "resume-from")]
    return terms, Places.of(*(path.replace("{run-id}", str(run)) for path in paths))


def _flag(config: Any, name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"run configuration: {name} must be true or false, got {value!r}.")
    return value


def _numbers(config: Any, name: str, kind: type) -> tuple[Any, ...] | None:
    text = str(config.get(name, ""))
    try:
        return tuple(map(kind, text.split(","))) if text.strip() else None
    except ValueError:
        raise ValueError(
            f"run configuration: {name} must be numbers with commas between, got {text!r}."
        ) from None


def _made(solver: Solver, context: Context) -> Alternating:
    made = solver if isinstance(solver, Alternating) else solver(context)
    if not isinstance(made, Alternating):
        raise ValueError(f"solver must be one such as aipod.E3AiPOD(), got {type(made).__name__}.")
    return made


def _state_folder(context: Context) -> Path:
    given = context.node_config.get("state-dir") or os.environ.get("AIPOD_STATE")
    return Path(str(given)) if given else Path.home() / ".aipod" / "flower"


def _keep_programs(folder: Path) -> None:
    # A cache that was chosen elsewhere, as by JAX_COMPILATION_CACHE_DIR, is kept.
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(private_folder(folder)))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
