"""`AbstractSet`, the base of all sets: geometry, clients, and the answers that are sets again."""

import optax
from jaxtyping import Array, ArrayLike, PRNGKeyArray, PyTree

from aipod._misc.tree import axpy, scaled
from aipod.sets._clients import AbstractClients
from aipod.sets._geometry import AbstractGeometry
from aipod.sets._rows import AbstractRows


class AbstractSet(AbstractGeometry, AbstractClients):
    """A set of pytrees that x or y must lie in; the base class for a set of one's own.

    A subclass is an `equinox.Module`. It **must** answer four methods, on pytrees and under jit,
    vmap and grad. With P the orthogonal projection on the directions of the set:

    - `project(y, x=None)`: the nearest point of the set, P y + anchor(x).
    - `tangent(v)`: P v. Linear in v, and the same for every x.
    - `anchor(x=None, *, like=None)`: one point of the set at x, with no part along the set. It has
        the structure of `like`; without `like` any shape that broadcasts to a point will do.
    - `residual(y, x=None)`: zero exactly where y is in the set.

    Points keep their structure, shapes and data types. Bad arguments raise `ValueError` when the
    set is made.

    It **may** answer more. The defaults suit a set that does not move with x, whose projection is
    orthogonal in the usual inner product, and that has no clients.

    - A set that moves with x: `coupled` returns True. `follow` and `at` then work as they are;
        override `at(x)` where fixing x saves work, and `emptiness(x, like)` where the set has no
        point for some x.
    - A projection that is orthogonal in another inner product: `cotangent`, `riesz`.
    - What `aipod.check` and the solvers report: `constrained`, `constraints(point)`, `example()`,
        `check(y, x, name=...)`.
    - A convex set that is not affine: see `affine`, `face`, `land`, `sides` and `holding`.
    - `directions()`, where the linear subspace parallel to the set has a class of its own.
    - A set of clients: `federated`, `per_client`, `everyone`, `largest`, `summed`, `for_round`,
        `project_corrected`, `keep_absent` and `message_size`.

    !!! example
        ```python
        class Palindromes(aipod.sets.AbstractSet):
            def project(self, y, x=None):
                return (y + y[::-1]) / 2

            def tangent(self, v):
                return (v + v[::-1]) / 2

            def anchor(self, x=None, *, like=None):
                return jnp.zeros(()) if like is None else jnp.zeros_like(like)

            def residual(self, y, x=None):
                return y - y[::-1]


        Palindromes().project(jnp.array([1.0, 2.0, 5.0]))  # [3., 2., 3.]
        ```
    """

    def face(
        self,
        y: PyTree,
        correction: PyTree,
        x: PyTree = None,
        *,
        step: ArrayLike = 1.0,
        previous: PyTree = None,
    ) -> "AbstractSet":
        """The active face at the point y of the set: an affine set. For affine sets the set itself.

        A bound is active where projecting y - step * correction lands on it: y is at the bound, and
        the bound's multiplier has the right sign. For a minimiser y, with its gradient as the
        correction, this holds with any step.

        **Arguments:**

        - `correction`: the gradient at y, or what ProxSkip's correction has learned of it.
        - `step`: how far to go against the correction; a step size of gradient descent suits. It
            weighs noise in the correction against noise in y.
        - `previous`: `active` of the face before. A bound then changes its state only where the
            test is passed, or failed, by a factor of 2: noise does not switch it to and fro.
        """
        return self

    def land(self, y: PyTree, x: PyTree = None) -> tuple[PyTree, PyTree]:
        """The projection of y, and the multipliers of the bounds that it met on the way.

        Multipliers are positive at lower bounds, negative at upper ones and 0 elsewhere. For a
        step along a gradient they have that step as a factor. Where clients agree, they are those
        of the point of one client, as `single` gives it.
        """
        return self.project(y, x), optax.tree.zeros_like(y)

    def sides(
        self, y: PyTree, multipliers: PyTree, x: PyTree = None, *, previous: PyTree = None
    ) -> PyTree:
        """Which bounds are active by their multipliers, as `active` of a face has it.

        A bound is active where its multiplier, times a step, is at least the distance of y from it.
        `previous` is as in `face`. Where clients agree, y is the point of one client. None for a
        set that is its own face.
        """
        return None

    def holding(self, active: PyTree) -> "AbstractSet":
        """The face on which these bounds hold with equality; `active` as of a face."""
        return self

    @property
    def active(self) -> PyTree:
        """Of a face, in the structure of a point: -1 at a lower bound, 1 at an upper one, else 0.

        None for a set that is its own face.
        """
        return None

    def pin(self, y: PyTree, x: PyTree = None) -> PyTree:
        """Of a face: y with its active entries at their bounds, the others as they are."""
        return y

    def loose(self, v: PyTree) -> PyTree:
        """Of a face: the direction v with 0 in the active entries."""
        return v

    @property
    def agreement(self) -> "AbstractSet | None":
        """Where clients agree on a point of another set, `of_one`: that they agree; else None."""
        return None

    @property
    def of_one(self) -> "AbstractSet":
        """The set of one client's point."""
        return self

    def single(self, y: PyTree) -> PyTree:
        """The point of one client, where clients agree on a point of another set."""
        return y

    def for_all(self, point: PyTree, like: PyTree) -> PyTree:
        """The point of one client for all of them, in the shape of `like`."""
        return point

    def alone(self, y: PyTree) -> PyTree:
        """The projection of a point that all clients have alike, for which nothing is sent."""
        return self.project(y)

    def averaged(self, v: PyTree) -> PyTree:
        """The mean of directions, where clients agree on a point of another set."""
        return v

    def multiply(self, x: PyTree, exponents: PyTree) -> PyTree:
        """x exp(-exponents), scaled to lie in the set; for a `Simplex` and products of it."""
        raise ValueError(
            f"a {type(self).__name__} has no exponentiated gradient step, which is for a Simplex "
            "and for a Product of it and Free: use aipod.EveryStep."
        )

    def at(self, x: PyTree) -> "AbstractSet":
        """The set with x fixed; its methods then need no x. Loops over y start with this."""
        # Here, because the class is itself an AbstractSet.
        from aipod.sets._wrapped import Fixed

        return Fixed(self, x) if self.coupled else self

    def equalities(self) -> AbstractRows | None:
        """The set as equalities, beside which bounds can stand; None where it is not given so."""
        return None

    def directions(self) -> "AbstractSet":
        """The directions along which the set extends, as a set: its projection is `tangent`."""
        from aipod.sets._wrapped import Directions

        return Directions(self)

    def for_round(self, key: PRNGKeyArray) -> "AbstractSet":
        """The set as one projection sees it; with partial participation, some of the clients."""
        return self

    def once(self, clients: int) -> "AbstractSet | None":
        """This agreement of so many clients for points that are kept once; None where it is none.

        The client axis of such a point has length 1.
        """
        return None

    def cohort(
        self, chosen: Array, clients: int, members: int, axis: str | None = None
    ) -> "AbstractSet":
        """This agreement of so many clients, for the first `members` of the chosen ones alone.

        The others fill up the devices of a mesh, along whose `axis` the clients are spread.
        """
        return self

    def start(self, x0: PyTree) -> PyTree:
        """The point from which a run starts: the projection; without a server x0 itself."""
        return self.project(x0)

    def inside(self) -> "AbstractSet":
        """The set as a solver sees it; without a server it has no average over all clients."""
        return self

    def settle(self, ahead: PyTree, correction: PyTree, scale: Array) -> tuple[PyTree, PyTree]:
        """v and r after a round for v_hat (`ahead`), with r in units of v over `scale`.

        Sets whose clients are `apart` exchange v_hat with their neighbours.
        """
        new = self.project_corrected(ahead, scaled(scale, correction))
        corrected = axpy(correction, 1 / scale, optax.tree.sub(new, ahead))
        return new, self.keep_absent(corrected, correction)

    def track(self, values: PyTree, correction: PyTree) -> tuple[PyTree, PyTree]:
        """What clients know of the mean of values after a round, and the next correction.

        A server tells the mean. Sets whose clients are `apart` track it.
        """
        return self.tangent(values), correction

    def project_corrected(self, y: PyTree, correction: PyTree) -> PyTree:
        """project(y - correction), for a correction that has no part along the set."""
        return self.project(axpy(y, -1, correction))
