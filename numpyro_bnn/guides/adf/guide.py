"""AutoADF: assumed density filtering as a NumPyro guide."""

import hashlib
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, check_finite, outside
from numpyro_bnn._keys import key_numbers, split
from numpyro_bnn._options import (
    Choice,
    Fraction,
    Kind,
    Model,
    PositiveInt,
    Prefix,
    RandomKey,
    Switch,
    checked,
)
from numpyro_bnn._types import Arrays, Attributes, Kwargs, PyTree, Trees
from numpyro_bnn.guides.adf.approximation import ADFPosterior
from numpyro_bnn.guides.adf.likelihoods import Likelihood, Point
from numpyro_bnn.guides.adf.moment_matching import ADFState
from numpyro_bnn.guides.adf.problem import (
    Program,
    build,
    build_fed,
    read_problem,
    run_epochs,
    sweep,
)
from numpyro_bnn.guides.adf.reading import CALL, Data, Values
from numpyro_bnn.guides.fitting import Keeper
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics._inputs import spread
from numpyro_bnn.metrics.left_out import (
    MAX_ROWS,
    MIN_ROWS_OF_FORMULAS,
    unless_interrupted,
    warn_if_behind,
)
from numpyro_bnn.program.arguments import Arguments, as_arrays
from numpyro_bnn.program.batches import Column, feeds_in, refuse_feeds
from numpyro_bnn.program.compiled import is_traced, shared
from numpyro_bnn.program.row_lengths import check_row_lengths
from numpyro_bnn.program.rows import with_head

MAX_RISE_NATS = 0.05  # of a row, from the first epoch to the last
INSTEAD_OF_MISFIT = "Take `priors.Normal()` or fewer layers, or use another guide."


class ADFResult(NamedTuple):
    """Result of :meth:`AutoADF.run`; its fields begin like those of NumPyro's
    ``SVIRunResult``.

    :param params: parameters of the guide by name, as all its methods take them.
    :param state: the same in float64, with the approximate prior factors; pass it to a
        later ``run`` to continue.
    :param losses: minus the log evidence of each epoch, (E,) or (R, E).
    :param refused: fraction of refused updates in each epoch, (E,) or (R, E).
    """

    params: dict[str, Array]
    state: ADFState
    losses: Array
    refused: Array


