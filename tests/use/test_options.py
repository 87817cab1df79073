"""Plain options: each is declared, refuses wrong values first, takes right ones."""

import inspect
from fnmatch import fnmatchcase
from importlib import import_module

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import registry
from helpers import refused
from options import ROOMS, calls, declared, parameters
from zoo import BATCH, ZOO, X

from numpyro_bnn import infer, sgmcmc, symmetry

pytestmark = pytest.mark.core

# Options of the plain kind (a number, a flag or a name by default) that are checked by
# code of their own, and why.
NOT_DECLARED = {
    "Auto*.init_scale": "a number, or standard deviations by pattern",
    "*.window": "a number, a pair, or the whole image",
    "*.strides": "a number or a pair",
    "C*.padding": "a name or a number",
    "*.activation": "a name or a layer",
    "*.path": "of layers: their place, given by the layer above",
    "Posterior.*": "for contributors; every program is read by it",
    "Sampler.init.num_warmup": "may be traced",
    "Sampler.refresh.recenter": "may be traced",
}
# The range of each number, by its name wherever it is an option, or for one function:
# what users rely on.
RANGES = {
    "integer from 0": """AutoLaplace.run.num_epochs num_observations num_warmup prefetch
        seed""",
    "integer from 1": """batch_size bins block_size blocks channels cycle_length
        draws_per_chunk draws_per_cycle max_columns max_steps num_chains num_cycles
        num_data num_epochs num_flows num_moves num_parameters num_particles num_rounds
        num_rows num_samples num_steps outputs patience rank steps_per_draw sweeps
        units""",
    "integer from 2": "evidence.num_samples num_classes num_nodes num_replicas",
    "integer from 100": "num_gradients",
    "finite number": "negative_slope power",
    "finite number at least 0": "NoseHoover.friction temperature value",
    "finite number at least 0 or infinity": "check.tolerance friction",
    "finite number at least 0 and below 1": """decay explore held_out jitter share
        warm_start""",
    "finite number at least 0 and at most 1": "max_refused momentum_decay",
    "finite number above 0": """GPFilters.jitter RMSProp.num_data a alpha b bias_scale
        bias_tolerance block_seconds damping df effort gain_scale global_scale initial
        mass narrow_scale noise_sd scale schedule slab_df slab_scale spread step_size
        tolerance wide_scale""",
    "finite number above 0 or infinity": """bound decoherence_length length log_sd
        max_energy_error max_kick max_warm_up_error""",
    "finite number above 0 and below 1": "level lowest weight",
    "finite number above 0.5": "gamma",
}
# What a class needs beside its options.
NEEDED = {
    "model": lambda: ZOO["line"].model,
    "params": lambda: {"kernel": np.ones((2, 1))},
    "weights": lambda: "w",
    "JointScale.scale": lambda: "s",
    "potential_fn": lambda: np.sum,
    "full_potential_fn": lambda: np.sum,
    "stream": lambda: sgmcmc.WithReplacement(10, 2),
    "num_data": lambda: 10,
    "batch_size": lambda: 1,
    "cyclical.num_steps": lambda: 10,
    "num_cycles": lambda: 1,
    "kernel": lambda: numpyro.infer.NUTS(ZOO["line"].model),
    "algorithm": lambda: import_module("blackjax").slice_sampling,
    "symmetries": lambda: [symmetry.Scale("w")],
    "UnitMoves.units": lambda: {"w": 0},
    "source": lambda: X,
    "batches.source": lambda: [X],
}
# Options of the base class of which a kernel takes one value only, and one that needs
# an optional package.
NOT_TAKEN = {
    "CyclicalSGLD": {"steps_per_draw", "warm_start"},
    "GHMC": {"gradient"},
    "Flowjax": {"standardized"},
}


def taken(name, call):
    """The options of a call."""
    return {
        argument: of
        for argument, of in declared(call).items()
        if argument not in NOT_TAKEN.get(name, ())
    }


