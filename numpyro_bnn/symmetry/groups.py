"""The symmetry groups: positive factors, shifts, signs and permutations of units."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from typing import Annotated, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Number, check_fields
from numpyro_bnn._types import Arrays, Trees
from numpyro_bnn.symmetry.base import Symmetry, UnitAxes, UnitAxis, Values, as_unit_axes

Powers: TypeAlias = tuple[tuple[UnitAxis, float], ...]


def _with_power(axes: Iterable[UnitAxis], power: float) -> Powers:
    return tuple((axis, power) for axis in axes)


def _convert_fields(symmetry: Symmetry, convert: Callable, *names: str) -> None:
    """Set fields of a frozen symmetry to the unit axes that they name."""
    call = f"symmetry.{type(symmetry).__name__}"
    for name in names:
        axes = convert(call, name, getattr(symmetry, name))
        object.__setattr__(symmetry, name, axes)


class Multiplicative(Symmetry):
    """A factor c = exp(g) per unit; every site is multiplied by a power of it. Haar
    measure dc / c = dg.
    """

    @property
    @abstractmethod
    def powers(self) -> Powers:
        """Unit axes with the power of c that multiplies their sites."""

    @property
    def unit_axes(self) -> tuple[UnitAxis, ...]:
        return tuple(axis for axis, _ in self.powers)

    def act(self, values: Arrays, g: Array) -> Values:
        new_values: Values = {}
        for axis, power in self.powers:
            value = new_values.get(axis.site, values[axis.site])
            new_values[axis.site] = value * jnp.exp(
                power * axis.by_element(g, jnp.ndim(value))
            )
        return new_values

    def dimension(self, values: Trees) -> float:
        """Sum of the powers over the elements of a unit: log|det| is
        this times log c.
        """
        return sum(
            power * axis.per_unit(jnp.shape(values[axis.site]))
            for axis, power in self.powers
        )

    def log_det(self, values: Arrays, g: Array) -> Array:
        return self.dimension(values) * g

    def random(self, rng_key: Array, units: int) -> Array:
        return jax.random.uniform(rng_key, (units,), minval=-1.5, maxval=1.5)


@dataclass(frozen=True)
class Scale(Multiplicative):
    r"""Scale invariance of weights that feed a normalization: w -> c w for every unit,
    channel or layer.

    Orbit conditional: density of c proportional to c^(d-1) p(c w) with d elements per
    unit; for w ~ N(0, s^2 I) the radius is drawn exactly, :math:`|w| / s \sim \chi_d`.
    Log determinant d log c. Gauge: :math:`|w| = \sqrt d`.

    :param weights: sites or (site, axis) pairs; the axis runs over units with separate
        factors (batch normalization); without an axis the whole site has one factor
        (layer normalization).

    >>> import jax.numpy as jnp
    >>> s = Scale([("w", 1)])
    >>> values = {"w": jnp.ones((3, 2))}
    >>> g = jnp.log(jnp.array([2.0, 1.0]))
    >>> (
    ...     s.act(values, g)["w"][0].round(3).tolist(),
    ...     (s.log_det(values, g) / g[0]).round().tolist(),
    ... )
    ([2.0, 1.0], [3.0, 0.0])
    """

    weights: UnitAxes

    def __post_init__(self) -> None:
        _convert_fields(self, as_unit_axes, "weights")

    @property
    def powers(self) -> Powers:
        return _with_power(self.weights, 1.0)


@dataclass(frozen=True)
class Rescale(Multiplicative):
    r"""Rescaling of positively homogeneous units (ReLU, leaky ReLU): incoming weights
    times c, outgoing over c.

    Orbit conditional under Gaussian priors: t = c^2 is generalized inverse Gaussian,

    .. math:: p(t) \propto t^{p-1} \exp(-(a t + b / t) / 2),\quad p = (d_{in} - d_{out})
              / 2,\quad
              a = \sum w_{in}^2 / s_{in}^2,\quad b = \sum w_{out}^2 / s_{out}^2.

    Log determinant (d_in - d_out) log c. Gauge: the incoming norm is the square root of
    d_in; balanced norms would keep an outgoing weight from changing sign.

    :param incoming: (site, axis) pairs: kernel with its output axis, bias.
    :param outgoing: (site, axis) pairs: kernels that read the units, with their input
        axis.

    >>> Rescale([("w", 1), ("b", 0)], [("v", 0)]).powers[2]
    (UnitAxis(site='v', axis=0, repeats=1), -1.0)
    """

    incoming: UnitAxes
    outgoing: UnitAxes

    def __post_init__(self) -> None:
        _convert_fields(self, as_unit_axes, "incoming", "outgoing")

    @property
    def powers(self) -> Powers:
        return _with_power(self.incoming, 1.0) + _with_power(self.outgoing, -1.0)


@dataclass(frozen=True)
class JointScale(Multiplicative):
    """Scale invariance of weights together with their hierarchical scale: (w, s) -> (c
    w, c^power s).

    p(w | s) does not change, only the hyperprior does: orbit conditional s ~ p(s),
    drawn as an independent proposal and corrected if the weights are not a scale family
    of s. It holds only for weights whose scale the likelihood ignores. In a
    non-centered model s moves and the standardized weights stay.

    :param weights: sites whose scale does not matter to the likelihood, all of them
        scaled by ``scale``.
    :param scale: the site of the hyperparameter.
    :param power: 1 for a scale, -2 for a precision.

    >>> JointScale("net/Dense_0.kernel", "net/Dense_0.kernel_scale").sites
    ('net/Dense_0.kernel', 'net/Dense_0.kernel_scale')
    """

    weights: UnitAxes
    scale: UnitAxes
    power: Annotated[float, Number(-inf)] = 1.0

    def __post_init__(self) -> None:
        call = "symmetry.JointScale"
        check_fields(call, self)
        scale = as_unit_axes(call, "scale", self.scale)
        if len(scale) != 1 or scale[0].axis is not None:
            raise argument_error(
                call, "scale", self.scale, "Name one site, without an axis."
            )
        if not self.power:
            raise argument_error(
                call, "power", self.power, "Pass 1 for a scale, -2 for a precision."
            )
        _convert_fields(self, _whole_sites, "weights")
        object.__setattr__(self, "scale", scale)

    @property
    def name(self) -> str:
        return f"JointScale({self.scale[0].site})"

    @property
    def powers(self) -> Powers:
        scale = (self.scale[0], float(self.power))
        return (*_with_power(self.weights, 1.0), scale)


@dataclass(frozen=True)
class JointRescale(Multiplicative):
    """Rescaling of a layer of positively homogeneous units together with the
    hierarchical scales on both sides.

    Incoming weights, biases and their scale are multiplied by c, outgoing weights and
    their scale divided by it. The priors of the weights given the scales do not change,
    only the hyperpriors and the priors of biases do, so the ratio of the two scales can
    move far. In a non-centered model the standardized weights stay. Orbit conditional:
    a random walk.

    :param incoming: sites of incoming kernels and biases.
    :param outgoing: sites of outgoing kernels.
    :param scales: pairs of a hyper-site and the power of c that multiplies it, e.g.
        ``("Dense_1.kernel_scale", -1)``.

    >>> joint = JointRescale("w", "v", [("w_scale", 1), ("v_precision", 2)])
    >>> [(place.site, power) for place, power in joint.powers[2:]]
    [('w_scale', 1.0), ('v_precision', 2.0)]
    """

    incoming: UnitAxes
    outgoing: UnitAxes
    scales: UnitAxes

    def __post_init__(self) -> None:
        call = "symmetry.JointRescale"
        _convert_fields(self, _whole_sites, "incoming", "outgoing")
        instead = "Name hyper-sites with powers, e.g. `[(site, 1.0)]`."
        pairs = self.scales
        paired = isinstance(pairs, list | tuple) and all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
        )
        if not paired:
            raise argument_error(call, "scales", pairs, instead, TypeError)
        scales = []
        for site, power in pairs:
            (axis,) = _whole_sites(call, "scales", [site])
            scales.append((axis, float(Number(-inf).check(call, "scales", power))))
        if not scales or not all(power for _, power in scales):
            raise argument_error(call, "scales", pairs, instead)
        object.__setattr__(self, "scales", tuple(scales))

    @property
    def name(self) -> str:
        return f"JointRescale({self.scales[0][0].site})"

    @property
    def powers(self) -> Powers:
        weights = _with_power(self.incoming, 1.0) + _with_power(self.outgoing, -1.0)
        return weights + self.scales


def _whole_sites(call: str, argument: str, value: object) -> tuple[UnitAxis, ...]:
    axes = as_unit_axes(call, argument, value) if value else ()
    if any(axis.axis is not None for axis in axes):
        raise argument_error(
            call,
            argument,
            axes,
            "Name whole sites, without axes: they share one scale.",
        )
    return axes


@dataclass(frozen=True)
class OnElements(Symmetry):
    """A volume-preserving group that acts alike on every element of a unit: shifts,
    signs, orders.

    :param elements: sites, or (site, axis) pairs; the axis runs over the units.
    """

    elements: UnitAxes

    def __post_init__(self) -> None:
        _convert_fields(self, as_unit_axes, "elements")

    @property
    def unit_axes(self) -> tuple[UnitAxis, ...]:
        return self.elements

    @abstractmethod
    def on_site(self, axis: UnitAxis, value: Array, g: Array) -> Array:
        """The value of one site after ``g`` (U,) has acted along the axis."""

    def act(self, values: Arrays, g: Array) -> Values:
        new_values: Values = {}
        for axis in self.elements:
            new_values[axis.site] = self.on_site(
                axis, new_values.get(axis.site, values[axis.site]), g
            )
        return new_values

    def log_det(self, values: Arrays, g: Array) -> Array:
        return jnp.zeros(g.shape)


@dataclass(frozen=True)
class Shift(OnElements):
    r"""Shift invariance: the same number added to all elements of a unit, w -> w + g.

    For a bias before batch normalization each unit has a free number; for class logits
    one number is added to all classes, and one per input of the last layer. Orbit
    conditional: a prior draw for a unit of one element; for Gaussian elements N(m_k,
    s_k^2)

    .. math:: g \sim N\Big(-\frac{\sum_k (w_k - m_k) / s_k^2}{\sum_k 1 / s_k^2},\
              \frac{1}{\sum_k 1 / s_k^2}\Big).

    Log determinant 0. Gauge: the elements of a unit have mean 0.

    :param elements: sites, or (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> Shift([("w", 0)]).act({"w": jnp.zeros((2, 3))}, jnp.array([1.0, 2.0]))["w"][
    ...     :, 0
    ... ].tolist()
    [1.0, 2.0]
    """

    def on_site(self, axis: UnitAxis, value: Array, g: Array) -> Array:
        return value + axis.by_element(g, jnp.ndim(value))

    def random(self, rng_key: Array, units: int) -> Array:
        return 3.0 * jax.random.normal(rng_key, (units,))


@dataclass(frozen=True)
class SignFlip(OnElements):
    """Sign symmetry of units with an odd activation: all weights into and out of a unit
    change their sign.

    Also of weights before a normalization together with its gain. Orbit conditional: a
    unit is flipped with probability p(g theta) / (p(theta) + p(g theta)), one half
    under a symmetric prior. Gauge: see :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> SignFlip([("w", 0)]).act({"w": jnp.ones(2)}, jnp.array([1.0, -1.0]))[
    ...     "w"
    ... ].tolist()
    [1.0, -1.0]
    """

    continuous: ClassVar[bool] = False

    def on_site(self, axis: UnitAxis, value: Array, g: Array) -> Array:
        return value * axis.by_element(g, jnp.ndim(value))

    def identity(self, units: int) -> Array:
        return jnp.ones(units)

    def random(self, rng_key: Array, units: int) -> Array:
        return jnp.where(jax.random.bernoulli(rng_key, 0.5, (units,)), 1.0, -1.0)

    def trials(self, rng_key: Array, units: int) -> list[Array]:
        g = self.random(rng_key, units)
        return [g, -g]  # every unit is flipped in one of them


@dataclass(frozen=True)
class Permutation(OnElements):
    """Permutation of hidden units, together with all weights into and out of them.

    Orbit conditional: uniform over orders under an exchangeable prior; otherwise a
    uniform proposal that is corrected. Hyperparameters of single units (horseshoe, ARD
    of the next layer) move along. Gauge: see :func:`~numpyro_bnn.symmetry.canonical`.

    :param elements: (site, axis) pairs; the axis runs over the units.

    >>> import jax.numpy as jnp
    >>> Permutation([("w", 0)]).act({"w": jnp.array([5.0, 6.0])}, jnp.array([1, 0]))[
    ...     "w"
    ... ].tolist()
    [6.0, 5.0]
    """

    continuous: ClassVar[bool] = False

    def on_site(self, axis: UnitAxis, value: Array, g: Array) -> Array:
        return axis.permuted(value, g)

    def identity(self, units: int) -> Array:
        return jnp.arange(units)

    def random(self, rng_key: Array, units: int) -> Array:
        # Random 32-bit keys: ties, which would favor the old order, have a probability
        # below U^2 2^-33.
        return jnp.argsort(jax.random.bits(rng_key, (units,)))

    def trials(self, rng_key: Array, units: int) -> list[Array]:
        order = self.identity(units)
        return [
            order.at[:2].set(order[:2][::-1]),
            jnp.roll(order, 1),
        ]  # these two generate all orders
