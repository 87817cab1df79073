"""What a Laplace approximation needs from a model: its outputs, its prior and its
likelihood, in the coordinates of the guide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.scipy.linalg import block_diag
from jax.typing import ArrayLike
from numpyro.distributions.transforms import Transform

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unwrapped,
)
from numpyro_bnn._jaxprs.axes import Axis
from numpyro_bnn._types import Arrays, Kwargs, PyTree, Trees
from numpyro_bnn.guides.auto_blocks import Values, is_identity
from numpyro_bnn.guides.blocks import cut
from numpyro_bnn.guides.initialization import base_sites
from numpyro_bnn.guides.laplace.jacobians import Jacobians, jacobians
from numpyro_bnn.guides.laplace.likelihoods import (
    CALL,
    ObservedRows,
    Site,
    likelihood_of,
    observed_rows,
)
from numpyro_bnn.guides.laplace.rows import Batch, ModelRows
from numpyro_bnn.guides.prototype import Scaled
from numpyro_bnn.networks import placeholder_statistics
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.axes import axes_of_data, counted
from numpyro_bnn.program.plates import Plate, sites_of_type
from numpyro_bnn.program.posterior import Posterior, log_density
from numpyro_bnn.program.row_lengths import check_state
from numpyro_bnn.program.sites import Sites

INSTEAD = (
    "Use `numpyro.infer.autoguide.AutoNormal`, or a kernel of MCMC, for this model."
)


class ObservedSite(NamedTuple):
    """The axis of its rows (``None``: it is one row), the names of the outputs that
    depend on the sites of the Gaussian, and what its noise, the outputs after the
    location, is computed from.
    """

    axis: int | None
    used: tuple[str, ...]
    noise: frozenset[str]


class LearnedScale(NamedTuple):
    """The weight that a site is or, non-centered, stands for, and the sites from which
    its prior scale is computed.
    """

    weight: str
    parents: frozenset[str]


class Tuned(NamedTuple):
    """What rounds of tuning change: factors on prior precisions by site, variances (N,
    M) of the loc by observed site whose noise scale is learned, and variances of
    weights by site whose prior scale is learned.
    """

    precision: Mapping[str, Array | float] = {}
    spread: Mapping[str, Array] = {}
    weights: Mapping[str, Array] = {}


@dataclass(frozen=True)
class LaplacePosterior:
    r"""A model in the coordinates v of the guide: unconstrained, or u = (w - m) / s if
    a prior scale s is learned.

    :param fixed: loc and scale by site, for Normal priors that depend on no other site.
    :param scaled: sites in the coordinates u, whose prior is N(0, 1).
    :param other_sites: all further latent sites.
    :param observed: the observed sites whose outputs depend on the Gaussian.
    :param data: all observed sites.
    :param sites: the sites of the Gaussian; all others are held.
    :param learned: those of weights, or of their non-centered bases, whose prior scale
        is learned.
    """

    rows: ModelRows
    transforms: Mapping[str, Transform]
    scaled: Scaled
    fixed: Mapping[str, tuple[np.ndarray, np.ndarray]]
    other_sites: Sequence[str]
    observed: Mapping[str, ObservedSite]
    data: Sequence[str]
    sites: Sequence[str]
    learned: Mapping[str, LearnedScale]

    def on(self, args: tuple, kwargs: Kwargs) -> "LaplacePosterior":
        """The same for all rows of other arguments."""
        return replace(self, rows=self.rows.on(args, kwargs))

    # -- coordinates -------------------------------------------------------------------

    def values(self, batch: Batch, v: Values) -> Values:
        """Constrained values of all latent sites."""
        constrained: Values = {}
        for name, transform in self.transforms.items():
            if name in self.scaled:
                loc, scale = self._prior_moments(batch, constrained, name)
                constrained[name] = loc + scale * v[name]
            else:
                constrained[name] = transform(v[name])
        return constrained

    def coordinates(self, batch: Batch, values: Values) -> Values:
        """The inverse of :meth:`values`."""
        coordinates = {}
        for name, transform in self.transforms.items():
            value = transform.inv(jnp.asarray(values[name], float))
            if name in self.scaled:
                loc, scale = self._prior_moments(batch, values, name)
                value = (value - loc) / scale
            coordinates[name] = value
        return coordinates

    def _prior_moments(
        self, batch: Batch, values: Values, name: str
    ) -> tuple[Array, Array]:
        parents = {parent: values[parent] for parent in self.scaled[name]}
        fn = batch.at(parents, only=[name])[name]["fn"]
        return affine_normal(fn, masked=True)  # type: ignore[return-value]

    def unflat(self, vector: ArrayLike, v: Values) -> Values:
        """Values of the sites of the Gaussian, shaped like ``v``, of (P,)."""
        shapes = {name: v[name].shape for name in self.sites}
        return cut(jnp.asarray(vector, float), shapes)

    def prior_scales(self, batch: Batch, v: Values) -> Values:
        """Of the weights whose prior scale is learned, by site of the Gaussian."""
        values, scales = self.values(batch, v), {}
        unit, zero = dict(values), dict(values)
        for name, (weight, _) in self.learned.items():
            if weight != name:
                unit[name], zero[name] = jnp.ones_like(v[name]), jnp.zeros_like(v[name])
        weights = [of.weight for of in self.learned.values()]
        ends = [batch.at(point, only=weights) for point in (zero, unit)]
        for name, (weight, _) in self.learned.items():
            if name in self.scaled:
                scale: ArrayLike = self._prior_moments(batch, values, name)[1]
            else:
                scale = self.fixed[name][1]
            if weight != name:
                low, high = (sites[weight]["value"] for sites in ends)
                scale = scale * (high - low)
            scales[name] = jnp.abs(scale)
        return scales

    def weight_variances(self, batch: Batch, v: Values, of_unit: Values) -> Values:
        """Of weights whose prior scale is learned, from those of standardized ones."""
        variances = {}
        for name, scale in self.prior_scales(batch, v).items():
            variances[name] = scale**2 * of_unit[name].reshape(v[name].shape)
        return variances

    # -- outputs by row ----------------------------------------------------------------

    def outputs(
        self, batch: Batch, v: Values, only: str | None = None
    ) -> dict[str, ObservedRows]:
        """The observed sites, or one of them; their values may have been drawn."""
        names = [only] if only else list(self.observed)
        sites, outputs = batch.at(self.values(batch, v), names), {}
        for name in names:
            axis, used, _ = self.observed[name]
            outputs[name] = observed_rows(sites[name], axis, used)
        return outputs

    def _flat_outputs(
        self, batch: Batch, v: Values, only: str | None = None
    ) -> tuple[Callable, Values]:
        """The outputs (B, E) as a function of the sites of the Gaussian, and those."""

        def flat(sites: Values) -> Array:
            outputs = self.outputs(batch, {**v, **sites}, only).values()
            return jnp.concatenate(_of_one_length([o.flat() for o in outputs]), axis=1)

        return flat, {name: v[name] for name in self.sites}

    def _roots(self, batch: Batch, v: Values) -> tuple[Array, Array]:
        """(B, D, E) roots of the Fisher information, and (B,) which rows have data."""
        outputs = self.outputs(batch, v).values()
        roots = jax.vmap(block_diag)(*_of_one_length([o.roots() for o in outputs]))
        weight = jnp.concatenate(_of_one_length([o.weight for o in outputs]), axis=1)
        return roots, jnp.any(weight > 0, axis=1).astype(roots.dtype)

    def jacobians(self, batch: Batch, v: Values) -> Jacobians:
        """Jacobians of the outputs, times the root of their Fisher information."""
        return jacobians(*self._flat_outputs(batch, v), *self._roots(batch, v))

    def output_jacobians(self, batch: Batch, v: Values, name: str) -> Jacobians:
        """Jacobians of the outputs of an observed site."""
        flat, sites = self._flat_outputs(batch, v, name)
        rows, width = jax.eval_shape(flat, sites).shape
        roots = jnp.broadcast_to(jnp.eye(width), (rows, width, width))
        return jacobians(flat, sites, roots, jnp.ones(rows))

    def bend(self, batch: Batch, v: Values, step: Values) -> Values:
        """Sum over rows of J^T F f'', with f'' the second derivative of the outputs
        along a step, by site.
        """
        flat, sites = self._flat_outputs(batch, v)
        roots, _ = self._roots(batch, v)

        def slope(sites: Values) -> Array:
            return jax.jvp(flat, (sites,), (step,))[1]

        second = jax.jvp(slope, (sites,), (step,))[1]
        gradient = jnp.einsum("bde,bdf,bf->be", roots, roots, second)
        return jax.vjp(flat, sites)[1](gradient)[0]

    def sweep(self, v: Values, fn: Callable, *extra: PyTree) -> PyTree:
        """The sum of a function of the Jacobians over all rows."""

        def of_batch(batch: Batch, v: Values, *extra: PyTree) -> PyTree:
            return fn(self.jacobians(batch, v), *extra)

        return self.rows.total(of_batch, v, *extra, key=fn)

    def inputs(self, name: str) -> list[Array]:
        """Arguments from which the outputs of an observed site are computed row by row,
        rows first, and not what is observed.
        """
        plate = self.rows.plate
        everything = None if plate is None else jnp.arange(plate.size)
        reading = self.rows.reading(everything)
        site, row_axis = reading.sites[name], self.observed[name].axis
        rank = len(site["fn"].batch_shape)
        plates = []
        for frame in site["cond_indep_stack"]:
            if rank + frame.dim == row_axis:
                plates.append(frame.name)
        natural = likelihood_of(site).natural
        labels: dict[Axis, int | None] = {}
        for places in axes_of_data(
            reading, lambda sites: natural(sites[name]["fn"])
        ).values():
            labels |= places
        leaves = dict(Arguments.of(*self.rows.call).leaves)
        of_value = reading.sources(lambda sites: {name: sites[name]["value"]})[name]
        counts, arrays = counted(reading), []
        for label, place in labels.items():
            if label.source not in leaves.keys() - of_value:
                continue
            key = label.source, label.axis
            if place == row_axis or any(counts.alike(key, plate) for plate in plates):
                arrays.append(jnp.moveaxis(leaves[label.source], label.axis, 0))
        return arrays

    # -- densities ---------------------------------------------------------------------

    def log_likelihood(
        self, batch: Batch, v: Values, spread: Arrays | None = None
    ) -> Array:
        """Sum over these rows; with the variances ``spread`` of loc, averaged over it
        to tune the noise.
        """
        sites = batch.at(self.values(batch, v), self.data)
        total = jnp.zeros(())
        for name in self.data:
            total += log_density(sites[name])
        if spread:
            detached = dict(v)
            for name in self._held_for_noise():
                detached[name] = jax.lax.stop_gradient(v[name])
            outputs = self.outputs(batch, detached)
            for name, variance in spread.items():
                rows, location = outputs[name], self.observed[name].used[0]
                slope = rows.likelihood.information(rows.outputs)[location]
                total -= 0.5 * jnp.sum(rows.weight * batch.of(variance) * slope**2)
        return total

    def _held_for_noise(self) -> set[str]:
        """Weights, and their scales, if the noise is computed from weights: averaging
        over the location is to change nothing but the noise.
        """
        weights = self.fixed.keys() | self.scaled.keys()
        if all(weights.isdisjoint(site.noise) for site in self.observed.values()):
            return set()
        return weights.union(*[learned.parents for learned in self.learned.values()])

    def log_prior(
        self, batch: Batch, v: Values, tuned: Tuned, names: Sequence
    ) -> Array:
        """Of sites in the coordinates v, with tuned prior precisions of fixed ones.

        With variances of weights it is averaged over these, to learn their scales,
        which at the joint mode are too large.
        """
        others = [name for name in names if name in self.other_sites]
        sites = batch.at(self.values(batch, v), others) if others else {}
        total = jnp.zeros(())
        for name in names:
            if name in self.fixed:
                loc, scale = self.fixed[name]
                fn = dist.Normal(loc, scale * tuned.precision.get(name, 1.0) ** -0.5)
                total += jnp.sum(fn.log_prob(v[name]))
            elif name in self.scaled:
                total += jnp.sum(dist.Normal().log_prob(v[name]))
            else:
                value, transform = sites[name]["value"], self.transforms[name]
                total += log_density(sites[name])
                total += jnp.sum(transform.log_abs_det_jacobian(v[name], value))
        return total + self._averaged(batch, v, tuned.weights)

    def _averaged(
        self, batch: Batch, v: Values, variances: Mapping[str, Array]
    ) -> Array:
        """What averaging over weights of these variances adds to the log prior of their
        scales, with the Jacobian of u = (w - m) / s.
        """
        total = jnp.zeros(())
        if variances:
            for name, scale in self.prior_scales(batch, v).items():
                total -= jnp.sum(jnp.log(scale) + 0.5 * variances[name] / scale**2)
        return total

    def potential(self, batch: Batch, v: Values, tuned: Tuned) -> Array:
        """-log p(D, v), estimated from some rows."""
        likelihood = self.log_likelihood(batch, v, tuned.spread)
        if batch.indices and self.rows.plate:
            (index,) = batch.indices.values()
            likelihood *= self.rows.plate.size / len(index)
        prior = self.log_prior(batch, v, tuned, list(self.transforms))
        return -likelihood - prior

    def prior_precision(
        self, v: Values, precision: Mapping[str, Array | float], curvature: Values
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


def _of_one_length(arrays: Sequence[Array]) -> list[Array]:
    """Rows of several observed sites side by side: a site with fewer rows gets empty
    ones.
    """
    number = max(map(len, arrays))
    padded = []
    for array in arrays:
        widths = [(0, number - len(array))] + [(0, 0)] * (array.ndim - 1)
        padded.append(jnp.pad(array, widths))
    return padded


# -- reading the model -----------------------------------------------------------------


def check_sites(rows: ModelRows) -> None:
    """Refuse latent sites whose density a Gaussian cannot follow, and models with
    random numbers of their own.
    """
    plates = rows.plates
    if len(plates) > 1:
        got = f"{len(plates)} subsampled plates ({', '.join(plates)})"
        raise argument_error(CALL, "model", got, "Subsample one plate of data.")
    reading = rows.reading(rows.chunks[0])
    check_state(CALL, "model", reading)
    if reading.stochastic:
        got = "a model with random numbers of its own (`numpyro.prng_key`)"
        raise argument_error(CALL, "model", got, INSTEAD)
    for name in reading.latent:
        site = reading.sites[name]
        if site["fn"].support.is_discrete:
            got = f"the discrete latent site {name!r}"
            raise argument_error(CALL, "model", got, INSTEAD)
        for frame in site["cond_indep_stack"]:
            if frame.name in plates:
                got = f"the local site {name!r} in plate {frame.name!r}"
                raise argument_error(CALL, "model", got, INSTEAD)
        if isinstance(unwrapped(site["fn"], masked=True), dist.Laplace):
            got = (
                f"the site {name!r} with a Laplace prior, which has no second "
                f"derivative at its mode"
            )
            raise argument_error(CALL, "model", got, "Use a Normal or StudentT prior.")


def read(
    rows: ModelRows,
    transforms: Mapping[str, Transform],
    scaled: Scaled,
    sites: Sequence[str],
    by_products: bool,
) -> LaplacePosterior:
    """Read a model for a Gaussian of some sites; errors name the site that cannot be
    approximated.

    :param by_products: whether Jacobians have to be products of inputs and gradients,
        row by row.
    """
    reading = rows.reading(rows.chunks[0])
    parents = reading.depends(
        lambda sites: {
            name: site["fn"] for name, site in sites_of_type(sites, "sample").items()
        }
    )
    moments = reading.run(_normal_moments)
    fixed, other_sites = {}, []
    for name in reading.latent:
        if name in scaled:
            continue
        site, is_real = reading.sites[name], is_identity(transforms[name])
        if parents[name] and is_real and not is_affine_normal(site["fn"]):
            got = (
                f"the site {name!r}, whose {type(unwrapped(site['fn'])).__name__} "
                f"prior depends on {parents[name]}"
            )
            instead = (
                "The joint mode degenerates at a scale of 0: use a non-centered "
                "prior, or a fixed scale."
            )
            raise argument_error(CALL, "model", got, instead)
        is_fixed = not parents[name] and is_real and site["scale"] is None
        if is_fixed and moments[name] is not None:
            loc, scale = moments[name]
            fixed[name] = np.asarray(loc), np.asarray(scale)
        else:
            other_sites.append(name)
    moving = set(sites)
    for name in scaled:
        if not scaled[name].isdisjoint(sites):
            moving.add(name)
    observed = _observed_sites(rows, reading, parents, moving, by_products)
    learned = {}
    for name, scale in _learned_scales(reading, scaled, fixed).items():
        if name in sites:
            learned[name] = scale
    return LaplacePosterior(
        rows,
        transforms,
        scaled,
        fixed,
        other_sites,
        observed,
        reading.observed,
        sites,
        learned,
    )


def _learned_scales(
    reading: Posterior, scaled: Scaled, fixed: Mapping[str, Any]
) -> dict[str, LearnedScale]:
    weights = base_sites(reading.sites)

    def computed(sites: Sites) -> dict[tuple[str, str], Array]:
        arrays = {}
        for name in scaled:
            _, arrays[name, "scale"] = affine_normal(sites[name]["fn"], masked=True)  # type: ignore[misc]
        for base, name in weights.items():
            arrays[base, "weight"] = sites[name]["value"]
        return arrays

    parents, learned = reading.depends(computed), {}
    for name in scaled:
        learned[name] = LearnedScale(name, frozenset(parents[name, "scale"]))
    noncentered = {}
    for base, name in weights.items():
        others = frozenset(parents[base, "weight"] - {base})
        if base in fixed.keys() | scaled.keys() and others:
            noncentered[base] = LearnedScale(name, others)
    if noncentered:
        by_base = {base: scale.weight for base, scale in noncentered.items()}
        is_affine = reading.run(partial(_are_affine, by_base))
        for base, scale in noncentered.items():
            learned.pop(base, None)
            if is_affine[base]:
                learned[base] = scale
    return learned


def _are_affine(weights: Mapping[str, str], reading: Posterior) -> dict[str, Array]:
    """Whether each element of a weight is an affine function of that of its base, by
    base, and of no other base.
    """
    random, shapes = np.random.default_rng(0), reading.shapes()
    draws = {base: random.normal(size=shapes[base].shape) for base in weights}
    values = []
    for point in (jnp.zeros_like, jnp.ones_like, jnp.asarray):
        bases = {base: point(draws[base], float) for base in weights}
        values.append(reading.at(bases, only=list(weights.values())))
    affine = {}
    for base, name in weights.items():
        low, high, drawn = (sites[name]["value"] for sites in values)
        affine[base] = jnp.allclose(drawn - low, draws[base] * (high - low), rtol=1e-3)
    return affine


def _normal_moments(reading: Posterior) -> Trees:
    """Loc and scale of sites with a Normal prior."""
    trace = reading.at({}, only=reading.latent)
    return {name: affine_normal(site["fn"]) for name, site in trace.items()}


def _observed_sites(
    rows: ModelRows,
    reading: Posterior,
    parents: Mapping[str, set[str]],
    moving: set[str],
    by_products: bool,
) -> dict[str, ObservedSite]:
    """Those that depend on ``moving`` sites; refuses rows that cannot be taken
    apart.
    """
    dependent = [name for name in reading.observed if parents[name]]
    for name in dependent:
        likelihood_of(reading.sites[name])

    def outputs_of(trace: Sites) -> dict[Any, Array]:
        outputs = {}
        for name in dependent:
            site = trace[name]
            for output, value in likelihood_of(site).natural(site["fn"]).items():
                outputs[name, output] = value
        return outputs

    by_output = reading.depends(outputs_of)
    data = mixed = axes_of_data(reading, outputs_of)
    if rows.normalizes:
        # Without batch statistics, in which rows are mixed.
        with placeholder_statistics():
            data = axes_of_data(rows.read_again(rows.chunks[0]), outputs_of)
    observed = {}
    for name in reading.observed:
        site = reading.sites[name]
        if is_factor(site["fn"]) and name not in dependent:
            continue
        frames = {frame.name for frame in site["cond_indep_stack"]}
        if rows.plates and frames.isdisjoint(rows.plates):
            got = f"the observed site {name!r} outside of the subsampled plate"
            instead = "Run it on all rows, without a minibatch."
            raise argument_error(CALL, "model", got, instead)
        if name not in dependent:
            continue
        axis = _row_axis(site, rows.plates, _places(data, name))
        _check_rows(_places(mixed, name), axis, rows.plates, by_products)
        used: list[str] = []
        noise: set[str] = set()
        for (observed_name, output), latent in by_output.items():
            if observed_name == name and latent & moving:
                if output in likelihood_of(site).constants:
                    got = f"the observed site {name!r} with a random `{output}`"
                    instead = f"Give a number for `{output}`."
                    raise argument_error(CALL, "model", got, instead)
                noise |= latent if used else set()
                used.append(output)
        if used:
            observed[name] = ObservedSite(axis, tuple(used), frozenset(noise))
    if not observed:
        got = "a model without observed sites"
        if reading.observed:
            got = "data that depend on none of the sites of the guide"
        instead = "Pass the targets (`y`), and sites that the data depend on."
        raise argument_error(CALL, "sites", got, instead)
    return observed


Places = list[tuple[Axis, int | None]]


def _places(
    axes: Mapping[tuple[str, str], Mapping[Axis, int | None]], name: str
) -> Places:
    """Where axes of data lie in the outputs of a site; ``None``: mixed."""
    places: Places = []
    for (observed_name, _), labels in axes.items():
        if observed_name == name:
            places += labels.items()
    return places


def _row_axis(site: Site, plates: Mapping[str, Plate], places: Places) -> int | None:
    """The axis of the subsampled plate; else of the outermost plate, or first axis,
    along which the data lie.
    """
    along = {place: label.source for label, place in places}
    rank = len(site["fn"].batch_shape)
    axes = []
    for frame in reversed(site["cond_indep_stack"]):
        axis = rank + frame.dim
        if axis < 0:
            continue
        axes.append(axis)
        if frame.name in plates or (not plates and along.get(axis) == frame.name):
            return axis
    if not axes and unwrapped(site["fn"], masked=True).event_dim == 0:
        axes = list(range(len(site["fn"].shape())))
    for axis in axes:
        if axis in along:
            return axis
    return axes[0] if axes else None


def _check_rows(
    places: Places, axis: int | None, plates: Mapping[str, Plate], by_products: bool
) -> None:
    """Refuse rows that influence one another where they are taken apart: in
    minibatches, and as products.
    """
    mixed = any(label.source in plates and place != axis for label, place in places)
    if by_products and places and not plates and axis is not None:
        mixed = axis not in {place for _, place in places}
    if mixed:
        got = (
            "a model in which one row changes the outputs of others, such as one with "
            "batch normalization"
        )
        instead = 'Use "diag", "low_rank" or "full" on all rows, or `nn.LayerNorm`.'
        raise argument_error(CALL, "model", got, instead)
