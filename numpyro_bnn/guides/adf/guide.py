"""AutoADF: assumed density filtering as a NumPyro guide."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._keys import split
from numpyro_bnn.guides.adf import posterior
from numpyro_bnn.guides.adf.approximation import ADFPosterior
from numpyro_bnn.guides.adf.problem import ADFState, Problem
from numpyro_bnn.guides.adf.rows import Arguments
from numpyro_bnn.guides.adf.run import ADFResult, Program, build, is_batch_of_keys, run_epochs, starting_means
from numpyro_bnn.moments import Gaussian

__all__ = ["AutoADF"]

CALL = "guides.AutoADF"


class AutoADF(ADFPosterior):
    r"""Probabilistic backpropagation: assumed density filtering (ADF) for a NumPyro model with Gaussian weights.

    The posterior is a product of Gaussians, one per weight, and of Gammas for the precisions of weights and noise.
    Data points are absorbed one after the other. Means and variances are carried through the model to
    f_n ~ N(m_f, v_f) (:func:`~numpyro_bnn.moments.propagate`), which gives the normalizer
    Z = \int p(y_n | f) N(f; m_f, v_f) df, and each weight N(m, v) moves to the moments of the exact posterior,

    .. math:: m \leftarrow m + v \frac{d\log Z}{dm}, \qquad
              v \leftarrow v - v^2\Big[\Big(\frac{d\log Z}{dm}\Big)^2 - 2\frac{d\log Z}{dv}\Big].

    An update that would make a variance negative or infinite is refused for that weight. After each epoch the prior
    factors are refined.

    The model may be any NumPyro model in which

    - weights have Normal priors with fixed scale, or scaled by one hyper-site: a Gamma precision (published update),
      or any positive site (by one-dimensional quadrature); centered or not (``w_base``);
    - one site is observed, a row at a time: Normal with noise that is fixed, has a Gamma precision (published
      update) or any other prior; Categorical with logits (pairwise approximation); any other distribution of one
      linear predictor, by quadrature;
    - arrays whose first axis is the number of data points are data; rows do not influence each other.

    It is a NumPyro guide: ``sample_posterior``, ``median``, ``quantiles``, ``Predictive(model, guide=...)`` and
    ``SVI`` (also to go on from its solution, ``init_params=result.params``) work with ``result.params``.

    :param model: a NumPyro model.
    :param prefix: part of the names of parameters, as in :class:`~numpyro.infer.autoguide.AutoNormal`.
    :raises ValueError: when called on data, for a site it cannot handle; the message names it.

    Reference: Hernandez-Lobato & Adams (2015), *Probabilistic backpropagation*; Minka (2001) on ADF.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> pbp = AutoADF(model)
    >>> fit = pbp.run(jax.random.key(0), x, jnp.array([1.0, 2.0]), num_epochs=1, progress_bar=False)
    >>> mean, variance = pbp.predictive_moments(fit.params, x)
    >>> variance.shape
    (2,)
    """

    def __init__(self, model: Callable, *, prefix: str = "auto") -> None:
        if not callable(model):
            raise argument_error(CALL, "model", model, "Pass a NumPyro model, a function.", TypeError)
        super().__init__(model, prefix=prefix)
        self._arguments: Arguments | None = None
        self._programs: dict[Any, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What was read from the model holds programs of JAX, which cannot be stored: it is read again.
        return super().__getstate__() | {"_programs": {}, "_problem": None}

    # -- learning --------------------------------------------------------------------------------------

    def run(
        self,
        rng_key: jax.Array,
        *args: Any,
        num_epochs: int = 40,
        in_axes: Sequence[int | None] | None = None,
        init_means: Mapping[str, Any] | None = None,
        init_state: ADFState | None = None,
        orders: Any = None,
        progress_bar: bool = True,
        max_refused: float = 0.05,
        **kwargs: Any,
    ) -> ADFResult:
        """Learn from data in ``num_epochs`` shuffled passes, in float64 whatever the global setting.

        With R keys it makes R runs at once, of the same data or, with ``in_axes``, of R data sets of one shape.
        Interrupting it from the keyboard returns what the finished epochs gave.

        :param rng_key: a key for the start and the order of the data, or R keys.
        :param args: arguments of the model, targets included.
        :param num_epochs: passes over the data.
        :param in_axes: for R keys, the axis of each positional argument that runs over the data sets, ``None`` for
            what they share.
        :param init_means: means to start from, by weight site (with a leading axis R for R runs); by default
            N(prior mean, prior variance / fan-in).
        :param init_state: ``result.state`` of an earlier run to go on from.
        :param orders: order of the rows in each epoch, (E, N), or (R, E, N), instead of random ones.
        :param progress_bar: show a bar that counts epochs.
        :param max_refused: warn when a larger share of the updates of weights is refused in an epoch.
        :param kwargs: keyword arguments of the model.
        :return: an :class:`ADFResult`.
        :raises ValueError: for a model, data or options it cannot use.
        """
        _check_options(num_epochs, max_refused)
        batched = is_batch_of_keys(rng_key)
        _check_staged("run", rng_key, args, kwargs)
        with jax.enable_x64(True):
            program, data, num_rows = self._prepare(args, kwargs, batched, in_axes)
            start_key, order_key = split(rng_key)
            state = init_state
            if state is None:
                state = program.start(start_key, starting_means(init_means))
            keys = split(order_key, num_epochs)
            orders = _checked_orders(orders, num_epochs, num_rows, batched)
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((data, rng_key))):
                state, record = program.whole(state, *data, keys, orders, 1.0)
                records = record if not batched else jax.tree.map(jnp.transpose, record)
            else:
                state, records = run_epochs(program, state, data, keys, orders, progress_bar, max_refused)
                state = jax.device_get(state)
            params = posterior.to_params(state, self.prefix)
        # Out here the parameters take the precision of the session; the state keeps its own.
        params = {name: jnp.asarray(value, float) for name, value in params.items()}
        return ADFResult(
            params, state, -jnp.asarray(records.log_z, float), jnp.asarray(records.refused, float)
        )

    def update(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        """Absorb further data, in the order given: what the guide knew becomes the prior.

        :param params: of a run of this guide, or of an earlier update.
        :param args: arguments of the model, with new data of any number of rows.
        :return: new parameters.
        :raises ValueError: before the first ``run``, and for data unlike those of the run.
        """
        _check_staged("update", params, args, kwargs)
        with jax.enable_x64(True):
            arguments = self._new_arguments("update", args, kwargs)
            problem, sweep = self._compiled("sweep", arguments, lambda problem: jax.jit(problem.sweep))
            state = self._state(params, problem)
            state, _ = sweep(state, arguments.part("row"), arguments.part("array"), 1.0)
            new = posterior.to_params(state, self.prefix)
        return {name: jnp.asarray(value, jnp.asarray(params[name]).dtype) for name, value in new.items()}

    def predictive_moments(
        self, params: Mapping[str, Any], *args: Any, noise: bool = True, **kwargs: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each observation under the posterior, without sampling.

        For a Categorical observation they are those of the K class indicators, or with ``noise=False`` of the K class
        probabilities.

        :param params: of a run.
        :param args: arguments of the model; targets may be left out.
        :param noise: include the variance of the observation given the network.
        :return: mean and variance, each (N,), or (N, K) for K outputs or classes.
        """
        _check_staged("predictive_moments", params, args, kwargs)
        with jax.enable_x64(True):
            arguments = self._new_arguments("predictive_moments", args, kwargs)

            def make(problem: Problem) -> Callable:
                def one(state: ADFState, row: Any, arrays: Any) -> Gaussian:
                    context = problem.context(state, row, arrays)
                    quantities = problem.likelihood.observation.quantities(state.weights, context)
                    found = problem.likelihood.predictive(quantities, state.others, context, noise)
                    return Gaussian(*(part[0] for part in found))

                return jax.jit(jax.vmap(one, in_axes=(None, 0, None)))

            problem, predict = self._compiled(f"predict {noise}", arguments, make, with_value=False)
            found = predict(self._state(params, problem), arguments.part("row"), arguments.part("array"))
        return jnp.asarray(found.mean, float), jnp.asarray(found.var, float)

    def log_predictive_density(self, params: Mapping[str, Any], *args: Any, **kwargs: Any) -> jax.Array:
        """log p(y_n | x_n) of each data point, the likelihood averaged over the posterior without sampling.

        :param params: of a run.
        :param args: arguments of the model, targets included.
        :return: (N,), summed over the K outputs of one point.
        """
        _check_staged("log_predictive_density", params, args, kwargs)
        with jax.enable_x64(True):
            arguments = self._new_arguments("log_predictive_density", args, kwargs)

            def make(problem: Problem) -> Callable:
                def one(state: ADFState, row: Any, arrays: Any) -> jax.Array:
                    return problem.log_density(state, row, arrays)

                return jax.jit(jax.vmap(one, in_axes=(None, 0, None)))

            problem, score = self._compiled("score", arguments, make)
            found = score(self._state(params, problem), arguments.part("row"), arguments.part("array"))
        return jnp.asarray(found, float)

    # -- preparation -----------------------------------------------------------------------------------

    def _prepare(
        self, args: tuple, kwargs: Any, batched: bool, in_axes: Any
    ) -> tuple[Program, tuple[Any, Any], int]:
        axes = _axes(args, in_axes, batched)
        first = tuple(
            arg
            if axis is None
            else jax.tree.map(lambda leaf, a=axis: jnp.take(jnp.asarray(leaf), 0, axis=a), arg)
            for arg, axis in zip(args, axes, strict=True)
        )
        arguments = Arguments.read(self.model, first, kwargs)
        arguments.check(f"{CALL}.run")
        mapped = Arguments.of(self.model, args, kwargs)
        labels = Arguments.of(
            self.model,
            tuple(jax.tree.map(lambda _, a=axis: str(a), arg) for arg, axis in zip(args, axes, strict=True)),
            {},
        )
        axis_of = {n: int(a) for n, a in zip(labels.names, labels.leaves, strict=True) if a != "None"}
        if axis_of:
            mapped.check(f"{CALL}.run")
        leaves = dict(zip(mapped.names, mapped.leaves, strict=True))
        rows = {name: leaves[name] for name in arguments.part("row")}
        arrays = {name: leaves[name] for name in arguments.part("array")}
        row_axes, array_axes = ({n: axis_of.get(n) for n in part} for part in (rows, arrays))
        num_rows = arguments.num_rows

        def make(problem: Problem) -> Program:
            return build(problem, batched, row_axes, array_axes, num_rows)

        problem, program = self._compiled(("run", batched, tuple(axis_of.items())), arguments, make)
        self._problem, self._arguments = problem, arguments.head()
        self._setup_prototype(*first, **kwargs)
        return program, (rows, arrays), num_rows

    def _compiled(
        self, purpose: Any, arguments: Arguments, make: Callable, with_value: bool = True
    ) -> tuple[Problem, Any]:
        """The model read for these arguments and what ``make`` makes of it, remembered by their shapes."""
        key = (purpose, arguments.key)
        if key not in self._programs:
            known = self._known_problem() if purpose[0] != "run" else None
            problem = Problem.of(arguments, known, with_value)
            self._programs[key] = problem, make(problem)
        return self._programs[key]

    def _read(self, args: tuple, kwargs: Any) -> None:
        """Read the model from the arguments of a call, without learning."""
        with jax.enable_x64(True):
            arguments = Arguments.read(self.model, args, kwargs)
            self._problem, self._arguments = Problem.of(arguments), arguments.head()

    def _new_arguments(self, method: str, args: tuple, kwargs: Any) -> Arguments:
        if self._arguments is None:
            raise argument_error(
                f"{CALL}.{method}",
                "params",
                "those of another guide",
                "Call `run` of this guide first: it reads the model.",
            )
        arguments = self._arguments.like(args, kwargs, f"{CALL}.{method}")
        arguments.check(f"{CALL}.{method}")
        return arguments

    def _state(self, params: Mapping[str, Any], problem: Problem) -> ADFState:
        return posterior.from_params(params, problem.sites.weights, problem.others, self.prefix)