class AutoADF(ADFPosterior):
    r"""Fit a network in closed form, with nothing to tune: probabilistic
    backpropagation, which is assumed density filtering (ADF) for Gaussian weights.

    The posterior is a product of Gaussians, one per weight, and of Gammas for the
    precisions of weights and noise. Data points are absorbed one at a time. Means and
    variances are propagated through the model to f_n ~ N(m_f, v_f)
    (:func:`~numpyro_bnn.moments.propagate`), which gives the normalizer Z = \int p(y_n
    | f) N(f; m_f, v_f) df, and each weight N(m, v) is set to the moments of the exact
    posterior,

    .. math:: m \leftarrow m + v \frac{d\log Z}{dm}, \qquad
              v \leftarrow v - v^2\Big[\Big(\frac{d\log Z}{dm}\Big)^2
              - 2\frac{d\log Z}{dv}\Big].

    An update that would make a variance negative or infinite is refused for that
    weight. After each epoch the prior factors are refined.

    The model may be any NumPyro model in which

    - weights have Normal priors (others on the real line are represented by mean and
      sd) with a fixed scale or one hyperparameter that scales them: a Gamma precision
      (published update) or any positive site (by one-dimensional quadrature); centered
      or not (``w_base``);
    - one site is observed, one row at a time: Normal with noise that is fixed, has a
      Gamma precision (published update) or any other prior; Categorical with logits
      (pairwise approximation); any other distribution whose parameters depend on one
      linear predictor, by quadrature; masked observations are left out;
    - arrays whose first axis is the number of data points are data; rows do not
      influence each other.

    It is a NumPyro guide: ``sample_posterior``, ``median``, ``quantiles``,
    ``Predictive(model, guide=...)`` and ``SVI`` (which can continue from it:
    ``init_params=result.params``) work with ``result.params``.

    :param model: a NumPyro model.
    :param prefix: part of the names of parameters, as in
        :class:`~numpyro.infer.autoguide.AutoNormal`.
    :raises ValueError: when it reads the model, for a site it cannot handle; the
        message names the site.

    Reference: Hernandez-Lobato & Adams (2015), *Probabilistic backpropagation*; Minka
    (2001) on ADF; Li, Hernandez-Lobato & Turner (2015) on ``recount=False``.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> pbp = AutoADF(model)
    >>> fit = pbp.run(
    ...     jax.random.key(0),
    ...     x,
    ...     jnp.array([1.0, 2.0]),
    ...     num_epochs=1,
    ...     progress_bar=False,
    ... )
    >>> mean, variance = pbp.predictive_moments(fit.params, x)
    >>> variance.shape
    (2,)
    """

    @checked("guides.{}")
    def __init__(self, model: Model, *, prefix: Prefix = "auto") -> None:
        super().__init__(model, prefix=prefix)
        self._programs: dict[Hashable, Any] = {}
        self._counted: dict[bytes, bytes] = {}  # digests of states, and of their rows

    def __getstate__(self) -> Attributes:
        # Compiled JAX programs cannot be pickled, so the model is read again.
        return super().__getstate__() | {"_programs": {}, "_problem": None}

    @checked(f"{CALL}.run")
    def run(
        self,
        rng_key: RandomKey,
        *args: Any,
        num_epochs: PositiveInt = 40,
        in_axes: Sequence[int | None] | None = None,
        init_means: Values | None = None,
        init_state: Annotated[
            ADFState,
            Kind(ADFState, "Pass the `state` of an earlier run of this guide."),
        ]
        | None = None,
        orders: ArrayLike | None = None,
        progress_bar: Switch = True,
        recount: Switch | None = None,
        max_refused: Fraction = 0.05,
        keeper: Keeper | None = None,
        **kwargs: Any,
    ) -> ADFResult:
        """Fit to data in ``num_epochs`` shuffled passes, in float64 whatever the global
        setting.

        With R keys it makes R runs at once, on the same data or, with ``in_axes``, on R
        data sets of the same shape. A keyboard interrupt returns the result of the
        finished epochs.

        It warns (:class:`~numpyro_bnn.metrics.HealthWarning`) if the last epoch
        predicts its rows clearly worse than the first, or than a constant or a linear
        model predicts them from the others. The first epoch is not compared with these:
        each of its rows is predicted from those before.

        :param rng_key: a key for the start and the order of the data, or R keys.
        :param args: arguments of the model, targets included.
        :param num_epochs: passes over the data.
        :param in_axes: for R keys, the axis of each positional argument that runs over
            the data sets, ``None`` for arguments they share.
        :param init_means: initial means by weight site (with a leading axis R for R
            runs); by default N(prior mean, prior variance / fan-in).
        :param init_state: ``result.state`` of an earlier run, to continue it.
        :param orders: order of the rows in each epoch, (E, N), or (R, E, N), instead of
            random ones.
        :param progress_bar: show a progress bar over epochs.
        :param recount: whether each epoch counts the rows again, as published: it
            learns more of data with little noise, and is too sure of others. Without,
            one Nth of the likelihood is taken out before each row of a later epoch
            (stochastic expectation propagation), and the last of ``losses`` is about
            that of leaving each row out if there are many. By default only for noise
            with a Gamma precision.
        :param max_refused: warn if a larger fraction of the weight updates is refused
            in an epoch.
        :param keeper: where the epochs are kept; :func:`numpyro_bnn.runs.fit` passes
            one.
        :param kwargs: keyword arguments of the model.
        :return: an :class:`ADFResult`.
        :raises ValueError: for a model, data or options it cannot use.
        """
        typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
        batched = jnp.ndim(rng_key) == (1 if typed else 2)
        _check_staged("run", rng_key, args, kwargs)
        with jax.enable_x64(True):
            program, data, num_rows = self._prepare(args, kwargs, batched, in_axes)
            start_key, order_key = split(rng_key)
            state: PyTree = init_state
            if state is None:
                state = program.start(start_key, self._checked_means(init_means or {}))
            keys = split(order_key, num_epochs)
            if orders is not None:
                reason = "it has its own order"
                refuse_feeds(f"{CALL}.run", "orders", reason, args, kwargs)
            orders = _checked_orders(orders, num_epochs, num_rows, batched)
            records: PyTree
            if recount is None:  # as published, for the noise that was published
                recount = self._known_problem().gamma is not None
            shares = None
            if not recount:
                shares = self._shares(num_epochs, num_rows, init_state, data[0])
            if is_traced((data, rng_key)):

                def epoch(state: ADFState, of_epoch: tuple) -> tuple:
                    return program.epoch(state, *data, *of_epoch, 1.0)[:2]

                state, records = jax.lax.scan(epoch, state, (keys, orders, shares))
                if batched:
                    records = jax.tree.map(jnp.transpose, records)
            else:
                state, records, by_row = run_epochs(
                    program,
                    state,
                    data,
                    keys,
                    orders,
                    shares,
                    progress_bar,
                    max_refused,
                    keeper,
                )
                state = jax.device_get(state)
                if data[0]:  # a loader's are not known
                    self._counted[_digest(state)] = _digest(data[0])
                risen = _warn_of_rise(-records.log_z / num_rows)
                # The first epoch predicts each row from those before, and not from all.
                is_later = init_state is not None or records.log_z.shape[-1] > 1
                if is_later and not risen and by_row is not None:
                    call = f"{CALL}.run"
                    unless_interrupted(call, self._check_rows, by_row, *data)
            params = self._to_params(state)
        # Parameters have the session's precision; the state stays in float64.
        params, losses, refused = jax.tree.map(
            _narrow, (params, -records.log_z, records.refused)
        )
        return ADFResult(params, state, losses, refused)

    def _shares(
        self, num_epochs: int, num_rows: int, init_state: PyTree, rows: Trees
    ) -> np.ndarray:
        """Of the likelihood, taken out before each row of an epoch.

        Other rows than those of the first state are refused: their likelihood is not in
        it.
        """
        shares = np.full(num_epochs, 1 / num_rows)
        if init_state is None:
            shares[0] = 0.0  # no row is counted yet
            return shares
        if not rows or is_traced((init_state, rows)):
            return shares
        counted = self._counted.get(_digest(init_state))
        if counted is not None and counted != _digest(rows):
            instead = (
                "Without `recount` a share of their likelihood is taken out first, "
                "which these rows have not put in: pass `recount=True`, or learn from "
                "further rows by `update(params, ...)`."
            )
            raise argument_error(
                f"{CALL}.run", "init_state", "the state of a run on other rows", instead
            )
        return shares

    def _check_rows(self, scores: np.ndarray, rows: Trees, arrays: Trees) -> None:
        """Warn of a run that predicts its rows, (N,) or (R, N) log scores, worse than
        the simplest models predict them from the others.
        """
        likelihood, head = self._known_problem(), self._data
        places = spread(scores.shape[-1], MAX_ROWS)
        if head is None or len(places) < MIN_ROWS_OF_FORMULAS:
            return
        names = likelihood.inputs(head.first)
        observed = shared(
            jax.vmap(lambda *row: likelihood.observed(row), in_axes=(0, None)),
            runs_rarely=True,
        )
        for run, by_row in enumerate(np.atleast_2d(scores)):
            of_run = partial(_of_run, run)
            run_rows = {
                place: leaf[places] for place, leaf in of_run(rows, head.rows).items()
            }
            value, mask = observed(run_rows, of_run(arrays, head.arrays))
            complete = np.asarray(mask).reshape(len(places), -1).all(axis=1)
            if warn_if_behind(
                f"{CALL}.run",
                by_row[places][complete],
                [np.asarray(run_rows[name])[complete] for name in sorted(names)],
                np.asarray(value)[complete],
                likelihood.base,
                INSTEAD_OF_MISFIT,
            ):
                return

    def _checked_means(self, init_means: Values) -> Arrays:
        means = {}
        known = Choice(self._known_problem().roles.weights)
        for name, mean in init_means.items():
            known.check(f"{CALL}.run", "init_means", name)
            check_finite(f"{CALL}.run", f"init_means[{name!r}]", mean)
            means[name] = jnp.asarray(mean, jnp.float64)
        return means

    def update(self, params: Values, *args: Any, **kwargs: Any) -> dict[str, Array]:
        """Learn from further data, in the order given: the current posterior becomes
        the prior.

        :param params: parameters from a run of this guide, or from an earlier update.
        :param args: arguments of the model, with new data of any number of rows.
        :return: new parameters.
        :raises ValueError: before the first ``run``, and for data that do not match
            those of the run.
        """

        def learned(likelihood: Likelihood, *inputs: PyTree) -> Arrays:
            return self._to_params(sweep(likelihood, *inputs)[0])

        more = None, 1.0
        new = self._on_new_data("update", params, args, kwargs, learned, more=more)
        return {
            name: jnp.asarray(value, jnp.asarray(params[name]).dtype)
            for name, value in new.items()
        }

    @checked(f"{CALL}.predictive_moments")
    def predictive_moments(
        self, params: Values, *args: Any, noise: Switch = True, **kwargs: Any
    ) -> tuple[Array, Array]:
        """Mean and variance of each observation under the posterior, without sampling.

        For a Categorical observation these are moments of the K class indicators, or
        with ``noise=False`` of the K class probabilities.

        :param params: parameters from a run.
        :param args: arguments of the model; targets may be left out.
        :param noise: include the variance of the observation given the network.
        :return: mean and variance, each (N,), or (N, K) for K outputs or classes.
        """

        fn = _by_row(lambda likelihood, point: likelihood.predictive(point, noise))
        moments = self._on_new_data(
            "predictive_moments", params, args, kwargs, fn, noise
        )
        return jnp.asarray(moments.mean, float), jnp.asarray(moments.var, float)

    def log_predictive_density(
        self, params: Values, *args: Any, **kwargs: Any
    ) -> Array:
        """log p(y_n | x_n) of each data point: the likelihood averaged over the
        posterior, without sampling.

        :param params: parameters from a run.
        :param args: arguments of the model, targets included.
        :return: (N,), summed over the K outputs of one point.
        """
        fn = _by_row(lambda likelihood, point: likelihood.log_z(point).sum())
        density = self._on_new_data("log_predictive_density", params, args, kwargs, fn)
        return jnp.asarray(density, float)

    def _prepare(
        self, args: tuple, kwargs: Kwargs, batched: bool, in_axes: PyTree
    ) -> tuple[Program, tuple[Trees, Trees], int]:
        """The compiled run of these arguments, its data, and the number of rows."""
        call = f"{CALL}.run"
        args, kwargs = as_arrays(args, kwargs, call)
        if feeds_in(args, kwargs):
            if batched:
                reason = "several runs at once would share it"
                refuse_feeds(call, "rng_key", reason, args, kwargs)
            return self._prepare_fed(args, kwargs)
        first, stacked = list(args), list(args)
        for k, axis in enumerate(_axes(args, in_axes, batched)):
            if axis is not None:
                in_front = partial(jnp.moveaxis, source=axis, destination=0)
                stacked[k] = jax.tree.map(in_front, args[k])
                first[k] = jax.tree.map(lambda leaf: leaf[0], stacked[k])
        check_row_lengths(call, self.model, tuple(first), kwargs)
        data, reading = Data.read(self.model, tuple(first), kwargs)
        every = Data.of(self.model, tuple(stacked), kwargs, data.rows)
        every.check(call)
        axes = _set_axes(data.rows, every.rows), _set_axes(data.arrays, every.arrays)
        key = "run", batched, str(axes), data.key
        if key not in self._programs:
            problem = read_problem(data, reading)
            program = build(problem, batched, *axes, data.num_rows)
            self._programs[key] = problem, program
        self._problem, program = self._programs[key]
        self._remember(data, reading, tuple(first), kwargs)
        return program, (every.rows, every.arrays), data.num_rows

    def _prepare_fed(
        self, args: tuple, kwargs: Kwargs
    ) -> tuple[Program, tuple[Trees, Trees], int]:
        """:meth:`_prepare` for rows of a loader, of which the first ones are read."""
        call, columns = f"{CALL}.run", {}
        for place, leaf in Arguments.of(args, kwargs, self.model).leaves.items():
            if isinstance(leaf, Column):
                columns[place] = leaf
        feed, *others = feeds_in(args, kwargs)
        heads = with_head({"args": args, "kwargs": kwargs})
        args, kwargs = heads["args"], heads["kwargs"]
        reading = Data.read(self.model, args, kwargs)[1]
        data = Data.of(self.model, args, kwargs, columns)
        lengths = {np.shape(array)[:1] for array in data.arrays.values()}
        if others or (feed.num_rows,) in lengths:
            reason = "other data with one row per data point have another order"
            refuse_feeds(call, "args", reason, list(columns.values()))
        data.check(call)
        numbers = {place: column.number for place, column in columns.items()}
        key = "fed", feed.num_rows, tuple(numbers.items()), data.key
        if key not in self._programs:
            problem = read_problem(data, reading)
            program_of = build_fed(problem, feed.num_rows, numbers)
            self._programs[key] = problem, program_of
        self._problem, program_of = self._programs[key]
        self._remember(data, reading, args, kwargs)
        return program_of(feed), ({}, data.arrays), feed.num_rows

    def _on_new_data(
        self,
        method: str,
        params: PyTree,
        args: tuple,
        kwargs: Kwargs,
        fn: Callable,
        option: PyTree = None,
        more: tuple = (),
    ) -> PyTree:
        """``fn(likelihood, state, rows, arrays, *more)`` of new data, compiled in
        float64.

        :param option: what ``fn`` depends on besides.
        """
        _check_staged(method, params, args, kwargs)
        call = f"{CALL}.{method}"
        if self._data is None:
            instead = "Call `run` of this guide first, so that it reads the model."
            raise argument_error(call, "params", "those of another guide", instead)
        with jax.enable_x64(True):
            data = self._data.like(*as_arrays(args, kwargs, call), call)
            data.check(call)
            key = method, option, data.key
            if key not in self._programs:
                with_value = method != "predictive_moments"
                likelihood = self._known_problem().on(data, with_value)
                self._programs[key] = jax.jit(partial(fn, likelihood))
            state = self._from_params(params)
            return self._programs[key](state, data.rows, data.arrays, *more)


