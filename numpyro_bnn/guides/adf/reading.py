"""What AutoADF reads from a call of the model: which arguments are data, and the role
of every site.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_bnn._checks import argument_error, check_finite, check_same_length
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unmasked_elements,
    unwrapped,
)
from numpyro_bnn.guides.initialization import BASE_SUFFIXES, base_sites, check_imputed
from numpyro_bnn.program.arguments import Arguments, Call
from numpyro_bnn.program.compiled import TRACING
from numpyro_bnn.program.plates import PARAMETERS
from numpyro_bnn.program.reading import Reading, Site, Sites
from numpyro_bnn.program.rows import refuse_rows

CALL = "guides.AutoADF"


def refuse(site: str, reason: str, instead: str) -> Exception:
    """The error for a site that assumed density filtering cannot handle."""
    return argument_error(CALL, "model", f"site {site!r}, {reason}", instead)


def read(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Reading:
    """What a model is; the guide that reads it may itself run inside NumPyro's
    handlers.
    """
    with TRACING, handlers.block():
        return Reading(model, args, kwargs)


def observed_site(sites: Sites) -> str:
    """The one observed site."""
    observed = []
    for name, site in sites.items():
        if site["type"] == "sample" and is_factor(site["fn"]):
            instead = "Write an observed `sample`, whose likelihood has a distribution."
            raise refuse(name, "a `factor` statement", instead)
        if (
            site["type"] == "sample"
            and site["is_observed"]
            and not site["infer"].get("is_auxiliary")
        ):
            observed.append(name)
            if is_scaled(site):
                raise refuse(
                    name, "whose likelihood is scaled", "Remove `handlers.scale`."
                )
    if len(observed) != 1:
        names = ", ".join(map(repr, observed)) or "none"
        instead = "Pass the targets; exactly one site must be observed."
        raise argument_error(
            CALL, "model", f"{len(observed)} observed sites ({names})", instead
        )
    return observed[0]


def is_scaled(site: Mapping[str, Any]) -> bool:
    """Whether the log density of a site has a factor other than 1."""
    scale = site["scale"]
    return scale is not None and (
        isinstance(scale, jax.core.Tracer) or bool(np.any(np.asarray(scale) != 1))
    )


@dataclass(frozen=True)
class Data:
    """A call of a model on a data set; its floating-point arrays are in float64."""

    model: Callable
    fixed: Arguments  # without arrays
    rows: dict[str, Any]  # arrays with one row per data point, by place
    arrays: dict[str, Any]  # all other arrays

    @classmethod
    def of(
        cls,
        model: Callable,
        args: tuple,
        kwargs: Mapping[str, Any],
        is_row: Callable[[str, Any], bool],
    ) -> "Data":
        """Split a call; ``is_row(place, array)`` says which arrays have one row per
        data point.
        """
        fixed, arrays = Arguments.of(args, kwargs, model).split()
        arrays = {name: _wide(leaf) for name, leaf in arrays.items()}
        rows = {}
        for name in list(arrays):
            if is_row(name, arrays[name]):
                rows[name] = arrays.pop(name)
        return cls(model, fixed, rows, arrays)

    @classmethod
    def read(cls, model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> "Data":
        """Split the call on a whole data set: arrays as long as the observation are
        data.
        """
        refuse_rows(CALL, "Every epoch takes all rows to the device", args, kwargs)
        sites = read(model, args, kwargs).sites
        observed = observed_site(sites)
        length = np.shape(sites[observed]["value"])[:1]
        if not length:
            raise refuse(
                observed, "one number", "Observe an array with one row per data point."
            )
        data = cls.of(
            model, args, kwargs, lambda name, leaf: np.shape(leaf)[:1] == length
        )
        if not data.rows:
            came = f"no array of length {length[0]}, the length of the observation"
            raise argument_error(CALL, "args", came, "Pass the data as arguments.")
        return data

    def like(self, args: tuple, kwargs: Mapping[str, Any], call: str) -> "Data":
        """Split another call in the same way: the arguments that were data before are
        data again.
        """
        data = self.of(self.model, args, kwargs, lambda name, leaf: name in self.rows)
        if not data.rows:
            raise argument_error(
                call, "args", "no data", f"Pass {', '.join(self.rows)}."
            )
        for name, leaf in data.rows.items():
            of_row = np.shape(self.rows[name])[1:]
            if np.ndim(leaf) == 0 or np.shape(leaf)[1:] != of_row:
                instead = (
                    f"Pass (N, {', '.join(map(str, of_row))}), rows as in the run."
                )
                raise argument_error(call, name, f"shape {np.shape(leaf)}", instead)
        check_same_length(
            call, **{name.replace("'", ""): leaf for name, leaf in data.rows.items()}
        )
        return data

    @property
    def num_rows(self) -> int:
        """Number of data points."""
        return np.shape(next(iter(self.rows.values())))[0]

    def head(self) -> "Data":
        """The same call with its first two rows only: enough to read
        the model again.
        """
        return replace(self, rows={name: leaf[:2] for name, leaf in self.rows.items()})

    @property
    def key(self) -> tuple:
        """Everything that a compiled program depends on except the
        values of the data.
        """
        shapes, arrays = [], []
        for name, leaf in self.rows.items():
            shapes.append((name, np.shape(leaf), leaf.dtype))
        for name, leaf in self.arrays.items():
            arrays.append((name, _fingerprint(leaf)))
        return self.fixed, tuple(shapes), tuple(arrays)

    def call(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> Call:
        """Positional and keyword arguments with these rows and arrays."""
        return self.fixed.call({**rows, **arrays})

    def row(self, rows: Mapping[str, Any], arrays: Mapping[str, Any]) -> Call:
        """The call for one data point, without the leading axis."""
        return self.call(jax.tree.map(lambda leaf: leaf[None], rows), arrays)

    def site(self, name: str, values: Mapping[str, Any], call: Call) -> Site:
        """One site of the model, called in this way, at values of others."""
        return read(self.model, *call).at(values, only=[name])[name]

    def check(self, call: str) -> None:
        """Refuse NaN and infinity in any array."""
        for name, leaf in {**self.rows, **self.arrays}.items():
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                check_finite(call, name, leaf)


def _fingerprint(value: Any) -> Any:
    """The value itself if it is concrete, because what the guide reads from a model may
    depend on it.
    """
    if isinstance(value, jax.core.Tracer) or jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return np.shape(value)
    return np.shape(value), np.asarray(value).tobytes()


def _wide(leaf: Any) -> Any:
    """Convert floating-point arrays to float64, on the host; leave PRNG keys and
    integers unchanged.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return (leaf if isinstance(leaf, jax.core.Tracer) else np.asarray(leaf)).astype(
        np.float64
    )


