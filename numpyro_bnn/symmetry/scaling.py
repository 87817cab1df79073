"""Groups of positive factors: scales before a normalization, rescaling of units, weights with their scale."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.symmetry.base import Symmetry, as_parts
from numpyro_bnn.symmetry.parts import Part, Values

__all__ = ["JointRescale", "JointScale", "Multiplicative", "Rescale", "Scale"]


class Multiplicative(Symmetry):
    """A factor c = exp(g) per unit; every part is multiplied by a power of it. Haar measure dc / c = dg."""

    @property
    def powers(self) -> tuple[tuple[Part, float], ...]:
        """Parts with the power of c that multiplies them."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(part for part, _ in self.powers)

    def act(self, values: Mapping[str, jax.Array], g: jax.Array) -> Values:
        moved: Values = {}
        for part, power in self.powers:
            value = moved.get(part.site, values[part.site])
            moved[part.site] = value * jnp.exp(power * part.by_element(g, jnp.ndim(value)))
        return moved

    def dimension(self, values: Mapping[str, Any]) -> float:
        """Sum of the powers over the elements of a unit: log|det| is this times log c."""
        return sum(power * part.per_unit(jnp.shape(values[part.site])) for part, power in self.powers)

    def log_det(self, values: Mapping[str, jax.Array], g: jax.Array) -> jax.Array:
        return self.dimension(values) * g

    def random(self, rng_key: jax.Array, units: int) -> jax.Array:
        return jax.random.uniform(rng_key, (units,), minval=-1.5, maxval=1.5)


@dataclass(frozen=True)
class Scale(Multiplicative):
    r"""Weights that feed a normalization: w -> c w for every unit, channel or layer.

    Orbit conditional: density of c proportional to c^(d-1) p(c w) with d elements per unit; for w ~ N(0, s^2 I) the
    radius is exact, :math:`|w| / s \sim \chi_d`. Log determinant d log c. Gauge: :math:`|w| = \sqrt d`.

    :param weights: sites or (site, axis) pairs; the axis runs over units that scale one by one (batch normalization),
        without axis the whole site has one factor (layer normalization).

    >>> import jax.numpy as jnp
    >>> s = Scale([("w", 1)])
    >>> values = {"w": jnp.ones((3, 2))}
    >>> g = jnp.log(jnp.array([2.0, 1.0]))
    >>> s.act(values, g)["w"][0].round(3).tolist(), (s.log_det(values, g) / g[0]).round().tolist()
    ([2.0, 1.0], [3.0, 0.0])
    """

    weights: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", as_parts("symmetry.Scale", "weights", self.weights))

    @property
    def powers(self) -> tuple[tuple[Part, float], ...]:
        return tuple((part, 1.0) for part in self.weights)


@dataclass(frozen=True)
class Rescale(Multiplicative):
    r"""Positively homogeneous units (ReLU, leaky ReLU): incoming weights and bias times c, outgoing weights over c.

    Orbit conditional under Gaussian priors: t = c^2 is generalized inverse Gaussian,

    .. math:: p(t) \propto t^{p-1} \exp(-(a t + b / t) / 2),\quad p = (d_{in} - d_{out}) / 2,\quad
              a = \sum w_{in}^2 / s_{in}^2,\quad b = \sum w_{out}^2 / s_{out}^2.

    Log determinant (d_in - d_out) log c. Gauge: the incoming norm is the square root of d_in; a balanced one would
    keep an outgoing weight from changing sign.

    :param incoming: (site, axis) pairs: kernel with its output axis, bias.
    :param outgoing: (site, axis) pairs: kernels that read the units, with their input axis.

    >>> Rescale([("w", 1), ("b", 0)], [("v", 0)]).powers[2]
    (Part(site='v', axis=0, repeats=1), -1.0)
    """

    incoming: Any
    outgoing: Any

    def __post_init__(self) -> None:
        for argument in ("incoming", "outgoing"):
            object.__setattr__(
                self, argument, as_parts("symmetry.Rescale", argument, getattr(self, argument))
            )

    @property
    def powers(self) -> tuple[tuple[Part, float], ...]:
        return tuple((part, 1.0) for part in self.incoming) + tuple((part, -1.0) for part in self.outgoing)