def test_every_plain_option_is_declared():
    missing = []
    for room in ROOMS:
        for name, _, call in calls(room):
            plain = [
                p.name
                for p in parameters(call).values()
                if isinstance(p.default, bool | int | float | str)
            ]
            missing += [
                f"{name}.{argument}" for argument in set(plain) - declared(call).keys()
            ]
    assert [
        name
        for name in missing
        if not any(fnmatchcase(name, known) for known in NOT_DECLARED)
    ] == []
    assert [
        known
        for known in NOT_DECLARED
        if not any(fnmatchcase(name, known) for name in missing)
    ] == []


def range_of(option):
    """The numbers that an option allows, in words, if it is a number."""
    if type(option).__name__ == "Count":
        return f"integer from {option.minimum}"
    if type(option).__name__ == "Number":
        return repr(option) + (" or infinity" if option.infinite else "")
    return None


def test_numbers_have_the_ranges_that_users_rely_on():
    expected = {name: of for of, names in RANGES.items() for name in names.split()}
    different, used = {}, set()
    for room in ROOMS:
        for name, _, call in calls(room):
            for argument, (option, _) in declared(call).items():
                known = (
                    f"{name}.{argument}"
                    if f"{name}.{argument}" in expected
                    else argument
                )
                used.add(known)
                if range_of(option) != expected.get(known):
                    different[f"{name}.{argument}"] = range_of(option)
    assert different == {}
    assert expected.keys() - used == set()


# -- values ----------------------------------------------------------------------------


def is_object(option):
    """Whether it is neither a number nor a name nor a flag."""
    return type(option).__name__ == "Kind" and option.instead != "Pass True or False."


def is_right(option, value):
    """Whether an option allows a value, from its limits alone."""
    kind = type(option).__name__
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if kind == "Count":
        return (
            number and isinstance(value, int | np.integer) and value >= option.minimum
        )
    if kind == "Number":
        above = (
            number
            and value >= option.minimum
            and not (option.strict and value == option.minimum)
        )
        below = number and value < option.below and value <= option.maximum
        return above and (below or (option.infinite and value == np.inf))
    if kind == "Choice":
        return isinstance(value, str) and value in option.names
    if kind == "Kind":
        is_class = isinstance(option.kind, type) or hasattr(option.kind, "__args__")
        return isinstance(value, option.kind) if is_class else option.kind(value)
    assert kind == "PositiveScalar", f"say which values {option} allows"
    return isinstance(value, dist.HalfNormal) or (
        option.fixed and number and 0 < value < np.inf
    )


def wrong_values(option, classes):
    """Values of all kinds, and around the limits, that the option forbids."""
    random = np.random.default_rng(0)
    values = [None, "", "no", "0.1", b"1", np.nan, np.inf, -np.inf, 1j, True, np.False_]
    values += [10**6, -1, 0, 1, 2.5, [1.0], (), {}, np.ones(3), np.array(["a"])]
    values += [object(), object, dist.Normal, dist.Normal(), lambda: None]
    names = ("minimum", "below", "most")
    limits = [getattr(option, name) for name in names if hasattr(option, name)]
    values += [limit + step for limit in limits for step in (-1, -1e-6, 0, 1e-6, 1)]
    values += [*random.normal(scale=100, size=5)]
    values += map(int, random.integers(-100, 100, size=5))
    return [
        value
        for value in values
        if not isinstance(value, classes) and not is_right(option, value)
    ]


def right_value(option, random):
    """One of the values that an option allows, neither huge nor tiny."""
    kind = type(option).__name__
    if kind == "Count":
        return int(option.minimum + random.integers(0, 4))
    if kind == "Number":
        lowest = max(option.minimum, 0.0)
        return float(
            random.uniform(
                lowest + 0.01, min(lowest + 0.5, option.below, option.maximum)
            )
        )
    if kind == "Choice":
        return str(random.choice(list(option.names)))
    if kind == "PositiveScalar":
        return dist.HalfNormal(float(random.uniform(0.5, 2)))
    assert not is_object(option), f"say what {option} may be"
    return bool(random.integers(2))


