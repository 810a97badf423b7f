"""Sums over a window of outer steps, and what they estimate.

With h_k the projected hypergradient of outer step k, x_w the point where the window began and
t_k the sum of the step sizes since then, a_k = <x_k - x_w, h_k> is free of the noise in h_k, which
is fresh. While x descends a_k is near -t_k |grad F|^2. Where steps of a constant size have ended in
a ball of noise, a_k is positive, and by Cauchy and Schwarz its mean gives a lower bound of
|grad F|^2 there, whatever the optimiser.
"""

import dataclasses

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

# What the lower bound is multiplied by. Half of the distance to x_w belongs to x_w itself; another
# factor 2 is for curvatures of F that differ by 20 (measured with SGD and Adam).
_BALL = 4.0


class Sums(eqx.Module):
    """Sums over one window; those of hypergradients are in units of `Watch.unit`.

    - `steps`: hypergradients.
    - `square`: |h_k|^2.
    - `along`, `along_square`, `along_path`: a_k, its square, and a_k t_k.
    - `path`, `path_square`: t_k and its square.
    - `distance`: |x_k - x_w|^2.
    - `decrease`: the predicted decrease of F, alpha <h_{k-1}, h_k>.
    - `drift`, `moves`: over blocks of steps, the displacement of y times that of the window so far;
        and its square.
    - `left`, `right`, `pull`: of the adjoint's `Health`.
    """

    steps: Array
    square: Array
    along: Array
    along_square: Array
    along_path: Array
    path: Array
    path_square: Array
    distance: Array
    decrease: Array
    drift: Array
    moves: Array
    left: Array
    right: Array
    pull: Array

    @staticmethod
    def zero(x: Array, y: Array) -> "Sums":
        """Sums of nothing, in the shapes of numbers about x and about y."""
        of_x, of_y = dict.fromkeys(OF_X, x), dict.fromkeys(OF_Y, y)
        return Sums(**of_x, **of_y)

    def plus(self, **terms: Array) -> "Sums":
        """With terms added, by name."""
        return dataclasses.replace(self, **{k: getattr(self, k) + v for k, v in terms.items()})

    def descent(self, unit: Array) -> tuple[Array, Array]:
        """|grad F|^2 / unit^2 as far as x descends along it, and its standard error.

        From the a_k as multiples of t_k, and their errors, which are independent.
        """
        path = self.path * unit
        path = jnp.where(path > 0, path, 1.0)
        return -self.along / path, jnp.sqrt(self._scatter()) / path

    def _scatter(self) -> Array:
        """The variance of `along`."""
        slope = self.along / jnp.where(self.path > 0, self.path, 1.0)
        rest = self.along_square - 2 * slope * self.along_path + slope**2 * self.path_square
        return jnp.maximum(rest, 0.0)

    def ball(self) -> Array:
        """|grad F|^2 / unit^2 of a ball of noise in which x wanders; 0 while x descends."""
        spread = self.steps * self.distance
        excess = jnp.maximum(self.along**2 - self._scatter(), 0.0)
        found = jnp.where(self.along > 0, excess, 0.0) / jnp.where(spread > 0, spread, 1.0)
        return _BALL * found

    def estimate(self, unit: Array) -> tuple[Array, Array]:
        """|grad F|^2 / unit^2 where h has noise, and the standard error."""
        descent, error = self.descent(unit)
        return jnp.maximum(descent, 0.0) + self.ball(), error

    def drifted(self) -> Array:
        """The squared displacement of y that is not explained by noise."""
        return jnp.where(2 * self.drift > self.moves, 2 * self.drift, 0.0)


OF_Y = ("drift", "moves", "left", "right", "pull")
OF_X = tuple(field.name for field in dataclasses.fields(Sums) if field.name not in OF_Y)
