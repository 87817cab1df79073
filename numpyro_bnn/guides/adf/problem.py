"""A model read for ADF, one pass over the data, and epochs as compiled programs."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array, lax

from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._types import PyTree, Trees
from numpyro_bnn.guides.adf.likelihoods import Likelihood, Point, read_likelihood
from numpyro_bnn.guides.adf.moment_matching import (
    ADFState,
    Gamma,
    PriorFactor,
    WeightSite,
    gamma_update,
    gaussian_update,
    refine_gamma,
    refine_normal,
)
from numpyro_bnn.guides.adf.observation import check_quantities, check_rows, rewritten
from numpyro_bnn.guides.adf.quadrature import sum_to
from numpyro_bnn.guides.adf.reading import CALL, Data, Values, find_roles
from numpyro_bnn.guides.fitting import Keeper
from numpyro_bnn.moments import Equation, Gaussian
from numpyro_bnn.program.batches import Feed
from numpyro_bnn.program.compiled import shared
from numpyro_bnn.program.posterior import Posterior

# Refused updates are counted on about this many weights of each site.
SAMPLE = 100
# Rows of a loader that one program absorbs.
PART_ROWS = 1024
MAX_SMALL_WEIGHT = 1000  # numbers in a weight that is small for a CPU


class Records(NamedTuple):
    """Records of one pass over the data, or of each epoch: (E,), or (R, E) for R runs
    at once.
    """

    # Sum over the data of log Z, the log density of each point just before it is
    # absorbed. In the first epoch it estimates the log evidence, log p(y); later epochs
    # have already seen the data.
    log_z: Array
    # fraction of refused updates of single weights, counted on a sample of the weights
    refused: Array


def read_problem(data: Data, reading: Posterior) -> Likelihood:
    """Read the model from one row of its arguments.

    :param reading: the model of all rows.
    """
    of_row = data.read_row()
    roles = find_roles(of_row)
    likelihood = read_likelihood(data, of_row, roles)
    check_rows(data, reading, of_row, roles)
    check_quantities(likelihood.cut, roles, data.first)

    def check() -> None:
        state = first_state(likelihood, jax.random.key(0), {})
        likelihood.check(likelihood.point(state, data.first))

    jax.eval_shape(check)
    return likelihood


def first_state(likelihood: Likelihood, rng_key: Array, means: Values) -> ADFState:
    """The prior, but with these means of the weights, and others at random: N(loc,
    prior variance / fan-in), which breaks the symmetry of the hidden units.
    """
    state = ADFState({}, {}, {})
    for name, hyper in likelihood.hyperparameters.items():
        state.hyperparameters[name] = jax.tree.map(jnp.asarray, hyper.prior)
    values = likelihood.typical_values(state.hyperparameters)
    weights = likelihood.roles.weights
    keys = jax.random.split(rng_key, len(weights))
    for key, (name, weight) in zip(keys, weights.items(), strict=True):
        var = weight.prior_sd(values) ** 2
        fan_in = np.prod(var.shape[:-1]) if var.ndim > 1 else max(1, var.size)
        noise = jnp.sqrt(var / fan_in) * jax.random.normal(key, var.shape)
        mean = means.get(name, weight.loc + noise)
        if jnp.shape(mean) != var.shape:
            got = f"shape {jnp.shape(mean)}"
            instead = f"Pass a value of shape {var.shape}."
            raise argument_error(f"{CALL}.run", f"init_means[{name!r}]", got, instead)
        state.weights[name] = Gaussian(jnp.asarray(mean, float), var)
        if weight.hyper is not None:
            zero = jnp.zeros(var.shape)
            state.factors[name] = PriorFactor(
                1 / var, jnp.asarray(weight.loc) / var, zero, zero
            )
    return state


def cavity(
    likelihood: Likelihood,
    state: ADFState,
    factors: Mapping[str, PriorFactor],
    share: Array | None,
) -> ADFState:
    """The posterior with a share of the likelihood, all but the priors, divided out;
    the posterior itself for ``None``.

    With one Nth of it the next row is counted once, however often it is seen: the
    average of the N factors stands for its own (stochastic expectation propagation).

    Reference: Li, Hernandez-Lobato & Turner (2015).
    """
    if share is None:
        return state
    weights, hypers = {}, dict(state.hyperparameters)
    for name, posterior in state.weights.items():
        if name in factors:
            precision, shift = factors[name][:2]
        else:
            weight = likelihood.roles.weights[name]
            precision = jnp.asarray(1 / weight.scale**2)
            shift = jnp.asarray(weight.loc) * precision
        weights[name] = _mixed(posterior, precision, shift, share)
    for name in likelihood.roles.noise:
        prior, posterior = likelihood.hyperparameters[name].prior, hypers[name]
        if isinstance(prior, Gamma):
            hypers[name] = jax.tree.map(
                lambda own, start: own + share * (start - own), posterior, prior
            )
        else:
            precision = 1 / prior.var
            hypers[name] = _mixed(posterior, precision, prior.mean * precision, share)
    return state._replace(weights=weights, hyperparameters=hypers)


def _mixed(
    posterior: Gaussian, precision: Array, shift: Array, share: Array
) -> Gaussian:
    """Moments of q^(1 - share) p^share; those of q if this is not proper."""
    remainder = (1 - share) / posterior.var
    total = remainder + share * precision
    proper = total > 0
    var = 1 / jnp.where(proper, total, 1.0)
    mean = var * (remainder * posterior.mean + share * shift)
    return Gaussian(
        jnp.where(proper, mean, posterior.mean), jnp.where(proper, var, posterior.var)
    )


def learn(
    likelihood: Likelihood, state: ADFState, data: Any
) -> tuple[ADFState, Array, Array]:
    """Absorb one data point, ``data`` being its row and the other arrays; also
    returns its log Z and the number of refused updates of weights.
    """
    hypers = dict(state.hyperparameters)
    noise = {name: hypers[name] for name in likelihood.noise}

    def log_z(weights: Any, noise: Any) -> tuple[Array, Point]:
        point = likelihood.point(state._replace(weights=weights), data)
        # Only the likelihood depends on the noise, not the quantities.
        noisy = point._replace(states=hypers | noise)
        return likelihood.log_z(noisy).sum(), point

    (value, point), gradients = jax.value_and_grad(log_z, argnums=(0, 1), has_aux=True)(
        state.weights, noise
    )
    refused = jnp.zeros(())
    weights = {}
    for name, weight in state.weights.items():
        weights[name], bad = gaussian_update(weight, gradients[0][name])
        refused += _sampled_mean(bad) * bad.size
    for name in noise:
        hypers[name], _ = gaussian_update(noise[name], gradients[1][name])
    if likelihood.gamma is not None:
        gamma, sums = hypers[likelihood.gamma], []
        for order in range(3):
            log_zs = likelihood.log_z(point, order)
            sums.append(sum_to(log_zs, gamma.concentration.shape))
        hypers[likelihood.gamma] = gamma_update(gamma, jnp.stack(sums))
    return ADFState(weights, hypers, state.factors), value, refused


def sweep(
    likelihood: Likelihood,
    state: ADFState,
    rows: PyTree,
    arrays: PyTree,
    share: Array | None,
    divisor: Array,
) -> tuple[ADFState, Records, Array]:
    """One pass over rows in the order given, and log Z of each; for ``share`` see
    :func:`cavity`, for ``divisor`` :func:`fusion_barrier`.
    """
    absorb = fusion_barrier(partial(learn, likelihood), divisor)

    def body(current: ADFState, row: PyTree) -> tuple[ADFState, PyTree]:
        before = cavity(likelihood, current, state.factors, share)
        updated, *records = absorb(before, (row, arrays))
        return updated, records

    without = state._replace(factors={})
    updated, (log_z, refused) = lax.scan(body, without, rows)
    size = sum(weight.loc.size for weight in likelihood.roles.weights.values())
    record = Records(log_z.sum(), refused.mean() / size)
    return updated._replace(factors=state.factors), record, log_z


def refine(likelihood: Likelihood, state: ADFState) -> ADFState:
    """The prior factors of all weights with a hyperparameter."""
    weights, hypers, factors = map(dict, state)
    for name, hyper in likelihood.hyperparameters.items():
        scaled = {n: w for n, w in likelihood.roles.weights.items() if w.hyper == name}
        if not scaled:
            continue
        sites = {n: WeightSite(w, weights[n], factors[n]) for n, w in scaled.items()}
        if isinstance(hypers[name], Gamma):
            refined, hypers[name] = refine_gamma(sites, hypers[name])
        else:
            refined, hypers[name] = refine_normal(sites, hyper)
        for site, (weight, factor) in refined.items():
            weights[site], factors[site] = weight, factor
    return ADFState(weights, hypers, factors)


def _sampled_mean(mask: Array) -> Array:
    """Fraction of True, counted on some slices of the first axis: counting all would
    take a fifth of the time.
    """
    if mask.ndim == 0:
        return mask.astype(float)
    slices = max(1, SAMPLE * mask.shape[0] // mask.size)
    return mask[:: -(-mask.shape[0] // slices)].astype(float).mean()


def fusion_barrier(fn: Callable, divisor: Array) -> Callable:
    """The same function with the operands of outer products divided by one: faster,
    with the same numbers.

    The gradient of a weight matrix is an outer product, and its whole update is
    elementwise in it. XLA on CPUs fuses everything elementwise into one loop, including
    the computation of the two vectors, which it then repeats for every element of the
    matrix. It does not fuse a division that it would have to repeat, and cannot know
    that the divisor is 1, because that is an argument of the program.

    :param fn: a function of arrays, already differentiated.
    :param divisor: the number 1; the same for all runs that are mapped over.
    """

    def product(equation: Equation, *operands: Any) -> Any:
        if np.prod(equation.outputs[0].shape) > max(map(np.size, operands)):
            operands = tuple(operand / divisor for operand in operands)
        return equation.bind(*operands)

    return rewritten(fn, {"dot_general": product})


class Program(NamedTuple):
    """Compiled parts of a run, for one run or for several at once; an epoch also gives
    log Z of each row, (N,) or (R, N), if it has all rows at once.
    """

    start: Callable[[Array, Trees], ADFState]
    epoch: Callable[..., tuple[ADFState, Records, Array | None]]


def build(
    likelihood: Likelihood,
    batched: bool,
    row_axes: PyTree,
    array_axes: PyTree,
    num_rows: int,
) -> Program:
    """Compiled functions of keys, rows and arrays; an epoch is one pass and the
    refinement of the prior.
    """

    def epoch(
        state: ADFState,
        rows: PyTree,
        arrays: PyTree,
        rng_key: Array,
        order: Array,
        share: Array | None,
        divisor: Array,
    ) -> PyTree:
        order = jax.random.permutation(rng_key, num_rows) if order is None else order
        shuffled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[order], rows)
        state, record, log_z = sweep(
            likelihood, state, shuffled, arrays, share, divisor
        )
        by_row = jnp.zeros_like(log_z).at[order].set(log_z)
        return refine(likelihood, state), record, by_row

    begin = partial(first_state, likelihood)
    if batched:
        begin = jax.vmap(begin)
        epoch = jax.vmap(epoch, in_axes=(0, row_axes, array_axes, 0, 0, None, None))

    run_epoch = shared(epoch, is_large=_is_large(likelihood))
    return Program(shared(begin, runs_rarely=True), run_epoch)


def _is_large(likelihood: Likelihood) -> bool:
    """Whether a row, which updates each weight by itself, takes long."""
    weights = likelihood.roles.weights.values()
    return max(weight.loc.size for weight in weights) > MAX_SMALL_WEIGHT


def build_fed(
    likelihood: Likelihood, num_rows: int, columns: Mapping[str, int]
) -> Callable[[Feed], Program]:
    """:func:`build` for rows of any loader of ``num_rows`` rows: an epoch takes as many
    as there are, in parts of one size, so that the last one needs no program of its
    own.

    :param columns: numbers of the parts of a batch by the place of their argument.
    """
    size = min(PART_ROWS, num_rows)

    @partial(shared, is_large=_is_large(likelihood))
    def absorbed(
        state: ADFState,
        rows: PyTree,
        count: Array,
        arrays: PyTree,
        share: Array | None,
        divisor: Array,
    ) -> tuple[ADFState, Array, Array]:
        absorb = fusion_barrier(partial(learn, likelihood), divisor)

        def body(n: Array, carry: tuple) -> tuple:
            state, log_z, refused = carry
            row = {place: column[n] for place, column in rows.items()}
            before = cavity(likelihood, state, factors, share)
            updated, value, bad = absorb(before, (row, arrays))
            return updated, log_z + value, refused + bad

        zero, factors = jnp.zeros(()), state.factors
        start = state._replace(factors={}), zero, zero
        updated, *sums = lax.fori_loop(0, count, body, start)
        return updated._replace(factors=factors), *sums

    refined = shared(partial(refine, likelihood))

    def epoch(
        feed: Feed, state: ADFState, _: object, arrays: PyTree, *rest: PyTree
    ) -> PyTree:
        updated, sums = state, np.zeros(2)
        for start in range(0, num_rows, size):
            count = min(size, num_rows - start)
            parts, rows = feed.take(count).columns, {}
            for place, number in columns.items():
                part = parts[number]
                dtype = np.float64 if part.dtype.kind == "f" else part.dtype
                rows[place] = np.zeros((size, *part.shape[1:]), dtype)
                rows[place][:count] = part
            numbers = np.int32(count), arrays, *rest[-2:]
            updated, *part_sums = absorbed(updated, rows, *numbers)
            sums += np.asarray(part_sums)
        weights = likelihood.roles.weights.values()
        num_weights = sum(weight.loc.size for weight in weights)
        record = Records(jnp.asarray(sums[0]), sums[1] / num_rows / num_weights)
        return refined(updated), record, None

    start = shared(partial(first_state, likelihood), runs_rarely=True)
    return lambda feed: Program(start, partial(epoch, feed))


def run_epochs(
    program: Program,
    state: ADFState,
    data: tuple[Any, Any],
    keys: Array,
    orders: Any,
    shares: np.ndarray | None,
    progress_bar: bool,
    max_refused: float,
    keeper: Keeper | None = None,
) -> tuple[ADFState, Records, np.ndarray | None]:
    """Run one compiled program per epoch, to show progress and lose at most one epoch
    to an interruption.

    ``data`` are rows and other arrays; ``keys``, ``orders`` and ``shares`` (or
    ``None``) hold one entry per epoch. The last part of the result is log Z of each row
    in the last epoch, if one was made on all rows at once.
    """
    num_epochs = keys.shape[0]
    by_row: Array | None = None
    records: list[Records] = []
    warned = False

    def stacked_records() -> Records:
        return jax.tree.map(lambda *leaves: np.stack(leaves, axis=-1), *records)

    if keeper is not None and (saved := keeper.load(state)) is not None:
        state, saved_records = saved
        records = list(
            map(Records, saved_records["log_z"].T, saved_records["refused"].T)
        )
    done = len(records)
    shown = progress_bar and done < num_epochs
    with tqdm.trange(
        max(0, num_epochs - done), total=num_epochs, initial=done, disable=not shown
    ) as bar:
        try:
            for k in (done + step for step in bar):
                of_epoch = jax.tree.map(itemgetter(k), (keys, orders, shares))
                updated, record, log_z = program.epoch(state, *data, *of_epoch, 1.0)
                records.append(jax.device_get(record))
                state, by_row = updated, log_z
                warned = warned or _warn(records[-1], k, max_refused)
                if keeper is not None:
                    keeper.save(state, stacked_records()._asdict(), last=False)
                bar.set_postfix_str(
                    f"log evidence {np.mean(records[-1].log_z):.4g}", refresh=False
                )
        except KeyboardInterrupt:
            if not records:
                raise
            finished = f"{len(records)} of {num_epochs} epochs"
            warnings.warn(
                f"Interrupted: the result is that of {finished}.", stacklevel=outside()
            )
    if keeper is not None:
        keeper.save(state, stacked_records()._asdict(), last=True)
    return state, stacked_records(), jax.device_get(by_row)


def _warn(record: Records, epoch: int, max_refused: float) -> bool:
    share = float(np.max(record.refused))
    if not np.all(np.isfinite(record.log_z)):
        message = (
            f"AutoADF: log Z is not finite in epoch {epoch + 1}; check the scales of "
            f"the data."
        )
    elif share > max_refused:
        message = (
            f"AutoADF refused {share:.1%} of the updates of weights in epoch "
            f"{epoch + 1}, more than {max_refused:.0%}: the approximation is "
            "unreliable. Standardize the data, or choose a likelihood that fits them "
            "better."
        )
    else:
        return False
    warnings.warn(message, stacklevel=outside())
    return True
