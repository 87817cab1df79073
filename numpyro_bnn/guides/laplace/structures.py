"""Structures of the precision: what is summed over the rows, the Gaussian it gives, and
that Gaussian as a guide.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array, random
from numpyro.distributions import constraints
from numpyro.distributions.util import cholesky_of_inverse

from numpyro_bnn._types import PyTree, Shape
from numpyro_bnn.guides.auto_blocks import Values
from numpyro_bnn.guides.blocks import (
    Block,
    Family,
    FullRank,
    cut,
    declare_loc,
    declare_scale,
)
from numpyro_bnn.guides.laplace.jacobians import (
    DenseJacobian,
    Jacobians,
    MatrixLayout,
    OuterJacobian,
    from_matrix,
    to_matrix,
)

# sums a function of the Jacobians (and further arguments) over all rows
Sweep = Callable[..., Any]
# of the subspace iteration: products, and vectors beside the wanted ones
SUBSPACE_ITERATIONS = 4
OVERSAMPLING = 10
# numbers of a Jacobian up to which one product costs less than compiling many
MAX_SMALL_JACOBIAN = 2**17


class LaplaceGaussian(NamedTuple):
    """N(loc, precision^-1) of the sites of a guide, without its location.

    :param params: parameters of the guide, by ``(site or "*", field)``.
    :param variance: (P_s,) marginal variances by site.
    :param log_det: log determinant of the precision.
    :param lost: by how much rounding of a number grows in a variance: largest relative
        error over that of a number.
    """

    params: dict[tuple[str, str], Array]
    variance: Values
    log_det: Array
    lost: PyTree = 1.0


class AffineNormal(dist.Distribution):
    """A linear image x = loc + M e of standard normal noise, M being square and given
    as functions.
    """

    support = constraints.real_vector

    def __init__(self, loc: Array, *, validate_args: bool | None = None) -> None:
        self.loc = loc
        super().__init__(event_shape=loc.shape[-1:], validate_args=validate_args)

    def times(self, noise: Array) -> Array:
        """M times (..., P)."""
        raise NotImplementedError

    def solve(self, difference: Array) -> tuple[Array, Array]:
        """M^-1 times (P,), and log |det M|."""
        raise NotImplementedError

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        return self.loc + self.times(
            random.normal(key, (*sample_shape, *self.event_shape))
        )

    def log_prob(self, value: Array) -> Array:
        def log_density(difference: Array) -> Array:
            noise, log_det = self.solve(difference)
            return jnp.sum(dist.Normal().log_prob(noise)) - log_det

        return jnp.vectorize(log_density, signature="(p)->()")(value - self.loc)

    @property
    def mean(self) -> Array:
        return self.loc


class KroneckerNormal(AffineNormal):
    """x = loc + A (scale * E) B^T for a site that is a matrix (I, O)."""

    def __init__(
        self,
        loc: Array,
        left: Array,
        right: Array,
        scale: Array,
        layout: MatrixLayout,
        *,
        validate_args: bool | None = None,
    ):
        self.left, self.right, self.scale, self.layout = left, right, scale, layout
        super().__init__(loc, validate_args=validate_args)

    def times(self, noise: Array) -> Array:
        matrix = self.left @ (self.scale * to_matrix(noise, self.layout)) @ self.right.T
        return from_matrix(matrix, self.layout)

    def solve(self, difference: Array) -> tuple[Array, Array]:
        half = jnp.linalg.solve(self.left, to_matrix(difference, self.layout))
        noise = jnp.linalg.solve(self.right, half.T).T / self.scale
        inputs, outputs = self.layout.size
        log_dets = (
            outputs * jnp.linalg.slogdet(self.left)[1]
            + inputs * jnp.linalg.slogdet(self.right)[1]
        )
        return from_matrix(noise, self.layout), log_dets + jnp.sum(jnp.log(self.scale))

    @property
    def variance(self) -> Array:
        return from_matrix(
            self.left**2 @ self.scale**2 @ (self.right**2).T, self.layout
        )


class LowRankNormal(AffineNormal):
    """x = loc + scale * (e - Q (shrink * Q^T e)): the precision is diagonal plus low
    rank.
    """

    def __init__(
        self,
        loc: Array,
        scale: Array,
        basis: Array,
        shrink: Array,
        *,
        validate_args: bool | None = None,
    ):
        self.scale, self.basis, self.shrink = scale, basis, shrink
        super().__init__(loc, validate_args=validate_args)

    def times(self, noise: Array) -> Array:
        return self.scale * (
            noise - ((noise @ self.basis) * self.shrink) @ self.basis.T
        )

    def solve(self, difference: Array) -> tuple[Array, Array]:
        inside = difference / self.scale
        small = jnp.eye(len(self.shrink)) - self.shrink[:, None] * (
            self.basis.T @ self.basis
        )
        noise = inside + self.basis @ jnp.linalg.solve(
            small, self.shrink * (self.basis.T @ inside)
        )
        return noise, jnp.linalg.slogdet(small)[1] + jnp.sum(
            jnp.log(jnp.abs(self.scale))
        )

    @property
    def variance(self) -> Array:
        gram = self.basis.T @ self.basis * self.shrink[:, None] * self.shrink
        inner = gram - jnp.diag(2 * self.shrink)
        return self.scale**2 * (1 + jnp.sum((self.basis @ inner) * self.basis, axis=1))


@dataclass(frozen=True)
class Kronecker(Family):
    """A site whose covariance is diagonal in the product of two bases."""

    layout: MatrixLayout
    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc`` (P,), ``left`` (I, I), ``right`` (O, O) and ``scale`` (I,
        O).
        """
        (inputs, outputs), name = self.layout.size, block.name
        left = numpyro.param(f"{name}_left", jnp.eye(inputs), event_dim=2)
        right = numpyro.param(f"{name}_right", jnp.eye(outputs), event_dim=2)
        start = to_matrix(block.scale, self.layout)
        scale = numpyro.param(
            f"{name}_scale",
            start,
            constraint=constraints.softplus_positive,
            event_dim=2,
        )
        return KroneckerNormal(declare_loc(block), left, right, scale, self.layout)


