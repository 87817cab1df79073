"""What the health report needs and only an export can compute: predictions by the members of a warm start."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from numpyro.infer import MCMC

from numpyro_bnn.metrics.health import LEAST_DRAWS
from numpyro_bnn.metrics.health_evidence import explained_by_site
from numpyro_bnn.results.fit import Fit
from numpyro_bnn.results.replay import Draws, map_draws


def members_of(result: Any, fit: Fit) -> dict[str, np.ndarray]:
    """Values (C, ...) by site of the members of a run's warm start, if it is long enough to be judged by them."""
    draws = next(iter(fit.posterior.values())).shape[1]
    if not isinstance(result, MCMC) or draws < LEAST_DRAWS or not hasattr(result.sampler, "members"):
        return {}
    try:
        found = result.sampler.members(result.last_state, result._args, result._kwargs)
    except ValueError:  # a run without warm start
        return {}
    return jax.device_get(found)


class WithMembers:
    """:func:`~numpyro_bnn.results.replay.map_draws` that evaluates the members too, by the same program."""

    def __init__(self, members: Mapping[str, np.ndarray]) -> None:
        self.members = members
        self.values: dict[str, np.ndarray] = {}

    def __call__(self, fn: Callable, draws: Draws, rng_key: jax.Array, *options: Any) -> dict[str, np.ndarray]:
        chains, length = next(iter(draws.values())).shape[:2]
        total, joined = chains * length, {}
        for name, value in draws.items():
            flat = value.reshape(total, *value.shape[2:])
            joined[name] = np.concatenate([flat, self.members[name]])[None]
        found = map_draws(fn, joined, rng_key, *options)
        self.values = {name: value[0, total:, None] for name, value in found.items()}
        return {name: value[0, :total].reshape(chains, length, *value.shape[2:]) for name, value in found.items()}

    def explained(self, groups: Mapping[str, Any]) -> dict[str, str]:
        """The attribute ``explained_by_members``: how much of the training targets each explains, by site."""
        observed = {str(name): y.to_numpy() for name, y in groups["observed_data"].data_vars.items()}
        means = {f"{site}_{suffix}" for site in observed for suffix in ("mean", "probs")} & self.values.keys()
        found = explained_by_site({name: self.values[name] for name in means}, observed)
        return {"explained_by_members": json.dumps({site: values.tolist() for site, values in found.items()})}
