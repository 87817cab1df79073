"""The search for the mode, and what is summed over the rows there."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.flatten_util import ravel_pytree

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.problem import Call, LaplaceProblem, Values
from numpyro_bnn.guides.laplace.structures import LaplaceGaussian
from numpyro_bnn.program.compiled import prepare
from numpyro_bnn.program.plates import draw_indices

LEARNING_RATE = 3e-3
EPOCHS_PER_PROGRAM = 50  # epochs of one step each that are made at once
# share of a derivative that comes from others, above which they are not independent
MAX_MIXED_SHARE = 1e-3
# most products with the whole precision to find the distance from the mode
MAX_CG_STEPS = 20
MIN_GAIN_NATS = 1e-6  # nats that a step of Newton must promise
# distance from the mode, as in the result of a run, at which the steps end
NEWTON_DISTANCE_SDS = 0.01
# length of the second part of such a step, twice, against the first
MAX_BEND_RATIO = 0.75


class SearchOptions(NamedTuple):
    """Options of the search for the mode."""

    num_epochs: int
    optimizer: Any
    patience: int
    progress_bar: bool


class Mode(NamedTuple):
    """A point v, the factors on the prior precisions, and all that the evidence depends
    on there: sums over rows, curvature of the prior, and log densities.
    """

    v: Values
    precision: Mapping[str, Any]
    sums: Any
    curvature: Values  # of sites without Normal prior, (P_s,)
    coupling: jax.Array | None
    log_likelihood: jax.Array


Search = Callable[[Values, tuple, jax.Array], tuple[Values, list[float]]]


def fit_mode(problem: LaplaceProblem, call: Call, options: SearchOptions) -> Search:
    """A function from a start, what is tuned, and a key, to the mode and the losses;
    compiled once.
    """
    import optax

    plate, optimizer = problem.plate, options.optimizer
    if plate is None and optimizer is None:
        program = prepare(partial(_descend, problem, options), *call)
        return partial(_lbfgs, program, options)
    steps = EPOCHS_PER_PROGRAM if plate is None else -(-plate.size // plate.batch_size)
    if optimizer is None:
        total = max(1, options.num_epochs * steps)
        optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, total))

    def epoch(start: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        v, state, (precision, spread), key = start

        def step(carry: tuple, key: jax.Array) -> tuple:
            v, state = carry
            index = None
            if plate is not None:
                index = draw_indices(plate.size, plate.batch_size, key)
            loss, grads = jax.value_and_grad(problem.potential)(
                v, precision, spread, index, (args, kwargs)
            )
            updates, state = optimizer.update(grads, state, v)
            return (optax.apply_updates(v, updates), state), loss

        losses: jax.Array
        end, losses = jax.lax.scan(step, (v, state), jax.random.split(key, steps))
        return *end, losses[-1] if plate is None else jnp.mean(losses)

    size = EPOCHS_PER_PROGRAM if plate is None else 1
    return partial(_epochs, prepare(epoch, *call), optimizer, options, size)


def _epochs(
    program: Callable,
    optimizer: Any,
    options: SearchOptions,
    size: int,
    v: Values,
    tuning: tuple,
    key: Any,
) -> tuple[Values, list[float]]:
    losses: list[float] = []
    state, best, since = optimizer.init(v), np.inf, 0
    with tqdm.tqdm(total=options.num_epochs, disable=not options.progress_bar) as bar:
        while (
            len(losses) * size < options.num_epochs and since * size < options.patience
        ):
            key, epoch_key = split(key)
            v, state, loss = program((v, state, tuning, epoch_key))
            losses.append(finite(float(loss)))
            since += 1
            if losses[-1] < best:
                best, since = losses[-1], 0
            bar.set_postfix_str(f"loss {loss:.5g}", refresh=False)
            bar.update(size)
    return v, losses


def _descend(
    problem: LaplaceProblem,
    options: SearchOptions,
    start: tuple,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> tuple:
    """L-BFGS on all rows, until the loss no longer falls."""
    import optax

    v, (precision, spread) = start
    solver = optax.lbfgs()

    def loss(v: Values) -> jax.Array:
        return problem.potential(v, precision, spread, None, (args, kwargs))

    value_and_grad = optax.value_and_grad_from_state(loss)

    def go_on(carry: tuple) -> jax.Array:
        *_, since, epochs = carry
        return (since < options.patience) & (epochs < options.num_epochs)

    def step(carry: tuple) -> tuple:
        v, state, losses, best, best_v, since, epochs = carry
        value, grad = value_and_grad(v, state=state)
        updates, state = solver.update(
            grad, state, v, value=value, grad=grad, value_fn=loss
        )
        lower = value < best
        # A step that overflows ends the search at the lowest point so far.
        since = jnp.where(jnp.isfinite(value), since + 1, options.patience)
        return (
            optax.apply_updates(v, updates),
            state,
            losses.at[epochs].set(value),
            jnp.where(lower, value, best),
            jax.tree.map(
                lambda new, previous: jnp.where(lower, new, previous), v, best_v
            ),
            jnp.where(lower, 0, since),
            epochs + 1,
        )

    losses = jnp.zeros(max(1, options.num_epochs))
    zero = jnp.asarray(0)
    first_carry = (v, solver.init(v), losses, jnp.asarray(jnp.inf), v, zero, zero)
    _, _, losses, _, best_v, _, epochs = jax.lax.while_loop(go_on, step, first_carry)
    return best_v, losses, epochs


def _lbfgs(
    program: Callable, options: SearchOptions, v: Values, tuning: tuple, key: Any
) -> tuple:
    if not options.num_epochs:
        return v, []
    v, losses, epochs = program((v, tuning))
    losses = np.asarray(losses)[: int(epochs)]
    finite(float(losses[0]))
    return v, losses[np.isfinite(losses)].tolist()


def finite(loss: float) -> float:
    if not np.isfinite(loss):
        instead = (
            "Look for NaN in the data; start from likely values (`init_params=`), or "
            "pass a smaller step size."
        )
        raise argument_error(
            f"{CALL}.run", "args", f"data and parameters with loss {loss}", instead
        )
    return loss


def newton(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    mode: Mode,
    spread: Mapping[str, jax.Array],
    num_steps: int,
    progress_bar: bool = False,
) -> tuple[Mode, list[float]]:
    """To the mode by the steps of Levenberg and Marquardt, bent along with the outputs;
    the precision is dense.

    The narrow valleys of networks are curved. Along a step s the outputs have a second
    derivative f'', and -1/2 H^-1 J^T F f'' is added to the step; one that would bend
    too much is tried again with more damping (Transtrum & Sethna 2012).
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    value_of, slope_of, bend_of = _programs(problem, call)
    losses: list[float] = []
    # the last mode, if the precision is positive there
    positive_mode: Mode | None = None
    damping = 1e-3
    for _ in (bar := tqdm.tqdm(range(num_steps), disable=not progress_bar)):
        v, tuning = mode.v, (mode.precision, spread)
        value, gradient = map(_float64, slope_of((v, tuning)))
        matrix = _float64(_dense(problem, mode))
        distance = _distance(guide, problem, mode, gradient)
        if losses and distance < NEWTON_DISTANCE_SDS:
            break
        if positive_mode and not np.isfinite(distance):
            # the fit became so close that no digits are left
            mode = positive_mode
            losses.pop()
            break
        positive_mode = mode if np.isfinite(distance) else None
        diagonal = np.abs(np.diag(matrix))
        lower, gain, new = np.inf, np.inf, v
        while lower >= value and gain > MIN_GAIN_NATS and damping < 1e12:
            try:
                factor = cho_factor(matrix + damping * np.diag(diagonal))
            except LinAlgError:
                damping *= 10
                continue
            step = -cho_solve(factor, gradient)
            gain = -(gradient @ step)
            bend = bend_of((v, problem.unflat(step, v)))
            turn = -0.5 * cho_solve(factor, _float64(bend))
            new = dict(v)
            for name, move in problem.unflat(step + turn, v).items():
                new[name] = v[name] + move
            bent_length = np.sqrt(diagonal @ turn**2)
            straight = 2 * bent_length < MAX_BEND_RATIO * np.sqrt(diagonal @ step**2)
            lower = float(value_of((new, tuning))) if straight else np.inf
            damping = max(damping / 3, 1e-12) if lower < value else 2 * damping
        if not lower < value:
            break
        losses.append(lower)
        bar.set_postfix_str(f"loss {lower:.5g}", refresh=False)
        mode = measured(guide, problem, call, new, mode.precision)
    else:
        if positive_mode and not np.isfinite(_distance(guide, problem, mode, gradient)):
            mode = positive_mode
            losses.pop()
    return mode, losses