def needed(name, call, random):
    """Right values of the arguments that a class requires."""
    found, options = {}, taken(name, call)
    for argument, parameter in (
        parameters(call).items() if options and isinstance(call, type) else ()
    ):
        if (
            parameter.default is parameter.empty
            and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            make = NEEDED.get(f"{name}.{argument}") or NEEDED.get(argument)
            found[argument] = (
                make() if make else right_value(options[argument][0], random)
            )
    return found


def attempt(room, owner, call, chosen):
    """A call in which nothing but the options is right."""
    if room == "estimators" and isinstance(call, type):
        return call(**chosen).fit(None, None)
    if owner is not None:
        return call(
            object() if inspect.isabstract(owner) else object.__new__(owner), **chosen
        )
    return call(**chosen)


# -- the tests -------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_wrong_values_of_options_are_refused_before_any_program_is_compiled(
    room, compiled
):
    faults, random = [], np.random.default_rng(0)
    for name, owner, call in calls(room):
        if inspect.isabstract(call):
            continue
        required = needed(name, call, random)
        for argument, (option, classes) in taken(name, call).items():
            for value in wrong_values(option, classes):
                before = len(compiled)
                try:
                    with refused(argument, getattr(option, "instead", "")) as caught:
                        attempt(room, owner, call, {**required, argument: value})
                    assert name in str(caught.value).split(": argument")[0]
                    assert len(compiled) == before
                except (Exception, pytest.fail.Exception) as error:
                    faults.append(f"{name}({argument}={value!r}): {error!r}")
    assert faults == []


@pytest.mark.parametrize("room", ROOMS)
def test_right_values_of_options_are_taken(room):
    random = np.random.default_rng(0)
    for name, owner, call in calls(room):
        for argument, (option, classes) in taken(name, call).items():
            if is_object(option):
                continue  # other tests pass them
            values = [right_value(option, random) for _ in range(3)]
            values += [np.inf] if getattr(option, "infinite", False) else []
            assert [option.check(name, argument, value) for value in values] == values
            if type(option).__name__ == "Count":
                number = option.check(name, argument, np.uint8(option.minimum))
                assert type(number) is int  # Python's own
            is_class = owner is None and isinstance(call, type)
            if not is_class or room == "estimators" or inspect.isabstract(call):
                continue
            options = needed(name, call, random)
            if argument == "cycle_length":
                options |= {"draws_per_cycle": 1, "explore": 0.0}
            for value in values + ([None] if type(None) in classes else []):
                call(**{**options, argument: value})


# -- several right options at once -----------------------------------------------------

# Others are allowed too: chains diverge, precisions underflow, or there are too few
# transitions here.
MODERATE = {"step_size": (1e-6, 1e-3), "temperature": (0.5, 2.0)}
MODERATE |= {"warm_start": (0.3, 0.6), "alpha": (0.3, 3.0)}


def chosen(name, call):
    """Up to four options with right values."""
    random, found = np.random.default_rng(0), {}
    options = taken(name, call).items()
    drawn = [argument for argument, (option, _) in options if not is_object(option)]
    for argument in random.choice(drawn, min(4, len(drawn)), replace=False):
        option = declared(call)[argument][0]
        value = (
            random.uniform(*MODERATE[argument])
            if argument in MODERATE
            else right_value(option, random)
        )
        found[str(argument)] = int(value) if type(option).__name__ == "Count" else value
    return found


KERNELS = sorted(registry.USUAL.keys() - {"CyclicalSGLD", "MALA"})


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_with_random_options_give_finite_draws(name):
    kind, line = getattr(infer, name), ZOO["spread"]
    options = {"steps_per_draw": 2, **chosen(name, kind)}
    kernel = kind(line.model, **options)
    call = line.args, {} if kernel.exact else {"batch_size": BATCH}
    state = kernel.init(jax.random.key(0), 4, None, *call)
    for _ in range(3):
        state = jax.jit(lambda state: kernel.sample(state, *call))(state)
    assert (
        all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.z))
        or state.diverging
    ), options
