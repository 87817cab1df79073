"""Blocks of a guide: which latent sites are approximated together, and by what."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.nn import Shape

__all__ = ["Block", "Family", "Patterns", "checked_blocks", "matches", "partition"]

Patterns: TypeAlias = str | Sequence[str]


class Block(NamedTuple):
    """Latent sites that a family approximates together, as one vector of D unconstrained numbers.

    :param name: prefix of the parameters, e.g. ``"auto_net/Dense_0"``.
    :param shapes: unconstrained shape by site, in the order of the vector.
    :param loc: (D,) means to start from.
    :param scale: (D,) standard deviations to start from.
    """

    name: str
    shapes: Mapping[str, Shape]
    loc: jax.Array
    scale: jax.Array

    @property
    def size(self) -> int:
        """D."""
        return sum(prod(shape) for shape in self.shapes.values())

    def flatten(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """The vector (..., D) of the values of the sites; they share their leading batch axes.

        >>> block = Block("auto", {"a": (2,), "b": ()}, jnp.zeros(3), jnp.ones(3))
        >>> block.flatten({"a": jnp.ones((4, 2)), "b": jnp.zeros(4)}).shape
        (4, 3)
        """
        parts = [jnp.asarray(values[name]) for name in self.shapes]
        batches = (p.shape[: p.ndim - len(s)] for p, s in zip(parts, self.shapes.values(), strict=True))
        return jnp.concatenate([p.reshape((*b, -1)) for p, b in zip(parts, batches, strict=True)], axis=-1)

    def unflatten(self, vector: jax.Array) -> dict[str, jax.Array]:
        """Values of the sites from a vector (..., D); batch axes stay in front.

        >>> block = Block("auto", {"a": (2,), "b": ()}, jnp.zeros(3), jnp.ones(3))
        >>> {name: value.shape for name, value in block.unflatten(jnp.ones((4, 3))).items()}
        {'a': (4, 2), 'b': (4,)}
        """
        values, start = {}, 0
        for name, shape in self.shapes.items():
            end = start + prod(shape)
            values[name] = vector[..., start:end].reshape((*vector.shape[:-1], *shape))
            start = end
        return values


class Family(ABC):
    """A kind of distribution over the D unconstrained numbers of a block.

    :cvar gaussian: every marginal is N(fn.mean, fn.variance), so medians and quantiles have closed forms.

    >>> class Shared(Family):  # one scale for all unknowns of the block
    ...     gaussian = True
    ...
    ...     def distribution(self, block):
    ...         loc = numpyro.param(f"{block.name}_loc", block.loc)
    ...         scale = numpyro.param(f"{block.name}_scale", block.scale.mean(), constraint=constraints.positive)
    ...         return dist.Normal(loc, scale).to_event(1)
    >>> import numpyro
    >>> from numpyro import handlers
    >>> from numpyro.distributions import constraints
    >>> block = Block("auto", {"w": (3,)}, jnp.zeros(3), jnp.ones(3))
    >>> handlers.seed(Shared().distribution, 0)(block).event_shape
    (3,)
    """

    gaussian: ClassVar[bool] = False

    @abstractmethod
    def distribution(self, block: Block) -> dist.Distribution:
        """Declare the parameters, ``numpyro.param(f"{block.name}_...", start)``, and build q over R^D from them.

        :return: a distribution with ``event_shape`` (D,) that can be sampled by reparameterization.
        """


def matches(name: str, patterns: Patterns) -> bool:
    """Whether a site is one of the names, or matches one of the shell-style patterns.

    >>> matches("net/layers[0].weight", "net/layers[0].weight"), matches("net/Dense_0.bias", ("a", "*.bias"))
    (True, True)
    """
    return any(name == p or fnmatchcase(name, p) for p in _listed(patterns))


def _listed(patterns: Patterns) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def checked_blocks(call: str, blocks: Any) -> tuple[tuple[tuple[str, ...], Family], ...]:
    """The blocks a user wrote, as pairs of patterns and family.

    :raises TypeError: for anything but a mapping from patterns to families, or pairs of them.
    """
    pairs = list(blocks.items() if isinstance(blocks, Mapping) else blocks)
    for pair in pairs:
        if isinstance(pair, str) or len(pair) != 2 or not isinstance(pair[1], Family):
            raise argument_error(
                call,
                "blocks",
                pair,
                'Pass a dictionary from patterns to families, e.g. `{"net/Dense_1.*": guides.FullRank()}`.',
                TypeError,
            )
    return tuple((_listed(patterns), family) for patterns, family in pairs)


def partition(
    call: str, names: Sequence[str], blocks: Sequence[tuple[tuple[str, ...], Any]]
) -> list[list[str]]:
    """The sites of each block, in the order of the model.

    :param call: the public name for error messages.
    :param names: latent sites.
    :param blocks: pairs whose first part is a tuple of patterns.
    :raises ValueError: for a pattern that matches no site, and for a site in two blocks.

    >>> partition("guides.AutoBlocks", ["a", "b", "c"], [(("a", "c"), None)])
    [['a', 'c']]
    """
    owner: dict[str, tuple[str, ...]] = {}
    found = []
    for patterns, _ in blocks:
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise unknown_name(call, "blocks", pattern, names)
        sites = [name for name in names if matches(name, patterns)]
        for name in sites:
            if name in owner:
                raise argument_error(
                    call,
                    "blocks",
                    f"site {name!r} in {owner[name]} and in {patterns}",
                    f"Write patterns that do not overlap. Sites: {', '.join(names)}.",
                )
            owner[name] = patterns
        found.append(sites)
    return found
