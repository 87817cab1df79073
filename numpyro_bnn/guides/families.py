"""Gaussian families for the blocks of a guide."""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.blocks import Block, Family
from numpyro_bnn.guides.matrix_normal import FlatMatrixNormal
from numpyro_bnn.nn import inputs_first

__all__ = ["Diagonal", "FullRank", "LowRank", "MatrixNormal", "matrix_shape"]

MOST_NUMBERS = 10**8  # in one parameter: 400 MB, and three times that with an optimizer


def _too_many(family: str, block: Block, number: int, instead: str) -> Exception:
    got = f"block {block.name!r} of {block.size} unknowns, with {number:.1e} numbers in its covariance"
    return argument_error(f"guides.{family}", "block", got, instead)


def _loc(block: Block) -> jax.Array:
    return numpyro.param(f"{block.name}_loc", block.loc, event_dim=1)


@dataclass(frozen=True)
class Diagonal(Family):
    """Independent Gaussians: N(m, diag(s^2)), with 2 D parameters.

    What sites in no block get as well, one site at a time; as a family it makes one vector of several sites.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(Diagonal().distribution, 0)(block).event_shape
    (3,)
    """

    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc``, ``scale``, each (D,)."""
        scale = numpyro.param(
            f"{block.name}_scale", block.scale, constraint=constraints.softplus_positive, event_dim=1
        )
        return dist.Normal(_loc(block), scale).to_event(1)


@dataclass(frozen=True)
class FullRank(Family):
    """A Gaussian with any covariance: N(m, L L^T), with D + D (D + 1) / 2 free parameters.

    :raises ValueError: for a block of more than 10^4 unknowns.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(FullRank().distribution, 0)(block).scale_tril.shape
    (3, 3)
    """

    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc`` (D,) and ``scale_tril`` (D, D)."""
        if block.size**2 > MOST_NUMBERS:
            instead = "Take `guides.LowRank(rank)`, or smaller blocks, e.g. one per layer."
            raise _too_many("FullRank", block, block.size**2, instead)
        scale_tril = numpyro.param(
            f"{block.name}_scale_tril",
            jnp.diag(block.scale),
            constraint=constraints.scaled_unit_lower_cholesky,
        )
        return dist.MultivariateNormal(_loc(block), scale_tril=scale_tril)


@dataclass(frozen=True)
class LowRank(Family):
    r"""A Gaussian whose covariance is diagonal plus low rank, with (2 + rank) D parameters.

    .. math:: N\big(m,\ \operatorname{diag}(s)\,(I + F F^\top)\operatorname{diag}(s)\big), \qquad F \in R^{D \times r}

    :param rank: r, the number of directions of correlation.

    Reference: Ong, Nott & Smith (2018), *Gaussian variational approximation with a factor covariance structure*.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(LowRank(2).distribution, 0)(block).cov_factor.shape
    (3, 2)
    """

    rank: int = 10

    gaussian: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise argument_error("guides.LowRank", "rank", self.rank, "Pass a whole number of at least 1.")

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc``, ``scale`` (D,) and ``cov_factor`` (D, rank), which multiplies the scale."""
        if block.size * self.rank > MOST_NUMBERS:
            instead = "Take a smaller rank, or smaller blocks, e.g. one per layer."
            raise _too_many("LowRank", block, block.size * self.rank, instead)
        # At zero the gradient of the bound with respect to F is zero: start near it, in fixed random directions.
        factor = 0.1 * jax.random.normal(jax.random.key(0), (block.size, self.rank)) / self.rank**0.5
        factor = numpyro.param(f"{block.name}_cov_factor", factor, event_dim=2)
        scale = numpyro.param(
            f"{block.name}_scale", block.scale, constraint=constraints.softplus_positive, event_dim=1
        )
        return dist.LowRankMultivariateNormal(_loc(block), factor * scale[:, None], scale * scale)


def matrix_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a kernel laid out as a matrix: (inputs, outputs), in Equinox's layout (outputs, inputs).

    >>> matrix_shape("Conv2d_0.kernel", (5, 5, 2, 16)), matrix_shape("convolution.weight", (16, 2, 5, 5))
    ((50, 16), (16, 50))
    """
    if inputs_first(name):
        return prod(shape[:-1]), shape[-1]
    return shape[0], prod(shape[1:])


@dataclass(frozen=True)
class MatrixNormal(Family):
    r"""A matrix normal for one kernel: rows (inputs) and columns (outputs) have a covariance each.

    .. math:: W = M + A E B^\top,\ E_{ij} \sim N(0, 1), \qquad
              \operatorname{cov}(W_{ij}, W_{kl}) = (A A^\top)_{ik} (B B^\top)_{jl}

    A kernel of a convolution (h, w, in, out) is the matrix (h w in, out). With R rows and C columns it has
    R C + R (R + 1) / 2 + C (C + 1) / 2 parameters, diagonal R C + R + C.

    :param diagonal: diagonal A and B: one scale per input and one per output.
    :raises ValueError: for a block of several sites or of a site with fewer than two axes, and for a side
        of more than 10^4.

    Reference: Louizos & Welling (2016), *Structured and efficient variational deep learning with matrix Gaussian
    posteriors*.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3, 2)}, jnp.zeros(6), jnp.ones(6))
    >>> fn = handlers.seed(MatrixNormal().distribution, 0)(block)
    >>> fn.row.shape, fn.column.shape, fn.event_shape
    ((3, 3), (2, 2), (6,))
    """

    diagonal: bool = False

    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """Parameters ``loc`` (R C,), ``row`` and ``column``: (R, R) and (C, C), diagonal (R,) and (C,)."""
        if len(block.shapes) != 1 or len(next(iter(block.shapes.values()))) < 2:
            got = f"block {block.name!r} of sites {dict(block.shapes)}"
            instead = (
                "Give each kernel (a site of at least two axes) a block of its own, or use `guides.FullRank`."
            )
            raise argument_error("guides.MatrixNormal", "block", got, instead)
        rows, columns = matrix_shape(*next(iter(block.shapes.items())))
        if not self.diagonal and max(rows, columns) ** 2 > MOST_NUMBERS:
            instead = "Take `guides.MatrixNormal(diagonal=True)`."
            raise _too_many("MatrixNormal", block, max(rows, columns) ** 2, instead)
        # The geometric mean of the first scales over the other axis.
        log_scale = jnp.log(block.scale.reshape(rows, columns))
        row = jnp.exp(log_scale.mean(1) - log_scale.mean())
        column = jnp.exp(log_scale.mean(0))
        return FlatMatrixNormal(
            _loc(block), self._factor(block, "row", row), self._factor(block, "column", column)
        )

    def _factor(self, block: Block, name: str, start: jax.Array) -> Any:
        if self.diagonal:
            constraint, event_dim = constraints.softplus_positive, 1
        else:
            start, constraint, event_dim = jnp.diag(start), constraints.scaled_unit_lower_cholesky, 2
        return numpyro.param(f"{block.name}_{name}", start, constraint=constraint, event_dim=event_dim)