def _digest(tree: PyTree) -> bytes:
    """A digest of the values of arrays, whatever their types."""
    hashed = hashlib.blake2b()
    for leaf in jax.tree.leaves(tree):
        hashed.update(np.asarray(key_numbers(leaf), np.float64).tobytes())
    return hashed.digest()


def _by_row(fn: Callable[[Likelihood, Point], PyTree]) -> Callable:
    """A function of one data point, for each row."""

    def of_rows(
        likelihood: Likelihood, state: ADFState, rows: PyTree, arrays: PyTree
    ) -> PyTree:
        def of_row(row: PyTree) -> PyTree:
            return fn(likelihood, likelihood.point(state, (row, arrays)))

        return jax.vmap(of_row)(rows)

    return of_rows


def _check_staged(method: str, *values: PyTree) -> None:
    """Refuse to be compiled into a float32 program, which would silently truncate
    float64 numbers.
    """
    if jnp.result_type(float) == jnp.float64:
        return
    for leaf in jax.tree.leaves(values):
        while type(leaf).__name__ == "BatchTracer":
            # it holds the value of the outer transformation
            leaf = leaf.val
        if isinstance(leaf, jax.core.Tracer):
            instead = (
                "Call it outside `jax.jit`, or set `jax_enable_x64`; `jax.vmap` alone "
                "needs neither."
            )
            raise argument_error(
                f"{CALL}.{method}",
                "args",
                "values of a compiled float32 program",
                instead,
            )