def _check_staged(method: str, *values: Any) -> None:
    """Refuse to be compiled into a float32 program, which would cut float64 numbers without a word."""
    if jnp.result_type(float) == jnp.float64:
        return
    for leaf in jax.tree.leaves(values):
        while type(leaf).__name__ == "BatchTracer":  # it holds the value of the transformation outside
            leaf = leaf.val
        if isinstance(leaf, jax.core.Tracer):
            raise argument_error(
                f"{CALL}.{method}",
                "args",
                "values of a compiled float32 program",
                "Call it outside `jax.jit`, or set `jax_enable_x64`; `jax.vmap` alone needs neither.",
            )


def _check_options(num_epochs: Any, max_refused: Any) -> None:
    if not isinstance(num_epochs, int) or isinstance(num_epochs, bool) or num_epochs < 1:
        raise argument_error(f"{CALL}.run", "num_epochs", num_epochs, "Pass a whole number of at least 1.")
    if not isinstance(max_refused, int | float) or not 0 <= max_refused <= 1:
        raise argument_error(f"{CALL}.run", "max_refused", max_refused, "Pass a share between 0 and 1.")


def _axes(args: tuple, in_axes: Any, batched: bool) -> tuple[int | None, ...]:
    """The mapped axis of each positional argument."""
    if in_axes is None:
        return (None,) * len(args)
    if not batched:
        raise argument_error(
            f"{CALL}.run", "in_axes", in_axes, "It needs one key per data set: `jax.random.split(key, R)`."
        )
    good = isinstance(in_axes, tuple | list) and len(in_axes) == len(args)
    if not good or any(not (axis is None or isinstance(axis, int)) for axis in in_axes):
        raise argument_error(
            f"{CALL}.run",
            "in_axes",
            in_axes,
            f"Pass an axis or None for each of the {len(args)} positional arguments.",
        )
    return tuple(in_axes)


def _checked_orders(orders: Any, num_epochs: int, num_rows: int, batched: bool) -> jax.Array | None:
    """Orders with the epoch as first axis."""
    if orders is None:
        return None
    shape = np.shape(orders)
    if (
        len(shape) != 2 + batched
        or shape[-2] != num_epochs
        or not np.array_equal(
            np.sort(np.asarray(orders), axis=-1), np.broadcast_to(np.arange(num_rows), shape)
        )
    ):
        raise argument_error(
            f"{CALL}.run",
            "orders",
            f"shape {shape}",
            f"Pass {'(R, E, N)' if batched else '(E, N)'}: E = {num_epochs} permutations of N = {num_rows} rows.",
        )
    return jnp.swapaxes(jnp.asarray(orders), 0, 1) if batched else jnp.asarray(orders)
