"""When a warm adjoint has to begin anew.

Over a convex lower level an old z only helps. Elsewhere it would grow without bound, and the
residual of the adjoint's equation with it. So an old z is given up where its residual is longer
than the right-hand side by a factor. With noise that is true of single samples at any z, and giving
up z on each of them would make its mean too short; so there means over steps are compared, and the
residual must also have grown.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

# An old z is of use where its residual is at most so many times as long as the right-hand side.
_STRAY = 2.0
# With noise: how much of the recent and of the usual sizes is kept in a step, and how many times
# larger the squares of late must be than those usual.
_RECENT, _USUAL, _GROWN = 0.9, 0.99, 4.0
# The same for a single sample, as after a step of x that changes the lower level completely.
_JUMP = 100.0
# No noise makes residuals so many times longer than the right-hand side; slow growth does.
_MOST = 1e3


class Straying(eqx.Module):
    """Means over steps of squared sizes, in a federation one of each for a client.

    - `recent`, `usual`: of the residual, over some ten and some hundred steps.
    - `right`: of the right-hand side, over some ten.
    """

    recent: Array
    usual: Array
    right: Array

    @staticmethod
    def first(like: Array) -> "Straying":
        """Before the first step."""
        none = jnp.zeros_like(like)
        return Straying(none, none, none)

    def after(self, left: Array, right: Array, *, noisy: bool) -> tuple[Array, "Straying"]:
        """Whether to begin anew, from the squared sizes of residual and right-hand side."""
        if not noisy:
            return left > _STRAY**2 * right, self

        def mean(old: Array, new: Array, kept: float) -> Array:
            return jnp.where(old > 0, kept * old + (1 - kept) * new, new).astype(old.dtype)

        recent = mean(self.recent, left, _RECENT)
        usual, whole = mean(self.usual, left, _USUAL), mean(self.right, right, _RECENT)
        grown = (recent > _STRAY**2 * whole) & (recent > _GROWN * usual)
        grown |= (left > _STRAY**2 * right) & (left > _JUMP * self.usual) & (self.usual > 0)
        # Written so that a NaN, a size that is still missing over a network, is not a reason.
        stray = grown | (recent > _MOST**2 * whole)

        def unless(value: Array) -> Array:
            return jnp.where(stray, 0.0, value)

        return stray, Straying(unless(recent), unless(usual), unless(whole))