@dataclass(frozen=True)
class LowRankPrecision(Family):
    """A Gaussian whose precision is diagonal plus low rank."""

    rank: int
    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc``, ``scale`` (P,), ``basis`` (P, K) and ``shrink`` (K,)
        between 0 and 1.
        """
        shape = (block.size, min(self.rank, block.size))
        start = random.normal(random.key(0), shape) / block.size**0.5
        basis = numpyro.param(f"{block.name}_basis", start, event_dim=2)
        options = {"constraint": constraints.unit_interval, "event_dim": 1}
        shrink = numpyro.param(
            f"{block.name}_shrink", jnp.full(shape[1], 0.1), **options
        )
        return LowRankNormal(declare_loc(block), declare_scale(block), basis, shrink)


Jacobian: TypeAlias = OuterJacobian | DenseJacobian


def _is_single(jacobian: Jacobian) -> TypeGuard[OuterJacobian]:
    """Whether it is one outer product for each row and direction."""
    return isinstance(jacobian, OuterJacobian) and jacobian.inputs.shape[1] == 1


def _squared(first: Jacobian, second: Jacobian) -> Array:
    """(P, Q) the sum over rows and directions of products of two Jacobians."""
    if not (_is_single(first) and _is_single(second)):
        return jnp.einsum("bdp,bdq->pq", first.dense(), second.dense())
    # Summed over the directions first, which costs as much as one direction.
    middle = jnp.einsum("bdo,bdp->bop", first.grads[:, :, 0], second.grads[:, :, 0])
    blocks = jnp.einsum(
        "bi,bop,bj->iojp", first.inputs[:, 0], middle, second.inputs[:, 0]
    )
    blocks = blocks * first.slope[:, :, None, None] * second.slope
    by_first = from_matrix(jnp.moveaxis(blocks, (0, 1), (2, 3)), first.layout)
    return from_matrix(jnp.moveaxis(by_first, 2, 0), second.layout)


def _as_product(jacobian: OuterJacobian) -> OuterJacobian:
    """With the slope of the weight in inputs and gradients, as if it were itself a
    product.
    """
    slope = jacobian.slope
    inputs = jacobian.inputs * (jnp.sum(slope, axis=1) / jnp.sum(slope))
    grads = jacobian.grads * jnp.sum(slope, axis=0)
    return jacobian._replace(inputs=inputs, grads=grads, slope=jnp.ones_like(slope))


# -- covariances of outputs ------------------------------------------------------------

# Jointly Gaussian sites, and their distribution.
Blocks = Sequence[tuple[Sequence[str], dist.Distribution]]


def output_halves(jac: Jacobians, blocks: Blocks) -> Array:
    """(B, D, P) J M, with M M^T the covariance."""
    halves = [_half(jac, names, fn) for names, fn in blocks]
    return jnp.concatenate(halves, axis=2)


def output_covariance(jac: Jacobians, blocks: Blocks) -> Array:
    """(B, D, D) J covariance J^T."""
    return sum(_covariance(jac, names, fn) for names, fn in blocks)  # type: ignore[return-value]


def _half(jac: Jacobians, names: Sequence[str], fn: Any) -> Array:
    dense = jnp.concatenate([jac[name].dense() for name in names], axis=2)
    if isinstance(fn, AffineNormal):
        return jax.linear_transpose(fn.times, dense)(dense)[0]
    if isinstance(fn, dist.MultivariateNormal):
        return dense @ fn.scale_tril
    return dense * jnp.ravel(fn.scale)


def _covariance(jac: Jacobians, names: Sequence[str], fn: Callable) -> Array:
    jacobian = jac[names[0]]
    if isinstance(fn, dist.Normal | KroneckerNormal) and _is_single(jacobian):
        # Elements are independent, of a Kronecker product in its two bases. The
        # Jacobian of a large layer is never made.
        variance = fn.scale**2
        if isinstance(fn, KroneckerNormal):
            product = _as_product(jacobian)
            inputs, grads = product.inputs @ fn.left, product.grads @ fn.right
            jacobian = product._replace(inputs=inputs, grads=grads)
        else:
            variance = to_matrix(jnp.ravel(variance), jacobian.layout)
        middle = jacobian.inputs[:, 0] ** 2 @ (variance * jacobian.slope**2)
        grads = jacobian.grads[:, :, 0]
        return jnp.einsum("bo,bdo,beo->bde", middle, grads, grads)
    half = _half(jac, names, fn)
    return jnp.einsum("bdp,bep->bde", half, half)


# -- structures ------------------------------------------------------------------------


@dataclass(frozen=True)
class Structure(ABC):
    """How a precision of sites is summed over the rows and factored.

    :param sizes: numbers of unknowns by site.
    """

    sizes: Mapping[str, int]
    #: Whether what it measures depends on the prior.
    scales_by_prior: ClassVar[bool] = False

    @abstractmethod
    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        """Label, sites and family of what is jointly Gaussian; all other sites have
        independent elements.
        """

    @abstractmethod
    def measure(self, sweep: Sweep, prior: Values) -> PyTree:
        """What the precision needs of J^T J."""

    @abstractmethod
    def gaussian(
        self, sums: PyTree, prior: Values, coupling: Array | None = None
    ) -> LaplaceGaussian:
        """The Gaussian of such sums and a prior precision.

        :param coupling: (P, P) what the precision of the prior has besides its
            diagonal; only a dense precision takes it.
        """

    def flat(self, vectors: Values) -> Array:
        """(P,) of all sites."""
        return jnp.concatenate([jnp.ravel(vectors[name]) for name in self.sizes])

    def split(self, vectors: Array) -> Values:
        """Parts (..., P_s) of the last axis by site."""
        return cut(vectors, {name: (size,) for name, size in self.sizes.items()})

    def squares(self, jac: Jacobians) -> Values:
        """(P_s,) the diagonal of J^T J, by site."""
        return {name: jac[name].squares() for name in self.sizes}

    def product(self, sweep: Sweep, vectors: Array, scale: Array) -> Array:
        """(P, K) J^T J between two scales (P,), times vectors (P, K)."""
        return sweep(self._products, vectors, scale)

    def _products(self, jac: Jacobians, vectors: Array, scale: Array) -> Array:
        by_site = self.split((vectors * scale[:, None]).T)
        forward: PyTree = 0.0
        for name in self.sizes:
            forward += jac[name].times(by_site[name].T)
        back = [jac[name].transposed_times(forward) for name in self.sizes]
        return scale[:, None] * jnp.concatenate(back)


@dataclass(frozen=True)
class FullStructure(Structure):
    """One dense precision of all sites."""

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [("*", tuple(self.sizes), FullRank())]

    def measure(self, sweep: Sweep, prior: Values) -> Array:
        """(P, P) J^T J."""
        return sweep(self._matrix)

    def _matrix(self, jac: Jacobians) -> Array:
        dense = jnp.concatenate([jac[name].dense() for name in self.sizes], axis=2)
        if dense.size <= MAX_SMALL_JACOBIAN:
            return jnp.einsum("bdp,bdq->pq", dense, dense)
        rows = []
        for first in self.sizes:
            blocks = [_squared(jac[first], jac[second]) for second in self.sizes]
            rows.append(jnp.concatenate(blocks, axis=1))
        return jnp.concatenate(rows)

    def precision(self, sums: Array, prior: Values, coupling: Array | None) -> Array:
        """(P, P)."""
        matrix = sums + jnp.diag(self.flat(prior))
        return matrix if coupling is None else matrix + coupling

    def gaussian(
        self, sums: Array, prior: Values, coupling: Array | None = None
    ) -> LaplaceGaussian:
        precision = self.precision(sums, prior, coupling)
        tril = cholesky_of_inverse(precision)
        variance = jnp.sum(tril**2, axis=1)
        log_det = -2 * jnp.sum(jnp.log(jnp.diag(tril)))
        lost = jnp.max(jnp.diag(precision) * variance)
        params = {("*", "scale_tril"): tril}
        return LaplaceGaussian(params, self.split(variance), log_det, lost)


@dataclass(frozen=True)
class DiagonalStructure(Structure):
    """Independent weights: the diagonal of the precision."""

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return []

    def measure(self, sweep: Sweep, prior: Values) -> PyTree:
        """The diagonal of J^T J, by site."""
        return sweep(self.squares)

    def gaussian(
        self, sums: PyTree, prior: Values, coupling: Array | None = None
    ) -> LaplaceGaussian:
        params, variance = {}, {}
        log_det = jnp.zeros(())
        for name in self.sizes:
            precision = sums[name] + prior[name]
            params[name, "scale"] = precision**-0.5
            variance[name] = 1 / precision
            log_det += jnp.sum(jnp.log(precision))
        return LaplaceGaussian(params, variance, log_det)


@dataclass(frozen=True)
class KroneckerStructure(Structure):
    """A Kronecker product for every site that is a matrix, in ``layouts``; the elements
    of others independent.
    """

    layouts: Mapping[str, MatrixLayout]

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [
            (name, (name,), Kronecker(layout)) for name, layout in self.layouts.items()
        ]

    def measure(self, sweep: Sweep, prior: Values) -> PyTree:
        """Eigenvalues and eigenvectors of the factors of each site that is a matrix;
        the diagonal of J^T J for the others.
        """
        by_site = sweep(self._factors)
        for name in self.layouts:
            left, right, count = by_site[name]
            by_site[name] = *jnp.linalg.eigh(left), *jnp.linalg.eigh(right / count)
        return by_site

    def _factors(self, jac: Jacobians) -> PyTree:
        by_site: PyTree = {}
        for name in self.sizes:
            jacobian = jac[name]
            if name not in self.layouts or not isinstance(jacobian, OuterJacobian):
                by_site[name] = jacobian.squares()
                continue
            inputs, grads, _, _, has_data = _as_product(jacobian)
            count = jnp.sum(has_data) * inputs.shape[1]
            left = jnp.einsum("bti,b,btj->ij", inputs, has_data, inputs)
            right = jnp.einsum("bdto,bdtp->op", grads, grads)
            by_site[name] = left, right, count
        return by_site

    def gaussian(
        self, sums: PyTree, prior: Values, coupling: Array | None = None
    ) -> LaplaceGaussian:
        sizes = dict(self.sizes)
        for name in self.layouts:
            del sizes[name]
        params, variance, log_det, lost = DiagonalStructure(sizes).gaussian(sums, prior)
        for name, layout in self.layouts.items():
            left_values, left, right_values, right = sums[name]
            products = jnp.maximum(left_values, 0.0)[:, None] * jnp.maximum(
                right_values, 0.0
            )
            precision = products + prior[name][0]
            params[name, "left"] = left
            params[name, "right"] = right
            params[name, "scale"] = precision**-0.5
            covariance = left**2 @ (1 / precision) @ (right**2).T
            variance[name] = from_matrix(covariance, layout)
            log_det = log_det + jnp.sum(jnp.log(precision))
            lost = jnp.maximum(lost, jnp.max(precision) / jnp.min(precision))
        return LaplaceGaussian(params, variance, log_det, lost)


@dataclass(frozen=True)
class LowRankStructure(Structure):
    """The largest eigenvectors of J^T J relative to the prior, and the diagonal of the
    rest.
    """

    rank: int
    scales_by_prior: ClassVar[bool] = True

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [("*", tuple(self.sizes), LowRankPrecision(self.rank))]

    def measure(self, sweep: Sweep, prior: Values) -> PyTree:
        """Diagonal (P,) and columns (P, K) with J^T J about diag + columns columns^T,
        by subspace iteration.
        """
        scale = self.flat(prior) ** -0.5
        rank = min(self.rank, scale.size)
        width = min(rank + OVERSAMPLING, scale.size)
        basis = jnp.linalg.qr(random.normal(random.key(0), (scale.size, width)))[0]
        for _ in range(SUBSPACE_ITERATIONS if width < scale.size else 0):
            basis = jnp.linalg.qr(self.product(sweep, basis, scale))[0]
        values, turn = jnp.linalg.eigh(basis.T @ self.product(sweep, basis, scale))
        values, vectors = jnp.maximum(values[-rank:], 0.0), (basis @ turn)[:, -rank:]
        columns = vectors * jnp.sqrt(values) / scale[:, None]
        total = self.flat(sweep(self.squares))
        return jnp.maximum(total - jnp.sum(columns**2, axis=1), 0.0), columns

    def gaussian(
        self, sums: PyTree, prior: Values, coupling: Array | None = None
    ) -> LaplaceGaussian:
        diagonal, columns = sums
        scale = (diagonal + self.flat(prior)) ** -0.5
        scaled = scale[:, None] * columns
        basis, singular, _ = jnp.linalg.svd(scaled, full_matrices=False)
        shrink = 1 - (1 + singular**2) ** -0.5
        params = {("*", "scale"): scale, ("*", "basis"): basis, ("*", "shrink"): shrink}
        fn = LowRankNormal(jnp.zeros_like(scale), scale, basis, shrink)
        log_det = jnp.sum(jnp.log1p(singular**2)) - 2 * jnp.sum(jnp.log(scale))
        # what is left of a difference
        lost = jnp.max(1 + jnp.sum(scaled**2, axis=1))
        return LaplaceGaussian(params, self.split(fn.variance), log_det, lost)