def _set_axes(of_one: Values, of_all: Values) -> dict[str, int | None]:
    """Where the axis of data sets lies in each array."""
    axes: dict[str, int | None] = {}
    for place, leaf in of_one.items():
        axes[place] = 0 if np.ndim(of_all[place]) > np.ndim(leaf) else None
    return axes


def _narrow(value: object) -> Array:
    """In the precision of the session, converted on the host where the
    number is known.
    """
    concrete = isinstance(value, np.ndarray | np.generic)
    return jnp.asarray(
        np.asarray(value, jnp.result_type(float)) if concrete else value, float
    )


def _of_run(run: int, leaves: Trees, of_one: Trees) -> dict[str, Array]:
    """The arrays of one of several runs."""
    arrays = {}
    for place, leaf in leaves.items():
        shared_by_runs = np.ndim(leaf) == np.ndim(of_one[place])
        arrays[place] = leaf if shared_by_runs else leaf[run]
    return arrays


def _axes(args: tuple, in_axes: PyTree, batched: bool) -> tuple[int | None, ...]:
    if in_axes is None:
        return (None,) * len(args)
    one_each = isinstance(in_axes, tuple | list) and len(in_axes) == len(args)
    if not batched:
        instead = "It needs one key per data set: `jax.random.split(key, R)`."
    elif one_each and all(isinstance(axis, int | None) for axis in in_axes):
        return tuple(in_axes)
    else:
        instead = (
            f"Pass an axis or None for each of the {len(args)} positional arguments."
        )
    raise argument_error(f"{CALL}.run", "in_axes", repr(in_axes), instead)


