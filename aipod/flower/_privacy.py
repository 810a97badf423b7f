"""Privacy of what a client sends: clipping and Gaussian noise, before anything leaves it."""

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from aipod._misc.extras import install
from aipod.algorithms import Alternating, State
from aipod.flower._mailbox import Tables
from aipod.flower._secret import secret_of
from aipod.stepsize import Rates, adapts

# One exchange of E3-AiPOD holds three vectors: the gradient, y and u.
_VECTORS = 3


@dataclasses.dataclass(frozen=True)
class Privacy:
    """What a client does to each of the three vectors of an exchange before they leave it.

    How far the vector lies from what all clients already know (the y or u at which the step began;
    for the gradient zero) is cut to the length `clip`; then Gaussian noise of standard deviation
    `noise * clip` is added to every entry. Whatever a client's data are, one exchange then differs
    by at most 2 sqrt(3) clip from what it would be with any other data: `epsilon` counts that.

    For `E3AiPOD` with fixed step sizes and a given damping: the numbers that find them would tell
    of the data too.

    **Arguments:**

    - `clip`: the longest change, in the norm of all entries.
    - `noise`: the standard deviation of the noise, in units of `clip`.

    !!! example
        ```python
        privacy = aipod.flower.Privacy(clip=0.1, noise=1.0)
        privacy.epsilon(releases=100, delta=1e-5)
        ```
    """

    clip: float
    noise: float

    def __post_init__(self) -> None:
        for name in ("clip", "noise"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"Privacy: {name} must be positive, got {getattr(self, name)}.")

    def epsilon(self, releases: int, delta: float = 1e-5) -> float:
        """What `releases` exchanges add up to: (epsilon, delta)-differential privacy of a client.

        Its whole data count as one record, against a server that sees every message.
        """
        if releases < 1 or not 0 < delta < 1:
            raise ValueError(
                f"releases must be at least 1 and delta in (0, 1), got {releases} and {delta}."
            )
        try:
            from dp_accounting import dp_event, rdp
        except ImportError as error:
            raise ImportError(
                f"Privacy.epsilon needs dp-accounting; to add it: {install('flower')}"
            ) from error

        # In units of the farthest that two messages can lie apart.
        multiplier = self.noise / (2 * math.sqrt(_VECTORS))
        accountant = rdp.RdpAccountant()
        accountant.compose(dp_event.GaussianDpEvent(multiplier), releases)
        return float(accountant.get_epsilon(delta))

    def check(self, solver: Alternating) -> None:
        """Raises `ValueError` unless everything that the solver's clients send is covered."""
        lower, adjoint = solver.lower, solver.adjoint
        if solver.upper.needs_moves:
            raise ValueError(
                "privacy needs upper_lr, or an upper_optimizer such as aipod.fading_adam(): the "
                "numbers that find the pace of x would be sent without noise."
            )
        if not (lower.deferred and adjoint.deferred and solver.upper.sends_direction):
            raise ValueError("privacy is for aipod.E3AiPOD alone: choose it, or leave privacy out.")
        finds = adapts(lower.lr) or adapts(adjoint.lr)
        if finds or getattr(adjoint, "damping", None) is None:
            raise ValueError(
                "privacy needs numbers for lower_lr, adjoint_lr and damping: those that are found "
                "from the data would be sent without noise."
            )


class Guard:
    """Privacy with a client's own secret, from which its noise comes."""

    def __init__(self, privacy: Privacy, solver: Alternating, folder: Path) -> None:
        privacy.check(solver)
        self._privacy, self._solver = privacy, solver
        self._secret = secret_of(folder / "secret")

    def protected(self, state: State, asked: Tables) -> Tables:
        """The questions of one outer step as they may leave; the same whenever asked again."""
        tables = dict(asked)
        for name, knowns in _known(state).items():
            values = np.array(asked[name].values)
            for row, known in enumerate(knowns):
                values[row] = self._sent(f"{int(state.step)} {name} {row}", values[row], known)
            tables[name] = eqx.tree_at(lambda table: table.values, asked[name], values)
        return tables

    def _sent(self, what: str, value: np.ndarray, known: np.ndarray) -> np.ndarray:
        change = value.astype(float) - known
        length = np.linalg.norm(change)
        shorter = min(1.0, self._privacy.clip / length) if length > 0 else 1.0
        seed = hashlib.sha256(self._secret + what.encode()).digest()
        rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
        noise = rng.normal(scale=self._privacy.noise * self._privacy.clip, size=change.shape)
        return (known + shorter * change + noise).astype(value.dtype)

    def settled(self, old: State, new: State, asked: Tables) -> State:
        """The state after a step, with corrections as if what was sent had been meant.

        Only then do the corrections of all clients add up to zero.
        """
        sent = self.protected(old, asked)["y"].values
        rates = Rates(old.step, None)
        changes = np.asarray(sent) - np.asarray(asked["y"].values)
        restore = ravel_pytree(new.y)[1]
        slots: Any = (self._solver.lower, self._solver.adjoint)
        lower, adjoint = (
            slot.resent(state, restore(jnp.asarray(change)), rates)
            for slot, state, change in zip(slots, (new.lower, new.adjoint), changes, strict=False)
        )
        return dataclasses.replace(new, lower=lower, adjoint=adjoint)


def _known(state: State) -> dict[str, list[np.ndarray]]:
    """What all clients know of each vector of E3-AiPOD's round before it is sent."""

    def flat(tree: PyTree) -> np.ndarray:
        return np.asarray(ravel_pytree(tree)[0], float)

    gradient = jax.tree.map(jnp.zeros_like, state.x)
    return {"x": [flat(gradient)], "y": [flat(state.y), flat(state.adjoint.u)]}
