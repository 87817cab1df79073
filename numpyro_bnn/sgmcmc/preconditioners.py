"""Preconditioners: symmetric positive definite G = L L', used as theta += (eps / 2) G g~ + sqrt(eps T) L z.

For dynamics with momentum m the same G is the inverse mass matrix; there the whitened momentum r = L' m ~ N(0, T I)
is stored, so that only products with L and L' are needed. A fixed G needs no correction term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_bnn._checks import argument_error, check_count, check_number
from numpyro_bnn.sgmcmc.interfaces import Preconditioner

__all__ = [
    "Identity",
    "Diagonal",
    "Dense",
    "Blocks",
    "RMSProp",
    "RMSPropState",
    "Curvature",
    "CurvatureState",
    "from_squared_gradients",
]


@dataclass(frozen=True)
class Identity(Preconditioner):
    """G = I.

    >>> Identity().root((), 3.0)
    3.0
    """

    def root(self, state: Any, v: jax.Array) -> jax.Array:
        return v

    def transpose(self, state: Any, v: jax.Array) -> jax.Array:
        return v

    def whiten(self, state: Any, v: jax.Array) -> jax.Array:
        return v


@dataclass(frozen=True, eq=False)
class Diagonal(Preconditioner):
    """G = diag(values), or a multiple of the identity.

    :param values: positive; scalar or (P,).
    :raises ValueError: if a value is not positive and finite, or the length is not P.

    >>> import jax.numpy as jnp
    >>> G = Diagonal(jnp.array([4.0, 9.0]))
    >>> G.root(G.init(jnp.zeros(2)), jnp.ones(2)).tolist()
    [2.0, 3.0]
    """

    values: Any

    def __post_init__(self) -> None:
        if isinstance(self.values, jax.core.Tracer):
            return
        values = np.asarray(self.values)
        if values.ndim > 1:
            raise argument_error(
                "sgmcmc.Diagonal", "values", f"shape {values.shape}", "Pass a scalar or (P,), or use `Dense`."
            )
        if not (np.isfinite(values) & (values > 0)).all():
            raise argument_error(
                "sgmcmc.Diagonal", "values", f"smallest {values.min()}", "Pass positive finite numbers."
            )

    def init(self, position: jax.Array) -> jax.Array:
        values = jnp.asarray(self.values, position.dtype)
        if values.ndim == 1 and values.shape != position.shape:
            raise argument_error(
                "sgmcmc.Diagonal",
                "values",
                f"shape {values.shape}",
                f"Pass one per coordinate, {position.shape}.",
            )
        return jnp.sqrt(values)

    def root(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return state * v

    def transpose(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return state * v

    def whiten(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return v / state


@dataclass(frozen=True, eq=False)
class Dense(Preconditioner):
    """G = matrix; L is its lower Cholesky factor.

    :param matrix: symmetric positive definite (P, P).
    :raises ValueError: if it is not square, symmetric, positive definite, or of size P.

    >>> import jax.numpy as jnp
    >>> G = Dense(jnp.array([[4.0, 0.0], [0.0, 9.0]]))
    >>> G.root(G.init(jnp.zeros(2)), jnp.ones(2)).tolist()
    [2.0, 3.0]
    """

    matrix: Any

    def __post_init__(self) -> None:
        if isinstance(self.matrix, jax.core.Tracer):
            return
        matrix = np.asarray(self.matrix, np.float64)
        call, instead = "sgmcmc.Dense", "Pass a symmetric positive definite matrix (P, P)."
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise argument_error(call, "matrix", f"shape {matrix.shape}", instead)
        if not np.isfinite(matrix).all() or not np.allclose(matrix, matrix.T, rtol=1e-5, atol=1e-8):
            raise argument_error(call, "matrix", "a matrix that is not finite or not symmetric", instead)
        smallest = np.linalg.eigvalsh(matrix)[0]
        if smallest <= 0:
            raise argument_error(call, "matrix", f"smallest eigenvalue {smallest:.3g}", instead)

    def init(self, position: jax.Array) -> jax.Array:
        matrix = jnp.asarray(self.matrix, position.dtype)
        if matrix.shape[0] != position.shape[0]:
            raise argument_error(
                "sgmcmc.Dense",
                "matrix",
                f"shape {matrix.shape}",
                f"Pass one row per coordinate, {position.shape}.",
            )
        return jnp.linalg.cholesky(matrix)

    def root(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return state @ v

    def transpose(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return v @ state

    def whiten(self, state: jax.Array, v: jax.Array) -> jax.Array:
        return solve_triangular(state, v, lower=True)


@dataclass(frozen=True)
class Blocks(Preconditioner):
    """G block diagonal, each block with a preconditioner of its own.

    :param parts: pairs (size, preconditioner) that cover the flat position in order.
    :raises ValueError: if the sizes do not sum to P.

    >>> import jax.numpy as jnp
    >>> G = Blocks([(1, Diagonal(4.0)), (2, Identity())])
    >>> G.root(G.init(jnp.zeros(3)), jnp.ones(3)).tolist()
    [2.0, 1.0, 1.0]
    """

    parts: Sequence[tuple[int, Any]]

    @property
    def adapts(self) -> bool:
        return any(part.adapts for _, part in self.parts)

    @property
    def biased(self) -> bool:
        return any(part.biased for _, part in self.parts)

    def _split(self, v: jax.Array) -> list[jax.Array]:
        edges = np.cumsum([size for size, _ in self.parts])[:-1]
        return jnp.split(v, edges)

    def init(self, position: jax.Array) -> tuple[Any, ...]:
        for size, _ in self.parts:
            check_count("sgmcmc.Blocks", "parts", size)
        total = sum(size for size, _ in self.parts)
        if total != position.shape[0]:
            raise argument_error(
                "sgmcmc.Blocks",
                "parts",
                f"sizes that sum to {total}",
                f"Cover all {position.shape[0]} coordinates.",
            )
        return tuple(part.init(v) for (_, part), v in zip(self.parts, self._split(position), strict=True))

    def update(self, state: tuple[Any, ...], gradient: jax.Array, warming: jax.Array) -> tuple[Any, ...]:
        blocks = zip(self.parts, state, self._split(gradient), strict=True)
        return tuple(part.update(own, g, warming) for (_, part), own, g in blocks)

    def root(self, state: tuple[Any, ...], v: jax.Array) -> jax.Array:
        blocks = zip(self.parts, state, self._split(v), strict=True)
        return jnp.concatenate([part.root(own, block) for (_, part), own, block in blocks])

    def transpose(self, state: tuple[Any, ...], v: jax.Array) -> jax.Array:
        blocks = zip(self.parts, state, self._split(v), strict=True)
        return jnp.concatenate([part.transpose(own, block) for (_, part), own, block in blocks])

    def whiten(self, state: tuple[Any, ...], v: jax.Array) -> jax.Array:
        blocks = zip(self.parts, state, self._split(v), strict=True)
        return jnp.concatenate([part.whiten(own, block) for (_, part), own, block in blocks])


class RMSPropState(NamedTuple):
    """Running mean square of the mean gradient, (P,), and the number of gradients seen."""

    mean_square: jax.Array
    num_seen: jax.Array


@dataclass(frozen=True)
class RMSProp(Preconditioner):
    r"""Diagonal G = 1 / (damping + sqrt(V)), V <- decay V + (1 - decay) (g / N)^2, adapted in warm-up, then frozen.

    V starts at the first squared gradient. With ``running=True`` it goes on adapting, as in Li et al. (2016,
    algorithm 1); then **the chain is biased**, whatever the step size: on the density exp(-x^4 / 4) E[x^2] comes out
    near 1.25 instead of 0.676. The correction term Gamma of that paper is absent here: it repairs only the case
    decay = 0, not a running average.

    :param decay: in [0, 1).
    :param damping: positive; bounds G from above by 1 / damping.
    :param num_data: N, the divisor that turns a gradient of the full potential into a mean per data point.
    :param running: go on adapting after warm-up.
    :raises ValueError: outside these ranges.

    >>> import jax.numpy as jnp
    >>> G = RMSProp(damping=1.0)
    >>> state = G.update(G.init(jnp.zeros(1)), jnp.array([3.0]), True)
    >>> G.root(state, jnp.ones(1)).tolist()
    [0.5]
    """

    decay: float = 0.99
    damping: float = 1e-5
    num_data: float = 1
    running: bool = False

    def __post_init__(self) -> None:
        check_number("sgmcmc.RMSProp", "decay", self.decay)
        if self.decay >= 1:
            raise argument_error("sgmcmc.RMSProp", "decay", self.decay, "Pass a number in [0, 1).")
        check_number("sgmcmc.RMSProp", "damping", self.damping, strict=True)
        check_number("sgmcmc.RMSProp", "num_data", self.num_data, strict=True)

    @property
    def adapts(self) -> bool:
        return not self.running

    @property
    def biased(self) -> bool:
        return self.running

    def init(self, position: jax.Array) -> RMSPropState:
        return RMSPropState(jnp.ones_like(position), jnp.int32(0))

    def update(self, state: RMSPropState, gradient: jax.Array, warming: jax.Array) -> RMSPropState:
        square = jnp.square(gradient / self.num_data)
        average = jnp.where(
            state.num_seen == 0, square, self.decay * state.mean_square + (1 - self.decay) * square
        )
        learning = jnp.asarray(True if self.running else warming)
        mean_square = jnp.where(learning, average, state.mean_square)
        return RMSPropState(mean_square, state.num_seen + learning.astype(jnp.int32))

    def root(self, state: RMSPropState, v: jax.Array) -> jax.Array:
        return v / jnp.sqrt(self.damping + jnp.sqrt(state.mean_square))

    def transpose(self, state: RMSPropState, v: jax.Array) -> jax.Array:
        return self.root(state, v)

    def whiten(self, state: RMSPropState, v: jax.Array) -> jax.Array:
        return v * jnp.sqrt(self.damping + jnp.sqrt(state.mean_square))


class CurvatureState(NamedTuple):
    """Running mean of what squared gradients exceed the known curvature by, (P,); the number of gradients seen."""

    excess: jax.Array
    num_seen: jax.Array


@dataclass(frozen=True, eq=False)
class Curvature(Preconditioner):
    r"""Diagonal G = 1 / (known + learned), of curvatures; what is learned is frozen after warm-up.

    Under a density exp(-U) the mean square of a derivative is the mean curvature,
    :math:`E[(\partial_i U)^2] = E[\partial_i^2 U]`. So what g^2 exceeds ``known`` by tells the curvature of the rest.
    The excess is averaged where it is positive, which is too much by half of ``known`` where there is no rest, and
    never negative. ``known`` may change between transitions, as prior precisions do between sweeps of ``Gibbs``.

    :param known: at least 0, (P,). Where it is 0 the curvature is all learned, and 1 before the first gradient.
    :param decay: of the running mean, in [0, 1]; 1 keeps the mean of all.

    >>> import jax.numpy as jnp
    >>> G = Curvature(jnp.array([4.0, 1.0]), decay=0.0)
    >>> state = G.update(G.init(jnp.zeros(2)), jnp.array([1.0, 2.0]), True)
    >>> G.root(state, jnp.ones(2)).tolist()  # 1 / sqrt(4 + 0), 1 / sqrt(1 + 3)
    [0.5, 0.5]
    """

    known: jax.Array
    decay: float = 0.99

    @property
    def adapts(self) -> bool:
        return True

    def init(self, position: jax.Array) -> CurvatureState:
        return CurvatureState(jnp.zeros_like(position), jnp.int32(0))

    def update(self, state: CurvatureState, gradient: jax.Array, warming: jax.Array) -> CurvatureState:
        learning = jnp.asarray(warming)
        # A mean of all at first, which forgets the way to the typical set later.
        weight = jnp.maximum(1 - self.decay, 1 / (1 + state.num_seen.astype(gradient.dtype)))
        excess = jnp.maximum(jnp.square(gradient) - self.known, 0)
        excess = state.excess + weight * (excess - state.excess)
        return CurvatureState(
            jnp.where(learning, excess, state.excess), state.num_seen + learning.astype(jnp.int32)
        )

    def _root(self, state: CurvatureState) -> jax.Array:
        total = self.known + state.excess
        return 1 / jnp.sqrt(jnp.where(total > 0, total, 1))

    def root(self, state: CurvatureState, v: jax.Array) -> jax.Array:
        return v * self._root(state)

    def transpose(self, state: CurvatureState, v: jax.Array) -> jax.Array:
        return self.root(state, v)

    def whiten(self, state: CurvatureState, v: jax.Array) -> jax.Array:
        return v / self._root(state)


def from_squared_gradients(mean_square: jax.Array, num_data: float = 1, damping: float = 1e-5) -> Diagonal:
    """Return the fixed diagonal G = 1 / (damping + sqrt(mean_square) / N) from the squared gradients of a warm start.

    :param mean_square: (P,) average of squared minibatch gradients of the full potential, e.g. Adam's second moment.
    :param num_data: N, as for :class:`RMSProp`.
    :param damping: as for :class:`RMSProp`.

    >>> import jax.numpy as jnp
    >>> from_squared_gradients(jnp.array([9.0]), damping=1.0).values.tolist()
    [0.25]
    """
    check_number("sgmcmc.from_squared_gradients", "num_data", num_data, strict=True)
    check_number("sgmcmc.from_squared_gradients", "damping", damping, strict=True)
    return Diagonal(1.0 / (damping + jnp.sqrt(mean_square) / num_data))
