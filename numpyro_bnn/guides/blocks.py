"""Blocks of a guide: which latent sites are approximated together, and by which family
of distributions.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import constraints

from numpyro_bnn._checks import argument_error, is_list, unknown_name
from numpyro_bnn._options import PositiveInt, check_fields
from numpyro_bnn._types import Arrays
from numpyro_bnn.nn.base import Shape

Patterns: TypeAlias = str | Sequence[str]

MAX_NUMBERS = 10**8  # per parameter: 400 MB, and three times that with an optimizer


class Block(NamedTuple):
    """Latent sites that a family approximates together, as one vector of D
    unconstrained numbers.

    :param name: prefix of the parameters, e.g. ``"auto_net/Dense_0"``.
    :param shapes: unconstrained shape by site, in the order of the vector.
    :param loc: (D,) initial means.
    :param scale: (D,) initial standard deviations.
    """

    name: str
    shapes: Mapping[str, Shape]
    loc: Array
    scale: Array

    @property
    def size(self) -> int:
        """How many unconstrained numbers the block has: D."""
        return sum(prod(shape) for shape in self.shapes.values())

    def unflatten(self, vector: Array) -> Arrays:
        """Split a vector (..., D) into the values of the sites; batch axes stay in
        front.

        >>> block = Block("auto", {"a": (2,), "b": ()}, jnp.zeros(3), jnp.ones(3))
        >>> {
        ...     name: value.shape
        ...     for name, value in block.unflatten(jnp.ones((4, 3))).items()
        ... }
        {'a': (4, 2), 'b': (4,)}
        """
        return cut(vector, self.shapes)


def cut(vector: Array, shapes: Mapping[Any, Shape]) -> dict[Any, Array]:
    """Consecutive parts of a vector (..., D), by name and in these shapes."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        end = start + prod(shape)
        arrays[name] = vector[..., start:end].reshape((*vector.shape[:-1], *shape))
        start = end
    return arrays


class Family(ABC):
    """A family of distributions over the D unconstrained numbers of a block.

    :cvar gaussian: every marginal is N(fn.mean, fn.variance), so medians and quantiles
        have closed forms.

    >>> class Shared(Family):  # one scale for all unknowns of the block
    ...     gaussian = True
    ...
    ...     def distribution(self, block):
    ...         loc = numpyro.param(f"{block.name}_loc", block.loc)
    ...         scale = numpyro.param(
    ...             f"{block.name}_scale",
    ...             block.scale.mean(),
    ...             constraint=constraints.positive,
    ...         )
    ...         return dist.Normal(loc, scale).to_event(1)
    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(Shared().distribution, 0)(block).event_shape
    (3,)
    """

    gaussian: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(f"guides.{type(self).__name__}", self)

    @abstractmethod
    def distribution(self, block: Block) -> dist.Distribution:
        """Declare the parameters, ``numpyro.param(f"{block.name}_...", start)``, and
        build q over R^D from them.

        :return: a distribution with ``event_shape`` (D,) that can be sampled by
            reparameterization.
        """


@dataclass(frozen=True)
class FullRank(Family):
    """A Gaussian with any covariance: N(m, L L^T), with D + D (D + 1) / 2 free
    parameters.

    :raises ValueError: for a block of more than 10^4 numbers.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(FullRank().distribution, 0)(block).scale_tril.shape
    (3, 3)
    """

    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """The Gaussian of the block, with parameters ``loc`` (D,) and ``scale_tril``
        (D, D).
        """
        instead = "Use `guides.LowRank(rank)`, or smaller blocks, e.g. one per layer."
        _check_size("guides.FullRank", block, block.size**2, instead)
        constraint = constraints.scaled_unit_lower_cholesky
        scale_tril = numpyro.param(
            f"{block.name}_scale_tril", jnp.diag(block.scale), constraint=constraint
        )
        # scale_tril meets its constraint, and the check takes twenty programs
        options = {"scale_tril": scale_tril, "validate_args": False}
        return dist.MultivariateNormal(declare_loc(block), **options)


