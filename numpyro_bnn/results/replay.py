"""Call a model again: its arguments by name, and its sites at every posterior draw, in
chunks.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import tqdm

from numpyro_bnn._checks import (
    argument_error,
    check_finite,
    check_same_length,
    unknown_name,
)
from numpyro_bnn._distributions import is_factor, unmasked_elements, unwrapped
from numpyro_bnn.networks import record_statistics, use_statistics
from numpyro_bnn.program import compiled
from numpyro_bnn.program.arguments import Arguments, Call, as_numpy
from numpyro_bnn.program.axes import Counted
from numpyro_bnn.program.plates import PARAMETERS, full_trace, unobserved
from numpyro_bnn.program.reading import Sites

CALL = "to_inference_data"
# Draws of which this many times more would fit into the memory of a chunk are few.
FEW_DRAWS_FACTOR = 4
# Seconds after which a progress bar appears.
SECONDS_WITHOUT_BAR = 3

# Observations that are censored: values are those of the distribution inside.
CENSORED = (
    dist.LeftCensoredDistribution,
    dist.RightCensoredDistribution,
    dist.IntervalCensoredDistribution,
)

Draws = Mapping[str, Any]


def bind(
    model: Callable, args: tuple, kwargs: Mapping[str, Any], call: str = CALL
) -> Arguments:
    """The arguments of a call by name, in the precision in which they were passed."""
    try:
        return Arguments.of(*as_numpy(args, kwargs), model)
    except TypeError as error:
        instead = "Pass the arguments of the model, as in the run."
        raise argument_error(
            call, "args", f"other arguments than the model takes ({error})", instead
        ) from error


def for_prediction(
    arguments: Arguments,
    new: Mapping[str, Any],
    observed: set[str],
    affecting: Callable[[], Collection[str]] = tuple,
    counts: Callable[[], Counted] = Counted,
) -> Arguments:
    """Arguments of a prediction: new values replace the old, and observations without a
    new value are dropped.

    So are optional arguments with one row per training point that only weight or mask
    the likelihood.

    :param arguments: those of the run.
    :param new: values by argument name, e.g. ``{"x": x_test, "y": y_test}``.
    :param observed: names of the arguments that carry observations.
    :param affecting: finds the arguments that change what is predicted.
    :param counts: finds which axes of the arguments have the same rows; where it cannot
        tell, those of one length.
    :raises ValueError: for an unknown name, NaN, an array of another shape than in the
        run, mismatched lengths, or an argument with one row per training point and no
        new value that changes what is predicted.
    """
    new = as_numpy((), new)[1]
    arrays, run_arrays = Arguments(new).arrays, arguments.arrays
    accepted = {**arguments.values, **arguments.optional}
    for name in new:
        if name not in accepted:
            raise unknown_name(CALL, "predictions", name, accepted)
    rows = _RowAxes(run_arrays, observed, counts() if arrays else Counted())
    for name, value in arrays.items():
        if np.issubdtype(np.asarray(value).dtype, np.floating):
            check_finite(CALL, f"predictions[{name!r}]", value)
        if name in run_arrays:
            shape, run_shape = np.shape(value), np.shape(run_arrays[name])
            sizes, expected = list(map(str, shape)), list(map(str, run_shape))
            row_axis = rows.axes[name]
            sizes[row_axis : row_axis + 1] = ["M"]
            expected[row_axis : row_axis + 1] = ["M"]
            if sizes != expected or len(shape) != len(run_shape):
                comma = "," if len(run_shape) == 1 else ""
                instead = (
                    f"Pass ({', '.join(expected)}{comma}), one row per new point, as "
                    f"in the run's {run_shape}."
                )
                raise argument_error(
                    CALL, f"predictions[{name!r}]", f"shape {shape}", instead
                )
    replaced = [name for name in arrays if name in run_arrays]
    for name in replaced:
        # Arguments with the same rows in the run are columns of one table, so their new
        # lengths must agree.
        columns = {
            column: np.moveaxis(arrays[column], rows.axes[column], 0)
            for column in replaced
            if rows.same(name, rows.axes[name], column)
        }
        check_same_length(CALL, **columns)
    lacking = set()
    for name in run_arrays.keys() - new.keys() - observed:
        for axis in range(np.ndim(run_arrays[name])):
            for column in replaced:
                if rows.same(name, axis, column):
                    lacking.add(name)
    affected = affecting() if lacking else ()
    for name in sorted(lacking):
        if name not in arguments.optional or name in affected:
            got = f"no value for {name!r}, which has one row per training point"
            instead = f"Write e.g. `predictions={{..., {name!r}: {name}_test}}`"
            if name in arguments.optional:
                instead += f", or its default, `{name!r}: {arguments.optional[name]!r}`"
            instead += "."
            raise argument_error(CALL, "predictions", got, instead)
    defaults = {}
    for name, default in arguments.optional.items():
        if name in lacking or (name in observed and default is None):
            defaults[name] = default
    return arguments.with_values({**defaults, **new})


class _RowAxes:
    """The axis of each array of a run that has its rows: the first, unless the program
    has them along another.
    """

    def __init__(
        self, arrays: Mapping[str, Any], observed: set[str], counts: Counted
    ) -> None:
        self.arrays, self.counts = arrays, counts
        self.observed = observed & arrays.keys()
        self.axes: dict[str, int] = {}
        for name, array in arrays.items():
            self.axes[name] = 0
            axes = range(np.ndim(array))
            along = [axis for axis in axes if True in self._answers(name, axis)]
            if along and self._answers(name, 0) == {False}:
                self.axes[name] = along[0]

    def _answers(self, name: str, axis: int) -> set[bool | None]:
        """Whether an axis has the rows of each observation, as far as it is known."""
        return {self.counts.alike((name, axis), (y, 0)) for y in self.observed}

    def same(self, name: str, axis: int, column: str) -> bool:
        """Whether an axis of an array has the rows of another array."""
        along = self.axes[column]
        if np.shape(self.arrays[name])[axis] != np.shape(self.arrays[column])[along]:
            return False
        alike = self.counts.alike((name, axis), (column, along))
        return axis == self.axes[name] if alike is None else alike


def sites_at(
    model: Callable,
    draw: Draws,
    rng_key: Any,
    call: Call,
    training: Call | None = None,
    *,
    predict: Any = (),
) -> Sites:
    """Trace of ``model`` with its latent sites at ``draw`` and its plates full.

    :param draw: values of latent sites, and of parameters that are known.
    :param training: use the statistics of batch normalizations of this call.
    :param predict: names of observed sites to be drawn instead of using their data.
    """

    def latent(site: dict[str, Any]) -> Any:
        # Deterministic sites are recomputed: the draw holds their values for the
        # training data.
        return (
            draw.get(site["name"]) if site["type"] in ("sample", *PARAMETERS) else None
        )

    def run(call: Call, predict: Collection[str] = ()) -> Sites:
        return full_trace(unobserved(model, predict), latent, *call, rng_key)

    # Draws of a diverged chain are NaN; validation would raise an error and lose the
    # other chains.
    with numpyro.validation_enabled(False):
        if training is None:
            return run(call, predict)
        with record_statistics() as recorded:
            run(training)
        with use_statistics(recorded.calls):
            return run(call, predict)


def site_values(
    model: Callable,
    draw: Draws,
    rng_key: jax.Array,
    call: Call,
    training: Call | None = None,
    observed: Any = None,
) -> Sites:
    """:func:`sites_at` with the values of parameters and observed sites, computed by
    one program.

    Each observed site also says which of its elements no mask leaves out, as
    ``"unmasked"``. Of other sites only what is known without computing can be read.

    :param training: use the statistics of batch normalizations of this call.
    :param observed: names of observed sites, to be drawn; by default those that the
        model observes, with their data.
    """
    sites: Sites = {}

    def values(draw_and_key: tuple, calls: tuple, _: Any) -> Sites:
        sites.update(sites_at(model, *draw_and_key, *calls, predict=observed or ()))
        return {name: _computed(site, observed) for name, site in sites.items()}

    computed = jax.device_get(
        compiled.run(values, (draw, rng_key), (call, training), {})
    )
    return {name: {**site, **computed[name]} for name, site in sites.items()}


def is_data(site: Mapping[str, Any]) -> bool:
    """Whether a site is an observation."""
    return (
        site["type"] == "sample"
        and site["is_observed"]
        and not site.get("infer", {}).get("is_auxiliary", False)
    )


def _computed(
    site: Mapping[str, Any], observed: Collection[str] | None
) -> dict[str, Any]:
    if site["type"] in PARAMETERS:
        leaves = jax.tree.leaves(site["value"])
        return {"value": [leaf for leaf in leaves if isinstance(leaf, jax.Array)]}
    if is_data(site) if observed is None else site["name"] in observed:
        return {"unmasked": unmasked_elements(site["fn"]), "value": site["value"]}
    return {}


def observation_mean(fn: dist.Distribution) -> tuple[str, jax.Array] | None:
    """``"mean"`` and the mean of an observation, or ``"probs"`` and class probabilities
    (..., K), if it has one.
    """
    base = unwrapped(fn, masked=True)
    shape = fn.batch_shape + fn.event_shape
    if isinstance(base, CENSORED):  # draws of these are not censored either
        fn = base.base_dist
    if isinstance(base, dist.CategoricalProbs | dist.CategoricalLogits):
        classes = jnp.arange(base.probs.shape[-1]).reshape((-1,) + (1,) * len(shape))
        return "probs", jnp.moveaxis(jnp.exp(base.log_prob(classes)), 0, -1)
    try:
        mean = fn.mean
    except NotImplementedError:
        return None
    return "mean", jnp.broadcast_to(mean, shape)


def observed_elements(
    site: Mapping[str, Any], log_likelihood: np.ndarray
) -> np.ndarray:
    """Which elements of log likelihoods (C, S, ...) of a site are of data, not left out
    by a mask in every draw.
    """
    if is_factor(site["fn"]):
        return (log_likelihood != 0).any(axis=(0, 1))
    events = tuple(range(-site["fn"].event_dim, 0))
    return site["unmasked"].any(axis=events) | (log_likelihood != 0).any(axis=(0, 1))


def zero_draws(
    fn: Callable, draws: Draws, rng_key: jax.Array, _: Any, shared: tuple = ()
) -> dict[str, np.ndarray]:
    """Zeros shaped as one chain and draw of the results of :func:`map_draws`; nothing
    is computed.
    """
    first = {name: value[0, 0] for name, value in draws.items()}
    shapes = jax.eval_shape(
        lambda *draw_and_key: fn(*draw_and_key, *shared), first, rng_key
    )
    return {
        name: np.zeros((1, 1, *shape.shape), shape.dtype)
        for name, shape in shapes.items()
    }


def map_draws(
    fn: Callable[..., dict[str, jax.Array]],
    draws: Draws,
    rng_key: jax.Array,
    draws_per_chunk: int | None = None,
    shared: tuple = (),
    progress_bar: bool = False,
) -> dict[str, np.ndarray]:
    """Apply ``fn(draw, key, *shared)`` to every draw and collect the results in host
    memory.

    The function is compiled once for a chunk of draws; memory holds the results and one
    chunk. Each draw has its own key, so results do not depend on the chunk size, by
    default as many as keep working memory near 128 MiB.

    :param draws: arrays (C, S, ...); so are the results.
    :param shared: arguments of models and parameters, the same for every draw.
    """
    chains, length = next(iter(draws.values())).shape[:2]
    total = chains * length
    flat = {
        name: np.asarray(value).reshape((total, *value.shape[2:]))
        for name, value in draws.items()
    }
    first = {name: value[0] for name, value in flat.items()}, rng_key
    fitting = compiled.draws_per_chunk(lambda *draw: fn(*draw, *shared), *first)
    size = min(total, draws_per_chunk or fitting)

    def at_draws(inputs: tuple, shared: tuple, _: Any) -> dict[str, jax.Array]:
        draws, index, rng_key = inputs
        keys = jax.random.split(rng_key, total)[index]
        return jax.vmap(lambda draw, key: fn(draw, key, *shared))(draws, keys)

    # Few draws take less time than a program that is optimized for many.
    program = compiled.prepare(
        at_draws, shared, {}, once=FEW_DRAWS_FACTOR * total <= fitting
    )
    results: dict[str, np.ndarray] = {}
    for start in tqdm.trange(
        0,
        total,
        size,
        desc="predictions",
        delay=SECONDS_WITHOUT_BAR,
        disable=not progress_bar,
    ):
        # The last chunk is padded with the last draw: one shape, one compilation.
        index = np.minimum(np.arange(start, start + size), total - 1)
        inputs = {name: value[index] for name, value in flat.items()}, index, rng_key
        chunk = jax.device_get(program(inputs))
        count = min(size, total - start)
        for name, value in chunk.items():
            if name not in results:
                shape = chains, length, *value.shape[1:]
                results[name] = np.empty(shape, value.dtype)
            by_draw = results[name].reshape(total, *value.shape[1:])  # a view
            by_draw[start : start + count] = value[:count]
    return results
