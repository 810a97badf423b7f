"""Federated methods published since FedNest: SimFBO, FedBiOAcc, FedMBO, and federated F2SA."""

import optax

from aipod.algorithms._alternating import Alternating
from aipod.problem import Scope
from aipod.slots.adjoint import JointSteps, PassedSeries, PenalisedSteps, RecursiveSteps
from aipod.slots.lower import ProjectedSGD, ToldLower
from aipod.slots.upper import EveryStep, ToldUpper, paced_unless
from aipod.stepsize import Curvature, StepSize


def SimFBO(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    local_steps: int = 5,
    upper_server_lr: StepSize | None = None,
    lower_server_lr: StepSize | None = None,
    adjoint_server_lr: StepSize | None = None,
    radius: float | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """SimFBO (Yang, Xiao and Ji, NeurIPS 2023): local steps of y, z and x at once, one round.

    On client i, tau times, all three from the same (x_i, y_i, z_i), each on samples of its own:

        y_i <- y_i - eta_y grad_y g_i(x_i, y_i)
        z_i <- z_i - eta_z (grad_yy g_i(x_i, y_i) z_i - grad_y f_i(x_i, y_i))
        x_i <- x_i - eta_x (grad_x f_i(x_i, y_i) - grad_xy g_i(x_i, y_i) z_i)

    and on the server, with q the average over clients of the sum of a variable's tau directions:

        y <- y - gamma_y q_y,   z <- P_r(z - gamma_z q_z),   x <- x - gamma_x q_x

    where P_r(z) = min(1, r / |z|) z. Nothing corrects the drift of unlike clients: where tau > 1,
    it stops near a solution, at a distance that shrinks with the local step sizes.

    Only the paper's abstract and summaries were at hand (arXiv 2305.19442: one loop, three
    variables at once, one round, aggregation on the server): the equations are its published
    algorithm as we know it, not checked against the text or the authors' code, with its weights of
    local steps all equal to 1. Then all clients make tau steps, and ShroFBO, which divides each
    client's sum by the number of its steps, is the same method up to a factor tau in the server's
    steps. Takes federations with a server, and problems without constraints.

    **Arguments:**

    - `upper_lr` [eta_x], `lower_lr` [eta_y], `adjoint_lr` [eta_z]: sizes of the local steps.
        Without `upper_lr` x is fixed in them.
    - `local_steps` [tau]: local steps between two rounds.
    - `upper_server_lr` [gamma_x], `lower_server_lr` [gamma_y], `adjoint_server_lr` [gamma_z]: sizes
        of the server's steps; by default those of the local steps, which averages the variables.
    - `radius` [r]: the largest norm of z; by default there is none.
    - `upper_optimizer`: an Optax optimiser of q_x / tau in place of `upper_server_lr`; where there
        is no size for x at all, `aipod.paced_adam()`. Not in the original.

    !!! example
        ```python
        solver = aipod.SimFBO(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05, local_steps=5)
        ```
    """
    given = upper_server_lr if upper_lr is None else upper_lr
    return Alternating(
        lower=ToldLower(lower_lr, lower_server_lr),
        adjoint=JointSteps(local_steps, adjoint_lr, lower_lr, upper_lr, adjoint_server_lr, radius),
        upper=ToldUpper(
            upper_lr, local_steps, upper_server_lr, paced_unless(given, upper_optimizer)
        ),
        scope=Scope("SimFBO", averages=True),
    )


def FedBiOAcc(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    local_steps: int = 5,
    momentum: StepSize = 0.1,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """FedBiOAcc (Li, Huang and Huang, NeurIPS 2023): local steps along recursive momenta.

    On client i, I times, with the directions of `SimFBO` for y, z and x, at the point where the
    client is and at its last one, on the same samples:

        v_i <- d_i(point_i) + (1 - a) (v_i - d_i(last point_i)),   point_i <- point_i - eta v_i

    and then points and momenta are averaged, in one round. At first v_i = d_i. Its rule: all steps
    O(K^(-1/3)), a = O(K^(-2/3)); both may be schedules.

    Only the paper's abstract and summaries were at hand (arXiv 2302.06701: one loop for y, x and
    the adjoint's quadratic problem, STORM's momentum for all three, averages after several local
    steps): the equations are its published algorithm as we know it, not checked against the text or
    the authors' code.
    As we know it, a momentum is used in the step after the one in which it was found; here it is
    used at once, so that points and momenta travel together; for I > 1 the first step after a round
    is then along the clients' own momenta. Takes federations with a server, and problems without
    constraints.

    **Arguments:** `upper_lr`, `lower_lr`, `adjoint_lr`, `upper_optimizer` as in `SimFBO`, and

    - `local_steps` [I]: local steps between two rounds.
    - `momentum` [a]: the weight of the newest derivative, a number or an Optax schedule.

    !!! example
        ```python
        solver = aipod.FedBiOAcc(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05)
        ```
    """
    return Alternating(
        lower=ToldLower(lower_lr),
        adjoint=RecursiveSteps(local_steps, adjoint_lr, lower_lr, upper_lr, momentum),
        upper=ToldUpper(upper_lr, local_steps, None, paced_unless(upper_lr, upper_optimizer)),
        scope=Scope("FedBiOAcc", averages=True),
    )


def FedMBO(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    lower_steps: int = 5,
    adjoint_steps: int = 5,
    adjoint_lr: StepSize = Curvature(0.5),
    adjoint_random: bool = False,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """FedMBO (Huang, Zhang and Ji, ICML 2023): every Hessian of a series is another client's.

        y <- average of y - beta grad_y g_i(x, y)   T times
        v_0 = grad_y f_i(x, y),   v_n = (I - eta grad_yy g_i(x, y)) v_{n-1},   n < N
        z_i = eta sum_n v_n,   x <- x - alpha average of grad_x f_i(x, y) - grad_xy g_i(x, y) z_i

    The second line runs as often at once as there are clients, and i is a newly drawn client in
    every factor and once more in the last line: no client is in two series at a time. So the mean
    of z_i is that of the series with the average Hessian, without an average of vectors in between.
    In the outer step there are T + N + 1 rounds.

    Checked against the published text (PMLR 202, Algorithms 1 and 2). Its series have random
    numbers of factors, each its own, with eta = 1 / l_g1: that is `adjoint_random=True`. The sum,
    our default, has the same mean and takes a second vector along. The paper's grad_x f is that of
    the client where a series began, on a sample of its own; here it is that of the last one, on the
    sample of grad_y f, with the same mean. With partial participation all series run, and x is
    moved by those that end at a client of the last round: these visit clients as the series of so
    many sampled clients do, and bytes are counted for these alone. (With `chosen="step"` a series
    stays within one cohort, and the mean is that of the cohort's Hessian only for large cohorts.)
    Takes federations with a server on one device whose clients have the same weight, and problems
    without constraints.

    **Arguments:**

    - `upper_lr` [alpha], `lower_lr` [beta], `adjoint_lr` [eta]: step sizes. The last must be at
        most 1 / l_g1 for the Hessian of every client.
    - `lower_steps` [T]: steps on y, each of them a round.
    - `adjoint_steps` [N]: terms of the series.
    - `adjoint_random`: z_i = eta N v_{N'} with N' uniform in {0, ..., N - 1}, for each series.
    - `upper_optimizer`: an Optax optimiser in place of `upper_lr`. Not in the original.

    !!! example
        ```python
        solver = aipod.FedMBO(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05)
        ```
    """
    return Alternating(
        lower=ProjectedSGD(lr=lower_lr, steps=lower_steps),
        adjoint=PassedSeries(adjoint_steps, adjoint_lr, adjoint_random),
        upper=EveryStep(lr=upper_lr, optimizer=paced_unless(upper_lr, upper_optimizer)),
        scope=Scope("FedMBO", averages=True),
    )


def FedF2SA(
    *,
    upper_lr: StepSize | None = None,
    lower_lr: StepSize = Curvature(),
    adjoint_lr: StepSize = Curvature(),
    local_steps: int = 5,
    perturbation: StepSize = 0.05,
    upper_server_lr: StepSize | None = None,
    lower_server_lr: StepSize | None = None,
    adjoint_server_lr: StepSize | None = None,
    upper_optimizer: optax.GradientTransformation | None = None,
) -> Alternating:
    """F2SA (Kwon, Kwon, Wright and Nowak, ICML 2023) in a federation: first derivatives alone.

    On client i, tau times, all three from the same (x_i, y_i, u_i), with lambda = 1 / delta:

        y_i <- y_i - eta_y grad_y g_i(x_i, y_i)
        u_i <- u_i - eta_u (grad_y g_i(x_i, u_i) + delta grad_y f_i(x_i, u_i))
        x_i <- x_i - eta_x (grad_x f_i(x_i, u_i)
                            + lambda (grad_x g_i(x_i, u_i) - grad_x g_i(x_i, y_i)))

    and on the server, with q as in `SimFBO`, all in one round:

        y <- y - gamma_y q_y,   u <- u - gamma_u q_u,   x <- x - gamma_x q_x

    The paper (PMLR 202, Algorithm 1) writes z for y and y for u, has no clients, and makes several
    steps on both and then one on x at the new ones, each on samples of its own. Its step on u is
    alpha_k = eta_u / lambda_k and its step on x a multiple of alpha_k; its delta_k is the growth of
    lambda, not our delta. `perturbation` may be a schedule, with which eta_x must fall too. Ours
    are its directions in SimFBO's rounds, all from one point. They were checked against its text
    and against the solver of benchopt's benchmark_bilevel, which others wrote: both take f at u, as
    here. By its abstract MemFBO (Yang, Xiao, Ma and Ji, AAAI 2025) has this shape too, a single
    loop of first-order local steps; its equations were not at hand, and this is not MemFBO. Here y
    and u share their batches of g, so that noise cancels. A `Curvature` as a step size measures by
    products with the Hessian; numbers do without. The fixed points are off by O(delta); where
    tau > 1 and clients differ, by their drift too. Takes federations with a server, and problems
    without constraints.

    **Arguments:** those of `SimFBO` but for `radius`, with u in place of z, and

    - `perturbation` [delta = 1 / lambda]: a number or an Optax schedule.

    !!! example
        ```python
        solver = aipod.FedF2SA(upper_lr=0.01, lower_lr=0.05, adjoint_lr=0.05, perturbation=0.02)
        ```
    """
    given = upper_server_lr if upper_lr is None else upper_lr
    optimizer = paced_unless(given, upper_optimizer)
    return Alternating(
        lower=ToldLower(lower_lr, lower_server_lr),
        adjoint=PenalisedSteps(
            local_steps, adjoint_lr, lower_lr, upper_lr, adjoint_server_lr, perturbation
        ),
        upper=ToldUpper(upper_lr, local_steps, upper_server_lr, optimizer, perturbation),
        scope=Scope("FedF2SA", averages=True),
    )