@dataclass(frozen=True)
class Weight:
    """A weight site: w ~ N(loc, (scale h^power)^2), with h an element of a
    hyperparameter, or without h.

    Any other prior on the real line is represented by its mean and sd.
    """

    latent: (
        str  # the site that the model samples: `w` itself, or its non-centered `w_base`
    )
    loc: np.ndarray  # prior mean, shaped like the site
    scale: np.ndarray  # prior sd without its hyperparameter
    hyper: str | None = None  # name of the hyperparameter
    power: float = 0.0  # -1/2 for a precision, 1 for a scale, 1/2 for a variance
    element: np.ndarray | None = (
        # for every weight, the index of its element in the flattened hyperparameter
        None
    )

    @property
    def centered(self) -> bool:
        return not self.latent.endswith(BASE_SUFFIXES)

    def prior_sd(self, hypers: Mapping[str, Any]) -> jax.Array:
        """Prior sd at values of the hyperparameters."""
        scale = jnp.asarray(self.scale, float)
        if self.hyper is None:
            return scale
        return scale * jnp.ravel(hypers[self.hyper])[self.element] ** self.power


@dataclass(frozen=True)
class Roles:
    """What the sites of a model are for."""

    # on the whole real line, by the name of the site whose value enters the network
    weights: Mapping[str, Weight]
    # all others: scales of weights, noise, what data do not inform
    hyperparameters: Mapping[str, dist.Distribution]
    noise: tuple[str, ...]  # the hyperparameters that the observation depends on
    observed: str  # name of the observed site

    @property
    def prior_means(self) -> dict[str, Any]:
        return {name: weight.loc for name, weight in self.weights.items()}


