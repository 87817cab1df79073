"""What a Laplace approximation needs from a model: its outputs, its prior, its
likelihood, and sums over all rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from numpyro_bnn.program.reading import Reading
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
            index = jnp.arange(msg["args"][0]) if self.index is None else self.index
            msg["args"], msg["value"] = (msg["args"][0], len(index)), index
        elif msg["type"] == "sample" and self.index is not None:
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.plates and msg["scale"] is not None:
                    msg["scale"] = (
                        msg["scale"] * frame.size / self.plates[frame.name].size
                    )


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
    plates: Mapping[str, Any]
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
        moments = (
            self.prior_program(self.training or call)(values) if self.scaled else {}
        )
        coordinates = {}
        for name, transform in self.transforms.items():
            value = transform.inv(jnp.asarray(values[name], float))
            coordinates[name] = (
                (value - moments[name][0]) / moments[name][1]
                if name in moments
                else value
            )
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
        return {
            name: observation(trace[name], axis)
            for name, (axis, _) in self.observed.items()
        }

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
        names = (
            [only]
            if only
            else [name for name, (_, used) in self.observed.items() if used]
        )

        def flat(sites: Mapping[str, jax.Array]) -> jax.Array:
            observations = self.observations(self.trace({**v, **sites}, index, call))
            outputs = [
                observations[name].flat(self.observed[name][1]) for name in names
            ]
            return jnp.concatenate(_of_one_length(outputs), axis=1)

        return flat, {name: v[name] for name in self.sites}, names

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
        second = jax.jvp(
            lambda point: jax.jvp(flat, (point,), (step,))[1], (sites,), (step,)
        )[1]
        return jax.vjp(flat, sites)[1](
            jnp.einsum("bde,bdf,bf->be", roots, roots, second)
        )[0]

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
        for site in (trace[name] for name in self.data):
            log_prob = site["fn"].log_prob(site["value"])
            total += jnp.sum(
                log_prob if site["scale"] is None else site["scale"] * log_prob
            )
        if spread:
            detached = {
                name: value
                if name in self.other_sites
                else jax.lax.stop_gradient(value)
                for name, value in v.items()
            }
            observations = self.observations(self.trace(detached, index, call))
            for name, variance in spread.items():
                observation, rows = (
                    observations[name],
                    variance if index is None else variance[index],
                )
                total -= 0.5 * jnp.sum(
                    observation.weight
                    * rows
                    * jnp.exp(-2 * observation.outputs["log_scale"])
                )
        return total

    def log_prior(
        self, v: Values, precision: Mapping[str, Any], call: Call, names: Sequence[str]
    ) -> jax.Array:
        """Of sites in the coordinates v; ``precision`` divides the prior variances of
        fixed ones.
        """
        without_moments = [name for name in names if name in self.other_sites]
        trace = self.trace(v, self.few(), call) if without_moments else {}
        total = jnp.zeros(())
        for name in names:
            if name in self.fixed:
                loc, scale = self.fixed[name]
                total += jnp.sum(
                    dist.Normal(loc, scale * precision.get(name, 1.0) ** -0.5).log_prob(
                        v[name]
                    )
                )
            elif name in self.scaled:
                total += jnp.sum(dist.Normal().log_prob(v[name]))
            else:
                site, transform = trace[name], self.transforms[name]
                log_prob = site["fn"].log_prob(site["value"])
                total += jnp.sum(
                    log_prob if site["scale"] is None else site["scale"] * log_prob
                )
                total += jnp.sum(transform.log_abs_det_jacobian(v[name], site["value"]))
        return total

    def potential(
        self, v: Values, precision: Mapping, spread: Mapping, index: Any, call: Call
    ) -> jax.Array:
        """-log p(D, v), estimated from some rows."""
        scale = 1.0 if index is None or not self.plates else self.size / index.shape[0]
        likelihood = scale * self.log_likelihood(v, index, call, spread)
        return -likelihood - self.log_prior(v, precision, call, list(self.transforms))

    def prior_precision(self, v: Values, precision: Mapping[str, Any]) -> Values:
        """(P_s,) the diagonal precision of Normal priors, by site."""
        diagonals = {}
        for name in self.sites:
            if name in self.fixed:
                diagonals[name] = jnp.ravel(
                    precision.get(name, 1.0) / jnp.square(self.fixed[name][1])
                )
            elif name in self.scaled:
                diagonals[name] = jnp.ones(v[name].size)
        return diagonals

    # -- rows --------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """N of the subsampled plate."""
        return next(iter(self.plates.values())).size

    def chunks(self) -> list[jax.Array | None]:
        """Indices of all rows, in parts of about the batch size and at least two."""
        if not self.plates:
            return [None]
        plate = next(iter(self.plates.values()))
        number = max(1, min(ceil(plate.size / plate.batch_size), plate.size // 2))
        return [
            jnp.asarray(rows) for rows in np.array_split(np.arange(plate.size), number)
        ]

    def few(self) -> jax.Array | None:
        """Indices of one part, where the rows do not matter."""
        return self.chunks()[0]

    def sweep(self, v: Values, call: Call) -> Callable:
        """A function that sums a function of the Jacobians over all rows."""

        def summed(function: Callable, *extra: Any) -> Any:
            def part(inputs: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
                v, index, extra = inputs
                return function(self.jacobians(v, index, (args, kwargs)), *extra)

            program, total = (
                self.prepared(f"sweep {function.__qualname__}", part, call),
                None,
            )
            for index in self.chunks():
                chunk_sum = program((v, index, extra))
                total = (
                    chunk_sum
                    if total is None
                    else jax.tree.map(jnp.add, total, chunk_sum)
                )
            return total

        return summed

    def total(
        self, key: str, function: Callable, v: Values, call: Call, *extra: Any
    ) -> Any:
        """The sum of ``function(v, index, call, *extra)`` over all rows."""

        def part(inputs: tuple, args: tuple, kwargs: Mapping[str, Any]) -> Any:
            v, index, extra = inputs
            return function(v, index, (args, kwargs), *extra)

        program = self.prepared(key, part, call)
        sums = [program((v, index, extra)) for index in self.chunks()]
        return jax.tree.map(lambda *leaves: sum(leaves), *sums)


def _of_one_length(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Rows of several observed sites side by side: a site with fewer rows gets empty
    ones.
    """
    number = max(len(array) for array in arrays)
    return [
        jnp.pad(array, [(0, number - len(array)), *[(0, 0)] * (array.ndim - 1)])
        for array in arrays
    ]


