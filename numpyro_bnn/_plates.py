"""Models that see all their data: full plates, traces on them, and observations drawn instead of given."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from numpyro import handlers
from numpyro.primitives import Messenger

__all__ = ["full_plates", "full_trace", "unobserved"]


class full_plates(Messenger):
    """Run every subsampled plate on all its indices, in order, with scale 1.

    Predictions, log likelihoods and exported data are about the data set, not about one random minibatch.

    >>> import numpyro
    >>> def model():
    ...     with numpyro.plate("data", 5, subsample_size=2) as index:
    ...         return index
    >>> full_plates(model)().tolist()
    [0, 1, 2, 3, 4]
    """

    def __init__(self, fn: Callable | None = None) -> None:
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            size = msg["args"][0]
            msg["args"] = (size, size)
            msg["value"] = jnp.arange(size)


def full_trace(
    model: Callable,
    values: Mapping[str, Any] | Callable[[dict[str, Any]], Any],
    args: tuple,
    kwargs: Mapping[str, Any] | None,
    rng_key: Any = 0,
) -> dict[str, dict[str, Any]]:
    """Trace of a model on all its data.

    :param values: of sites by name, or a function of a site that gives its value or ``None``; other sites are drawn.
    :param rng_key: a key or seed for them.

    >>> import numpyro, numpyro.distributions as dist
    >>> full_trace(lambda: numpyro.sample("w", dist.Normal(0.0, 1.0)), {"w": 3.0}, (), {})["w"]["value"]
    3.0
    """
    at = values if callable(values) else lambda site: values.get(site["name"])
    placed = handlers.substitute(full_plates(model), substitute_fn=at)
    return handlers.trace(handlers.seed(placed, rng_key)).get_trace(*args, **(kwargs or {}))


class unobserved(Messenger):
    """Draw observed sites from their distributions; ``factor`` statements stay.

    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro import handlers
    >>> model = lambda: numpyro.sample("y", dist.Normal(0.0, 1.0), obs=99.0)
    >>> bool(handlers.seed(unobserved(model), 0)() < 99.0)
    True
    """

    def __init__(self, fn: Callable | None = None) -> None:
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        auxiliary = msg.get("infer", {}).get("is_auxiliary", False)
        if msg["type"] == "sample" and msg["is_observed"] and not auxiliary:
            msg["is_observed"] = False
            msg["value"] = None
