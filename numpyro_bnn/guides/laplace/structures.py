"""Structures of the precision: what is summed over the rows, the Gaussian it gives, and
that Gaussian as a guide.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints
from numpyro.distributions.util import cholesky_of_inverse

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

Vectors = Mapping[str, jax.Array]  # (P_s,) by site
# sums a function of the Jacobians (and further arguments) over all rows
Sweep = Callable[..., Any]
# of the subspace iteration: products, and vectors beside the wanted ones
SUBSPACE_ITERATIONS = 4
OVERSAMPLING = 10


class LaplaceGaussian(NamedTuple):
    """N(loc, precision^-1) of the sites of a guide, without its location.

    :param params: parameters of the guide, by ``(site or "*", field)``.
    :param variance: (P_s,) marginal variances by site.
    :param log_det: log determinant of the precision.
    :param lost: by how much rounding of a number grows in a variance: largest relative
        error over that of a number.
    """

    params: dict[tuple[str, str], jax.Array]
    variance: dict[str, jax.Array]
    log_det: jax.Array
    lost: Any = 1.0


class AffineNormal(dist.Distribution):
    """A linear image x = loc + M e of standard normal noise, M being square and given
    as functions.
    """

    support = constraints.real_vector

    def __init__(self, loc: jax.Array, *, validate_args: Any = None) -> None:
        self.loc = loc
        super().__init__(event_shape=loc.shape[-1:], validate_args=validate_args)

    def times(self, noise: jax.Array) -> jax.Array:
        """M times (..., P)."""
        raise NotImplementedError

    def solve(self, difference: jax.Array) -> tuple[jax.Array, jax.Array]:
        """M^-1 times (P,), and log |det M|."""
        raise NotImplementedError

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.loc + self.times(
            random.normal(key, (*sample_shape, *self.event_shape))
        )

    def log_prob(self, value: jax.Array) -> jax.Array:
        def log_density(difference: jax.Array) -> jax.Array:
            noise, log_det = self.solve(difference)
            return jnp.sum(dist.Normal().log_prob(noise)) - log_det

        return jnp.vectorize(log_density, signature="(p)->()")(value - self.loc)

    @property
    def mean(self) -> jax.Array:
        return self.loc


class KroneckerNormal(AffineNormal):
    """x = loc + A (scale * E) B^T for a site that is a matrix (I, O)."""

    def __init__(
        self,
        loc: Any,
        left: Any,
        right: Any,
        scale: Any,
        layout: MatrixLayout,
        *,
        validate_args: Any = None,
    ):
        self.left, self.right, self.scale, self.layout = left, right, scale, layout
        super().__init__(loc, validate_args=validate_args)

    def times(self, noise: jax.Array) -> jax.Array:
        matrix = self.left @ (self.scale * to_matrix(noise, self.layout)) @ self.right.T
        return from_matrix(matrix, self.layout)

    def solve(self, difference: jax.Array) -> tuple[jax.Array, jax.Array]:
        half = jnp.linalg.solve(self.left, to_matrix(difference, self.layout))
        noise = jnp.linalg.solve(self.right, half.T).T / self.scale
        inputs, outputs = self.layout.size
        log_dets = (
            outputs * jnp.linalg.slogdet(self.left)[1]
            + inputs * jnp.linalg.slogdet(self.right)[1]
        )
        return from_matrix(noise, self.layout), log_dets + jnp.sum(jnp.log(self.scale))

    @property
    def variance(self) -> jax.Array:
        return from_matrix(
            self.left**2 @ self.scale**2 @ (self.right**2).T, self.layout
        )


class LowRankNormal(AffineNormal):
    """x = loc + scale * (e - Q (shrink * Q^T e)): the precision is diagonal plus low
    rank.
    """

    def __init__(
        self,
        loc: Any,
        scale: Any,
        basis: Any,
        shrink: Any,
        *,
        validate_args: Any = None,
    ):
        self.scale, self.basis, self.shrink = scale, basis, shrink
        super().__init__(loc, validate_args=validate_args)

    def times(self, noise: jax.Array) -> jax.Array:
        return self.scale * (
            noise - ((noise @ self.basis) * self.shrink) @ self.basis.T
        )

    def solve(self, difference: jax.Array) -> tuple[jax.Array, jax.Array]:
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
    def variance(self) -> jax.Array:
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


def _squared(
    first: OuterJacobian | DenseJacobian, second: OuterJacobian | DenseJacobian
) -> jax.Array:
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


def _is_single(jacobian: OuterJacobian | DenseJacobian) -> TypeGuard[OuterJacobian]:
    """Whether it is one outer product for each row and direction."""
    return isinstance(jacobian, OuterJacobian) and jacobian.inputs.shape[1] == 1


def split(vector: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
    """Parts of the last axis by site."""
    return cut(vector, {name: (size,) for name, size in sizes.items()})


@dataclass(frozen=True)
class FullStructure:
    """One dense precision of all sites."""

    sizes: Mapping[str, int]

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [("*", tuple(self.sizes), FullRank())]

    def measure(self, sweep: Sweep, prior: Vectors) -> jax.Array:
        """(P, P) J^T J."""

        def squares(jac: Jacobians) -> jax.Array:
            rows = []
            for first in self.sizes:
                blocks = [_squared(jac[first], jac[second]) for second in self.sizes]
                rows.append(jnp.concatenate(blocks, axis=1))
            return jnp.concatenate(rows)

        return sweep(squares)

    def flat(self, vectors: Vectors) -> jax.Array:
        """(P,) of all sites."""
        return jnp.concatenate([vectors[name] for name in self.sizes])

    def joined(self, jac: Jacobians) -> jax.Array:
        """(B, D, P) of all sites."""
        return jnp.concatenate([jac[name].dense() for name in self.sizes], axis=2)

    def product(self, sweep: Sweep, vectors: jax.Array, scale: jax.Array) -> jax.Array:
        """(P, K) J^T J between two scales (P,), times vectors (P, K)."""

        def products(jac: Jacobians, vectors: jax.Array, scale: jax.Array) -> jax.Array:
            by_site = split((vectors * scale[:, None]).T, self.sizes)
            forward: Any = 0.0
            for name in self.sizes:
                forward += jac[name].times(by_site[name].T)
            back = [jac[name].transposed_times(forward) for name in self.sizes]
            return scale[:, None] * jnp.concatenate(back)

        return sweep(products, vectors, scale)

    def gaussian(
        self, sums: jax.Array, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        """:param coupling: (P, P) what the precision of the prior has besides its
        diagonal.
        """
        precision = sums + jnp.diag(self.flat(prior))
        if coupling is not None:
            precision = precision + coupling
        tril = cholesky_of_inverse(precision)
        variance = jnp.sum(tril**2, axis=1)
        log_det = -2 * jnp.sum(jnp.log(jnp.diag(tril)))
        lost = jnp.max(jnp.diag(precision) * variance)
        params = {("*", "scale_tril"): tril}
        return LaplaceGaussian(params, split(variance, self.sizes), log_det, lost)

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        """(B, D, P) J M, with M M^T the covariance."""
        return self.joined(jac) @ fns["*"].scale_tril

    def covariance(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        """(B, D, D) J covariance J^T."""
        half = self.halves(jac, fns)
        return jnp.einsum("bdp,bep->bde", half, half)


@dataclass(frozen=True)
class DiagonalStructure(FullStructure):
    """Independent weights: the diagonal of the precision."""

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return []

    def measure(self, sweep: Sweep, prior: Vectors) -> Any:
        """The diagonal of J^T J, by site."""
        return sweep(lambda jac: {name: jac[name].squares() for name in self.sizes})

    def gaussian(
        self, sums: Any, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        params, variance = {}, {}
        log_det = jnp.zeros(())
        for name in self.sizes:
            precision = sums[name] + prior[name]
            params[name, "scale"] = precision**-0.5
            variance[name] = 1 / precision
            log_det += jnp.sum(jnp.log(precision))
        return LaplaceGaussian(params, variance, log_det)

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        matrices = []
        for name in self.sizes:
            matrices.append(self._half(name, jac[name].dense(), fns[name]))
        return jnp.concatenate(matrices, axis=2)

    def _half(self, name: str, dense: jax.Array, fn: Any) -> jax.Array:
        """(B, D, P) the Jacobian of a site times the root of its covariance."""
        return dense * jnp.ravel(fn.scale)

    def covariance(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        return sum(self._covariance(name, jac[name], fns[name]) for name in self.sizes)

    def _covariance(self, name: str, jacobian: Any, fn: Any) -> Any:
        """(B, D, D) of one site."""
        return _independent(jacobian, jnp.ravel(fn.scale) ** 2)


def _independent(jacobian: Any, variance: jax.Array) -> jax.Array:
    """(B, D, D) of a site whose elements are independent."""
    if _is_single(jacobian):
        matrix = to_matrix(variance, jacobian.layout) * jacobian.slope**2
        middle = (jacobian.inputs[:, 0] ** 2) @ matrix
        grads = jacobian.grads[:, :, 0]
        return jnp.einsum("bo,bdo,beo->bde", middle, grads, grads)
    dense = jacobian.dense()
    return jnp.einsum("bdp,p,bep->bde", dense, variance, dense)


@dataclass(frozen=True)
class KroneckerStructure(DiagonalStructure):
    """A Kronecker product for every site that is a matrix, in ``layouts``; the elements
    of others independent.
    """

    layouts: Mapping[str, MatrixLayout]

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [
            (name, (name,), Kronecker(layout)) for name, layout in self.layouts.items()
        ]

    def measure(self, sweep: Sweep, prior: Vectors) -> Any:
        """Eigenvalues and eigenvectors of the factors of each site that is a matrix;
        the diagonal of J^T J for the others.
        """

        def factors(jac: Jacobians) -> Any:
            by_site: Any = {}
            for name in self.sizes:
                jacobian = jac[name]
                if name not in self.layouts or not isinstance(jacobian, OuterJacobian):
                    by_site[name] = jacobian.squares()
                    continue
                inputs, grads = _products(jacobian)
                has_data = jacobian.has_data
                count = jnp.sum(has_data) * inputs.shape[1]
                left = jnp.einsum("bti,b,btj->ij", inputs, has_data, inputs)
                right = jnp.einsum("bdto,bdtp->op", grads, grads)
                by_site[name] = left, right, count
            return by_site

        by_site = sweep(factors)
        for name in self.layouts:
            left, right, count = by_site[name]
            by_site[name] = *jnp.linalg.eigh(left), *jnp.linalg.eigh(right / count)
        return by_site

    def gaussian(
        self, sums: Any, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        sizes = {
            name: self.sizes[name] for name in self.sizes if name not in self.layouts
        }
        params, variance, log_det, lost = DiagonalStructure(sizes).gaussian(sums, prior)
        for name, layout in self.layouts.items():
            left_values, left, right_values, right = sums[name]
            left_values = jnp.maximum(left_values, 0.0)
            right_values = jnp.maximum(right_values, 0.0)
            precision = left_values[:, None] * right_values + prior[name][0]
            params[name, "left"] = left
            params[name, "right"] = right
            params[name, "scale"] = precision**-0.5
            covariance = left**2 @ (1 / precision) @ (right**2).T
            variance[name] = from_matrix(covariance, layout)
            log_det = log_det + jnp.sum(jnp.log(precision))
            lost = jnp.maximum(lost, jnp.max(precision) / jnp.min(precision))
        return LaplaceGaussian(params, variance, log_det, lost)

    def _half(self, name: str, dense: jax.Array, fn: Any) -> jax.Array:
        if name not in self.layouts:
            return super()._half(name, dense, fn)
        layout = self.layouts[name]
        rotated = fn.left.T @ to_matrix(dense, layout) @ fn.right * fn.scale
        return from_matrix(rotated, layout)

    def _covariance(self, name: str, jacobian: Any, fn: Any) -> Any:
        if name not in self.layouts:
            return super()._covariance(name, jacobian, fn)
        if not isinstance(jacobian, OuterJacobian):
            # these rows influence one another, other than those of the run
            half = self._half(name, jacobian.dense(), fn)
            return jnp.einsum("bdp,bep->bde", half, half)
        inputs, grads = _products(jacobian)
        layout = jacobian.layout
        turned = OuterJacobian(
            inputs @ fn.left,
            grads @ fn.right,
            jnp.ones(layout.size),
            layout,
            jacobian.has_data,
        )
        return _independent(turned, from_matrix(fn.scale**2, layout))


def _products(jacobian: OuterJacobian) -> tuple[jax.Array, jax.Array]:
    """Inputs and gradients with the slope of the weight in them, as if it were itself a
    product.
    """
    slope = jacobian.slope
    first = jnp.sum(slope, axis=1) / jnp.sum(slope)
    return jacobian.inputs * first, jacobian.grads * jnp.sum(slope, axis=0)


@dataclass(frozen=True)
class LowRankStructure(FullStructure):
    """The largest eigenvectors of J^T J relative to the prior, and the diagonal of the
    rest.
    """

    rank: int

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [("*", tuple(self.sizes), LowRankPrecision(self.rank))]

    def measure(self, sweep: Sweep, prior: Vectors) -> Any:
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
        diagonal = DiagonalStructure.measure(self, sweep, prior)  # type: ignore[arg-type]
        total = self.flat(diagonal)
        return jnp.maximum(total - jnp.sum(columns**2, axis=1), 0.0), columns

    def gaussian(
        self, sums: Any, prior: Vectors, coupling: jax.Array | None = None
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
        return LaplaceGaussian(params, split(fn.variance, self.sizes), log_det, lost)

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        fn = fns["*"]
        # M = diag(scale) (1 - Q shrink Q^T)
        scaled = self.joined(jac) * fn.scale
        return scaled - ((scaled @ fn.basis) * fn.shrink) @ fn.basis.T
