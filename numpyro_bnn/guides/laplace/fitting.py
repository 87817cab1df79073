"""The mode, the precision there, and prior precisions that maximize the evidence."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
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
from numpyro_bnn.guides.laplace.prediction import gaussian_outputs
from numpyro_bnn.guides.laplace.problem import Call, Problem, Values
from numpyro_bnn.guides.laplace.structures import Gaussian
from numpyro_bnn.program.compiled import prepare, run
from numpyro_bnn.program.plates import draw_indices

LEARNING_RATE = 3e-3
FULL_EPOCHS = 50  # epochs of one step each that are made at once
SAME = 1e-3  # change of a log precision below which tuning ends
MIXED = 1e-3  # share of a row's gradient that comes from other rows, above which rows are not independent
CLOSE = 0.1  # distance from the mode, in posterior standard deviations, below which a run has converged


class LaplaceResult(NamedTuple):
    """Result of :meth:`AutoLaplace.run`; ``params`` and ``losses`` are as in NumPyro's ``SVIRunResult``.

    :param params: parameters of the guide by name, as all its methods take them.
    :param losses: -log p(D, v) after each epoch of the search for the mode.
    :param log_evidence: Laplace's log p(D), given the sites that are held at the mode.
    :param prior_precision: by site with a fixed Normal prior, the factor on its precision (1 without ``tune_prior``).
    :param effective_parameters: how many unknowns the data determine, sum_j (1 - prior precision_j * variance_j).
    :param grad_norm: norm of the gradient of -log p(D, v) at the end.
    :param distance: estimated distance from the mode, the root mean square of gradient * sd.
    :param converged: whether the distance is below 0.1; a run that did not converge also warns.
    """

    params: dict[str, jax.Array]
    losses: jax.Array
    log_evidence: float
    prior_precision: dict[str, float]
    effective_parameters: float
    grad_norm: float
    distance: float
    converged: bool


class Fit(NamedTuple):
    """Options of the search for the mode."""

    num_epochs: int
    optimizer: Any
    patience: int
    progress_bar: bool


Search = Callable[[Values, tuple, jax.Array], tuple[Values, list[float]]]


def fit_mode(problem: Problem, call: Call, options: Fit) -> Search:
    """A function from a start, what is tuned, and a key, to the mode and the losses; compiled once."""
    import optax

    if options.optimizer is None and not problem.plates:
        return partial(_lbfgs, prepare(partial(_descend, problem, options), *call), options)
    batch = next(iter(problem.plates.values())).batch_size if problem.plates else 1
    steps = -(-problem.size // batch) if problem.plates else FULL_EPOCHS
    total = max(1, options.num_epochs * (steps if problem.plates else 1))
    optimizer = options.optimizer or optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, total))

    def epoch(given: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        v, state, (precision, spread), key = given

        def step(carry: tuple, key: jax.Array) -> tuple:
            v, state = carry
            index = draw_indices(problem.size, batch, key) if problem.plates else None
            loss, grads = jax.value_and_grad(problem.potential)(v, precision, spread, index, (args, kwargs))
            updates, state = optimizer.update(grads, state, v)
            return (optax.apply_updates(v, updates), state), loss

        found: jax.Array
        carried, found = jax.lax.scan(step, (v, state), jax.random.split(key, steps))
        return *carried, jnp.mean(found[-1:] if not problem.plates else found)

    return partial(_epochs, prepare(epoch, *call), optimizer, options, 1 if problem.plates else FULL_EPOCHS)


def _epochs(
    program: Callable, optimizer: Any, options: Fit, size: int, v: Values, tuning: tuple, key: Any
) -> tuple[Values, list[float]]:
    losses: list[float] = []
    state, best, since = optimizer.init(v), np.inf, 0
    with tqdm.tqdm(total=options.num_epochs, disable=not options.progress_bar) as bar:
        while len(losses) * size < options.num_epochs and since * size < options.patience:
            key, now = split(key)
            v, state, loss = program((v, state, tuning, now))
            losses.append(_finite(float(loss)))
            best, since = (losses[-1], 0) if losses[-1] < best else (best, since + 1)
            bar.set_postfix_str(f"loss {loss:.5g}", refresh=False)
            bar.update(size)
    return v, losses


def _descend(problem: Problem, options: Fit, given: tuple, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """L-BFGS on all rows, until the loss no longer falls."""
    import optax

    v, (precision, spread) = given
    solver = optax.lbfgs()

    def loss(v: Values) -> jax.Array:
        return problem.potential(v, precision, spread, None, (args, kwargs))

    value_and_grad = optax.value_and_grad_from_state(loss)

    def go_on(carry: tuple) -> jax.Array:
        *_, since, taken = carry
        return (since < options.patience) & (taken < options.num_epochs)

    def step(carry: tuple) -> tuple:
        v, state, losses, best, found, since, taken = carry
        value, grad = value_and_grad(v, state=state)
        updates, state = solver.update(grad, state, v, value=value, grad=grad, value_fn=loss)
        lower = value < best
        return (
            optax.apply_updates(v, updates),
            state,
            losses.at[taken].set(value),
            jnp.where(lower, value, best),
            jax.tree.map(lambda new, old: jnp.where(lower, new, old), v, found),
            # A step that overflows ends the search at the lowest point so far.
            jnp.where(lower, 0, jnp.where(jnp.isfinite(value), since + 1, options.patience)),
            taken + 1,
        )

    losses = jnp.zeros(max(1, options.num_epochs))
    start = (v, solver.init(v), losses, jnp.asarray(jnp.inf), v, jnp.asarray(0), jnp.asarray(0))
    _, _, losses, _, found, _, taken = jax.lax.while_loop(go_on, step, start)
    return found, losses, taken


def _lbfgs(program: Callable, options: Fit, v: Values, tuning: tuple, key: Any) -> tuple:
    if not options.num_epochs:
        return v, []
    v, losses, taken = program((v, tuning))
    made = np.asarray(losses)[: int(taken)].tolist()
    return v, [_finite(made[0]), *(loss for loss in made[1:] if np.isfinite(loss))]


def _finite(loss: float) -> float:
    if not np.isfinite(loss):
        instead = "Look for NaN in the data; start from likely values (`init_params=`), or pass a smaller step size."
        raise argument_error(f"{CALL}.run", "args", f"data and parameters with loss {loss}", instead)
    return loss


class Precision(NamedTuple):
    """What the evidence depends on, at one mode: sums over rows, curvature of the prior, and log densities."""

    sums: Any
    curvature: Values  # of sites without Normal prior, (P_s,)
    coupling: jax.Array | None
    log_likelihood: jax.Array


def measured(guide: Any, problem: Problem, call: Call, v: Values, precision: Mapping[str, Any]) -> Precision:
    """All that is summed over the rows at a mode."""
    curvature, coupling = _prior_curvature(problem, v, call, guide.structure == "full")
    prior = {**problem.prior_precision(v, precision), **curvature}
    here = {name: jnp.maximum(prior[name], 1e-6) for name in problem.sites}
    sums = guide._structure.measure(problem.sweep(v, call), here)
    return Precision(sums, curvature, coupling, problem.total("likelihood", problem.log_likelihood, v, call))


def gaussian_at(guide: Any, problem: Problem, found: Precision, v: Values, precision: Mapping[str, Any]) -> Gaussian:
    """The Gaussian for some prior precisions."""
    prior = {**problem.prior_precision(v, precision), **found.curvature}
    return guide._structure.gaussian(found.sums, {name: prior[name] for name in problem.sites}, found.coupling)


def log_evidence(
    guide: Any, problem: Problem, found: Precision, v: Values, precision: Mapping[str, Any], call: Call
) -> jax.Array:
    r"""Laplace's log p(D) = log p(D, v) + P / 2 log 2 pi - 1/2 log det of the precision, given what is held."""
    gaussian = gaussian_at(guide, problem, found, v, precision)
    unknowns = sum(v[name].size for name in problem.sites)
    prior = problem.log_prior(v, precision, call, problem.sites)
    return found.log_likelihood + prior + 0.5 * unknowns * jnp.log(2 * jnp.pi) - 0.5 * gaussian.log_det