def _warn_of_rise(losses: Array) -> bool:
    """Of a fit that predicts its rows, (..., E) nats each, worse than the first pass,
    which had not seen them; whether it does.
    """
    rise = float(np.max(losses[..., -1] - losses[..., 0]))
    if rise > MAX_RISE_NATS:
        message = (
            f"{CALL}.run: in the last epoch a row costs {rise:.2g} nats more than in "
            "the first: the fit has failed. Standardize the data, take fewer epochs or "
            "layers, or use another guide."
        )
        warnings.warn(message, HealthWarning, stacklevel=outside())
    return rise > MAX_RISE_NATS


def _checked_orders(
    orders: ArrayLike | None, num_epochs: int, num_rows: int, batched: bool
) -> Array | None:
    """Orders with the epoch as the first axis."""
    if orders is None:
        return None
    shape = np.shape(orders)
    permuted = np.broadcast_to(np.arange(num_rows), (*shape[:-1], num_rows))
    if (
        len(shape) != 2 + batched
        or shape[-2] != num_epochs
        or not np.array_equal(np.sort(np.asarray(orders), axis=-1), permuted)
    ):
        expected = (
            f"{'(R, E, N)' if batched else '(E, N)'}: E = {num_epochs} permutations of "
            f"N = {num_rows} rows"
        )
        raise argument_error(
            f"{CALL}.run", "orders", f"shape {shape}", f"Pass {expected}."
        )
    return jnp.swapaxes(jnp.asarray(orders), 0, 1) if batched else jnp.asarray(orders)