def find_sites(model: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Roles:
    """The role of every site of ``model``, called with the arguments of one data point;
    refuse other models.
    """
    reading = read(model, args, kwargs)
    observed = observed_site(reading.sites)
    _check_latent(reading, observed)
    bases = base_sites(reading.sites)
    latent_of, hypers = {}, []
    for name in reading.latent:
        if _is_weight(reading.sites[name]["fn"]):
            latent_of[bases.get(name, name)] = name
        else:
            hypers.append(name)
    if not latent_of:
        raise argument_error(
            CALL, "model", "no weights", "Give the weights a Normal prior."
        )
    parents = _reached(reading, latent_of, hypers, observed)
    prior_moments, distributions = _priors(reading, latent_of, hypers)
    weights = {
        name: _weight(name, base, parents[name], prior_moments[name])
        for name, base in latent_of.items()
    }
    noise = tuple(name for name in hypers if name in parents[observed])
    _check_roles(weights, parents[observed], noise)
    return Roles(weights, distributions, noise, observed)


def _check_latent(reading: Reading, observed: str) -> None:
    check_imputed(CALL, reading.sites)
    data_plates = {frame.name for frame in reading.sites[observed]["cond_indep_stack"]}
    for name in reading.latent:
        site = reading.sites[name]
        if isinstance(unwrapped(site["fn"]), dist.MaskedDistribution) or is_scaled(
            site
        ):
            instead = "Change the prior itself; for a flat one pass a wide prior."
            raise refuse(name, "whose prior is masked or scaled", instead)
        if site["fn"].support.is_discrete:
            raise refuse(name, "which is discrete", "Sum it out, or use MCMC.")
        for frame in site["cond_indep_stack"]:
            if frame.size == 1 and frame.name in data_plates:
                reason = f"inside the plate {frame.name!r} of the data"
                raise refuse(name, reason, "Each data point would have its own weight.")
    for name, site in reading.sites.items():
        if site["type"] in PARAMETERS:
            raise refuse(
                name,
                f"a `{site['type']}` site",
                "Give it a prior, or fix it with `handlers.substitute`.",
            )


def _is_weight(fn: dist.Distribution) -> bool:
    """Whether a site is normal, or elementwise on the whole real line, so that a normal
    can stand for its prior.
    """
    base = unwrapped(fn)
    return is_affine_normal(fn) or (
        not base.event_dim
        and not isinstance(base, dist.TransformedDistribution | dist.ImproperUniform)
        and base.support == constraints.real
    )


def _projected(fn: dist.Distribution) -> tuple[jax.Array, jax.Array]:
    """Mean and sd of the prior of a weight site."""
    loc, scale = affine_normal(fn) or (fn.mean, jnp.sqrt(fn.variance))
    return jnp.asarray(loc, float), jnp.asarray(scale, float)


def _reached(
    reading: Reading, weights: Mapping[str, str], hypers: Sequence[str], observed: str
) -> dict[str, set[str]]:
    """The latent sites from which the prior of each weight, and the observation, are
    computed.
    """

    def priors(sites: Sites) -> dict[str, Any]:
        moments_and_value = {}
        for name, latent in weights.items():
            value = 0.0 if name == latent else sites[name]["value"]
            moments_and_value[name] = [_projected(sites[latent]["fn"]), value]
        return moments_and_value

    def others_leaves(sites: Sites) -> dict[tuple[str, str], Any]:
        leaves: dict[tuple[str, str], Any] = {}
        for name in hypers:
            leaves["prior", name] = jax.tree.leaves(sites[name]["fn"])
        fn = sites[observed]["fn"]
        leaves["likelihood", observed] = jax.tree.leaves(unwrapped(fn, masked=True))
        leaves["data", observed] = [sites[observed]["value"], unmasked_elements(fn)]
        return leaves

    weight_parents = {
        name: sources - {weights[name]}
        for name, sources in reading.depends(priors).items()
    }
    leaf_parents = reading.depends(others_leaves, {*reading.latent, *weights})
    for name in (*hypers, *weights):
        if name in hypers:
            parents = leaf_parents["prior", name]
        else:
            parents = weight_parents[name] - set(hypers)
        if parents:
            instead = (
                "A weight may have one positive hyperparameter, its scale, and no more."
            )
            raise refuse(name, f"whose prior depends on {min(parents)!r}", instead)
    if parents := leaf_parents["data", observed]:
        raise refuse(
            observed,
            f"whose values, or mask, depend on {min(parents)!r}",
            "Pass them as data.",
        )
    return {**weight_parents, observed: leaf_parents["likelihood", observed]}


def _priors(
    reading: Reading, weights: Mapping[str, str], hypers: Sequence[str]
) -> tuple[dict[str, Any], dict[str, dist.Distribution]]:
    """Prior mean and sd of every weight with hyperparameters 1, 2, 3, and 2, 4, 6, ...,
    each (4, ...); priors of the hyperparameters.

    The sd of a weight that is not an affine function of its own base is NaN.
    """
    random = np.random.default_rng(0)
    bases = {w: latent for w, latent in weights.items() if w != latent}
    zeros, ones, probes = {}, {}, {}
    for w, shape in reading.shapes(bases).items():
        base = bases[w]
        zeros[base], ones[base] = np.zeros(shape.shape), np.ones(shape.shape)
        probes[base] = random.normal(size=shape.shape)

    def prior(reading: Reading, values: dict) -> dict[str, Any]:
        at_zeros, at_ones = reading.at(values | zeros), reading.at(values | ones)
        at_probes = reading.at(values | probes)
        moments = {}
        for w, latent in weights.items():
            mean, sd = moments[w] = _projected(at_zeros[latent]["fn"])
            if w in bases:
                shift = at_zeros[w]["value"]
                slope = at_ones[w]["value"] - shift
                line = shift + slope * probes[latent]
                affine = jnp.isclose(at_probes[w]["value"], line)
                plain = affine & (mean == 0) & (sd == 1)
                moments[w] = shift, jnp.where(plain, slope, jnp.nan)
        return moments

    values = {}
    for name, shape in reading.shapes(hypers).items():
        unit = np.ones(shape.shape)
        count = 1.0 + np.arange(shape.size).reshape(shape.shape)
        values[name] = np.stack([unit, 2 * unit, 3 * unit, 2 * count])

    def program(reading: Reading, values: dict) -> tuple[dict, dict]:
        moments = jax.lax.map(
            lambda indexed: prior(reading, indexed[1]), (np.arange(4), values)
        )
        sites = reading.at({}, only=hypers)
        return moments, {name: site["fn"] for name, site in sites.items()}

    return jax.device_get(reading.run(program, values))


def _weight(
    name: str, latent: str, parents: set[str], moments: tuple[np.ndarray, np.ndarray]
) -> Weight:
    """Read the prior of a weight site: its mean and sd, and how its hyperparameter
    scales it.
    """
    loc, loc_doubled, *_ = moments[0]
    scale, doubled, tripled, counted = moments[1]
    if latent == name and not np.all(np.isfinite(scale)):
        raise refuse(
            name,
            "whose prior has no finite variance",
            "Pass a prior with lighter tails.",
        )
    if not np.all(scale > 0):
        raise refuse(
            name,
            f"which is not a multiple of a unit normal {latent!r}",
            "Use independent weights.",
        )
    if len(parents) > 1:
        reason = f"scaled by {' and '.join(map(repr, sorted(parents)))}"
        raise refuse(name, reason, "Use one hyperparameter per weight.")
    if not parents:
        return Weight(latent, loc, scale)
    (hyper,) = parents
    if not np.allclose(loc, loc_doubled):
        raise refuse(
            name,
            f"whose prior mean depends on {hyper!r}",
            "Only its scale may have a hyperparameter.",
        )
    power = float(np.log2(doubled.flat[0] / scale.flat[0]))
    element = np.full(loc.shape, -1)
    if power:
        element = np.rint((counted / scale) ** (1 / power) / 2 - 1).astype(int)
    if not (
        np.all(element >= 0)
        and np.allclose(doubled / scale, 2**power)
        and np.allclose(tripled / scale, 3**power)
        and np.allclose(counted / scale, (2.0 * element + 2) ** power)
    ):
        reason = f"whose sd is not a constant times a power of {hyper!r}"
        raise refuse(name, reason, "Scale it by a scale, a variance or a precision.")
    # 32-bit indices work in either precision of JAX.
    return Weight(latent, loc, scale, hyper, round(power, 6), element.astype(np.int32))


def _check_roles(
    weights: Mapping[str, Weight], likelihood_parents: set[str], noise: tuple[str, ...]
) -> None:
    if not likelihood_parents & set(weights):
        came = "an observation that does not depend on any Gaussian weight"
        raise argument_error(CALL, "model", came, "Check the prior of the weights.")
    for name, weight in weights.items():
        if weight.hyper in noise:
            reason = f"which scales {name!r} and also enters the likelihood"
            instead = (
                "Write the weight centered, or non-centered with "
                "`numpyro.infer.reparam`."
            )
            raise refuse(str(weight.hyper), reason, instead)
