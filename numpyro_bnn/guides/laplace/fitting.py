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
FULL_EPOCHS = 50  # epochs of one step each that are made at once
# share of a derivative that comes from others, above which they are not independent
MIXED = 1e-3
CG_STEPS = (
    20  # most products with the whole precision to find the distance from the mode
)
TINY = 1e-6  # nats that a step of Newton must promise
NEAR = 0.01  # distance from the mode, as in the result of a run, at which the steps end
BENT = 0.75  # length of the second part of such a step, twice, against the first


class SearchOptions(NamedTuple):
    """Options of the search for the mode."""

    num_epochs: int
    optimizer: Any
    patience: int
    progress_bar: bool


Search = Callable[[Values, tuple, jax.Array], tuple[Values, list[float]]]


def fit_mode(problem: LaplaceProblem, call: Call, options: SearchOptions) -> Search:
    """A function from a start, what is tuned, and a key, to the mode and the losses;
    compiled once.
    """
    import optax

    if options.optimizer is None and not problem.plates:
        return partial(
            _lbfgs, prepare(partial(_descend, problem, options), *call), options
        )
    batch = next(iter(problem.plates.values())).batch_size if problem.plates else 1
    steps = -(-problem.size // batch) if problem.plates else FULL_EPOCHS
    total = max(1, options.num_epochs * (steps if problem.plates else 1))
    optimizer = options.optimizer or optax.adam(
        optax.cosine_decay_schedule(LEARNING_RATE, total)
    )

    def epoch(carried: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        v, state, (precision, spread), key = carried

        def step(carry: tuple, key: jax.Array) -> tuple:
            v, state = carry
            index = draw_indices(problem.size, batch, key) if problem.plates else None
            loss, grads = jax.value_and_grad(problem.potential)(
                v, precision, spread, index, (args, kwargs)
            )
            updates, state = optimizer.update(grads, state, v)
            return (optax.apply_updates(v, updates), state), loss

        losses: jax.Array
        end, losses = jax.lax.scan(step, (v, state), jax.random.split(key, steps))
        return *end, jnp.mean(losses[-1:] if not problem.plates else losses)

    return partial(
        _epochs,
        prepare(epoch, *call),
        optimizer,
        options,
        1 if problem.plates else FULL_EPOCHS,
    )


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
            key, now = split(key)
            v, state, loss = program((v, state, tuning, now))
            losses.append(finite(float(loss)))
            best, since = (losses[-1], 0) if losses[-1] < best else (best, since + 1)
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
        return (
            optax.apply_updates(v, updates),
            state,
            losses.at[epochs].set(value),
            jnp.where(lower, value, best),
            jax.tree.map(
                lambda new, previous: jnp.where(lower, new, previous), v, best_v
            ),
            # A step that overflows ends the search at the lowest point so far.
            jnp.where(
                lower, 0, jnp.where(jnp.isfinite(value), since + 1, options.patience)
            ),
            epochs + 1,
        )

    losses = jnp.zeros(max(1, options.num_epochs))
    first_carry = (
        v,
        solver.init(v),
        losses,
        jnp.asarray(jnp.inf),
        v,
        jnp.asarray(0),
        jnp.asarray(0),
    )
    _, _, losses, _, best_v, _, epochs = jax.lax.while_loop(go_on, step, first_carry)
    return best_v, losses, epochs


def _lbfgs(
    program: Callable, options: SearchOptions, v: Values, tuning: tuple, key: Any
) -> tuple:
    if not options.num_epochs:
        return v, []
    v, losses, epochs = program((v, tuning))
    finite_start = np.asarray(losses)[: int(epochs)].tolist()
    return v, [
        finite(finite_start[0]),
        *(loss for loss in finite_start[1:] if np.isfinite(loss)),
    ]


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
    v: Values,
    sums: "PrecisionSums",
    tuning: tuple,
    num_steps: int,
    progress_bar: bool = False,
) -> tuple[Values, "PrecisionSums", list[float]]:
    """To the mode by the steps of Levenberg and Marquardt, bent along with the outputs;
    the precision is dense.

    The narrow valleys of networks are curved. Along a step s the outputs have a second
    derivative f'', and -1/2 H^-1 J^T F f'' is added to the step; one that would bend
    too much is tried again with more damping (Transtrum & Sethna 2012).
    """
    from scipy.linalg import LinAlgError, cho_factor, cho_solve

    value_of, slope_of, bend_of = _programs(guide, problem, call)
    _, back = ravel_sites({name: v[name] for name in guide._structure.sizes})
    losses: list[float] = []
    positive_point: tuple | None = (
        None  # the last point, if the precision is positive there
    )
    damping = 1e-3
    for _ in (bar := tqdm.tqdm(range(num_steps), disable=not progress_bar)):
        value, gradient = (
            np.asarray(array, np.float64) for array in slope_of((v, tuning))
        )
        matrix = np.asarray(_dense(guide, problem, sums, v, tuning[0]), np.float64)
        distance = _distance(guide, problem, sums, v, tuning[0], gradient)
        if losses and distance < NEAR:
            break
        if positive_point and not np.isfinite(distance):
            # the fit became so close that no digits are left
            v, sums = positive_point
            losses.pop()
            break
        positive_point = (v, sums) if np.isfinite(distance) else None
        lower, gain, new, diagonal = np.inf, np.inf, v, np.abs(np.diag(matrix))
        while lower >= value and gain > TINY and damping < 1e12:
            try:
                factor = cho_factor(matrix + damping * np.diag(diagonal))
            except LinAlgError:
                damping *= 10
                continue
            step = -cho_solve(factor, gradient)
            gain = -(gradient @ step)
            turn = -0.5 * cho_solve(
                factor,
                np.asarray(bend_of((v, back(jnp.asarray(step, float)))), np.float64),
            )
            new = {
                name: v[name] + move
                for name, move in back(jnp.asarray(step + turn, float)).items()
            }
            straight = 2 * np.sqrt(diagonal @ turn**2) < BENT * np.sqrt(
                diagonal @ step**2
            )
            lower = float(value_of(({**v, **new}, tuning))) if straight else np.inf
            damping = max(damping / 3, 1e-12) if lower < value else 2 * damping
        if not lower < value:
            break
        v = {**v, **new}
        losses.append(lower)
        bar.set_postfix_str(f"loss {lower:.5g}", refresh=False)
        sums = measured(guide, problem, call, v, tuning[0])
    else:
        if positive_point and not np.isfinite(
            _distance(guide, problem, sums, v, tuning[0], gradient)
        ):
            v, sums = positive_point
            losses.pop()
    return v, sums, losses


def _programs(guide: Any, problem: LaplaceProblem, call: Call) -> list[Callable]:
    """Of -log p(D, v), of it with its gradient, and of the bend along a step, both
    flat.
    """

    def potential(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        v, (precision, spread) = point
        return problem.potential(v, precision, spread, None, (args, kwargs))

    def slope(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        value, grads = jax.value_and_grad(
            lambda v: potential((v, point[1]), args, kwargs)
        )(point[0])
        return value, flat(grads)

    def bend(point: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        v, step = point
        try:
            bent = flat(problem.bend(v, step, None, (args, kwargs)))
        except (
            NotImplementedError,
            TypeError,
        ):
            # a function that has only a rule for reverse mode: straight steps
            return jnp.zeros_like(flat(step))
        return jnp.where(jnp.all(jnp.isfinite(bent)), bent, 0.0)

    def flat(values: Values) -> jax.Array:
        return jnp.concatenate(
            [jnp.ravel(values[name]) for name in guide._structure.sizes]
        )

    return [problem.prepared(fn.__name__, fn, call) for fn in (potential, slope, bend)]


def _distance(
    guide: Any,
    problem: LaplaceProblem,
    sums: "PrecisionSums",
    v: Values,
    precision: Any,
    gradient: Any,
) -> float:
    """From the mode, as in the result of a run; not finite if rounding leaves no
    positive precision.
    """
    tril = np.asarray(
        gaussian_at(guide, problem, sums, v, precision).params["*", "scale_tril"],
        np.float64,
    )
    with np.errstate(invalid="ignore"):
        return float(np.sqrt(np.mean((gradient @ tril) ** 2)))


def distance(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    v: Values,
    sums: "PrecisionSums",
    precision: Any,
    gradient: np.ndarray,
) -> float:
    r"""From the mode in posterior sds, :math:`\sqrt{g^\top H^{-1} g / P}`, H being the
    whole Gauss-Newton matrix.

    Structures other than "full" leave out directions in which the posterior is wide.
    They solve by conjugate gradients, whose partial sums grow to the result, and end
    where the prior bounds what is left.
    """
    if guide.structure == "full":
        return _distance(guide, problem, sums, v, precision, gradient)
    names = list(guide._structure.sizes)

    def flat(values: Values) -> np.ndarray:
        return np.concatenate([np.ravel(values[name]) for name in names]).astype(
            np.float64
        )

    scale = np.sqrt(flat(gaussian_at(guide, problem, sums, v, precision).variance))
    prior_floor = scale**2 * np.maximum(
        flat({**problem.prior_precision(v, precision), **sums.curvature}), 1e-6
    )
    sweep = problem.sweep(v, call)
    residual = direction = scale * gradient
    squares, total = residual @ residual, 0.0
    for _ in range(CG_STEPS):
        left = np.sum(residual**2 / prior_floor)
        if left <= max(0.1 * total, NEAR**2 * len(scale)):
            break
        vectors = jnp.asarray(direction[:, None], float)
        image = guide._structure.product(sweep, vectors, jnp.asarray(scale, float))
        image = np.asarray(image, np.float64)[:, 0] + prior_floor * direction
        step = squares / (direction @ image)
        total += step * squares
        residual = residual - step * image
        old_squares, squares = squares, residual @ residual
        direction = residual + squares / old_squares * direction
    else:
        left = 0.0
    return float(np.sqrt((total + left) / len(scale)))


class PrecisionSums(NamedTuple):
    """What the evidence depends on, at one mode: sums over rows, curvature of the
    prior, and log densities.
    """

    sums: Any
    curvature: Values  # of sites without Normal prior, (P_s,)
    coupling: jax.Array | None
    log_likelihood: jax.Array


def measured(
    guide: Any,
    problem: LaplaceProblem,
    call: Call,
    v: Values,
    precision: Mapping[str, Any],
) -> PrecisionSums:
    """All that is summed over the rows at a mode."""
    curvature, coupling = _prior_curvature(problem, v, call, guide.structure == "full")
    prior = {**problem.prior_precision(v, precision), **curvature}
    positive_prior = {name: jnp.maximum(prior[name], 1e-6) for name in problem.sites}
    sums = guide._structure.measure(problem.sweep(v, call), positive_prior)
    return PrecisionSums(
        sums,
        curvature,
        coupling,
        problem.total("likelihood", problem.log_likelihood, v, call),
    )


def _dense(
    guide: Any,
    problem: LaplaceProblem,
    sums: PrecisionSums,
    v: Values,
    precision: Mapping[str, Any],
) -> jax.Array:
    """(P, P) the precision of the structure "full"."""
    prior = {**problem.prior_precision(v, precision), **sums.curvature}
    matrix = sums.sums + jnp.diag(
        jnp.concatenate([prior[name] for name in guide._structure.sizes])
    )
    return matrix if sums.coupling is None else matrix + sums.coupling


def gaussian_at(
    guide: Any,
    problem: LaplaceProblem,
    sums: PrecisionSums,
    v: Values,
    precision: Mapping[str, Any],
) -> LaplaceGaussian:
    """The Gaussian for some prior precisions."""
    prior = {**problem.prior_precision(v, precision), **sums.curvature}
    return guide._structure.gaussian(
        sums.sums, {name: prior[name] for name in problem.sites}, sums.coupling
    )


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
            flat, back = ravel_sites({name: v[name] for name in problem.sites})

            def negative(flat: jax.Array) -> jax.Array:
                return -problem.log_prior(
                    {**v, **back(flat)}, {}, (args, kwargs), names
                )

            return jax.hessian(negative)(flat)

        matrix = problem.prepared("curvature", of_all, call)(v)
        ends = np.cumsum([v[name].size for name in problem.sites])
        diagonal = dict(
            zip(problem.sites, jnp.split(jnp.diag(matrix), ends[:-1]), strict=True)
        )
        of_sites = {name: diagonal[name] for name in names}
        inside = jnp.concatenate(
            [jnp.full(v[n].size, n in names) for n in problem.sites]
        )
        return of_sites, matrix - jnp.diag(jnp.where(inside, jnp.diag(matrix), 0.0))

    def products(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        start = {name: v[name] for name in names}
        flat, back = ravel_pytree(start)
        gradient = jax.grad(
            lambda f: -problem.log_prior({**v, **back(f)}, {}, (args, kwargs), names)
        )
        signs = jnp.where(
            jax.random.bernoulli(jax.random.key(3), shape=flat.shape), 1.0, -1.0
        )
        ones, signed = (
            jax.jvp(gradient, (flat,), (t,))[1] for t in (jnp.ones_like(flat), signs)
        )
        return back(ones), jnp.max(jnp.abs(signed - signs * ones)) / (
            jnp.max(jnp.abs(ones)) + 1e-30
        )

    diagonal, error = problem.prepared("curvature", products, call)(v)
    if error > MIXED:
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


def ravel_sites(v: Values) -> tuple[jax.Array, Callable]:
    """A vector of all values in the order of the dictionary, and the inverse."""
    shapes = {name: value.shape for name, value in v.items()}
    ends = np.cumsum([value.size for value in v.values()])

    def back(flat: jax.Array) -> Values:
        pieces = jnp.split(flat, ends[:-1])
        return {
            name: piece.reshape(shapes[name])
            for name, piece in zip(shapes, pieces, strict=True)
        }

    return jnp.concatenate([jnp.ravel(value) for value in v.values()]), back