def read(guide: Any, sites: Sequence[str], call: Call) -> LaplaceProblem:
    """Read the model of a guide; errors name the site that cannot be approximated."""
    with handlers.block(), record_statistics() as recorded:
        reading = Reading(guide.model, *call, full=False)
    latent, trace, scaled = reading.latent, reading.sites, guide._scaled
    parents = reading.depends(
        lambda found: {name: found[name]["fn"] for name in latent}
    )
    fixed, others = {}, []
    values = reading.run(
        lambda r: {n: affine_normal(s["fn"]) for n, s in r.at({}, only=latent).items()}
    )
    for name in latent:
        moments, plain = (
            values[name],
            trace[name]["scale"] is None and is_identity(guide._transforms[name]),
        )
        if name in scaled:
            continue
        if moments is not None and not parents[name] and plain:
            fixed[name] = (np.asarray(moments[0]), np.asarray(moments[1]))
            continue
        fn = trace[name]["fn"]
        if (
            is_identity(guide._transforms[name])
            and parents[name]
            and not is_affine_normal(fn)
        ):
            got = (
                f"the site {name!r}, whose {type(unwrapped(fn)).__name__} prior "
                f"depends on {parents[name]}"
            )
            instead = (
                "The joint mode degenerates at a scale of 0: use a non-centered prior, "
                "or a fixed scale."
            )
            raise argument_error(CALL, "model", got, instead)
        others.append(name)
    observed = {
        n: s for n, s in trace.items() if s["type"] == "sample" and s["is_observed"]
    }
    plates = reading.plates
    moving = {*sites, *(name for name in scaled if scaled[name] & set(sites))}
    unmixed = reading
    if any(recorded.calls):
        with handlers.block(), placeholder_statistics():
            unmixed = Reading(guide.model, *call, full=False)
    found = _outputs(reading, unmixed, observed, moving, guide.structure == "kron")
    prior, names = guide._prior_program, list(observed)
    problem = LaplaceProblem(
        guide.model,
        guide._transforms,
        prior,
        scaled,
        fixed,
        others,
        found,
        names,
        plates,
        sites,
    )
    problem.normalizes = any(recorded.calls)
    return problem


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
        inside = [
            frame.name
            for frame in site["cond_indep_stack"]
            if frame.name in reading.plates
        ]
        if site["fn"].support.is_discrete:
            raise argument_error(
                CALL, "model", f"the discrete latent site {name!r}", INSTEAD
            )
        if inside:
            raise argument_error(
                CALL,
                "model",
                f"the local site {name!r} in plate {inside[0]!r}",
                INSTEAD,
            )
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

    def parts(trace: Mapping[str, Site]) -> dict[Any, Any]:
        return {
            (n, output): f
            for n in observed
            if n in dependent
            for output, f in natural(trace[n]).items()
        }

    depends = reading.depends(lambda trace: {n: trace[n]["fn"] for n in observed})
    dependent = {name for name in observed if depends[name]}
    for name in dependent:
        kind_of(observed[name])
    used = {key: outputs & sites for key, outputs in reading.depends(parts).items()}
    plates, mixed = reading.plates, axes_of_data(reading, parts)
    data = mixed if unmixed is reading else axes_of_data(unmixed, parts)
    outputs = {}
    for name, site in observed.items():
        if is_factor(site["fn"]) and not depends[name]:
            continue
        if plates and not any(
            frame.name in plates for frame in site["cond_indep_stack"]
        ):
            got = f"the observed site {name!r} outside of the subsampled plate"
            raise argument_error(
                CALL, "model", got, "Run it on all rows, without a minibatch."
            )
        if name in dependent:
            rows, arrived = (
                {key[1]: of[key] for key in of if key[0] == name}
                for of in (data, mixed)
            )
            axis = _row_axis(site, plates, rows)
            _check_rows(arrived, axis, plates, by_products)
            outputs[name] = (
                axis,
                tuple(output for n, output in used if n == name and used[n, output]),
            )
    if not any(names for _, names in outputs.values()):
        got = (
            "data that depend on none of the sites of the guide"
            if observed
            else "a model without observed sites"
        )
        raise argument_error(
            CALL,
            "sites",
            got,
            "Pass the targets (`y`), and sites that the data depend on.",
        )
    return outputs


