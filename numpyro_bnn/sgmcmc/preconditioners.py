"""Preconditioners: symmetric positive definite G = L L', used as theta += (eps / 2) G
g~ + sqrt(eps T) L z.

For dynamics with momentum m, G is the inverse mass matrix; they store the whitened
momentum r = L' m ~ N(0, T I), so that only products with L and L' are needed. A fixed G
needs no correction term.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import Count, FractionBelow1, Positive, Switch
from numpyro_bnn._types import PyTree
from numpyro_bnn.sgmcmc.interfaces import Array, Preconditioner


@dataclass(frozen=True)
class Identity(Preconditioner):
    """G = I."""

    def root(self, state: PyTree, v: Array) -> Array:
        return v

    def whiten(self, state: PyTree, v: Array) -> Array:
        return v


@dataclass(frozen=True, eq=False)
class Diagonal(Preconditioner):
    """A fixed diagonal G = diag(values), or a multiple of the identity.

    :param values: positive; scalar or (P,).
    :raises ValueError: if a value is not positive and finite, or the length is not P.

    >>> import jax.numpy as jnp
    >>> G = Diagonal(jnp.array([4.0, 9.0]))
    >>> G.root(G.init(jnp.zeros(2)), jnp.ones(2)).tolist()
    [2.0, 3.0]
    """

    values: ArrayLike

    def __post_init__(self) -> None:
        if isinstance(self.values, jax.core.Tracer):
            return
        values = as_floats("sgmcmc.Diagonal", "values", self.values)
        if values.ndim > 1:
            instead = "Pass a scalar or (P,), or use `Dense`."
            raise argument_error(
                "sgmcmc.Diagonal", "values", f"shape {values.shape}", instead
            )
        if not (np.isfinite(values) & (values > 0)).all():
            instead = "Pass positive finite numbers."
            raise argument_error(
                "sgmcmc.Diagonal", "values", f"smallest {values.min()}", instead
            )

    def init(self, position: Array) -> Array:
        values = jnp.asarray(self.values, position.dtype)
        if values.ndim == 1 and values.shape != position.shape:
            instead = f"Pass one per coordinate, {position.shape}."
            raise argument_error(
                "sgmcmc.Diagonal", "values", f"shape {values.shape}", instead
            )
        return jnp.broadcast_to(
            jnp.sqrt(values), position.shape
        )  # one shape, whatever replaces it

    def root(self, state: Array, v: Array) -> Array:
        return state * v

    def whiten(self, state: Array, v: Array) -> Array:
        return v / state


@dataclass(frozen=True, eq=False)
class Factor(Preconditioner):
    """A dense G = L L' whose state is L, lower triangular; the identity, until the
    state is replaced.
    """

    def init(self, position: Array) -> Array:
        return jnp.eye(position.shape[0], dtype=position.dtype)

    def root(self, state: Array, v: Array) -> Array:
        return state @ v

    def transpose(self, state: Array, v: Array) -> Array:
        return v @ state

    def whiten(self, state: Array, v: Array) -> Array:
        return solve_triangular(state, v, lower=True)


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    """A fixed dense G = matrix, with L its lower Cholesky factor.

    :param matrix: symmetric positive definite (P, P).
    :raises ValueError: if it is not square, symmetric, positive definite, or of size P.

    >>> import jax.numpy as jnp
    >>> G = Dense(jnp.array([[4.0, 0.0], [0.0, 9.0]]))
    >>> G.root(G.init(jnp.zeros(2)), jnp.ones(2)).tolist()
    [2.0, 3.0]
    """

    matrix: ArrayLike

    def __post_init__(self) -> None:
        if isinstance(self.matrix, jax.core.Tracer):
            return
        matrix = as_floats("sgmcmc.Dense", "matrix", self.matrix)
        call, instead = (
            "sgmcmc.Dense",
            "Pass a symmetric positive definite matrix (P, P).",
        )
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise argument_error(call, "matrix", f"shape {matrix.shape}", instead)
        if not np.isfinite(matrix).all() or not np.allclose(
            matrix, matrix.T, rtol=1e-5, atol=1e-8
        ):
            raise argument_error(
                call, "matrix", "a matrix that is not finite or not symmetric", instead
            )
        smallest = np.linalg.eigvalsh(matrix)[0]
        if smallest <= 0:
            raise argument_error(
                call, "matrix", f"smallest eigenvalue {smallest:.3g}", instead
            )

    def init(self, position: Array) -> Array:
        matrix = jnp.asarray(self.matrix, position.dtype)
        if matrix.shape[0] != position.shape[0]:
            instead = f"Pass one row per coordinate, {position.shape}."
            raise argument_error(
                "sgmcmc.Dense", "matrix", f"shape {matrix.shape}", instead
            )
        return jnp.linalg.cholesky(matrix)


@dataclass(frozen=True)
class Blocks(Preconditioner):
    """Block-diagonal G; ``parts`` are pairs (size, preconditioner) that cover the flat
    position in order.
    """

    parts: Sequence[tuple[int, Preconditioner]]

    @property
    def adapts(self) -> bool:
        return any(part.adapts for _, part in self.parts)

    @property
    def biased(self) -> bool:
        return any(part.biased for _, part in self.parts)

    def _split(self, v: Array) -> list[Array]:
        return jnp.split(v, np.cumsum([size for size, _ in self.parts])[:-1])

    def _each(
        self, method: str, state: tuple[PyTree, ...], v: Array, *options: Any
    ) -> list[PyTree]:
        blocks = zip(self.parts, state, self._split(v), strict=True)
        return [
            getattr(part, method)(own, block, *options)
            for (_, part), own, block in blocks
        ]

    def init(self, position: Array) -> tuple[PyTree, ...]:
        total = sum(
            Count().check("sgmcmc.Blocks", "parts", size) for size, _ in self.parts
        )
        if total != position.shape[0]:
            instead = f"Cover all {position.shape[0]} coordinates."
            raise argument_error(
                "sgmcmc.Blocks", "parts", f"sizes that sum to {total}", instead
            )
        return tuple(
            part.init(v)
            for (_, part), v in zip(self.parts, self._split(position), strict=True)
        )

    def update(
        self, state: tuple[PyTree, ...], gradient: Array, warming: Array
    ) -> tuple[PyTree, ...]:
        return tuple(self._each("update", state, gradient, warming))

    def root(self, state: tuple[PyTree, ...], v: Array) -> Array:
        return jnp.concatenate(self._each("root", state, v))

    def transpose(self, state: tuple[PyTree, ...], v: Array) -> Array:
        return jnp.concatenate(self._each("transpose", state, v))

    def whiten(self, state: tuple[PyTree, ...], v: Array) -> Array:
        return jnp.concatenate(self._each("whiten", state, v))


class RMSPropState(NamedTuple):
    """Running mean square of the mean gradient, (P,), and the number of
    gradients seen.
    """

    mean_square: Array
    num_seen: Array


@dataclass(frozen=True)
class RMSProp(Preconditioner):
    r"""Diagonal G from a running mean of squared gradients, adapted in warm-up, then
    frozen.

    G = 1 / (damping + sqrt(V)) with V <- decay V + (1 - decay) (g / N)^2; V starts at
    the first squared gradient. With ``running=True`` it keeps adapting, as in Li et al.
    (2016, algorithm 1); then **the chain is biased** at any step size: on the density
    exp(-x^4 / 4) it gives E[x^2] near 1.25 instead of 0.676. The correction term Gamma
    of that paper is left out: it repairs only the case decay = 0, not a running
    average.

    :param decay: in [0, 1).
    :param damping: positive; bounds G from above by 1 / damping.
    :param num_data: N, the divisor that turns a gradient of the full potential into a
        mean per data point.
    :param running: keep adapting after warm-up.
    :raises ValueError: outside these ranges.

    >>> import jax.numpy as jnp
    >>> G = RMSProp(damping=1.0)
    >>> state = G.update(G.init(jnp.zeros(1)), jnp.array([3.0]), True)
    >>> G.root(state, jnp.ones(1)).tolist()
    [0.5]
    """

    decay: FractionBelow1 = 0.99
    damping: Positive = 1e-5
    num_data: Positive = 1
    running: Switch = False

    @property
    def adapts(self) -> bool:
        return not self.running

    @property
    def biased(self) -> bool:
        return self.running

    def init(self, position: Array) -> RMSPropState:
        return RMSPropState(jnp.ones_like(position), jnp.int32(0))

    def update(
        self, state: RMSPropState, gradient: Array, warming: Array
    ) -> RMSPropState:
        square = jnp.square(gradient / self.num_data)
        average = jnp.where(
            state.num_seen == 0,
            square,
            self.decay * state.mean_square + (1 - self.decay) * square,
        )
        learning = jnp.asarray(True if self.running else warming)
        mean_square = jnp.where(learning, average, state.mean_square)
        return RMSPropState(mean_square, state.num_seen + learning.astype(jnp.int32))

    def root(self, state: RMSPropState, v: Array) -> Array:
        return v / jnp.sqrt(self.damping + jnp.sqrt(state.mean_square))

    def whiten(self, state: RMSPropState, v: Array) -> Array:
        return v * jnp.sqrt(self.damping + jnp.sqrt(state.mean_square))
