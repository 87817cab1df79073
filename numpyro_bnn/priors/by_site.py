"""Different priors for different parameters, chosen by name."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

import numpyro.distributions as dist

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn.nn import Shape

__all__ = ["BySite", "PriorLike", "as_prior"]

PriorLike: TypeAlias = Callable[[str, Shape], dist.Distribution] | dist.Distribution


@dataclass(frozen=True)
class BySite:
    """Pick the prior of a parameter by the first pattern its name matches.

    :param patterns: shell-style patterns (``*``, ``?``, ``[...]``) on names such as ``Dense_0.kernel``, in order of
        preference, each with a prior (a callable of (name, shape), or a distribution).
    :param default: prior of what no pattern matches; without it such a parameter is an error.

    :raises ValueError: for a parameter without a prior, and, inside :func:`~numpyro_bnn.random_network`, for a
        pattern that matches nothing.

    >>> from numpyro_bnn import priors
    >>> prior = priors.BySite({"Dense_0.*": priors.Laplace()}, default=priors.Normal())
    >>> type(prior("Dense_0.kernel", (4, 2))).__name__, type(prior("Dense_1.kernel", (4, 2))).__name__
    ('Laplace', 'Normal')
    """

    patterns: Mapping[str, PriorLike]
    default: PriorLike | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            raise argument_error(
                "priors.BySite",
                "patterns",
                self.patterns,
                'Pass a dictionary, e.g. `{"Dense_0.*": priors.ARD(), "*": priors.Normal()}`.',
                TypeError,
            )
        for pattern, prior in self.patterns.items():
            _check(f"patterns[{pattern!r}]", prior)
        if self.default is not None:
            _check("default", self.default)

    def __call__(self, name: str, shape: Shape) -> dist.Distribution:
        for pattern, prior in self.patterns.items():
            if fnmatchcase(name, pattern):
                return _distribution(prior, name, shape)
        if self.default is None:
            raise argument_error(
                "priors.BySite",
                "patterns",
                f"no pattern for parameter {name!r} (patterns: {', '.join(self.patterns) or 'none'})",
                'Add one, or a `default=`; in a dictionary the last entry may be `"*": priors.Normal()`.',
            )
        return _distribution(self.default, name, shape)

    def check(self, names: Iterable[str]) -> None:
        """Refuse patterns that match none of ``names``: most likely a misspelt site."""
        known = list(names)
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise unknown_name("priors.BySite", "patterns", pattern, known)


def _check(argument: str, prior: object) -> None:
    if isinstance(prior, type) or not callable(prior):
        raise argument_error(
            "priors.BySite", argument, prior, "Pass an object such as `priors.Normal()`.", TypeError
        )


def _distribution(prior: PriorLike, name: str, shape: Shape) -> dist.Distribution:
    return prior if isinstance(prior, dist.Distribution) else prior(name, shape)


def as_prior(prior: PriorLike | Mapping[str, PriorLike]) -> Callable[[str, Shape], dist.Distribution]:
    """Turn what NumPyro takes for ``prior=`` into a callable: a callable, a distribution, or a dict of these.

    :raises TypeError: for anything else; a string gets the closest family by name.

    >>> import numpyro.distributions as dist
    >>> as_prior(dist.Normal(0.0, 2.0))("Dense_0.kernel", (3, 2)).scale
    2.0
    """
    if isinstance(prior, dist.Distribution):
        return lambda name, shape: prior
    if isinstance(prior, Mapping):
        return BySite(prior)
    if isinstance(prior, type) or not callable(prior):
        from numpyro_bnn import priors

        written = prior.__name__ if isinstance(prior, type) else str(prior)
        families = [name for name in priors.__all__ if isinstance(getattr(priors, name), type)]
        error = unknown_name("random_network", "prior", written, families)
        raise TypeError(f"{error} Pass an object, e.g. `priors.Normal()`.")
    return prior
