"""Refuse models whose minibatches would be silently wrong; handlers for kernels that
run the model themselves.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import in_support, is_factor, unwrapped
from numpyro_bnn._jaxprs.slices import dependence, indexed_lengths
from numpyro_bnn._types import Arrays, PyTree, Site, Sites
from numpyro_bnn.program.plates import Plate, sites_of_type
from numpyro_bnn.program.posterior import Posterior

OUTSIDE = "_outside_of_support"  # name of a factor
KEY = "prng_key"  # entry of a batch that seeds the model's own randomness
# Changes of log densities that rounding explains if rows change places, relative to the
# largest log density.
REORDERED = 0.01


class RowSubset(NamedTuple):
    """By plate, the rows that a model sees in place of a minibatch; of ``batch`` it
    takes only the key.
    """

    indices: Arrays
    batch: Arrays


# -- handlers -------------------------------------------------------------------------


class weight_jacobians(Messenger):
    """Multiply the Jacobians of NumPyro's potential by a factor, and by nothing that
    handlers inside do to a site.
    """

    def __init__(self, fn: Callable, factor: float) -> None:
        super().__init__(fn)
        self.factor = factor

    def process_message(self, msg: Site) -> None:
        if msg["type"] == "sample" and is_jacobian(msg):
            msg["scale"], msg["fn"] = self.factor, unwrapped(msg["fn"], masked=True)


class _bounds(Messenger):
    """Notes whether the distributions of all sites, and the observed values, are within
    their bounds.
    """

    def __init__(self) -> None:
        self.inside: Any = None  # as long as no bound is computed
        self.known = False
        super().__init__(None)

    def postprocess_message(self, msg: Site) -> None:
        self.known |= msg.get("name") == OUTSIDE  # a key has no name
        if msg["type"] != "sample" or not isinstance(msg["fn"], dist.Distribution):
            return
        inside = in_support(msg["fn"], msg["value"] if msg["is_observed"] else None)
        if isinstance(inside, jax.core.Tracer):
            inside = jnp.all(inside)
            self.inside = inside if self.inside is None else self.inside & inside


def within_support(model: Callable) -> Callable:
    """Give a model the density 0 where its distributions leave their bounds.

    Their own log densities are often finite there, and gradients take a chain across
    the border.
    """

    def bounded(*args: Any, **kwargs: Any) -> PyTree:
        bounds = _bounds()
        with bounds:
            result = model(*args, **kwargs)
        if bounds.inside is not None and not bounds.known:
            numpyro.factor(OUTSIDE, jnp.where(bounds.inside, 0.0, -jnp.inf))
        return result

    return bounded


def is_jacobian(site: Site) -> bool:
    """Whether a sample site is the log Jacobian that NumPyro's potential adds for a
    constrained latent site.
    """
    return re.search(r"(^|\W)_.+_log_det$", site["name"]) is not None and is_factor(
        site["fn"]
    )


# -- refusals --------------------------------------------------------------------------


def check_indices(call: str, reading: Posterior) -> frozenset[str]:
    """Refuse models whose likelihood, scaled by N / B, is not that of a fresh minibatch
    of N data points.

    :param reading: of the model on a minibatch.
    :return: names of deterministic sites that belong to one minibatch.
    """
    refused, plates = partial(argument_error, call, "model"), reading.plates
    sites = sites_of_type(reading.sites, "sample")

    def quantities(batch: Arrays) -> dict[tuple[str, str], Any]:
        return _parts(reading.at(reading.row_values(reading.zeros(), batch)))

    batch = first_batch(plates)
    used = dependence(quantities, batch)
    observed = set().union(*(used["density", name] for name in reading.observed))
    for name, plate in plates.items():
        if name not in observed:
            raise refused(
                f"plate {name!r}, whose indices the likelihood does not use",
                f"Its data would be scaled by {plate.size}/{plate.batch_size} as if "
                f"they were a fresh minibatch each step. Pass all {plate.size} rows "
                "and index them: `with plate(...) as i: ... obs=y[i]`.",
            )
        row_counts = indexed_lengths(
            lambda i, name=name: quantities({**batch, name: i}),  # type: ignore[misc]
            batch[name],
        )
        if row_counts and min(row_counts) < plate.size:
            raise refused(
                f"plate {name!r} of size {plate.size} that indexes an array with "
                f"{min(row_counts)} rows",
                "JAX would silently repeat the last row. Make the plate as large as "
                "the data: `x.shape[0]`.",
            )
    shapes = jax.eval_shape(quantities, batch)
    for site in sites.values():
        _check_site(refused, reading, site, used, shapes)
    if not reading.redrawn.issuperset(plates):
        raise refused(
            "a model that is already seeded",
            "Its minibatch and random numbers would be the same at every step. Pass it "
            "without `handlers.seed`.",
        )
    if not reading.stochastic:
        # random numbers belong to places of the minibatch, not to its rows
        _check_order(refused, reading, sites, batch)
    of_one_minibatch = set()
    for name in sites_of_type(reading.sites, "deterministic"):
        if used["deterministic", name] or reading.frames(name):
            of_one_minibatch.add(name)
    return frozenset(of_one_minibatch)


def first_batch(plates: Mapping[str, Plate]) -> dict[str, Array]:
    """The first B indices of every plate."""
    return {name: jnp.arange(plate.batch_size) for name, plate in plates.items()}


def _parts(traced: Sites) -> dict[tuple[str, str], Any]:
    """What may depend on the minibatch: scaled log densities, values, and deterministic
    sites.
    """
    quantities: dict[tuple[str, str], Any] = {}
    for name, site in traced.items():
        if site["type"] == "deterministic":
            quantities["deterministic", name] = site["value"]
        elif site["type"] == "sample":
            scale = 1.0 if site["scale"] is None else site["scale"]
            quantities["density", name] = scale * site["fn"].log_prob(site["value"])
            base = unwrapped(site["fn"], masked=True)
            quantities["value", name] = (
                base.log_factor if is_factor(base) else site["value"]
            )
    return quantities


def _check_site(
    refused: Callable,
    reading: Posterior,
    site: Site,
    used: Mapping,
    shapes: Mapping,
) -> None:
    """Check that a site stands in the plates whose indices it uses, and has one row for
    each of their indices.
    """
    name, plates = site["name"], reading.plates
    frames = reading.frames(name)
    for plate in sorted(used["density", name] - {frame.name for frame in frames}):
        raise refused(
            f"the site {name!r} outside of plate {plate!r}, whose indices it uses",
            f"It would not be scaled to {plates[plate].size} rows: move it inside, "
            "`with plate(...) as i: ...`.",
        )
    rows = shapes["value", name].shape  # of a factor: that of its log densities
    if not is_factor(site["fn"]):
        rows = rows[: max(len(rows) - site["fn"].event_dim, 0)]
    for frame in frames:
        length = rows[frame.dim] if len(rows) >= -frame.dim else None
        indexed = frame.name in used["value", name]
        unused = not indexed and frame.name not in used["density", name]
        if (
            unused
            or indexed != (length == frame.size)
            or length not in (None, 1, frame.size)
        ):
            raise refused(
                f"the site {name!r} in plate {frame.name!r}, whose value is not one "
                "row for each of its indices",
                f"Pass all {plates[frame.name].size} rows and index them: `with "
                "plate(...) as i: ... obs=y[i]`.",
            )


def _check_order(
    refused: Callable,
    reading: Posterior,
    sites: Sites,
    batch: Arrays,
) -> None:
    """Refuse sites that mix indexed rows with fixed ones: reversed indices must reverse
    their log densities.
    """

    def densities(reading: Posterior) -> list[dict[str, Array]]:
        drawn = reading.at()
        values = {name: drawn[name]["value"] for name in reading.latent}
        by_order = []
        for reversed_plate in (None, *batch):
            inputs = {**values, **batch}
            if reversed_plate is not None:
                inputs[reversed_plate] = batch[reversed_plate][::-1]
            for name in reading.local:
                for plate, axis in reading.row_axes(name).items():
                    if plate == reversed_plate:
                        inputs[name] = jnp.flip(inputs[name], axis)
            quantities = _parts(reading.at(inputs))
            by_order.append({name: quantities["density", name] for name in sites})
        return by_order

    in_order, *reversed_plates = reading.run(densities)
    for plate, reordered in zip(batch, reversed_plates, strict=True):
        for name in sites:
            if isinstance(reordered[name], jax.core.Tracer):
                continue  # the data are arguments of a compiled program
            frames = reading.frames(name)
            axes = tuple(frame.dim for frame in frames if frame.name == plate)
            expected = np.flip(np.asarray(in_order[name]), axes)
            largest = np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))
            if not np.allclose(
                expected, reordered[name], 0, REORDERED * largest, equal_nan=True
            ):
                raise refused(
                    f"the site {name!r} in plate {plate!r}, of which some rows stay "
                    "when the indices change",
                    "Index every array that has one row per data point, also for masks "
                    "and scales: `x[i]`.",
                )
