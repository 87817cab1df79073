"""Structures of the precision: what is summed over the rows, the Gaussian it gives, and
that Gaussian as a guide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
Sweep = Callable[
    ..., Any
]  # sums a function of the Jacobians (and further arguments) over all rows
ITERATIONS, OVERSAMPLING = 4, 10  # of the subspace iteration


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
        def one(difference: jax.Array) -> jax.Array:
            noise, log_det = self.solve(difference)
            return jnp.sum(dist.Normal().log_prob(noise)) - log_det

        return jnp.vectorize(one, signature="(p)->()")(value - self.loc)

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


def joined(jac: Jacobians, names: Sequence[str]) -> jax.Array:
    """(B, D, P) of all sites."""
    return jnp.concatenate([jac[name].dense() for name in names], axis=2)


def _squared(
    first: OuterJacobian | DenseJacobian, second: OuterJacobian | DenseJacobian
) -> jax.Array:
    """(P, Q) the sum over rows and directions of products of two Jacobians."""
    if not all(
        isinstance(jacobian, OuterJacobian) and jacobian.inputs.shape[1] == 1
        for jacobian in (first, second)
    ):
        return jnp.einsum("bdp,bdq->pq", first.dense(), second.dense())
    assert isinstance(first, OuterJacobian)
    assert isinstance(second, OuterJacobian)
    # Summed over the directions first, which costs as much as one direction.
    middle = jnp.einsum("bdo,bdp->bop", first.grads[:, :, 0], second.grads[:, :, 0])
    blocks = jnp.einsum(
        "bi,bop,bj->iojp", first.inputs[:, 0], middle, second.inputs[:, 0]
    )
    blocks = blocks * first.slope[:, :, None, None] * second.slope
    by_first = from_matrix(jnp.moveaxis(blocks, (0, 1), (2, 3)), first.layout)
    return from_matrix(jnp.moveaxis(by_first, 2, 0), second.layout)


def split(vector: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
    """Parts of the last axis by site."""
    ends = [sum(list(sizes.values())[: i + 1]) for i in range(len(sizes))]
    return dict(zip(sizes, jnp.split(vector, ends[:-1], axis=-1), strict=True))


@dataclass(frozen=True)
class FullStructure:
    """One dense precision of all sites."""

    sizes: Mapping[str, int]

    def blocks(self) -> list[tuple[str, tuple[str, ...], Family]]:
        return [("*", tuple(self.sizes), FullRank())]

    def measure(self, sweep: Sweep, prior: Vectors) -> jax.Array:
        """(P, P) J^T J."""

        def squares(jac: Jacobians) -> jax.Array:
            rows = [
                jnp.concatenate([_squared(jac[a], jac[b]) for b in self.sizes], axis=1)
                for a in self.sizes
            ]
            return jnp.concatenate(rows)

        return sweep(squares)

    def product(self, sweep: Sweep, vectors: jax.Array, scale: jax.Array) -> jax.Array:
        """(P, K) J^T J between two scales (P,), times vectors (P, K)."""

        def products(jac: Jacobians, vectors: jax.Array, scale: jax.Array) -> jax.Array:
            by_site = split((vectors * scale[:, None]).T, self.sizes)
            forward = sum(jac[name].times(by_site[name].T) for name in self.sizes)
            back = [
                jac[name].transposed_times(jnp.asarray(forward)) for name in self.sizes
            ]
            return scale[:, None] * jnp.concatenate(back)

        return sweep(products, vectors, scale)

    def gaussian(
        self, sums: jax.Array, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        """:param coupling: (P, P) what the precision of the prior has besides its
        diagonal.
        """
        precision = sums + jnp.diag(
            jnp.concatenate([prior[name] for name in self.sizes])
        )
        precision = precision if coupling is None else precision + coupling
        tril = cholesky_of_inverse(precision)
        variance = jnp.sum(tril**2, axis=1)
        log_det = -2 * jnp.sum(jnp.log(jnp.diag(tril)))
        lost = jnp.max(jnp.diag(precision) * variance)
        return LaplaceGaussian(
            {("*", "scale_tril"): tril}, split(variance, self.sizes), log_det, lost
        )

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        """(B, D, P) J M, with M M^T the covariance."""
        return joined(jac, list(self.sizes)) @ fns["*"].scale_tril

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
        precision = {name: sums[name] + prior[name] for name in self.sizes}
        params = {(name, "scale"): value**-0.5 for name, value in precision.items()}
        log_det = sum(jnp.sum(jnp.log(value)) for value in precision.values())
        return LaplaceGaussian(
            params,
            {name: 1 / value for name, value in precision.items()},
            jnp.asarray(log_det),
        )

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        return jnp.concatenate(
            [jac[n].dense() * jnp.ravel(fns[n].scale) for n in self.sizes], axis=2
        )

    def covariance(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        return sum(
            _independent(jac[n], jnp.ravel(fns[n].scale) ** 2) for n in self.sizes
        )  # type: ignore[return-value]


def _independent(jacobian: Any, variance: jax.Array) -> jax.Array:
    """(B, D, D) of a site whose elements are independent."""
    if isinstance(jacobian, OuterJacobian) and jacobian.inputs.shape[1] == 1:
        matrix = to_matrix(variance, jacobian.layout) * jacobian.slope**2
        middle = (jacobian.inputs[:, 0] ** 2) @ matrix
        return jnp.einsum(
            "bo,bdo,beo->bde", middle, jacobian.grads[:, :, 0], jacobian.grads[:, :, 0]
        )
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
        """Eigenvalues and eigenvectors of the factors of each site, and how far its
        slope is from a product.
        """

        def factors(jac: Jacobians) -> Any:
            by_site: Any = {}
            for name in self.sizes:
                jacobian = jac[name]
                if name not in self.layouts or not isinstance(jacobian, OuterJacobian):
                    by_site[name] = jacobian.squares()
                    continue
                rows, _, scaled = _products(jacobian)
                inputs, grads = scaled
                count = jnp.sum(jacobian.has_data) * inputs.shape[1]
                left = jnp.einsum("bti,b,btj->ij", inputs, jacobian.has_data, inputs)
                right = jnp.einsum("bdto,bdtp->op", grads, grads)
                by_site[name] = left, right, count, rows
            return by_site

        found: Any = {}
        for name, part in sweep(factors).items():
            if name not in self.layouts:
                found[name] = part
                continue
            left, right, count, error = part
            found[name] = *jnp.linalg.eigh(left), *jnp.linalg.eigh(right / count), error
        return found

    def gaussian(
        self, sums: Any, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        elementwise = DiagonalStructure(
            {
                name: size
                for name, size in self.sizes.items()
                if name not in self.layouts
            }
        )
        params, variance, log_det, lost = elementwise.gaussian(sums, prior)
        for name, layout in self.layouts.items():
            a, left, b, right, _ = sums[name]
            precision = (
                jnp.maximum(a, 0.0)[:, None] * jnp.maximum(b, 0.0) + prior[name][0]
            )
            params |= {
                (name, "left"): left,
                (name, "right"): right,
                (name, "scale"): precision**-0.5,
            }
            variance[name] = from_matrix(
                left**2 @ (1 / precision) @ (right**2).T, layout
            )
            log_det = log_det + jnp.sum(jnp.log(precision))
            lost = jnp.maximum(lost, jnp.max(precision) / jnp.min(precision))
        return LaplaceGaussian(params, variance, log_det, lost)

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        matrices = []
        for name in self.sizes:
            dense = jac[name].dense()
            if name in self.layouts:
                matrices.append(self._half(name, dense, fns[name]))
            else:
                matrices.append(dense * jnp.ravel(fns[name].scale))
        return jnp.concatenate(matrices, axis=2)

    def _half(self, name: str, dense: jax.Array, fn: Any) -> jax.Array:
        """(B, D, P) the Jacobian of a matrix times the root of its covariance."""
        layout = self.layouts[name]
        rotated = fn.left.T @ to_matrix(dense, layout) @ fn.right * fn.scale
        return from_matrix(rotated, layout)

    def covariance(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        total: Any = 0.0
        for name in self.sizes:
            jacobian = jac[name]
            if name not in self.layouts:
                total = total + _independent(jacobian, jnp.ravel(fns[name].scale) ** 2)
                continue
            if not isinstance(jacobian, OuterJacobian):
                # these rows influence one another, other than those of the run
                half = self._half(name, jacobian.dense(), fns[name])
                total = total + jnp.einsum("bdp,bep->bde", half, half)
                continue
            fn, (inputs, grads) = fns[name], _products(jacobian)[2]
            ones = jnp.ones(jacobian.layout.size)
            turned = OuterJacobian(
                inputs @ fn.left,
                grads @ fn.right,
                ones,
                jacobian.layout,
                jacobian.has_data,
            )
            total = total + _independent(
                turned, from_matrix(fn.scale**2, jacobian.layout)
            )
        return total


def _products(
    jacobian: OuterJacobian,
) -> tuple[jax.Array, OuterJacobian, tuple[jax.Array, jax.Array]]:
    """Inputs and gradients with the slope of the weight in them, if it is itself a
    product, and how far it is not.
    """
    slope, total = jacobian.slope, jnp.sum(jacobian.slope)
    first, second = jnp.sum(slope, axis=1) / total, jnp.sum(slope, axis=0)
    error = jnp.max(jnp.abs(slope - first[:, None] * second)) / jnp.max(jnp.abs(slope))
    return error, jacobian, (jacobian.inputs * first, jacobian.grads * second)


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
        scale = jnp.concatenate([prior[name] for name in self.sizes]) ** -0.5
        rank = min(self.rank, scale.size)
        width = min(rank + OVERSAMPLING, scale.size)
        basis = jnp.linalg.qr(random.normal(random.key(0), (scale.size, width)))[0]
        for _ in range(ITERATIONS if width < scale.size else 0):
            basis = jnp.linalg.qr(self.product(sweep, basis, scale))[0]
        values, turn = jnp.linalg.eigh(basis.T @ self.product(sweep, basis, scale))
        values, vectors = jnp.maximum(values[-rank:], 0.0), (basis @ turn)[:, -rank:]
        columns = vectors * jnp.sqrt(values) / scale[:, None]
        diagonal = DiagonalStructure.measure(self, sweep, prior)  # type: ignore[arg-type]
        total = jnp.concatenate([diagonal[name] for name in self.sizes])
        return jnp.maximum(total - jnp.sum(columns**2, axis=1), 0.0), columns

    def gaussian(
        self, sums: Any, prior: Vectors, coupling: jax.Array | None = None
    ) -> LaplaceGaussian:
        diagonal, columns = sums
        scale = (
            diagonal + jnp.concatenate([prior[name] for name in self.sizes])
        ) ** -0.5
        basis, singular, _ = jnp.linalg.svd(
            scale[:, None] * columns, full_matrices=False
        )
        shrink = 1 - (1 + singular**2) ** -0.5
        params = {("*", "scale"): scale, ("*", "basis"): basis, ("*", "shrink"): shrink}
        fn = LowRankNormal(jnp.zeros_like(scale), scale, basis, shrink)
        log_det = jnp.sum(jnp.log1p(singular**2)) - 2 * jnp.sum(jnp.log(scale))
        lost = jnp.max(
            1 + jnp.sum((scale[:, None] * columns) ** 2, axis=1)
        )  # what is left of a difference
        return LaplaceGaussian(params, split(fn.variance, self.sizes), log_det, lost)

    def halves(self, jac: Jacobians, fns: Mapping[str, Any]) -> jax.Array:
        fn = fns["*"]
        scaled = (
            joined(jac, list(self.sizes)) * fn.scale
        )  # M = diag(scale) (1 - Q shrink Q^T)
        return scaled - ((scaled @ fn.basis) * fn.shrink) @ fn.basis.T