@dataclass(frozen=True)
class JointScale(Multiplicative):
    """Weights together with their hierarchical scale: (w, s) -> (c w, c^power s).

    p(w | s) does not notice, only the hyperprior does: orbit conditional s ~ p(s), drawn as an independent proposal
    and corrected where the weights are no scale family of s. A symmetry only where the scale of the weights is one.
    In a non-centered model s moves and the standardized weights stay.

    :param weights: sites whose scale does not matter to the likelihood, all of them driven by ``scale``.
    :param scale: the site of the hyper-parameter.
    :param power: 1 for a scale, -2 for a precision.

    >>> JointScale("net/Dense_0.kernel", "net/Dense_0.kernel_scale").sites
    ('net/Dense_0.kernel', 'net/Dense_0.kernel_scale')
    """

    weights: Any
    scale: Any
    power: float = 1.0

    def __post_init__(self) -> None:
        call = "symmetry.JointScale"
        weights = as_parts(call, "weights", self.weights) if self.weights else ()
        if any(part.axis is not None for part in weights):
            raise argument_error(
                call, "weights", weights, "Name whole sites, without axes: they share one scale."
            )
        scale = as_parts(call, "scale", self.scale)
        if len(scale) != 1 or scale[0].axis is not None:
            raise argument_error(call, "scale", self.scale, "Name one site, without an axis.")
        if not self.power:
            raise argument_error(call, "power", self.power, "Write 1 for a scale, -2 for a precision.")
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "scale", scale)

    @property
    def name(self) -> str:
        return f"JointScale({self.scale[0].site})"

    @property
    def powers(self) -> tuple[tuple[Part, float], ...]:
        return (*((part, 1.0) for part in self.weights), (self.scale[0], float(self.power)))

    def without(self, sites: Container[str]) -> "JointScale":
        """The same group where some weights are made from their scale, and so need not be moved."""
        return replace(self, weights=tuple(part for part in self.weights if part.site not in sites))


@dataclass(frozen=True)
class JointRescale(Multiplicative):
    """A layer of positively homogeneous units together with the hierarchical scales on both of its sides.

    Incoming weights, biases and their scale times c, outgoing weights and their scale over c: the weights' priors
    given the scales do not notice, only the hyperpriors and the priors of biases do, so the ratio of the two scales
    can make long moves. In a non-centered model the standardized weights stay. Orbit conditional: a random walk.

    :param incoming: sites of incoming kernels and biases.
    :param outgoing: sites of outgoing kernels.
    :param scales: pairs of a hyper-site and the power of c that multiplies it, e.g. ``("Dense_1.kernel_scale", -1)``.

    >>> JointRescale("w", "v", [("w_scale", 1), ("v_precision", 2)]).powers[1:]
    ((Part(site='v', axis=None, repeats=1), -1.0), (Part(site='w_scale', axis=None, repeats=1), 1.0), \
(Part(site='v_precision', axis=None, repeats=1), 2.0))
    """

    incoming: Any
    outgoing: Any
    scales: Any

    def __post_init__(self) -> None:
        call = "symmetry.JointRescale"
        for argument in ("incoming", "outgoing"):
            object.__setattr__(self, argument, _whole_sites(call, argument, getattr(self, argument)))
        scales = tuple(
            (Part(site) if isinstance(site, str) else site, float(power)) for site, power in self.scales
        )
        if not scales or not all(power for _, power in scales):
            raise argument_error(
                call, "scales", self.scales, "Name hyper-sites with powers, e.g. `[(site, 1.0)]`."
            )
        object.__setattr__(self, "scales", scales)

    @property
    def name(self) -> str:
        return f"JointRescale({self.scales[0][0].site})"

    @property
    def powers(self) -> tuple[tuple[Part, float], ...]:
        weights = [(part, 1.0) for part in self.incoming] + [(part, -1.0) for part in self.outgoing]
        return (*weights, *self.scales)

    def without(self, sites: Container[str]) -> "JointRescale":
        """The same group where some weights are made from their scale, and so need not be moved."""
        kept = {
            argument: tuple(part for part in getattr(self, argument) if part.site not in sites)
            for argument in ("incoming", "outgoing")
        }
        return replace(self, **kept)


def _whole_sites(call: str, argument: str, value: Any) -> tuple[Part, ...]:
    parts = as_parts(call, argument, value) if value else ()
    if any(part.axis is not None for part in parts):
        raise argument_error(call, argument, parts, "Name whole sites, without axes: they share one scale.")
    return parts
