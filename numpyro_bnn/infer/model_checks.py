"""Choose the rows that a subsampled plate sees; refuse models whose minibatches would
be silently wrong.
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
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import in_support, is_factor, is_latent, unwrapped
from numpyro_bnn._jaxprs import dependence, indexed_lengths
from numpyro_bnn.program.plates import full_plates, random_indices, sites_of_type
from numpyro_bnn.program.reading import Plate, Reading

OUTSIDE = "_outside_of_support"  # name of a factor
KEY = "prng_key"  # entry of a batch that seeds the model's own randomness
# Changes of log densities that rounding explains if rows change places, relative to the
# largest log density.
REORDERED = 0.01


class RowSubset(NamedTuple):
    """By plate, the rows that a model sees in place of a minibatch; of ``batch`` it
    takes only the key.
    """

    indices: Mapping[str, jax.Array]
    batch: Mapping[str, jax.Array]


# -- handlers that choose rows ---------------------------------------------------------


class only_rows(Messenger):
    """Restrict some plates to a fixed subset of their rows, weighted as if it were all
    data; other plates are full.

    :param rows: indices by plate.
    """

    def __init__(self, fn: Callable, rows: Mapping[str, jax.Array]) -> None:
        self.rows = rows
        super().__init__(full_plates(fn))

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.rows:
            indices = self.rows[msg["name"]]
            msg["args"] = (msg["args"][0], indices.shape[0])
            msg["value"] = indices


class give_indices(Messenger):
    """Give subsampled plates the indices of a minibatch, and the model its random keys.

    Keys are set as values, because NumPyro's potential would replace those of a
    ``seed`` handler by a constant.

    :param batch: indices by plate.
    :param plates: the plates that ``batch`` was made for.
    """

    def __init__(
        self, fn: Callable, batch: Mapping[str, jax.Array], plates: Mapping[str, Plate]
    ) -> None:
        self.batch, self.plates, self.key = batch, plates, batch.get(KEY)
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key" and self.key is not None and msg["value"] is None:
            self.key, msg["value"] = random.split(self.key)
        if msg["type"] != "plate" or msg["value"] is not None:
            return
        name, sizes = msg["name"], tuple(msg["args"])
        start_sizes = self.plates.get(name) and tuple(self.plates[name])
        if sizes != start_sizes:
            got = f"data for which plate {name!r} has size and subsample size {sizes}"
            instead = (
                f"The run was started with {start_sizes}: start a new one for other "
                "sizes."
            )
            raise argument_error("MCMC.run", "model arguments", got, instead)
        msg["value"] = self.batch[name]


class weight_jacobians(Messenger):
    """Multiply the Jacobians of NumPyro's potential by a factor, and by nothing that
    handlers inside do to a site.
    """

    def __init__(self, fn: Callable, factor: float) -> None:
        super().__init__(fn)
        self.factor = factor

    def process_message(self, msg: dict[str, Any]) -> None:
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

    def postprocess_message(self, msg: dict[str, Any]) -> None:
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

    def bounded(*args: Any, **kwargs: Any) -> Any:
        bounds = _bounds()
        with bounds:
            result = model(*args, **kwargs)
        if bounds.inside is not None and not bounds.known:
            numpyro.factor(OUTSIDE, jnp.where(bounds.inside, 0.0, -jnp.inf))
        return result

    return bounded


def on_batch(model: Callable, plates: Mapping[str, Plate]) -> Callable:
    """Add a keyword ``_batch`` to a model: indices by plate, ``None`` for random ones,
    "full", or a ``RowSubset``.
    """

    def wrapped(*args: Any, _batch: Any = None, **kwargs: Any) -> Any:
        if _batch is None:
            return random_indices(model)(*args, **kwargs)
        if isinstance(_batch, RowSubset):
            subset = only_rows(model, _batch.indices)
            return give_indices(subset, _batch.batch, plates)(*args, **kwargs)
        if isinstance(_batch, str):
            return full_plates(model)(*args, **kwargs)
        return give_indices(model, _batch, plates)(*args, **kwargs)

    return wrapped


def lifted(model: Callable, plates: Mapping[str, Plate]) -> Callable:
    """Sample latent sites at full size outside of subsampled plates, and give the model
    the rows of the minibatch.

    The model runs twice: on all rows for its latent sites alone, where compilers drop
    the rest, then on their values.
    """

    def hidden(site: Mapping[str, Any]) -> bool:
        return site["type"] in ("sample", "deterministic", "plate") and not (
            is_latent(site) or is_jacobian(site)
        )

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        def rows(site: Mapping[str, Any]) -> Any:
            if not is_latent(site):
                return None
            value = full[site["name"]]["value"]
            for frame in frames_of(site, plates):
                indices = minibatch[frame.name]["value"]
                value = jnp.take(value, indices, frame.dim - site["fn"].event_dim)
            return value

        with handlers.block(hide_fn=hidden):
            full = handlers.trace(full_plates(model)).get_trace(*args, **kwargs)
        with (
            handlers.block(hide_fn=is_latent),
            handlers.trace() as minibatch,
            handlers.substitute(substitute_fn=rows),
        ):
            return model(*args, **kwargs)

    return wrapped


def first_batch(plates: Mapping[str, Plate]) -> dict[str, jax.Array]:
    """The first B indices of every plate."""
    return {name: jnp.arange(plate.batch_size) for name, plate in plates.items()}


# -- reading a trace -------------------------------------------------------------------


class constant_keys(Messenger):
    """Give a model that asks for random numbers of its own one key whenever it has
    none.
    """

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "prng_key" and msg["value"] is None:
            msg["value"] = random.key(0)


def is_jacobian(site: Mapping[str, Any]) -> bool:
    """Whether a sample site is the log Jacobian that NumPyro's potential adds for a
    constrained latent site.
    """
    return re.search(r"(^|\W)_.+_log_det$", site["name"]) is not None and is_factor(
        site["fn"]
    )


def frames_of(site: Mapping[str, Any], plates: Mapping[str, Plate]) -> list[Any]:
    """The plates of which a site has the rows of a minibatch."""
    frames = []
    for frame in site.get("cond_indep_stack", ()):
        if frame.name in plates and frame.size < plates[frame.name].size:
            frames.append(frame)
    return frames


# -- refusals --------------------------------------------------------------------------


def check_indices(call: str, reading: Reading) -> frozenset[str]:
    """Refuse models whose likelihood, scaled by N / B, is not that of a fresh minibatch
    of N data points.

    :param reading: of the model on a minibatch.
    :return: names of deterministic sites that belong to one minibatch.
    """
    refused, plates = partial(argument_error, call, "model"), reading.plates
    sites = sites_of_type(reading.sites, "sample")

    def quantities(batch: Mapping[str, jax.Array]) -> dict[tuple[str, str], Any]:
        return _parts(reading.at({**reading.zeros(), **batch}))

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
        _check_site(refused, site, plates, used, shapes)
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
    for name, site in sites_of_type(reading.sites, "deterministic").items():
        if used["deterministic", name] or frames_of(site, plates):
            of_one_minibatch.add(name)
    return frozenset(of_one_minibatch)


def _parts(traced: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
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
    site: Mapping[str, Any],
    plates: Mapping[str, Plate],
    used: Mapping,
    shapes: Mapping,
) -> None:
    """Check that a site stands in the plates whose indices it uses, and has one row for
    each of their indices.
    """
    name, frames = site["name"], frames_of(site, plates)
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
    reading: Reading,
    sites: Mapping[str, Any],
    batch: Mapping[str, jax.Array],
) -> None:
    """Refuse sites that mix indexed rows with fixed ones: reversed indices must reverse
    their log densities.
    """

    def densities(reading: Reading) -> list[dict[str, jax.Array]]:
        drawn = reading.at()
        values = {name: drawn[name]["value"] for name in reading.latent}
        orders = [batch]
        for plate, rows in batch.items():
            orders.append({**batch, plate: rows[::-1]})
        by_order = []
        for minibatch in orders:
            quantities = _parts(reading.at({**values, **minibatch}))
            by_order.append({name: quantities["density", name] for name in sites})
        return by_order

    in_order, *reversed_plates = reading.run(densities)
    for plate, reordered in zip(batch, reversed_plates, strict=True):
        for name, site in sites.items():
            if isinstance(reordered[name], jax.core.Tracer):
                continue  # the data are arguments of a compiled program
            frames = frames_of(site, reading.plates)
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
