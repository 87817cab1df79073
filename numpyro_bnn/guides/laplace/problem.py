"""What a Laplace approximation needs from a model: its outputs, its prior, its
likelihood, and sums over all rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_bnn._axes import Axis
from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unwrapped,
)
from numpyro_bnn.guides.auto_blocks import is_identity
from numpyro_bnn.guides.blocks import cut
from numpyro_bnn.guides.laplace.jacobians import Jacobians, jacobians
from numpyro_bnn.guides.laplace.likelihoods import (
    CALL,
    ObservedRows,
    Site,
    kind_of,
    natural,
    observation,
)
from numpyro_bnn.guides.scale_conditioning import Scaled
from numpyro_bnn.networks import (
    placeholder_statistics,
    record_statistics,
    use_statistics,
)
from numpyro_bnn.program.axes import axes_of_data
from numpyro_bnn.program.compiled import prepare
from numpyro_bnn.program.reading import Plate, Reading
from numpyro_bnn.program.row_lengths import check_state

Values = dict[str, jax.Array]
Call = tuple[tuple, Mapping[str, Any]]
INSTEAD = (
    "Use `numpyro.infer.autoguide.AutoNormal`, or a kernel of MCMC, for this model."
)


class chosen_rows(Messenger):
    """Run the subsampled plate on these indices, with scale 1; ``None``
    stands for all.
    """

    def __init__(
        self, fn: Callable, plates: Mapping[str, Any], index: jax.Array | None
    ) -> None:
        self.plates, self.index = plates, index
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.plates:
            size = msg["args"][0]
            index = jnp.arange(size) if self.index is None else self.index
            msg["args"], msg["value"] = (size, len(index)), index
        elif msg["type"] == "sample" and self.index is not None:
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.plates and msg["scale"] is not None:
                    size = self.plates[frame.name].size
                    msg["scale"] = msg["scale"] * frame.size / size


@dataclass
class LaplaceProblem:
    r"""A model in the coordinates v of the guide: unconstrained, or u = (w - m) / s if
    a prior scale s is learned.

    :param fixed: loc and scale by site, for Normal priors that depend on no other site.
    :param scaled: sites in the coordinates u, whose prior is N(0, 1).
    :param other_sites: all further latent sites.
    :param observed: by observed site, the axis of its rows and the names of the outputs
        that depend on the weights.
    :param data: all observed sites.
    :param plates: size and batch size of the subsampled plate.
    :param sites: the sites of the Gaussian; all others are held.
    :param model_params: values of the model's own parameters.
    :param normalizes: whether the model has batch normalizations.
    :param training: their statistics are those of this call; by default of the rows
        themselves.
    """

    model: Callable
    transforms: Mapping[str, Any]
    prior_program: Callable
    scaled: Scaled
    fixed: Mapping[str, tuple[np.ndarray, np.ndarray]]
    other_sites: Sequence[str]
    observed: Mapping[str, tuple[int | None, tuple[str, ...]]]
    data: Sequence[str]
    plates: Mapping[str, Plate]
    sites: Sequence[str]
    model_params: dict[str, Any] = field(default_factory=dict)
    normalizes: bool = False
    training: Call | None = None
    programs: dict[str, Callable] = field(default_factory=dict)

    def prepared(self, key: str, fn: Callable, call: Call) -> Callable:
        """``fn(given, args, kwargs)`` as a program that all rounds of a run share:
        ``fn`` closes over no values.
        """
        if key not in self.programs:
            self.programs[key] = prepare(fn, *call)
        return self.programs[key]

    def values(self, v: Mapping[str, jax.Array], call: Call) -> Values:
        """Constrained values of all latent sites."""
        program = self.prior_program(self.training or call) if self.scaled else None
        constrained: Values = {}
        for name, transform in self.transforms.items():
            if name in self.scaled:
                loc, scale = program(constrained)[name]  # type: ignore[misc]
                constrained[name] = loc + scale * v[name]
            else:
                constrained[name] = (
                    v[name] if is_identity(transform) else transform(v[name])
                )
        return constrained

    def coordinates(self, values: Mapping[str, jax.Array], call: Call) -> Values:
        """The inverse of :meth:`values`."""
        moments = {}
        if self.scaled:
            moments = self.prior_program(self.training or call)(values)
        coordinates = {}
        for name, transform in self.transforms.items():
            value = transform.inv(jnp.asarray(values[name], float))
            if name in moments:
                loc, scale = moments[name]
                value = (value - loc) / scale
            coordinates[name] = value
        return coordinates

    def trace(
        self, v: Mapping[str, jax.Array], index: jax.Array | None, call: Call
    ) -> dict[str, Site]:
        """The trace of the model on some rows."""
        data = {**self.model_params, **self.values(v, call)}

        def run(index: jax.Array | None, call: Call) -> dict[str, Site]:
            seeded = handlers.seed(chosen_rows(self.model, self.plates, index), 0)
            return handlers.trace(handlers.substitute(seeded, data=data)).get_trace(
                *call[0], **call[1]
            )

        with handlers.block():
            if self.training is None:
                return run(index, call)
            with record_statistics() as recorded:
                run(None, self.training)
            with use_statistics(recorded.calls):
                return run(index, call)

    def observations(self, trace: Mapping[str, Site]) -> dict[str, ObservedRows]:
        """The observed sites; for prediction their values may have been drawn."""
        observations = {}
        for name, (axis, _) in self.observed.items():
            observations[name] = observation(trace[name], axis)
        return observations

    def jacobians(
        self, v: Values, index: Any, call: Call, only: str | None = None
    ) -> Jacobians:
        """Jacobians of the outputs, times the root of their Fisher information, or the
        plain ones of a site.
        """
        flat, sites, names = self._flat_outputs(v, index, call, only)
        if only:
            rows, width = jax.eval_shape(flat, sites).shape
            roots = jnp.broadcast_to(jnp.eye(width), (rows, width, width))
            return jacobians(flat, sites, roots, jnp.ones(rows))
        observations = self.observations(self.trace(v, index, call))
        weights = _of_one_length([observations[name].weight for name in names])
        has_data = jnp.any(jnp.concatenate(weights, axis=1) > 0, axis=1)
        roots = self._roots(observations, names)
        return jacobians(flat, sites, roots, has_data.astype(roots.dtype))

    def _flat_outputs(
        self, v: Values, index: Any, call: Call, only: str | None = None
    ) -> tuple[Callable, Values, list]:
        """The outputs (B, E) as a function of the sites of the Gaussian, those sites,
        and the observed sites.
        """
        names = [only] if only else self.modeled

        def flat(sites: Mapping[str, jax.Array]) -> jax.Array:
            observations = self.observations(self.trace({**v, **sites}, index, call))
            outputs = [
                observations[name].flat(self.observed[name][1]) for name in names
            ]
            return jnp.concatenate(_of_one_length(outputs), axis=1)

        return flat, {name: v[name] for name in self.sites}, names

    @property
    def modeled(self) -> list[str]:
        """Observed sites whose outputs depend on the weights."""
        return [name for name, (_, used) in self.observed.items() if used]

    def _roots(
        self, observations: Mapping[str, ObservedRows], names: Sequence[str]
    ) -> jax.Array:
        """(B, D, E) roots of the Fisher information of the rows."""
        roots = [observations[name].roots(self.observed[name][1]) for name in names]
        return jax.vmap(jax.scipy.linalg.block_diag)(*_of_one_length(roots))

    def bend(self, v: Values, step: Values, index: Any, call: Call) -> Values:
        """Sum over rows of J^T F f'', with f'' the second derivative of the outputs
        along a step, by site.
        """
        flat, sites, names = self._flat_outputs(v, index, call)
        roots = self._roots(self.observations(self.trace(v, index, call)), names)

        def slope(sites: Values) -> jax.Array:
            return jax.jvp(flat, (sites,), (step,))[1]

        second = jax.jvp(slope, (sites,), (step,))[1]
        gradient = jnp.einsum("bde,bdf,bf->be", roots, roots, second)
        return jax.vjp(flat, sites)[1](gradient)[0]

    # -- densities ---------------------------------------------------------------------

    def log_likelihood(
        self,
        v: Values,
        index: jax.Array | None,
        call: Call,
        spread: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Sum over these rows; with the variances ``spread`` (N, M) of loc, averaged
        over it to tune the noise.
        """
        trace = self.trace(v, index, call)
        total = jnp.zeros(())
        for name in self.data:
            total += _log_prob(trace[name])
        if spread:
            detached = dict(v)
            for name, value in v.items():
                if name not in self.other_sites:
                    detached[name] = jax.lax.stop_gradient(value)
            observations = self.observations(self.trace(detached, index, call))
            for name, variance in spread.items():
                rows = observations[name]
                if index is not None:
                    variance = variance[index]
                precision = jnp.exp(-2 * rows.outputs["log_scale"])
                total -= 0.5 * jnp.sum(rows.weight * variance * precision)
        return total

    def log_prior(
        self, v: Values, precision: Mapping[str, Any], call: Call, names: Sequence[str]
    ) -> jax.Array:
        """Of sites in the coordinates v; ``precision`` divides the prior variances of
        fixed ones.
        """
        trace = {}
        if set(names) & set(self.other_sites):
            trace = self.trace(v, self.chunks()[0], call)
        total = jnp.zeros(())
        for name in names:
            if name in self.fixed:
                loc, scale = self.fixed[name]
                fn = dist.Normal(loc, scale * precision.get(name, 1.0) ** -0.5)
                total += jnp.sum(fn.log_prob(v[name]))
            elif name in self.scaled:
                total += jnp.sum(dist.Normal().log_prob(v[name]))
            else:
                site, transform = trace[name], self.transforms[name]
                total += _log_prob(site)
                total += jnp.sum(transform.log_abs_det_jacobian(v[name], site["value"]))
        return total

    def potential(
        self, v: Values, precision: Mapping, spread: Mapping, index: Any, call: Call
    ) -> jax.Array:
        """-log p(D, v), estimated from some rows."""
        likelihood = self.log_likelihood(v, index, call, spread)
        if index is not None and self.plate is not None:
            likelihood *= self.plate.size / index.shape[0]
        return -likelihood - self.log_prior(v, precision, call, list(self.transforms))

    def prior_precision(
        self, v: Values, precision: Mapping[str, Any], curvature: Values
    ) -> Values:
        """(P_s,) the diagonal precision of the prior, by site; ``curvature`` is that of
        sites without Normal prior.
        """
        diagonals = {}
        for name in self.sites:
            if name in self.fixed:
                factor = precision.get(name, 1.0)
                diagonals[name] = jnp.ravel(factor / jnp.square(self.fixed[name][1]))
            elif name in self.scaled:
                diagonals[name] = jnp.ones(v[name].size)
            else:
                diagonals[name] = curvature[name]
        return diagonals

    def flat(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """(P,) values of the sites of the Gaussian."""
        return jnp.concatenate([jnp.ravel(values[name]) for name in self.sites])

    def unflat(self, vector: Any, v: Values) -> Values:
        """The inverse of :meth:`flat`, shaped like ``v``."""
        shapes = {name: v[name].shape for name in self.sites}
        return cut(jnp.asarray(vector, float), shapes)

    # -- rows --------------------------------------------------------------------------

    @property
    def plate(self) -> Plate | None:
        """The subsampled plate."""
        return next(iter(self.plates.values()), None)

    def chunks(self) -> list[jax.Array | None]:
        """Indices of all rows, in parts of about the batch size and at least two."""
        if self.plate is None:
            return [None]
        size, batch_size = self.plate
        number = max(1, min(ceil(size / batch_size), size // 2))
        return list(map(jnp.asarray, np.array_split(np.arange(size), number)))

    def sweep(self, v: Values, call: Call) -> Callable:
        """A function that sums a function of the Jacobians over all rows."""

        def summed(function: Callable, *extra: Any) -> Any:
            def of_chunk(v: Values, index: Any, call: Call, *extra: Any) -> Any:
                return function(self.jacobians(v, index, call), *extra)

            return self.total(
                f"sweep {function.__qualname__}", of_chunk, v, call, *extra
            )

        return summed

    def total(
        self, key: str, function: Callable, v: Values, call: Call, *extra: Any
    ) -> Any:
        """The sum of ``function(v, index, call, *extra)`` over all rows."""

        def of_chunk(inputs: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
            v, index, extra = inputs
            return function(v, index, (args, kwargs), *extra)

        program = self.prepared(key, of_chunk, call)
        total: Any = None
        for index in self.chunks():
            chunk_sum = program((v, index, extra))
            total = (
                chunk_sum if total is None else jax.tree.map(jnp.add, total, chunk_sum)
            )
        return total


def _log_prob(site: Site) -> jax.Array:
    """Scaled log density of a site."""
    log_prob = site["fn"].log_prob(site["value"])
    return jnp.sum(log_prob if site["scale"] is None else site["scale"] * log_prob)


def _of_one_length(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Rows of several observed sites side by side: a site with fewer rows gets empty
    ones.
    """
    number = max(map(len, arrays))
    padded = []
    for array in arrays:
        widths = [(0, number - len(array))] + [(0, 0)] * (array.ndim - 1)
        padded.append(jnp.pad(array, widths))
    return padded


def read(guide: Any, sites: Sequence[str], call: Call) -> LaplaceProblem:
    """Read the model of a guide; errors name the site that cannot be approximated."""
    with handlers.block(), record_statistics() as recorded:
        reading = Reading(guide.model, *call, full=False)
    latent, trace, scaled = reading.latent, reading.sites, guide._scaled
    parents = reading.depends(partial(_distributions, latent))
    moments = reading.run(partial(_moments, latent))
    fixed: dict[str, tuple] = {}
    without_moments = []
    for name in latent:
        if name in scaled:
            continue
        fn, plain = trace[name]["fn"], is_identity(guide._transforms[name])
        if parents[name]:
            if plain and not is_affine_normal(fn):
                got = (
                    f"the site {name!r}, whose {type(unwrapped(fn)).__name__} prior "
                    f"depends on {parents[name]}"
                )
                instead = (
                    "The joint mode degenerates at a scale of 0: use a non-centered "
                    "prior, or a fixed scale."
                )
                raise argument_error(CALL, "model", got, instead)
        elif moments[name] is not None and plain and trace[name]["scale"] is None:
            loc, scale = moments[name]
            fixed[name] = np.asarray(loc), np.asarray(scale)
            continue
        without_moments.append(name)
    observed = {name: trace[name] for name in reading.observed}
    moving = set(sites)
    for name in scaled:
        if not scaled[name].isdisjoint(sites):
            moving.add(name)
    normalizes = any(recorded.calls)
    unmixed = reading
    if normalizes:
        with handlers.block(), placeholder_statistics():
            unmixed = Reading(guide.model, *call, full=False)
    return LaplaceProblem(
        guide.model,
        guide._transforms,
        guide._prior_program,
        scaled,
        fixed,
        without_moments,
        _outputs(reading, unmixed, observed, moving, guide.structure == "kron"),
        list(observed),
        reading.plates,
        sites,
        normalizes=normalizes,
    )


def _moments(names: Sequence[str], reading: Reading) -> dict[str, tuple | None]:
    """Loc and scale of sites with a Normal prior."""
    trace = reading.at({}, only=names)
    return {name: affine_normal(trace[name]["fn"]) for name in names}


def _distributions(
    names: Iterable[str], trace: Mapping[str, Site]
) -> dict[str, dist.Distribution]:
    return {name: trace[name]["fn"] for name in names}


def check_sites(model: Callable, call: Call) -> None:
    """Refuse latent sites whose density a Gaussian cannot follow, and models with
    random numbers of their own.
    """
    with handlers.block():
        reading = Reading(model, *call, full=False)
    check_state(CALL, "model", reading)
    if reading.stochastic:
        raise argument_error(
            CALL,
            "model",
            "a model with random numbers of its own (`numpyro.prng_key`)",
            INSTEAD,
        )
    if len(reading.plates) > 1:
        got = f"{len(reading.plates)} subsampled plates ({', '.join(reading.plates)})"
        raise argument_error(CALL, "model", got, "Subsample one plate of data.")
    for name in reading.latent:
        site = reading.sites[name]
        if site["fn"].support.is_discrete:
            raise argument_error(
                CALL, "model", f"the discrete latent site {name!r}", INSTEAD
            )
        for frame in site["cond_indep_stack"]:
            if frame.name in reading.plates:
                got = f"the local site {name!r} in plate {frame.name!r}"
                raise argument_error(CALL, "model", got, INSTEAD)
        if isinstance(unwrapped(site["fn"], masked=True), dist.Laplace):
            got = (
                f"the site {name!r} with a Laplace prior, which has no second "
                f"derivative at its mode"
            )
            raise argument_error(CALL, "model", got, "Use a Normal or StudentT prior.")


def _outputs(
    reading: Reading,
    unmixed: Reading,
    observed: Mapping[str, Site],
    sites: set[str],
    by_products: bool,
) -> dict[str, tuple]:
    """The axis of rows and the outputs that depend on the weights, of each observed
    site.

    :param unmixed: the same model without batch statistics, in which rows are mixed.
    """

    def outputs_of(trace: Mapping[str, Site]) -> dict[Any, Any]:
        outputs = {}
        for name in dependent:
            for output, value in natural(trace[name]).items():
                outputs[name, output] = value
        return outputs

    parents = reading.depends(partial(_distributions, observed))
    dependent = [name for name in observed if parents[name]]
    for name in dependent:
        kind_of(observed[name])
    by_output = reading.depends(outputs_of)
    plates, mixed = reading.plates, axes_of_data(reading, outputs_of)
    data = mixed if unmixed is reading else axes_of_data(unmixed, outputs_of)
    outputs = {}
    for name, site in observed.items():
        if is_factor(site["fn"]) and not parents[name]:
            continue
        if plates and not any(
            frame.name in plates for frame in site["cond_indep_stack"]
        ):
            got = f"the observed site {name!r} outside of the subsampled plate"
            raise argument_error(
                CALL, "model", got, "Run it on all rows, without a minibatch."
            )
        if name in dependent:
            axis = _row_axis(site, plates, _of_site(data, name))
            _check_rows(_of_site(mixed, name), axis, plates, by_products)
            used = []
            for output, latent in _of_site(by_output, name).items():
                if latent & sites:
                    used.append(output)
            outputs[name] = axis, tuple(used)
    if not any(used for _, used in outputs.values()):
        got = "a model without observed sites"
        if observed:
            got = "data that depend on none of the sites of the guide"
        raise argument_error(
            CALL,
            "sites",
            got,
            "Pass the targets (`y`), and sites that the data depend on.",
        )
    return outputs


def _of_site(outputs: Mapping[tuple[str, str], Any], name: str) -> dict[str, Any]:
    """What is known of each output of a site."""
    return {output: outputs[site, output] for site, output in outputs if site == name}


def _row_axis(
    site: Site,
    plates: Mapping[str, Any],
    arrived: Mapping[str, Mapping[Axis, int | None]],
) -> int | None:
    """The axis of the subsampled plate; else of the outermost plate, or first axis,
    along which the data lie.

    :param arrived: by output of the site, where axes of data lie in it.
    """
    along = {}
    for labels in arrived.values():
        for label, place in labels.items():
            along[place] = label.source
    rank = len(site["fn"].batch_shape)
    places = []
    for frame in reversed(site["cond_indep_stack"]):
        axis = rank + frame.dim
        if axis < 0:
            continue
        places.append(axis)
        if frame.name in plates or (not plates and along.get(axis) == frame.name):
            return axis
    if not places and unwrapped(site["fn"], masked=True).event_dim == 0:
        places = list(range(len(site["fn"].shape())))
    for place in places:
        if place in along:
            return place
    return places[0] if places else None


def _check_rows(
    arrived: Mapping[str, Mapping[Axis, int | None]],
    axis: int | None,
    plates: Mapping[str, Any],
    by_products: bool,
) -> None:
    """Refuse rows that influence one another where they are taken apart: in
    minibatches, and as products.
    """
    labels: list[tuple[Axis, int | None]] = []
    for places in arrived.values():
        labels += places.items()
    mixed = any(label.source in plates and place != axis for label, place in labels)
    if by_products and labels and not plates and axis is not None:
        mixed = axis not in {place for _, place in labels}
    if mixed:
        got = (
            "a model in which one row changes the outputs of others, such as one with "
            "batch normalization"
        )
        instead = 'Use "diag", "low_rank" or "full" on all rows, or `nn.LayerNorm`.'
        raise argument_error(CALL, "model", got, instead)
