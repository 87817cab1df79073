"""Distributions that NumPyro lacks, and access to the parameters of those
that it has.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, random
from jax.scipy.special import gammaln
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.distributions.transforms import (
    AffineTransform,
    IndependentTransform,
    LowerCholeskyAffine,
    Transform,
)
from numpyro.distributions.util import sum_rightmost, validate_sample

from numpyro_bnn._types import Shape, Site


def unwrapped(fn: dist.Distribution, masked: bool = False) -> dist.Distribution:
    """The distribution inside ``to_event``, ``expand`` and, if ``masked``, ``mask``."""
    around = (dist.Independent, dist.ExpandedDistribution) + (
        (dist.MaskedDistribution,) if masked else ()
    )
    while isinstance(fn, around):
        fn = fn.base_dist
    return fn


def is_factor(fn: dist.Distribution) -> bool:
    """Whether a distribution is that of a ``numpyro.factor``, masked or not."""
    return isinstance(unwrapped(fn, masked=True), dist.Unit)


def is_latent(site: Site) -> bool:
    """Whether a site is a random variable that the model does not observe."""
    return site["type"] == "sample" and not site["is_observed"]


def unmasked_elements(fn: dist.Distribution) -> Array:
    """Which elements of a value, shaped like ``fn.shape()``, count in its log density:
    those without a mask.
    """
    counted = jnp.ones(fn.shape(), bool)
    while isinstance(
        fn, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution
    ):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.broadcast_to(fn._mask, fn.batch_shape)
            counted &= mask.reshape(fn.batch_shape + (1,) * fn.event_dim)
        fn = fn.base_dist
    return counted


def weights(site: Site) -> Array:
    """The factor by which scales and masks multiply the log density of every element of
    a site.
    """
    fn = site["fn"]
    scale = jnp.broadcast_to(
        1.0 if site["scale"] is None else site["scale"], fn.batch_shape
    )
    return scale.reshape(fn.batch_shape + (1,) * fn.event_dim) * unmasked_elements(fn)


_BOUNDED = (constraints.greater_than, constraints.less_than, constraints.interval)


def in_support(fn: dist.Distribution, value: object = None) -> Any:
    """Where (batch shape of ``fn``) computed parameters, and a value, obey the bounds
    of a distribution.

    Many log densities are finite where they do not: a beta distribution with negative
    concentrations, probabilities below 0, which NumPyro clamps, values outside of a
    uniform distribution. Elements behind a mask always obey.

    >>> fn = dist.Poisson(jnp.array([-1.0, 2.0]), validate_args=False)
    >>> in_support(fn).tolist()
    [False, True]
    """
    if isinstance(fn, dist.MaskedDistribution):
        return in_support(fn.base_dist, value) | ~jnp.asarray(fn._mask)
    if isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        independent = isinstance(fn, dist.Independent)
        batch = fn.base_dist.batch_shape if independent else fn.batch_shape
        inside = jnp.asarray(in_support(fn.base_dist, value))
        inside = jnp.broadcast_to(inside, jnp.broadcast_shapes(inside.shape, batch))
        return _all(inside, len(batch) - len(fn.batch_shape))
    inside = jnp.array(True)
    for name, constraint in fn.arg_constraints.items():
        parameter = getattr(fn, name, None)
        bound = getattr(constraint, "base_constraint", constraint)
        periodic = isinstance(bound, type(constraints.circular))
        if (
            isinstance(parameter, Array)
            and isinstance(bound, _BOUNDED)
            and not periodic
        ):
            inside &= _all(bound(parameter), constraint.event_dim)
    for component in vars(fn).values():
        if isinstance(component, dist.Distribution):
            obeys = jnp.asarray(in_support(component))
            inside &= obeys if obeys.shape == fn.batch_shape else jnp.all(obeys)
    computed = value is not None and any(
        isinstance(bound, Array) for bound in jax.tree.leaves(fn.support)
    )
    if computed and not fn.support.is_discrete:
        inside &= fn.support(value)
    return inside


def _all(conditions: Array, num_axes: int) -> Array:
    """Whether all are true along so many of the last axes."""
    return jnp.all(
        conditions, axis=tuple(range(conditions.ndim - num_axes, conditions.ndim))
    )


def is_affine_normal(fn: dist.Distribution, masked: bool = False) -> bool:
    """Whether a distribution is independent normals or an affine function of them;
    computes nothing.

    :param masked: look inside ``mask`` as well.

    >>> (
    ...     is_affine_normal(dist.Normal(0.0, 1.0).expand([3]).to_event(1)),
    ...     is_affine_normal(dist.Gamma(1.0, 1.0)),
    ... )
    (True, False)
    """
    base = unwrapped(fn, masked)
    if isinstance(base, dist.TransformedDistribution):
        affine = all(
            isinstance(elementwise(t), AffineTransform) for t in base.transforms
        )
        return affine and is_affine_normal(base.base_dist, masked)
    return type(base) is dist.Normal


def affine_normal(
    fn: dist.Distribution, masked: bool = False
) -> tuple[Array, Array] | None:
    """Loc and scale, shaped like the site, of independent normals and affine functions
    of them, else ``None``.

    :param masked: look inside ``mask`` as well.
    :return: a scale has the sign that the affine functions give it.

    >>> [
    ...     float(part)
    ...     for part in affine_normal(
    ...         dist.TransformedDistribution(
    ...             dist.Normal(1.0, 2.0), dist.transforms.AffineTransform(0.5, -3.0)
    ...         )
    ...     )
    ... ]
    [-2.5, -6.0]
    """
    if not is_affine_normal(fn, masked):
        return None
    base = unwrapped(fn, masked)
    if isinstance(base, dist.TransformedDistribution):
        loc, scale = affine_normal(base.base_dist, masked)  # type: ignore[misc]
        for transform in map(elementwise, base.transforms):
            loc = transform.loc + transform.scale * loc
            scale = transform.scale * scale
    else:
        loc, scale = base.loc, base.scale
    # an integer is a mean too, and what is added to a mean takes its type
    loc, scale = (jnp.asarray(a, jnp.result_type(a, float)) for a in (loc, scale))
    return jnp.broadcast_to(loc, fn.shape()), jnp.broadcast_to(scale, fn.shape())


def log_scale(fn: dist.Distribution) -> Array:
    """log |A|, shaped like the batch, of values T(m + A u) whose u has no scale; 0
    behind a mask, and for other families.

    T is any transform that is not affine, and u is unbounded: the log of a positive u
    has a density that does not grow as its scale nears 0.

    >>> fn = dist.StudentT(3.0, 0.0, jnp.array([2.0, 0.5, 0.5])).to_event(1)
    >>> round(float(log_scale(fn)), 3)
    -0.693
    """
    if isinstance(fn, dist.MaskedDistribution):
        return jnp.where(fn._mask, log_scale(fn.base_dist), 0.0)
    if isinstance(fn, dist.Independent):
        return sum_rightmost(log_scale(fn.base_dist), fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.ExpandedDistribution):
        return jnp.broadcast_to(log_scale(fn.base_dist), fn.batch_shape)
    is_transformed = isinstance(fn, dist.TransformedDistribution)
    base = fn.base_dist if is_transformed else fn
    total = log_scale(base) if is_transformed else jnp.zeros(fn.batch_shape)
    if getattr(base.support, "base_constraint", base.support) is not constraints.real:
        return total
    scales: Array | float = 1.0  # of elements
    if is_transformed:
        for transform in map(elementwise, fn.transforms):
            if isinstance(transform, AffineTransform):
                scales *= transform.scale
            elif isinstance(transform, LowerCholeskyAffine):
                scales *= _diagonal(transform.scale_tril)
            else:
                break
    elif isinstance(fn, dist.MatrixNormal):
        rows, columns = map(_diagonal, (fn.scale_tril_row, fn.scale_tril_column))
        scales = rows[..., :, None] * columns[..., None, :]
    elif hasattr(fn, "scale_tril"):
        scales = _diagonal(fn.scale_tril)
    else:
        scale = jnp.asarray(getattr(fn, "scale", 1.0))
        scales = scale.reshape(scale.shape + (1,) * fn.event_dim)
    logs = jnp.broadcast_to(jnp.log(jnp.abs(scales)), base.shape())
    return total + sum_rightmost(logs, base.event_dim)


_diagonal = partial(jnp.diagonal, axis1=-2, axis2=-1)


def elementwise(transform: Transform) -> Transform:
    """The transform inside ``to_event``."""
    while isinstance(transform, IndependentTransform):
        transform = transform.base_transform
    return transform


# Of log Gamma(y + 1/2) - log Gamma(y) - log(y) / 2 as a series in odd powers of 1 / y.
HALF_STEP_SERIES = (-1 / 8, 1 / 192, -1 / 640, 17 / 14336, -31 / 18432)
HALF_STEP_SHIFT = 8  # steps up, to where the series holds


@jax.custom_jvp
def log_gamma_half_step(x: Array) -> Array:
    """log Gamma(x + 1/2) - log Gamma(x) for x > 0, without the cancellation of that
    form, and with much less to compile.

    >>> round(float(log_gamma_half_step(jnp.array(1.0))), 6)  # log(sqrt(pi) / 2)
    -0.120782
    """
    above = x + HALF_STEP_SHIFT
    series = _odd_powers(HALF_STEP_SERIES, 1 / above)
    return 0.5 * jnp.log(above) + series - jnp.log1p(0.5 / _steps(x)).sum(-1)


@log_gamma_half_step.defjvp
def _half_step_slope(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """A formula, since a derivative of the code keeps all its terms."""
    (x,), (change,) = primals, tangents
    inverse, steps = 1 / (x + HALF_STEP_SHIFT), _steps(x)
    terms = [(2 * k + 1) * value for k, value in enumerate(HALF_STEP_SERIES)]
    slope = 0.5 * inverse - inverse * _odd_powers(terms, inverse)
    slope = slope + (0.5 / (steps * (steps + 0.5))).sum(-1)
    return log_gamma_half_step(x), slope * change


def _steps(x: Array) -> Array:
    return x[..., None] + jnp.arange(HALF_STEP_SHIFT, dtype=x.dtype)


def _odd_powers(coefficients: Sequence[float], x: Array) -> Array:
    total = jnp.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * jnp.square(x) + coefficient
    return total * x


class NoiseStudentT(dist.StudentT):
    """Student's t for noise whose degrees of freedom are learned: log gamma functions
    and their derivatives are a quarter of the code of a gradient.

    >>> value = jnp.array([-1.0, 5.0])
    >>> difference = NoiseStudentT(3.0).log_prob(value) - dist.StudentT(3.0).log_prob(
    ...     value
    ... )
    >>> bool(abs(difference).max() < 1e-6)
    True
    """

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        df = jnp.asarray(self.df, jnp.result_type(self.df, float))
        squares = jnp.square((value - self.loc) / self.scale)
        constant = log_gamma_half_step(0.5 * df) - 0.5 * jnp.log(jnp.pi * df)
        tails = 0.5 * (df + 1) * jnp.log1p(squares / df)
        return constant - jnp.log(self.scale) - tails


# Messages name a distribution by its class, and it is a Student's t for users.
NoiseStudentT.__name__ = "StudentT"


class GroupStudentT(dist.Distribution):
    r"""Multivariate Student t with a spherical scale, for an array of weights whose
    common size is heavy-tailed.

    :math:`w = z / \sqrt\tau` with :math:`z \sim N(0, I)` and :math:`\tau \sim
    \mathrm{Gamma}(\alpha / 2)` of mean :math:`1 / s^2`, with tau integrated out; n
    weights have

    .. math:: p(w) \propto \Big(1 + \frac{|w|^2}{\alpha s^2}\Big)^{-(\alpha + n) / 2}

    :param df: alpha, degrees of freedom.
    :param scale: s.
    :param shape: shape of the array, which is one event.

    >>> round(
    ...     float(GroupStudentT(1.0, 1.0, (2, 1)).log_prob(jnp.zeros((2, 1)))), 3
    ... )  # -log(2 pi)
    -1.838
    """

    arg_constraints: ClassVar = {
        "df": constraints.positive,
        "scale": constraints.positive,
    }
    pytree_data_fields = ("df", "scale")
    reparametrized_params: ClassVar = ["df", "scale"]

    def __init__(
        self,
        df: Any,
        scale: Any,
        shape: Shape,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.df = df
        self.scale = scale
        super().__init__(
            batch_shape=(), event_shape=tuple(shape), validate_args=validate_args
        )

    @constraints.dependent_property(is_discrete=False)
    def support(self) -> Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        normal, gamma = random.split(key)
        z = random.normal(normal, (*sample_shape, *self.event_shape))
        # Logs: for a small alpha most precisions are below the smallest float.
        log_tau = random.loggamma(gamma, self.df / 2, sample_shape) - jnp.log(
            self.df / 2 * self.scale**2
        )
        return z * jnp.exp(-log_tau / 2).reshape(
            log_tau.shape + (1,) * len(self.event_shape)
        )

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        n = prod(self.event_shape)
        half = self.df / 2
        axes = tuple(range(-len(self.event_shape), 0))
        square = jnp.sum((value / self.scale) ** 2, axis=axes)
        constant = (
            gammaln(half + n / 2) - gammaln(half) - n / 2 * jnp.log(jnp.pi * self.df)
        )
        return (
            constant
            - n * jnp.log(self.scale)
            - (half + n / 2) * jnp.log1p(square / self.df)
        )

    def given_rest(self, rng_key: Array, value: Array, chosen: Array) -> Array:
        """Draw chosen elements of the array from their distribution given all others.

        With n other elements of squared length q these are of the same family, with
        :math:`\\alpha + n` degrees of freedom and :math:`s^2 (\\alpha + q / s^2) /
        (\\alpha + n)`: given few others they are heavy-tailed.

        :param chosen: booleans that broadcast against the array ``value``.
        """
        mask = jnp.broadcast_to(chosen, value.shape)
        df = self.df + jnp.sum(~mask)
        square = jnp.sum(jnp.where(mask, 0.0, value) ** 2)
        scale = jnp.sqrt((self.df * self.scale**2 + square) / df)
        new_values = GroupStudentT(df, scale, value.shape).sample(rng_key)
        return jnp.where(mask, new_values, value).astype(value.dtype)

    @property
    def mean(self) -> Array:
        return jnp.where(self.df > 1, jnp.zeros(self.event_shape), jnp.nan)

    @property
    def variance(self) -> Array:
        finite = jnp.where(
            self.df > 2,
            self.df / (self.df - 2),
            jnp.where(self.df > 1, jnp.inf, jnp.nan),
        )
        return jnp.full(self.event_shape, finite * self.scale**2)