def _row_axis(
    site: Site,
    plates: Mapping[str, Any],
    arrived: Mapping[str, Mapping[Axis, int | None]],
) -> int | None:
    """The axis of the subsampled plate; else of the outermost plate, or first axis,
    along which the data lie.

    :param arrived: by output of the site, where axes of data lie in it.
    """
    along = {
        place: axis.source
        for labels in arrived.values()
        for axis, place in labels.items()
        if place is not None
    }
    rank = len(site["fn"].batch_shape)
    outermost = [
        frame for frame in reversed(site["cond_indep_stack"]) if rank >= -frame.dim
    ]
    for frame in outermost:
        if frame.name in plates or (
            not plates and along.get(rank + frame.dim) == frame.name
        ):
            return rank + frame.dim
    places = [rank + frame.dim for frame in outermost]
    if not places and not (site["fn"].event_dim and not _elementwise(site)):
        places = list(range(len(site["fn"].shape())))
    return next(
        (axis for axis in places if axis in along), places[0] if places else None
    )


def _check_rows(
    arrived: Mapping[str, Mapping[Axis, int | None]],
    axis: int | None,
    plates: Mapping[str, Any],
    by_products: bool,
) -> None:
    """Refuse rows that influence one another where they are taken apart: in
    minibatches, and as products.
    """
    labels = [
        (label, place)
        for of_part in arrived.values()
        for label, place in of_part.items()
    ]
    mixed = any(label.source in plates and place != axis for label, place in labels)
    if by_products and labels and not plates and axis is not None:
        mixed = all(place != axis for _, place in labels)
    if mixed:
        got = (
            "a model in which one row changes the outputs of others, such as one with "
            "batch normalization"
        )
        instead = 'Use "diag", "low_rank" or "full" on all rows, or `nn.LayerNorm`.'
        raise argument_error(CALL, "model", got, instead)


def _elementwise(site: Site) -> bool:
    return unwrapped(site["fn"], masked=True).event_dim == 0
