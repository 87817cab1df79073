"""A model read for ADF, one pass over the data, and epochs as compiled programs."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import lax

from numpyro_bnn._checks import outside
from numpyro_bnn.guides.adf import moment_matching
from numpyro_bnn.guides.adf.likelihoods import Likelihood, noise_powers, sum_to
from numpyro_bnn.guides.adf.moment_matching import Hyperparameter, PriorFactor
from numpyro_bnn.guides.adf.observation import (
    Context,
    check_quantities,
    check_rows,
    observe,
    rewritten,
)
from numpyro_bnn.guides.adf.reading import Data, Roles, find_sites
from numpyro_bnn.guides.fitting import Keeper
from numpyro_bnn.moments import Equation, Gaussian
from numpyro_bnn.program.compiled import shared

# Refused updates are counted on about this many weights of each site.
SAMPLE = 100


class ADFState(NamedTuple):
    """State of a run: the posterior approximation and the approximate prior factors, in
    float64.

    :param weights: means and variances by site.
    :param hyperparameters: the other sites, a ``Gamma`` or a ``Gaussian`` in
        unconstrained space.
    :param factors: approximate prior factor of each weight that has a hyperparameter.
    """

    weights: dict[str, Gaussian]
    hyperparameters: dict[str, Any]
    factors: dict[str, PriorFactor]


class Records(NamedTuple):
    """Records of one pass over the data, or of each epoch: (E,), or (R, E) for R runs
    at once.
    """

    # Sum over the data of log Z, the log density of each point just before it is
    # absorbed. In the first epoch it estimates the log evidence, log p(y); later epochs
    # have already seen the data.
    log_z: jax.Array
    # fraction of refused updates of single weights, counted on a sample of the weights
    refused: jax.Array


@dataclass(frozen=True)
class ADFProblem:
    """A model read for assumed density filtering."""

    sites: Roles
    hyperparameters: Mapping[str, Hyperparameter]
    likelihood: Likelihood  # of one data point

    @classmethod
    def of(
        cls, data: Data, template: "ADFProblem | None" = None, with_value: bool = True
    ) -> "ADFProblem":
        """Read the model from one row of its arguments; if a ``template`` is
        given, take the roles from it.
        """
        rows = jax.tree.map(lambda leaf: leaf[0], data.rows)
        arrays = data.arrays
        if template is None:
            sites = find_sites(data.model, *data.row(rows, arrays))
        else:
            sites = template.sites
        ones = {name: np.ones(fn.shape()) for name, fn in sites.hyperparameters.items()}
        context = {"rows": rows, "arrays": arrays, "hyperparameters": ones}
        observation = observe(data, sites, context, with_value)
        if template is not None:
            return replace(
                template,
                likelihood=replace(template.likelihood, observation=observation),
            )
        hypers = moment_matching.describe(
            sites, noise_powers(observation, sites.noise, context)
        )
        gamma, normals = None, {}
        for name in sites.noise:
            if hypers[name].kind == "gamma":
                gamma = name
            else:
                normals[name] = hypers[name]
        problem = cls(sites, hypers, Likelihood(observation, normals, gamma))
        check_rows(data, sites, ones)
        check_quantities(observation, sites, context)

        def check() -> None:
            state = problem.start(sites.prior_means)
            context = problem.context(state, rows, arrays)
            problem.likelihood.check(state.weights, context)

        jax.eval_shape(check)
        return problem

    def context(self, state: ADFState, rows: Any, arrays: Any) -> Context:
        """Everything that a likelihood depends on except the weights."""
        hypers = self._values(state.hyperparameters)
        return {"rows": rows, "arrays": arrays, "hyperparameters": hypers}

    def _values(self, states: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Typical values of the hyperparameters."""
        hypers = self.hyperparameters.items()
        return {name: hyper.value(states[name]) for name, hyper in hypers}

    def _prior(self) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        """States of the hyperparameters, and at typical values of them the variances of
        the weights.
        """
        hypers = {name: hyper.start() for name, hyper in self.hyperparameters.items()}
        values = self._values(hypers)
        weights = self.sites.weights.items()
        return hypers, {name: weight.prior_sd(values) ** 2 for name, weight in weights}

    def start(self, means: Mapping[str, Any]) -> ADFState:
        """The prior, but with these means of the weights."""
        hypers, variances = self._prior()
        state = ADFState({}, hypers, {})
        for name, var in variances.items():
            state.weights[name] = Gaussian(jnp.asarray(means[name], float), var)
            weight = self.sites.weights[name]
            if weight.hyper is not None:
                zero = jnp.zeros(var.shape)
                state.factors[name] = PriorFactor(
                    1 / var, jnp.asarray(weight.loc) / var, zero, zero
                )
        return state

    def random_means(self, rng_key: jax.Array) -> dict[str, Any]:
        """Means N(loc, prior variance / fan-in), which break the symmetry of the hidden
        units.
        """
        _, variances = self._prior()
        means = {}
        for key, (name, var) in zip(
            jax.random.split(rng_key, len(variances)), variances.items(), strict=True
        ):
            fan_in = np.prod(var.shape[:-1]) if var.ndim > 1 else max(1, var.size)
            noise = jnp.sqrt(var / fan_in) * jax.random.normal(key, var.shape)
            means[name] = jnp.asarray(self.sites.weights[name].loc) + noise
        return means

    def learn(
        self, state: ADFState, rows: Any, arrays: Any
    ) -> tuple[ADFState, jax.Array, jax.Array]:
        """Absorb one data point; also returns its log Z and the number of refused
        updates of weights.
        """
        likelihood = self.likelihood
        context = self.context(state, rows, arrays)
        noise = {name: state.hyperparameters[name] for name in likelihood.noise}

        def log_z(weights: Any, noise: Any) -> tuple[jax.Array, Any]:
            quantities = likelihood.observation.quantities(weights, context)
            hypers = {**state.hyperparameters, **noise}
            return likelihood.log_z(quantities, hypers, context).sum(), quantities

        (value, quantities), gradients = jax.value_and_grad(
            log_z, argnums=(0, 1), has_aux=True
        )(state.weights, noise)
        refused = jnp.zeros(())
        weights = {}
        for name, weight in state.weights.items():
            weights[name], bad = moment_matching.gaussian_update(
                weight, gradients[0][name]
            )
            refused += _sampled_mean(bad) * bad.size
        hypers = dict(state.hyperparameters)
        for name in noise:
            hypers[name] = moment_matching.gaussian_update(
                noise[name], gradients[1][name]
            )[0]
        if likelihood.gamma is not None:
            gamma = state.hyperparameters[likelihood.gamma]
            sums = []
            for order in range(3):
                log_zs = likelihood.log_z(
                    quantities, state.hyperparameters, context, order
                )
                sums.append(sum_to(log_zs, gamma.concentration.shape))
            hypers[likelihood.gamma] = moment_matching.gamma_update(
                gamma, jnp.stack(sums)
            )
        return ADFState(weights, hypers, state.factors), value, refused

    def sweep(
        self, state: ADFState, rows: Any, arrays: Any, divisor: Any
    ) -> tuple[ADFState, Records]:
        """One pass over rows in the order given; for ``divisor`` see
        :func:`fusion_barrier`.
        """

        def body(carry: Any, row: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            def learn(carry: Any, row: Any) -> tuple[ADFState, jax.Array, jax.Array]:
                return self.learn(ADFState(carry[0], carry[1], {}), row, arrays)

            updated, log_z, refused = fusion_barrier(learn, divisor)(carry, row)
            return (updated.weights, updated.hyperparameters), (log_z, refused)

        carry, (log_z, refused) = lax.scan(
            body, (state.weights, state.hyperparameters), rows
        )
        size = sum(weight.loc.size for weight in self.sites.weights.values())
        record = Records(log_z.sum(), refused.mean() / size)
        return ADFState(*carry, state.factors), record

    def log_density(self, state: ADFState, row: Any, arrays: Any) -> jax.Array:
        """log Z of one data point."""
        context = self.context(state, row, arrays)
        quantities = self.likelihood.observation.quantities(state.weights, context)
        return self.likelihood.log_z(quantities, state.hyperparameters, context).sum()

    def predictive(
        self, state: ADFState, row: Any, arrays: Any, noise: bool
    ) -> Gaussian:
        """Mean and variance of the observation of one data point."""
        context = self.context(state, row, arrays)
        quantities = self.likelihood.observation.quantities(state.weights, context)
        moments = self.likelihood.predictive(
            quantities, state.hyperparameters, context, noise
        )
        observation = self.likelihood.observation

        def single(moment: jax.Array) -> jax.Array:
            if observation.kind != "categorical":
                # one number may be the predictor of all
                shape = jnp.broadcast_shapes(moment.shape, observation.shape, (1,))
                moment = jnp.broadcast_to(moment, shape)
            return moment[0]

        return jax.tree.map(single, moments)

    def refine(self, state: ADFState) -> ADFState:
        """The prior factors of all weights with a hyperparameter."""
        weights, hypers, factors = map(dict, state)
        sites = self.sites.weights
        for name, hyper in self.hyperparameters.items():
            names = [site for site, weight in sites.items() if weight.hyper == name]
            if names:
                new, factor, hypers[name] = moment_matching.refine(
                    names, sites, weights, factors, hyper, hypers[name]
                )
                weights |= new
                factors |= factor
        return ADFState(weights, hypers, factors)


def _sampled_mean(mask: jax.Array) -> jax.Array:
    """Fraction of True, counted on some slices of the first axis: counting all would
    take a fifth of the time.
    """
    if mask.ndim == 0:
        return mask.astype(float)
    slices = max(1, SAMPLE * mask.shape[0] // mask.size)
    return mask[:: -(-mask.shape[0] // slices)].astype(float).mean()


def fusion_barrier(fn: Callable, divisor: jax.Array) -> Callable:
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
    """Compiled parts of a run, for one run or for several at once."""

    start: Callable[[jax.Array, Any], ADFState]
    epoch: Callable[..., tuple[ADFState, Records]]
    all_epochs: Callable[..., tuple[ADFState, Records]]


def build(
    problem: ADFProblem, batched: bool, row_axes: Any, array_axes: Any, num_rows: int
) -> Program:
    """Compiled functions of keys, rows and arrays; an epoch is one pass and the
    refinement of the prior.
    """

    def start(rng_key: jax.Array, means: Any) -> ADFState:
        return problem.start({**problem.random_means(rng_key), **means})

    def epoch(
        state: ADFState,
        rows: Any,
        arrays: Any,
        rng_key: jax.Array,
        order: Any,
        divisor: Any,
    ) -> Any:
        order = jax.random.permutation(rng_key, num_rows) if order is None else order
        shuffled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[order], rows)
        state, record = problem.sweep(state, shuffled, arrays, divisor)
        return problem.refine(state), record

    if batched:
        start = jax.vmap(start, in_axes=(0, 0))
        epoch = jax.vmap(epoch, in_axes=(0, row_axes, array_axes, 0, 0, None))

    def all_epochs(
        state: ADFState,
        rows: Any,
        arrays: Any,
        keys: jax.Array,
        orders: Any,
        divisor: Any,
    ) -> Any:
        return lax.scan(
            lambda s, by_epoch: epoch(s, rows, arrays, *by_epoch, divisor),
            state,
            (keys, orders),
        )

    return Program(shared(start, once=True), shared(epoch), shared(all_epochs))


def run_epochs(
    program: Program,
    state: ADFState,
    data: tuple[Any, Any],
    keys: jax.Array,
    orders: Any,
    progress_bar: bool,
    max_refused: float,
    keeper: Keeper | None = None,
) -> tuple[ADFState, Records]:
    """Run one compiled program per epoch, to show progress and lose at most one epoch
    to an interruption.

    ``data`` are rows and other arrays; ``keys`` and ``orders`` (or ``None``) hold one
    entry per epoch.
    """
    num_epochs = keys.shape[0]
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
                order = None if orders is None else orders[k]
                updated, record = program.epoch(state, *data, keys[k], order, 1.0)
                records.append(jax.device_get(record))
                state = updated
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
    return state, stacked_records()


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