def _float64(values: Any) -> np.ndarray:
    return np.asarray(values, np.float64)


def _programs(problem: LaplaceProblem, call: Call) -> list[Callable]:
    """Of -log p(D, v), of it with its gradient, and of the bend along a step, both
    flat.
    """

    def potential(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        v, (precision, spread) = point
        return problem.potential(v, precision, spread, None, (args, kwargs))

    def slope(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        v, tuning = point
        value, grads = jax.value_and_grad(
            lambda v: potential((v, tuning), args, kwargs)
        )(v)
        return value, problem.flat(grads)

    def bend(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        v, step = point
        try:
            bent = problem.flat(problem.bend(v, step, None, (args, kwargs)))
        except (NotImplementedError, TypeError):
            # a function that has only a rule for reverse mode: straight steps
            return jnp.zeros_like(problem.flat(step))
        return jnp.where(jnp.all(jnp.isfinite(bent)), bent, 0.0)

    return [problem.prepared(fn.__name__, fn, call) for fn in (potential, slope, bend)]


def _distance(guide: Any, problem: LaplaceProblem, mode: Mode, gradient: Any) -> float:
    """From the mode, as in the result of a run; not finite if rounding leaves no
    positive precision.
    """
    tril = _float64(gaussian_at(guide, problem, mode).params["*", "scale_tril"])
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(np.mean((gradient @ tril) ** 2)))


def distance(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    mode: Mode,
    gradient: np.ndarray,
) -> float:
    r"""From the mode in posterior sds, :math:`\sqrt{g^\top H^{-1} g / P}`, H being the
    whole Gauss-Newton matrix.

    Structures other than "full" leave out directions in which the posterior is wide.
    They solve by conjugate gradients, whose partial sums grow to the result, and end
    where the prior bounds what is left.
    """
    if guide.structure == "full":
        return _distance(guide, problem, mode, gradient)
    variance = _float64(problem.flat(gaussian_at(guide, problem, mode).variance))
    scale = np.sqrt(variance)
    prior = _float64(problem.flat(prior_at(problem, mode)))
    prior_floor = scale**2 * np.maximum(prior, 1e-6)
    sweep = problem.sweep(mode.v, call)
    residual = direction = scale * gradient
    squares, total = residual @ residual, 0.0
    for _ in range(MAX_CG_STEPS):
        left = np.sum(residual**2 / prior_floor)
        if left <= max(0.1 * total, NEWTON_DISTANCE_SDS**2 * len(scale)):
            break
        vectors = jnp.asarray(direction[:, None], float)
        image = guide._structure.product(sweep, vectors, jnp.asarray(scale, float))
        image = _float64(image)[:, 0] + prior_floor * direction
        step = squares / (direction @ image)
        total += step * squares
        residual = residual - step * image
        old_squares, squares = squares, residual @ residual
        direction = residual + squares / old_squares * direction
    else:
        left = 0.0
    return float(np.sqrt((total + left) / len(scale)))


def measured(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    v: Values,
    precision: Mapping[str, Any],
) -> Mode:
    """All that is summed over the rows at a mode."""
    curvature, coupling = _prior_curvature(problem, v, call, guide.structure == "full")
    prior = problem.prior_precision(v, precision, curvature)
    positive_prior = {name: jnp.maximum(value, 1e-6) for name, value in prior.items()}
    sums = guide._structure.measure(problem.sweep(v, call), positive_prior)
    log_likelihood = problem.total("likelihood", problem.log_likelihood, v, call)
    return Mode(v, precision, sums, curvature, coupling, log_likelihood)


def prior_at(problem: LaplaceProblem, mode: Mode) -> Values:
    """(P_s,) the diagonal precision of the prior, by site."""
    return problem.prior_precision(mode.v, mode.precision, mode.curvature)


def _dense(problem: LaplaceProblem, mode: Mode) -> jax.Array:
    """(P, P) the precision of the structure "full"."""
    matrix = mode.sums + jnp.diag(problem.flat(prior_at(problem, mode)))
    return matrix if mode.coupling is None else matrix + mode.coupling


def gaussian_at(guide: Any, problem: LaplaceProblem, mode: Mode) -> LaplaceGaussian:
    """The Gaussian at a mode, for its prior precisions."""
    prior = prior_at(problem, mode)
    return guide._structure.gaussian(mode.sums, prior, mode.coupling)


def _prior_curvature(
    problem: LaplaceProblem, v: Values, call: Call, dense: bool
) -> tuple[Values, jax.Array | None]:
    """-d^2 log p / dv^2 of sites whose prior is not Normal: the diagonal by site and,
    if dense, all the rest.
    """
    names = [name for name in problem.sites if name in problem.other_sites]
    if not names:
        return {}, None
    if dense:
        # Locations of such a prior may be sites with a Normal one, so the matrix has
        # all sites.
        def of_all(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
            def negative(flat: jax.Array) -> jax.Array:
                values = {**v, **problem.unflat(flat, v)}
                return -problem.log_prior(values, {}, (args, kwargs), names)

            return jax.hessian(negative)(problem.flat(v))

        matrix = problem.prepared("curvature", of_all, call)(v)
        diagonals = problem.unflat(jnp.diag(matrix), v)
        curvature = {name: jnp.ravel(diagonals[name]) for name in names}
        zeros = {name: jnp.zeros(v[name].size) for name in problem.sites}
        return curvature, matrix - jnp.diag(problem.flat(zeros | curvature))

    def products(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        flat, back = ravel_pytree({name: v[name] for name in names})
        gradient = jax.grad(
            lambda f: -problem.log_prior({**v, **back(f)}, {}, (args, kwargs), names)
        )

        def product(vector: jax.Array) -> jax.Array:
            return jax.jvp(gradient, (flat,), (vector,))[1]

        signs = jnp.where(
            jax.random.bernoulli(jax.random.key(3), shape=flat.shape), 1.0, -1.0
        )
        diagonal = product(jnp.ones_like(flat))
        error = jnp.max(jnp.abs(product(signs) - signs * diagonal))
        return back(diagonal), error / (jnp.max(jnp.abs(diagonal)) + 1e-30)

    diagonal, error = problem.prepared("curvature", products, call)(v)
    if error > MAX_MIXED_SHARE:
        got = (
            f"{problem.sites}, whose joint prior is not independent "
            f"({', '.join(names)})"
        )
        raise argument_error(
            CALL,
            "structure",
            got,
            'Use "full", or give these sites independent priors.',
        )
    return {name: jnp.ravel(value) for name, value in diagonal.items()}, None