def _prior_curvature(problem: Problem, v: Values, call: Call, dense: bool) -> tuple[Values, jax.Array | None]:
    """-d^2 log p / dv^2 of sites whose prior is not Normal: the diagonal by site and, if dense, all the rest."""
    names = [name for name in problem.sites if name in problem.others]
    if not names:
        return {}, None
    if dense:
        # Locations of such a prior may be sites with a Normal one, so the matrix has all sites.
        def of_all(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
            flat, back = ravel_sites({name: v[name] for name in problem.sites})

            def negative(flat: jax.Array) -> jax.Array:
                return -problem.log_prior({**v, **back(flat)}, {}, (args, kwargs), names)

            return jax.hessian(negative)(flat)

        matrix = problem.prepared("curvature", of_all, call)(v)
        ends = np.cumsum([v[name].size for name in problem.sites])
        diagonal = dict(zip(problem.sites, jnp.split(jnp.diag(matrix), ends[:-1]), strict=True))
        own = {name: diagonal[name] for name in names}
        inside = jnp.concatenate([jnp.full(v[n].size, n in names) for n in problem.sites])
        return own, matrix - jnp.diag(jnp.where(inside, jnp.diag(matrix), 0.0))

    def products(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        here = {name: v[name] for name in names}
        flat, back = ravel_pytree(here)
        gradient = jax.grad(lambda f: -problem.log_prior({**v, **back(f)}, {}, (args, kwargs), names))
        signs = jnp.where(jax.random.bernoulli(jax.random.key(3), shape=flat.shape), 1.0, -1.0)
        ones, signed = (jax.jvp(gradient, (flat,), (t,))[1] for t in (jnp.ones_like(flat), signs))
        return back(ones), jnp.max(jnp.abs(signed - signs * ones)) / (jnp.max(jnp.abs(ones)) + 1e-30)

    diagonal, error = problem.prepared("curvature", products, call)(v)
    if error > MIXED:
        got = f"{problem.sites}, whose joint prior is not independent ({', '.join(names)})"
        raise argument_error(CALL, "structure", got, 'Use "full", or give these sites independent priors.')
    return {name: jnp.ravel(value) for name, value in diagonal.items()}, None


def ravel_sites(v: Values) -> tuple[jax.Array, Callable]:
    """A vector of all values in the order of the dictionary, and the inverse."""
    shapes = {name: value.shape for name, value in v.items()}
    ends = np.cumsum([value.size for value in v.values()])

    def back(flat: jax.Array) -> Values:
        parts = jnp.split(flat, ends[:-1])
        return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    return jnp.concatenate([jnp.ravel(value) for value in v.values()]), back


def _check_rows(guide: Any, problem: Problem, v: Values, call: Call) -> None:
    """Rows that influence one another: no products of inputs and gradients, and none of minibatches."""

    def mixing(v: Values, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        return problem.jacobians(v, problem.few(), (args, kwargs))[1]

    if run(mixing, v, *call) > MIXED:
        problem.capture = False
        if guide.structure == "kron" or problem.plates:
            got = "a model in which one row changes the outputs of others, such as one with batch normalization"
            instead = 'Use "diag", "low_rank" or "full" on all rows, or `nn.LayerNorm`.'
            raise argument_error(CALL, "model", got, instead)


def tuned(
    guide: Any, problem: Problem, call: Call, search: Search, v: Values, key: Any, tune: bool | str, num_rounds: int
) -> Any:
    """Search, measure and, if asked for, tune prior precisions in turn; returns a ``LaplaceResult``."""
    names = [name for name in problem.sites if name in problem.fixed]
    groups = [names] if tune == "global" else [[name] for name in names]
    spread = _spread(guide, problem, call, v, None) if tune else {}
    if tune and not names:
        got = f"{tune!r} for a guide without a site that has a Normal prior of fixed scale"
        raise argument_error(f"{CALL}.run", "tune_prior", got, "Leave it out: the scales are learned with the model.")
    precision = dict.fromkeys(names, 1.0)
    losses: list[float] = []
    _check_rows(guide, problem, v, call)
    for last in [*[False] * (num_rounds - 1 if tune else 0), True]:
        key, now = split(key)
        v, more = search(v, (precision, spread), now)
        losses += more
        found = measured(guide, problem, call, v, precision)
        if last or not tune:
            break
        new = _fixed_point(guide, problem, found, v, precision, groups, call)
        spread = _spread(guide, problem, call, v, gaussian_at(guide, problem, found, v, new))
        change = max(abs(np.log(new[name] / precision[name])) for name in names)
        precision = new
        if change < SAME:
            break
    gaussian = gaussian_at(guide, problem, found, v, precision)
    _check_positive(problem, gaussian)
    grads = problem.total("gradient", jax.grad(problem.log_likelihood), v, call, spread)
    of_prior = run(lambda g, *c: jax.grad(problem.log_prior)(g[0], g[1], c, list(v)), (v, precision), *call)
    grads = jax.tree.map(jnp.add, grads, of_prior)
    units = jnp.concatenate([jnp.ravel(grads[n]) * jnp.sqrt(gaussian.variance[n]) for n in problem.sites])
    distance = float(jnp.sqrt(jnp.mean(units**2)))
    if not distance < CLOSE:
        message = f"{CALL}.run: {distance:.2g} posterior sds from the mode on average. Run more epochs."
        warnings.warn(message, stacklevel=3)
    guide._problem = replace(problem, programs={})
    evidence = run(lambda g, *c: log_evidence(guide, problem, found, g[0], g[1], c), (v, precision), *call)
    prior = {**problem.prior_precision(v, precision), **found.curvature}
    effective = sum(jnp.sum(1 - prior[name] * gaussian.variance[name]) for name in problem.sites)
    return LaplaceResult(
        params={**guide._to_params(v, gaussian), **problem.held},
        losses=jnp.asarray(losses),
        log_evidence=_finite(float(evidence)),
        prior_precision={name: float(value) for name, value in precision.items()},
        effective_parameters=float(effective),
        grad_norm=float(jnp.linalg.norm(ravel_pytree(grads)[0])),
        distance=distance,
        converged=distance < CLOSE,
    )


def _spread(guide: Any, problem: Problem, call: Call, v: Values, gaussian: Gaussian | None) -> dict[str, jax.Array]:
    """(N, M) variances of the loc of sites whose noise scale is learned; 0 before there is a Gaussian."""
    names = [name for name, (_, used) in problem.observed.items() if {"loc", "log_scale"} <= set(used)]
    params = {} if gaussian is None else guide._to_params(v, gaussian)

    def rows(given: tuple, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, jax.Array]:
        params, index = given
        if not params:
            seen = problem.observations(problem.trace(v, index, (args, kwargs)))
            return {name: jnp.zeros_like(seen[name].weight, float) for name in names}
        found = {}
        for name in names:
            seen, cov, _ = gaussian_outputs(guide, problem, params, (args, kwargs), name, index=index)
            found[name] = jnp.diagonal(cov, axis1=1, axis2=2)[:, : seen.weight.shape[1]]
        return found

    program = problem.prepared("variances" if params else "no variances", rows, call)
    parts = [program((params, index)) for index in problem.chunks()]
    return {name: jnp.concatenate([part[name] for part in parts]) for name in names}


def _check_positive(problem: Problem, gaussian: Gaussian) -> None:
    for name in problem.sites:
        variance = gaussian.variance[name]
        if not bool(jnp.all(jnp.isfinite(variance) & (variance > 0))):
            got = f"a model whose precision is not positive at the site {name!r}"
            instead = "With little noise use float64 (`jax_enable_x64`); else run more epochs, or use Normal priors."
            raise argument_error(CALL, "model", got, instead)


def _fixed_point(
    guide: Any,
    problem: Problem,
    found: Precision,
    v: Values,
    precision: Mapping[str, float],
    groups: list[list[str]],
    call: Call,
) -> dict[str, float]:
    """Prior precisions that maximize the evidence at one mode."""

    def update(given: tuple, args: tuple, kwargs: Mapping[str, Any]) -> jax.Array:
        log_precision, found, v = given
        now = {name: jnp.exp(log_precision[i]) for i, group in enumerate(groups) for name in group}
        variance, prior = gaussian_at(guide, problem, found, v, now).variance, problem.prior_precision(v, now)
        new = []
        for group in groups:
            squares = sum(jnp.sum(jnp.square((v[n] - problem.fixed[n][0]) / problem.fixed[n][1])) for n in group)
            gamma = sum(jnp.sum(1 - prior[n] * variance[n]) for n in group)
            new.append(jnp.log(jnp.maximum(gamma, 1e-6)) - jnp.log(jnp.maximum(squares, 1e-12)))
        return jnp.clip(jnp.stack(new), -15.0, 15.0)

    logs = jnp.log(jnp.asarray([precision[group[0]] for group in groups]))
    program = problem.prepared("fixed point", update, call)
    for _ in range(100):
        logs, before = program((logs, found, v)), logs
        if float(jnp.max(jnp.abs(logs - before))) < SAME / 10:
            break
    return {name: float(jnp.exp(logs[i])) for i, group in enumerate(groups) for name in group}
