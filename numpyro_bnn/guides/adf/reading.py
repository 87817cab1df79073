"""What AutoADF reads from a call of the model: which arguments are data, and the role
of every site.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_bnn._checks import (
    argument_error,
    check_finite,
    check_same_length,
    is_floating,
)
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unmasked_elements,
    unwrapped,
)
from numpyro_bnn._types import PyTree, Trees
from numpyro_bnn.guides.initialization import base_sites, check_imputed
from numpyro_bnn.program.arguments import Arguments, Call
from numpyro_bnn.program.axes import counted
from numpyro_bnn.program.compiled import NEEDS_VALUES, TRACING
from numpyro_bnn.program.plates import PARAMETERS, sites_of_type
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import refuse_random
from numpyro_bnn.program.rows import refuse_rows
from numpyro_bnn.program.sites import Sites

CALL = "guides.AutoADF"
Values = Mapping[str, Any]  # by name


def refuse(site: str, reason: str, instead: str) -> NoReturn:
    """Refuse a site that assumed density filtering cannot handle."""
    raise argument_error(CALL, "model", f"site {site!r}, {reason}", instead)


def read(model: Callable, args: tuple, kwargs: Values) -> Posterior:
    """What a model is; the guide that reads it may itself run inside NumPyro's
    handlers.
    """
    came = "values by which the model branches, or computes shapes"
    instead = "Pass them as Python values, or use `jnp.where` instead of `if`."
    try:
        with TRACING, handlers.block():
            reading = Posterior(model, args, kwargs)
    except NEEDS_VALUES as error:
        raise argument_error(CALL, "args", came, instead) from error
    leaves = Arguments.of(args, kwargs, model).leaves.items()
    names = {id(leaf): name for name, leaf in leaves}
    for constant in reading.constants.values():
        name = names.get(id(constant), "args")
        raise argument_error(CALL, name, came, instead)
    return reading


def observed_site(sites: Sites) -> str:
    """The one observed site."""
    observed = []
    for name, site in sites_of_type(sites, "sample").items():
        if is_factor(site["fn"]):
            instead = "Write an observed `sample`, whose likelihood has a distribution."
            refuse(name, "a `factor` statement", instead)
        if site["is_observed"] and not site["infer"].get("is_auxiliary"):
            observed.append(name)
            if is_scaled(site):
                refuse(name, "whose likelihood is scaled", "Remove `handlers.scale`.")
    if len(observed) != 1:
        names = ", ".join(map(repr, observed)) or "none"
        instead = "Pass the targets; exactly one site must be observed."
        raise argument_error(
            CALL, "model", f"{len(observed)} observed sites ({names})", instead
        )
    return observed[0]


def _of_other_things(reading: Posterior, observed: str) -> set[str]:
    """The places of arrays whose first axis does not count the rows of an observation:
    for example one prior scale for each of as many units.
    """
    site, counts = reading.sites[observed], counted(reading)
    targets = reading.sources(lambda sites: {observed: sites[observed]["value"]})
    rows: list[tuple[str, int] | str] = [(place, 0) for place in targets[observed]]
    rows += [frame.name for frame in site["cond_indep_stack"]]
    others = set()
    for place in reading.data:
        if rows and all(counts.alike((place, 0), axis) is False for axis in rows):
            others.add(place)
    return others


def is_scaled(site: Values) -> bool:
    """Whether the log density of a site has a factor other than 1."""
    scale = site["scale"]
    return scale is not None and (
        isinstance(scale, jax.core.Tracer) or bool(np.any(np.asarray(scale) != 1))
    )


class _Place(str):
    """Stands for the array at a place."""


@dataclass(frozen=True)
class Data:
    """A call of a model on a data set; its floating-point arrays are in float64."""

    model: Callable
    fixed: Arguments  # without arrays
    rows: dict[str, PyTree]  # arrays with one row per data point, by place
    arrays: dict[str, PyTree]  # all other arrays

    @classmethod
    def of(
        cls,
        model: Callable,
        args: tuple,
        kwargs: Values,
        rows: Container[str] = (),
    ) -> "Data":
        """Split a call; the arrays at the places ``rows`` have one row per data
        point.
        """
        fixed, arrays = Arguments.of(args, kwargs, model).split()
        data = cls(model, fixed, {}, {})
        for place, array in arrays.items():
            if is_floating(array):
                # on the host, where the values are known
                known = not isinstance(array, jax.core.Tracer)
                array = (np.asarray(array) if known else array).astype(np.float64)
            (data.rows if place in rows else data.arrays)[place] = array
        return data

    @classmethod
    def read(
        cls, model: Callable, args: tuple, kwargs: Values
    ) -> tuple["Data", Posterior]:
        """Split the call on a whole data set: arrays as long as the observation are
        data, unless they count something else. Also returns the reading of it.
        """
        refuse_rows(CALL, "Every epoch takes all rows to the device", args, kwargs)
        data = cls.of(model, args, kwargs)
        reading = read(model, *data.call())
        refuse_random(CALL, "model", reading.stochastic)
        observed = observed_site(reading.sites)
        length = np.shape(reading.sites[observed]["value"])[:1]
        if not length:
            instead = "Observe an array with one row per data point."
            refuse(observed, "one number", instead)
        rows = [p for p, leaf in data.arrays.items() if np.shape(leaf)[:1] == length]
        # the reading knows places, not names of parameters
        marked = data.call(arrays={place: _Place(place) for place in data.arrays})
        places = Arguments.of(*marked).leaves
        others = {places[place] for place in _of_other_things(reading, observed)}
        rows = [place for place in rows if place not in others]
        if not rows:
            came = f"no array of length {length[0]}, the length of the observation"
            raise argument_error(CALL, "args", came, "Pass the data as arguments.")
        return cls.of(model, args, kwargs, rows), reading

    def like(self, args: tuple, kwargs: Values, call: str) -> "Data":
        """Split another call in the same way: the arguments that were data before are
        data again.
        """
        data = self.of(self.model, args, kwargs, self.rows)
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
        """The same call with its first two rows only: enough to read the model
        again.
        """
        return replace(self, rows={name: leaf[:2] for name, leaf in self.rows.items()})

    @property
    def first(self) -> tuple[Trees, Trees]:
        """The first data point, without the leading axis, and the other arrays."""
        return {name: leaf[0] for name, leaf in self.rows.items()}, self.arrays

    def read_row(self) -> Posterior:
        """The model of one row."""
        return read(self.model, *self.row_call(*self.first))

    @property
    def key(self) -> tuple:
        """Everything that a compiled program depends on except the
        values of the data.
        """
        shapes, arrays = [], []
        for name, leaf in self.rows.items():
            shapes.append((name, np.shape(leaf), leaf.dtype))
        for name, leaf in self.arrays.items():
            # what the guide reads from a model may depend on known values
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            unknown = is_key or isinstance(leaf, jax.core.Tracer)
            values = None if unknown else np.asarray(leaf).tobytes()
            arrays.append((name, np.shape(leaf), values))
        return self.fixed, tuple(shapes), tuple(arrays)

    def call(self, rows: PyTree = None, arrays: PyTree = None) -> Call:
        """Positional and keyword arguments, by default with its own rows and arrays."""
        rows = self.rows if rows is None else rows
        arrays = self.arrays if arrays is None else arrays
        return self.fixed.call({**rows, **arrays})

    def row_call(self, row: PyTree, arrays: PyTree) -> Call:
        """The call for one data point, without the leading axis."""
        return self.call(jax.tree.map(lambda leaf: leaf[None], row), arrays)

    def check(self, call: str) -> None:
        """Refuse NaN and infinity in any array."""
        for name, leaf in {**self.rows, **self.arrays}.items():
            if is_floating(leaf):
                check_finite(call, name, leaf)


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
    element: Any = (
        # for every weight, the index of its element in the flattened hyperparameter
        None
    )

    def prior_sd(self, hypers: Values) -> Array:
        """Prior sd at values of the hyperparameters."""
        if self.hyper is None:
            return jnp.asarray(self.scale, float)
        return self.sd_at(hypers[self.hyper])

    def sd_at(self, hyper: Array) -> Array:
        """Prior sd at a value of its hyperparameter."""
        growth = jnp.ravel(hyper)[self.element] ** self.power
        return jnp.asarray(self.scale, float) * growth


class Roles(NamedTuple):
    """What the sites of a model are for."""

    # on the whole real line, by the name of the site whose value enters the network
    weights: Mapping[str, Weight]
    # all others: scales of weights, noise, what data do not inform
    hyperparameters: Mapping[str, dist.Distribution]
    noise: tuple[str, ...]  # the hyperparameters that the observation depends on
    observed: str  # name of the observed site
    # with which power of the noise sites the scale of a Normal observation grows
    noise_power: float | None

    def random_values(self) -> dict[str, np.ndarray]:
        """Weights drawn from their prior with hyperparameters of 1, and these."""
        random = np.random.default_rng(0)
        values = {}
        for name, weight in self.weights.items():
            noise = random.normal(size=weight.loc.shape)
            values[name] = weight.loc + weight.scale * noise
        for name, fn in self.hyperparameters.items():
            values[name] = np.ones(fn.shape())
        return values


def find_roles(reading: Posterior) -> Roles:
    """The role of every site of a model, read on one data point; refuse other
    models.
    """
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
    parents = _parents(reading, latent_of, hypers, observed)
    moments, distributions = _priors(reading, latent_of, hypers, observed)
    weights = {}
    for name, latent in latent_of.items():
        weights[name] = _weight(name, latent, parents[name], *moments[name])
    noise = tuple(name for name in hypers if name in parents[observed])
    if not parents[observed] & set(weights):
        came = "an observation that does not depend on any Gaussian weight"
        raise argument_error(CALL, "model", came, "Check the prior of the weights.")
    for name, weight in weights.items():
        if weight.hyper in noise:
            reason = f"which scales {name!r} and also enters the likelihood"
            instead = (
                "Write the weight centered, or non-centered with "
                "`numpyro.infer.reparam`."
            )
            refuse(str(weight.hyper), reason, instead)
    return Roles(weights, distributions, noise, observed, _power(moments[observed][1]))


def _check_latent(reading: Posterior, observed: str) -> None:
    check_imputed(CALL, reading.sites)
    data_plates = {frame.name for frame in reading.sites[observed]["cond_indep_stack"]}
    for name in reading.latent:
        site = reading.sites[name]
        masked = isinstance(unwrapped(site["fn"]), dist.MaskedDistribution)
        if masked or is_scaled(site):
            instead = "Change the prior itself; for a flat one pass a wide prior."
            refuse(name, "whose prior is masked or scaled", instead)
        if site["fn"].support.is_discrete:
            refuse(name, "which is discrete", "Sum it out, or use MCMC.")
        for frame in site["cond_indep_stack"]:
            if frame.size == 1 and frame.name in data_plates:
                reason = f"inside the plate {frame.name!r} of the data"
                refuse(name, reason, "Each data point would have its own weight.")
    for name, site in sites_of_type(reading.sites, *PARAMETERS).items():
        instead = "Give it a prior, or fix it with `handlers.substitute`."
        refuse(name, f"a `{site['type']}` site", instead)


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


def _projected(fn: dist.Distribution) -> tuple[Array, Array]:
    """Mean and sd of the prior of a weight site."""
    loc, scale = affine_normal(fn) or (fn.mean, jnp.sqrt(fn.variance))
    return jnp.asarray(loc, float), jnp.asarray(scale, float)


def _parents(
    reading: Posterior, weights: Mapping[str, str], hypers: Sequence[str], observed: str
) -> dict[str, set[str]]:
    """The latent sites from which the prior of each weight, and the observation, are
    computed.
    """

    def priors(sites: Sites) -> Trees:
        quantities = {}
        for name, latent in weights.items():
            value = 0.0 if name == latent else sites[name]["value"]
            quantities[name] = [_projected(sites[latent]["fn"]), value]
        return quantities

    def others(sites: Sites) -> Trees:
        quantities: dict[str, PyTree] = {}
        for name in hypers:
            quantities[name] = jax.tree.leaves(sites[name]["fn"])
        fn = sites[observed]["fn"]
        quantities[observed] = jax.tree.leaves(unwrapped(fn, masked=True))
        quantities[""] = [sites[observed]["value"], unmasked_elements(fn)]
        return quantities

    parents = reading.depends(others, {*reading.latent, *weights})
    for name, sources in reading.depends(priors).items():
        parents[name] = sources - {weights[name]}
    for name in (*hypers, *weights):
        beyond = parents[name] - (set(hypers) if name in weights else set())
        if beyond:
            instead = (
                "A weight may have one positive hyperparameter, its scale, and no more."
            )
            refuse(name, f"whose prior depends on {min(beyond)!r}", instead)
    if of_data := parents.pop(""):
        reason = f"whose values, or mask, depend on {min(of_data)!r}"
        refuse(observed, reason, "Pass them as data.")
    return parents


def _priors(
    reading: Posterior, weights: Mapping[str, str], hypers: Sequence[str], observed: str
) -> tuple[dict[str, Any], dict[str, dist.Distribution]]:
    """Prior mean and sd of every weight, and the sd of a Normal observation, with
    hyperparameters 1, 2, 3, and 2, 4, 6, ..., each (4, ...); priors of the
    hyperparameters.

    The sd of a weight that is not an affine function of its own base is NaN, and so is
    that of other observations.
    """
    random, probes = np.random.default_rng(0), {}
    noncentered = [name for name, latent in weights.items() if name != latent]
    for w, shape in reading.shapes(noncentered).items():
        zeros, draw = np.zeros(shape.shape), random.normal(size=shape.shape)
        probes[weights[w]] = zeros, zeros + 1, draw

    def prior(reading: Posterior, values: dict) -> Trees:
        at_zeros, at_ones, at_draws = (
            reading.at(values | {base: probe[k] for base, probe in probes.items()})
            for k in range(3)
        )
        fn = unwrapped(at_zeros[observed]["fn"], masked=True)
        noise = fn.scale if type(fn) is dist.Normal else jnp.nan
        moments = {observed: (jnp.zeros(()), jnp.asarray(noise))}
        for w, latent in weights.items():
            mean, sd = moments[w] = _projected(at_zeros[latent]["fn"])
            if latent in probes:
                shift = at_zeros[w]["value"]
                slope = at_ones[w]["value"] - shift
                line = shift + slope * probes[latent][2]
                affine = jnp.isclose(at_draws[w]["value"], line)
                plain = affine & (mean == 0) & (sd == 1)
                moments[w] = shift, jnp.where(plain, slope, jnp.nan)
        return moments

    values = {}
    for name, shape in reading.shapes(hypers).items():
        unit = np.ones(shape.shape)
        count = 1.0 + np.arange(shape.size).reshape(shape.shape)
        values[name] = np.stack([unit, 2 * unit, 3 * unit, 2 * count])

    def program(reading: Posterior, values: dict) -> tuple[dict, dict]:
        moments = jax.lax.map(
            lambda indexed: prior(reading, indexed[1]), (np.arange(4), values)
        )
        sites = reading.at({}, only=hypers)
        return moments, {name: site["fn"] for name, site in sites.items()}

    return jax.device_get(reading.run(program, values))


def _power(scales: np.ndarray) -> float | None:
    """With which power of its hyperparameters an sd grows, from its values at 1, 2, 3;
    ``None`` if with none.
    """
    # those of an observation that has none are not numbers
    with np.errstate(all="ignore"):
        ratios = scales / scales[0]
        power = float(np.log2(ratios[1].flat[0]))
        grows = np.allclose(ratios[1], 2**power) and np.allclose(ratios[2], 3**power)
    return round(power, 6) if grows else None


def _weight(
    name: str, latent: str, parents: set[str], locs: np.ndarray, scales: np.ndarray
) -> Weight:
    """Read the prior of a weight site: its mean and sd, and how its hyperparameter
    scales it.
    """
    loc, scale = locs[0], scales[0]
    if latent == name and not np.all(np.isfinite(scale)):
        instead = "Pass a prior with lighter tails."
        refuse(name, "whose prior has no finite variance", instead)
    if not np.all(scale > 0):
        reason = f"which is not a multiple of a unit normal {latent!r}"
        refuse(name, reason, "Use independent weights.")
    if len(parents) > 1:
        reason = f"scaled by {' and '.join(map(repr, sorted(parents)))}"
        refuse(name, reason, "Use one hyperparameter per weight.")
    if not parents:
        return Weight(latent, loc, scale)
    (hyper,) = parents
    if not np.allclose(loc, locs[1]):
        reason = f"whose prior mean depends on {hyper!r}"
        refuse(name, reason, "Only its scale may have a hyperparameter.")
    power, counted = _power(scales) or 0.0, scales[3] / scale
    # The hyperparameter has the elements 2, 4, 6, ...
    element = np.rint(counted ** (1 / power) / 2 - 1) if power else np.full(1, -1.0)
    if np.any(element < 0) or not np.allclose(counted, (2 * element + 2) ** power):
        reason = f"whose sd is not a constant times a power of {hyper!r}"
        refuse(name, reason, "Scale it by a scale, a variance or a precision.")
    # 32-bit indices work in either precision of JAX.
    return Weight(latent, loc, scale, hyper, power, element.astype(np.int32))