@dataclass(frozen=True)
class LowRank(Family):
    r"""A Gaussian whose covariance is diagonal plus low rank, with (2 + rank) D
    parameters.

    .. math:: N\big(m,\ \operatorname{diag}(s)\,(I + F
              F^\top)\operatorname{diag}(s)\big), \qquad F \in R^{D \times r}

    :param rank: r, the number of directions of correlation.

    Reference: Ong, Nott & Smith (2018), *Gaussian variational approximation with a
    factor covariance structure*.

    >>> from numpyro import handlers
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(LowRank(2).distribution, 0)(block).cov_factor.shape
    (3, 2)
    """

    rank: PositiveInt = 10

    gaussian: ClassVar[bool] = True

    def distribution(self, block: Block) -> dist.Distribution:
        """The Gaussian of the block, with parameters ``loc``, ``scale`` (D,) and
        ``cov_factor`` (D, rank), which multiplies the scale.
        """
        instead = "Use a smaller rank, or smaller blocks, e.g. one per layer."
        _check_size("guides.LowRank", block, block.size * self.rank, instead)
        # At F = 0 the gradient of the bound with respect to F vanishes: start near it,
        # in fixed random directions.
        factor = (
            0.1
            * jax.random.normal(jax.random.key(0), (block.size, self.rank))
            / self.rank**0.5
        )
        factor = numpyro.param(f"{block.name}_cov_factor", factor, event_dim=2)
        scale = declare_scale(block)
        return dist.LowRankMultivariateNormal(
            declare_loc(block), factor * scale[:, None], scale * scale
        )


def declare_loc(block: Block) -> Array:
    return numpyro.param(f"{block.name}_loc", block.loc, event_dim=1)


def declare_scale(block: Block) -> Array:
    return numpyro.param(
        f"{block.name}_scale",
        block.scale,
        constraint=constraints.softplus_positive,
        event_dim=1,
    )


def _check_size(call: str, block: Block, numbers: int, instead: str) -> None:
    if numbers > MAX_NUMBERS:
        got = (
            f"block {block.name!r} of {block.size} unknowns, with {numbers:.1e} "
            f"numbers in its covariance"
        )
        raise argument_error(call, "block", got, instead)


def matches(name: str, patterns: Patterns) -> bool:
    """Whether a site is one of the names, or matches one of the shell-style patterns.

    >>> (
    ...     matches("net/layers[0].weight", "net/layers[0].weight"),
    ...     matches("net/Dense_0.bias", ("a", "*.bias")),
    ... )
    (True, True)
    """
    return any(name == p or fnmatchcase(name, p) for p in _as_tuple(patterns))


def _as_tuple(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def checked_blocks(
    call: str, blocks: Any
) -> tuple[tuple[tuple[str, ...], Family], ...]:
    """The blocks a user passed, a mapping from patterns to families or pairs of them,
    as pairs.
    """
    pairs = blocks.items() if isinstance(blocks, Mapping) else blocks
    pairs = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in pairs:
        if not is_list(pair) or len(pair) != 2 or not isinstance(pair[1], Family):
            instead = (
                'Pass a dictionary from patterns to families, e.g. `{"net/*": '
                "guides.FullRank()}`."
            )
            raise argument_error(call, "blocks", repr(pair), instead, TypeError)
    return tuple((_as_tuple(patterns), family) for patterns, family in pairs)


def partition(
    call: str, names: Sequence[str], blocks: Sequence[tuple[str, ...]]
) -> list[list[str]]:
    """The sites of each block, in the order of the model.

    :raises ValueError: for a pattern that matches no site, and for a site in two
        blocks.
    """
    owner: dict[str, tuple[str, ...]] = {}
    site_groups = []
    for patterns in blocks:
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise unknown_name(call, "blocks", pattern, names)
        sites = [name for name in names if matches(name, patterns)]
        for name in sites:
            if name in owner:
                got = f"site {name!r} in {owner[name]} and in {patterns}"
                instead = (
                    f"Write patterns that do not overlap. Sites: {', '.join(names)}."
                )
                raise argument_error(call, "blocks", got, instead)
            owner[name] = patterns
        site_groups.append(sites)
    return site_groups
