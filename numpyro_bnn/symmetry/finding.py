"""Find the symmetries of a network or a model from its layers and priors, and verify
them numerically.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_bnn._checks import argument_error, check_finite, is_floating, outside
from numpyro_bnn._distributions import unwrapped
from numpyro_bnn._options import (
    Args,
    KwargsOption,
    Model,
    NetworkName,
    NonNegativeOrInfinite,
    Switch,
    checked,
)
from numpyro_bnn._types import Kwargs, PyTree, Site
from numpyro_bnn.nn.base import Net, Shape
from numpyro_bnn.nn.wiring import Segment, Wire, Wiring
from numpyro_bnn.program.arguments import as_arrays, place_of
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import check_rows
from numpyro_bnn.symmetry.base import Symmetry, UnitAxis, as_symmetries, sites_of
from numpyro_bnn.symmetry.groups import (
    JointRescale,
    JointScale,
    Permutation,
    Rescale,
    Scale,
    Shift,
    SignFlip,
)
from numpyro_bnn.symmetry.prior_program import PriorProgram, in_latent, log_likelihoods

SEEDS = (0, 1, 2)
MAX_AXES_OF_A_LENGTH = 8  # axes of one length of which all subsets are tried
TOLERANCE = 1e-6
# How the hyper-sites of the priors scale a weight: w ~ s^power.
HYPER_SITES = {"scale": 1.0, "global": 1.0, "precision": -2.0}


@checked("symmetry.find")
def find(model: Model, *args: Any, **kwargs: Any) -> list[Symmetry]:
    """Find the symmetries of a model from its random networks and their priors.

    These are the symmetries that :func:`from_network` finds for every
    :func:`~numpyro_bnn.random_network` of the model, permutations and signs of hidden
    units that are found from the shapes of other latent sites (a network written by
    hand or of Flax), a shift of the class logits if the observation is categorical, and
    :class:`JointScale` and :class:`JointRescale` for the learned scales of the kernels
    involved. Each is verified numerically on the model, as by :func:`check`, and left
    out if it does not hold. Weights that are fixed
    (:class:`~numpyro_bnn.priors.Fixed`), learned or observed do not move.

    :param model: a NumPyro model.
    :param args: its positional arguments, with the data.
    :param kwargs: its keyword arguments.

    >>> import jax.numpy as jnp
    >>> from numpyro_bnn import models, nn, priors
    >>> model = models.regression(
    ...     nn.MLP([4, 1], "tanh", norm=nn.BatchNorm()), priors.Hierarchical()
    ... )
    >>> x = jnp.arange(12.0).reshape(6, 2) ** 2
    >>> [symmetry.name for symmetry in find(model, x, jnp.ones(6))][:2]
    ['Scale(net/Dense_0.kernel)', 'Shift(net/Dense_0.bias)']
    """
    measure = _Measure("symmetry.find", model, args, kwargs)
    reading = measure.reading
    networks: dict[Any, None] = {}
    for site in reading.sites.values():
        if network := (site.get("infer") or {}).get("network"):
            networks[network] = None
    logits = any(
        isinstance(unwrapped(reading.sites[name]["fn"]), dist.CategoricalLogits)
        for name in reading.observed
    )
    latent = set(reading.latent)
    free: list[Symmetry] = []
    joint: list[Symmetry] = []
    for name, net, input_shape in networks:
        for symmetry in from_network(net, input_shape, name, logits):
            # All weights of a unit must be free: those that are fixed or learned do not
            # move with it.
            if all({site, f"{site}_base"} & latent for site in symmetry.sites):
                free.append(symmetry)
                joint += _with_scales(symmetry, latent)
    candidates = list(dict.fromkeys(free + joint))
    known_sites = sites_of(free)
    known_sites |= {f"{site}_base" for site in known_sites}
    valid = measure.holding(candidates) + _hidden_units(measure, known_sites)
    if not valid:
        names = ", ".join(repr(name) for name, *_ in networks)
        looked = f"in {names}" if networks else "as it has no `random_network`"
        kinds = ", ".join(sorted({type(symmetry).__name__ for symmetry in candidates}))
        tried = f" of {len(candidates)} candidates ({kinds})" if candidates else ""
        message = (
            f"symmetry.find: found none{tried} {looked}. Declare your own, e.g. "
            "`symmetry.Permutation([(site, axis), ...])`, and verify them by `check`."
        )
        warnings.warn(message, stacklevel=outside())
    return valid


def _with_scales(symmetry: Symmetry, latent: set[str]) -> list[Symmetry]:
    """The same group for a whole layer, with the hyper-sites that scale its kernels."""

    def driving(axes: Iterable[UnitAxis]) -> list[tuple[str, float]]:
        """The hyper-sites that scale these sites, with their powers."""
        scales = []
        for axis in axes:
            for suffix, power in HYPER_SITES.items():
                if (hyper := f"{axis.site}_{suffix}") in latent:
                    scales.append((hyper, power))
        return scales

    if isinstance(symmetry, Scale):
        scales = driving(symmetry.weights)
        return [JointScale(symmetry.sites, *scale) for scale in scales]
    if isinstance(symmetry, Rescale):
        scales = driving(symmetry.incoming)
        scales += [(hyper, -power) for hyper, power in driving(symmetry.outgoing)]
        incoming = [axis.site for axis in symmetry.incoming]
        outgoing = [axis.site for axis in symmetry.outgoing]
        return [JointRescale(incoming, outgoing, scales)] if scales else []
    return []


# -- models that are not made of our layers --------------------------------------------


def _hidden_units(measure: "_Measure", left_out: Collection[str]) -> list[Symmetry]:
    """Permutations and sign flips of axes of one length in two or more sites that leave
    the likelihood as it is.

    Every set of such axes is tried, and the smallest that hold are kept: sets that
    contain another are left out.

    :param left_out: sites whose symmetries are known.
    """
    by_length: dict[int, list[UnitAxis]] = defaultdict(list)
    for site, value in measure.reading.shapes().items():
        for axis, length in enumerate(value.shape if site not in left_out else ()):
            if length > 1:
                by_length[length].append(UnitAxis(site, axis))
    candidates = []
    for same_length in by_length.values():
        candidates += list(map(Permutation, _subsets(same_length)))
    candidates.sort(key=lambda symmetry: len(symmetry.unit_axes))
    smallest: list[Symmetry] = []
    for symmetry in measure.holding(candidates):
        axes = set(symmetry.unit_axes)
        if not any(axes.issuperset(subset.unit_axes) for subset in smallest):
            smallest.append(symmetry)
    # An axis that may be permuted alone, as of hyperparameters, does not enter the
    # likelihood.
    smallest = [symmetry for symmetry in smallest if len(symmetry.unit_axes) > 1]
    flips = [SignFlip(symmetry.unit_axes) for symmetry in smallest]
    return smallest + measure.holding(flips)


def _subsets(axes: Sequence[UnitAxis]) -> Iterator[tuple[UnitAxis, ...]]:
    """Sets of axes of different sites."""
    if len(axes) <= MAX_AXES_OF_A_LENGTH:
        for size in range(1, len(axes) + 1):
            for subset in combinations(axes, size):
                if len({axis.site for axis in subset}) == size:
                    yield subset


# -- from the layers of a network ------------------------------------------------------


@checked("symmetry.from_network")
def from_network(
    net: Net, input_shape: Shape, name: NetworkName = "net", logits: Switch = False
) -> list[Symmetry]:
    """Find the symmetries of a network from its layers.

    - :class:`Scale` and :class:`Shift` of the weights before a normalization,
    - :class:`Rescale` of positively homogeneous units, through convolutions, pooling
      and residual streams,
    - :class:`SignFlip` of units with odd activations, and of a normalized unit with its
      gain,
    - :class:`Permutation` of hidden units,
    - with ``logits`` a common :class:`Shift` of all outputs.

    A user-defined layer takes part if it defines :meth:`~numpyro_bnn.nn.Layer.connect`.
    To include hyperparameters, use :func:`find`, which reads a whole model.

    :param net: the specification, e.g. ``nn.MLP([50, 1])``.
    :param input_shape: shape of one data point.
    :param name: prefix of the sites, as given to :func:`~numpyro_bnn.random_network`.
    :param logits: whether the outputs are class logits.

    >>> from numpyro_bnn import nn
    >>> [s.name for s in from_network(nn.MLP([8, 1], "relu"), (3,))]
    ['Rescale(net/Dense_0.kernel)', 'Permutation(net/Dense_0.kernel)']
    >>> [
    ...     s.name
    ...     for s in from_network(
    ...         nn.MLP([8, 1], "tanh", norm=nn.LayerNorm(False, False)), (3,)
    ...     )
    ... ][:2]
    ['Scale(net/Dense_0.kernel)', 'Shift(net/Dense_0.kernel)']
    """
    wiring = net.wiring(input_shape)
    symmetries = [*_scales(wiring), *_flips(wiring), *_permutations(wiring)]
    if logits:
        symmetries += _logit_shifts(wiring)
    names = {path: f"{name}/{path}" for path in net.param_shapes(input_shape)}
    return [symmetry.rename(names) for symmetry in symmetries]


def _axis(wire: Wire, per_layer: bool = False) -> UnitAxis:
    return UnitAxis(wire.param) if per_layer else UnitAxis(*wire)


def _axes(wires: list[Wire], per_layer: bool = False) -> tuple[UnitAxis, ...]:
    return tuple(dict.fromkeys(_axis(wire, per_layer) for wire in wires))


def _is(kind: str, wire: Wire) -> bool:
    return wire.param.rsplit(".", 1)[-1] == kind


def _reaches_far(segment: Segment) -> bool:
    """Whether a normalization joins its units, so that only one number is free for all
    of them.
    """
    return not set(segment.norms) <= {"unit"}


def _scales(wiring: Wiring) -> Iterator[Symmetry]:
    for i in wiring.distinct():
        segment = wiring.segments[i]
        free = not segment.fixed and not segment.bound and segment.homogeneous
        if not free or not segment.writers:
            continue
        layer = _reaches_far(segment)
        if segment.readers:
            yield Rescale(_axes(segment.writers, layer), _axes(segment.readers, layer))
        elif segment.norms:
            yield from _before_normalization(segment, layer)


def _before_normalization(segment: Segment, layer: bool) -> Iterator[Symmetry]:
    """Weights that feed only normalizations: their scale is free, and without an
    activation between, their mean.
    """
    biases = [wire for wire in segment.writers if _is("bias", wire)]
    factors = [wire for wire in segment.writers if wire not in biases]
    if not segment.linear:
        yield Scale(_axes(segment.writers, layer))
    elif layer:
        # One factor for the layer; a shift shared by all units, from the bias and from
        # every input.
        yield Scale(_axes(segment.writers, True))
        # What an input adds differs by data point and pixel: each must be normalized
        # separately.
        separate = segment.pointwise and set(segment.norms) == {"layer"}
        for wire in factors:
            if separate and _is("kernel", wire):
                yield Shift((UnitAxis(wire.param, wire.axis - 1),))
        if biases:
            yield Shift((UnitAxis(biases[0].param),))
    else:
        # The mean of each unit is subtracted: a bias has no effect, so only kernels and
        # gains scale.
        yield Scale(_axes(factors))
        for wire in biases:
            yield Shift(_axes([wire]))


def _flips(wiring: Wiring) -> Iterator[Symmetry]:
    """Signs of units with odd activations; a normalization without gain passes the sign
    on.
    """
    for segments in _groups(wiring, lambda segment: segment.flipped_with):
        if any(map(_keeps_sign, segments)) or not any(s.writers for s in segments):
            continue
        layer = any(map(_reaches_far, segments))
        axes: Counter[UnitAxis] = Counter()
        for s in segments:
            for wire in (*s.writers, *s.readers, *s.gains):
                axes[_axis(wire, layer)] += 1
        # A kernel between flipped layers, or the gain of a flipped output, changes sign
        # twice.
        yield SignFlip(tuple(axis for axis, times in axes.items() if times % 2))


def _keeps_sign(segment: Segment) -> bool:
    if segment.fixed or not segment.odd:
        return True
    return segment.bound and not segment.flipped_with


def _permutations(wiring: Wiring) -> Iterator[Symmetry]:
    for segments in _groups(wiring, lambda segment: segment.normalized):
        if any(s.fixed for s in segments) or max(s.units for s in segments) < 2:
            continue
        wires: list[Wire] = []
        for s in segments:
            wires += (*s.writers, *s.readers)
        if wires:
            yield Permutation(_axes(wires))


def _groups(
    wiring: Wiring, linked: Callable[[Segment], list[int]]
) -> Iterator[list[Segment]]:
    """Segments joined by links, in the order of the network."""
    group = {i: {i} for i in wiring.distinct()}
    for i in wiring.distinct():
        for neighbor in linked(wiring.segments[i]):
            joined = group[i] | group[wiring.find(neighbor)]
            group.update(dict.fromkeys(joined, joined))
    for members in dict.fromkeys(map(frozenset, group.values())):
        yield [wiring.segments[i] for i in sorted(members)]


def _logit_shifts(wiring: Wiring) -> Iterator[Symmetry]:
    """One number added to all outputs: by the bias, and by every input of the last
    layer.
    """
    segment = wiring[wiring.output]
    if not segment.linear or segment.bound or segment.readers or segment.norms:
        return
    for wire in segment.writers:
        if _is("bias", wire):
            yield Shift((UnitAxis(wire.param),))
        elif _is("kernel", wire) and segment.pointwise and wiring.output.repeats == 1:
            yield Shift((UnitAxis(wire.param, wire.axis - 1),))


# -- verified on a model ---------------------------------------------------------------


class Invariance(NamedTuple):
    """How well a symmetry holds: the largest relative change of a log likelihood, see
    :func:`check`.
    """

    symmetry: Symmetry
    error: float


@checked("symmetry.check")
def check(
    model: Model,
    symmetries: Sequence[Symmetry],
    args: Args = (),
    kwargs: KwargsOption | None = None,
    tolerance: NonNegativeOrInfinite = TOLERANCE,
) -> list[Invariance]:
    r"""Test numerically whether a model has the given symmetries, and refuse those that
    it does not have.

    The log likelihood of each observation is compared before and after random group
    elements act on draws from the prior, in float64:

    .. math:: \mathrm{error} = \max \frac{|\Delta \log p(y_n)|}{1 + |\log p(y_n)|}

    :param model: a NumPyro model, with its data among the arguments.
    :param symmetries: symmetries of its parameter sites.
    :param args: positional arguments of the model.
    :param kwargs: its keyword arguments.
    :param tolerance: maximum error of a symmetry; infinity only measures. A model that
        itself computes in float32 needs about 1e-3.
    :return: for every symmetry a named tuple ``(symmetry, error)``.
    :raises ValueError: for a symmetry with a larger error, which the message gives, or
        if nothing is observed.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro_bnn import symmetry
    >>> def model(y):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     numpyro.sample(
    ...         "y", dist.Normal(w[0] / (w[1] ** 2 + 1e-5) ** 0.5, 1.0), obs=y
    ...     )
    >>> check(model, [symmetry.Scale("w")], (0.3,))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: symmetry.check: argument `symmetries` got Scale(w), under which ...
    """
    measure = _Measure("symmetry.check", model, args, kwargs)
    invariances = measure(as_symmetries("symmetry.check", symmetries))
    for entry in invariances:
        if not entry.error <= tolerance:
            change = f"the log likelihood changes by {entry.error:.1e} (relative)"
            instead = (
                f"At most {tolerance:.0e} is allowed. Leave it out, remove the epsilon "
                f"of the normalization, or pass"
                " `exact=False` to OrbitMoves, which then evaluates the likelihood."
            )
            got = f"{entry.symmetry.name}, under which {change}"
            raise argument_error("symmetry.check", "symmetries", got, instead)
    return invariances


class _Measure:
    """Measures how group elements change the log likelihood of a model, which is read
    once, in float64, and evaluated at draws from its prior.
    """

    def __init__(
        self, call: str, model: Callable, args: Any, kwargs: Kwargs | None
    ) -> None:
        self.call = call
        args, kwargs = as_arrays(args, kwargs, call)
        with jax.core.eval_context(), jax.enable_x64(True):
            args, kwargs = jax.tree.map(_doubled, (args, kwargs))
            model = handlers.substitute(model, substitute_fn=_unlearned)
            try:
                self.reading = Posterior(model, args, kwargs)
            except TypeError as error:
                if "float64" not in str(error):
                    raise
                first = str(error).split("\n")[0]
                got = f"a model that does not run in float64 ({first})"
                instead = (
                    "Symmetries are tested in float64: let its layers follow, e.g. "
                    "`GRUCell(..., param_dtype=float)`."
                )
                raise argument_error(call, "model", got, instead) from error
            check_rows(call, self.reading, args, kwargs)
            self.prior = PriorProgram(self.reading)
            self.draws = self.reading.draw(SEEDS)
            self._check_data(args, kwargs)

    def _check_data(self, args: tuple, kwargs: Kwargs) -> None:
        """Refuse NaN and infinity among the data where they reach the likelihood or its
        gradient.

        Elsewhere they are allowed, as behind a mask or in an infinite bound.
        """
        suspicious = []
        for path, leaf in jax.tree_util.tree_leaves_with_path((args, kwargs)):
            if is_floating(leaf) and not np.isfinite(leaf).all():
                suspicious.append((place_of(path), leaf))
        if not suspicious:
            return

        def slopes(reading: Posterior, values: dict) -> Any:
            free = {name: v for name, v in values.items() if is_floating(v)}

            def total(free: dict) -> Array:
                logs = log_likelihoods(reading, {**values, **free})
                return sum(map(jnp.sum, logs), jnp.zeros(()))

            return jax.value_and_grad(total)(free)

        results = jax.tree.leaves(self.reading.run(slopes, self.draws[0]))
        if not all(np.isfinite(result).all() for result in results):
            check_finite(self.call, *suspicious[0])

    def __call__(self, symmetries: Sequence[Symmetry]) -> list[Invariance]:
        if symmetries and self.reading.held.keys() >= set(self.reading.observed):
            instead = (
                "Pass the data with the observations, e.g. `x, y`: symmetries are "
                "tested on their likelihood."
            )
            raise argument_error(self.call, "args", "no observations", instead)
        with jax.core.eval_context(), jax.enable_x64(True):
            moving = []
            for symmetry in symmetries:
                moving.append(in_latent(symmetry, self.prior, self.draws[0]))
            changes = self.reading.prepare(partial(_changes, moving))
            errors = np.array([changes(*start) for start in enumerate(self.draws)])
        return list(map(Invariance, symmetries, errors.max(0, initial=0.0).tolist()))

    def holding(self, symmetries: Sequence[Symmetry]) -> list[Symmetry]:
        """Those that leave the likelihood as it is."""
        invariances = self(symmetries) if symmetries else []
        return [entry.symmetry for entry in invariances if entry.error <= TOLERANCE]


def _unlearned(site: Site) -> Array | None:
    """Arbitrary values of parameters that will be learned: a symmetry must hold at all
    of them.
    """
    learned = site["type"] == "param" and site["kwargs"].get("learned")
    if not learned or site["value"] is not None:
        return None
    (start,) = site["args"]
    rng_key = jax.random.key(crc32(site["name"].encode()))
    return start + jax.random.normal(rng_key, jnp.shape(start), start.dtype)


def _doubled(leaf: PyTree) -> PyTree:
    return jnp.asarray(np.asarray(leaf, np.float64)) if is_floating(leaf) else leaf


def _changes(
    moving: Sequence[Symmetry], reading: Posterior, seed: Array, values: dict
) -> Array:
    """Largest relative change of a pointwise log likelihood, by symmetry, at a draw
    with its seed.
    """
    points, owner = [values], []
    for i, symmetry in enumerate(moving):
        rng_key = jax.random.fold_in(jax.random.key(seed), i)
        for g in symmetry.trials(rng_key, symmetry.units(values)):
            points.append({**values, **symmetry.act(values, g)})
            owner.append(i)

    def logs_at(point: Mapping) -> Array:
        logs = map(jnp.ravel, log_likelihoods(reading, point))
        return jnp.concatenate([jnp.zeros(0), *logs])

    logs = jax.vmap(logs_at)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *points))
    changes = jnp.abs(logs[1:] - logs[0]) / (1 + jnp.abs(logs[0]))
    # NaN stays NaN, and is refused. Without symmetries there is nothing to compare.
    largest = jnp.zeros(len(moving))
    return largest.at[jnp.array(owner, int)].max(jnp.max(changes, 1, initial=0.0))
