"""Ways to cross modes: mixing of the predicted function from random starts, at equal
processor seconds.

A ReLU network with one hidden layer, one learned scale per layer and learned noise on
UCI sets. Every way starts the same number of chains at random and uses the same
processor seconds, without compilation and with warm-up. It is judged by R-hat of the
function at the test rows. `plain` samples all weights by MCLMC, `collapsed` does so
with the output layer integrated out. The others add to `collapsed`: parallel
`tempering`; `units` redrawn from their prior; an `exchange` of units between chains;
sequential Monte Carlo (`smc`), where a population of particles takes the place of a
chain. `T=3` and `T=10` show at which temperature the chains of `collapsed` agree.
Writes JSON, and tables into a page. Rows of the same options that the file has are
kept.

    python -m examples.benchmarks.mixing --data FOLDER
        --docs docs/tables/hierarchical.md
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import HMC
from numpyro.infer.util import initialize_model
from scipy.optimize import linear_sum_assignment

from examples.benchmarks.annealing import Clock, anneal
from examples.benchmarks.microcanonical import SETS, load, model_of
from examples.benchmarks.shared import environment, options_of, put_table, write_report
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, metrics

KERNEL, BIAS = "net/Dense_0.kernel_base", "net/Dense_0.bias"
OUTPUT = ("net/Dense_1.kernel_base", "net/Dense_1.bias")


class Case(NamedTuple):
    """One posterior: the models; latent sites of the collapsed one, potentials of their
    flat unconstrained values, and processor seconds of a gradient for all chains.
    """

    data: Any
    call: tuple[jax.Array, jax.Array]
    plain: Callable
    collapsed: Callable
    names: tuple[str, ...]
    unravel: Callable
    potential: Callable
    prior: Callable
    seconds: dict[str, float]


def case_of(name: str, args: argparse.Namespace) -> Case:
    data = load(name, args.data)
    call = (
        jnp.asarray(data.x_train, jnp.float32),
        jnp.asarray(data.y_train, jnp.float32),
    )
    plain = model_of("1x20")
    collapsed = infer.collapse(plain, list(OUTPUT), *call)
    info = initialize_model(random.key(0), collapsed, model_args=call)
    flat, unravel = ravel_pytree(info.param_info.z)
    hidden = initialize_model(random.key(0), _hidden(plain), model_args=(call[0],))
    whole = initialize_model(random.key(0), plain, model_args=call)
    potential, prior = (
        lambda q, fn=i.potential_fn: fn(unravel(q)) for i in (info, hidden)
    )
    seconds = {}
    points = {"value": (potential, flat), "gradient": (jax.grad(potential), flat)}
    points["plain gradient"] = jax.grad(whole.potential_fn), whole.param_info.z
    for what, (fn, at) in points.items():
        several = jax.tree.map(
            lambda leaf: jnp.tile(leaf, (args.num_chains, *[1] * leaf.ndim)), at
        )
        run = jax.jit(partial(_repeated, jax.vmap(fn)))
        jax.block_until_ready(run(several))
        start = time.process_time()
        jax.block_until_ready(run(several))
        seconds[what] = (time.process_time() - start) / 50
    return Case(
        data,
        call,
        plain,
        collapsed,
        tuple(info.param_info.z),
        unravel,
        potential,
        prior,
        seconds,
    )


def _repeated(fn: Callable, z: Any) -> Any:
    return lax.map(
        lambda i: fn(jax.tree.map(lambda leaf: leaf + 1e-6 * i, z)), jnp.arange(50)
    )


def _hidden(model: Callable) -> Callable:
    """The prior of the sites that are not integrated out."""
    return handlers.block(
        lambda x: model(x, None), hide=[*OUTPUT, "net/Dense_1.kernel", "y"]
    )


def function(case: Case, sites: dict[str, jax.Array]) -> jax.Array:
    """The network at the test rows."""
    x = jnp.asarray(case.data.x_test, jnp.float32)
    hidden = jax.nn.relu(x @ sites["net/Dense_0.kernel"] + sites[BIAS])
    return (hidden @ sites["net/Dense_1.kernel"])[:, 0] + sites["net/Dense_1.bias"]


# --------------------------------------------------------------------------------------
# chains of kernels


def chains(
    case: Case,
    kernel: Any,
    cost: float,
    args: argparse.Namespace,
    after: Callable = lambda state, key: (state, 0.0),
) -> tuple[dict[str, np.ndarray], Any, dict[str, Any]]:
    """Draws (C, S, ...) of the function and what else is kept, the last state, and what
    was spent.

    :param cost: predicted seconds of a transition of all chains.
    :param after: ``after(state, key)`` moves the chains once more and returns an
        acceptance probability.
    """
    length = max(round(args.seconds / 20 / cost), 2)
    warmup = 10 * length
    keys = random.split(random.key(args.seed), args.num_chains)
    state = kernel.init(keys, warmup, None, model_args=case.call, model_kwargs={})
    constrain = kernel.postprocess_fn(case.call, {})

    def kept(z: Any) -> tuple[jax.Array, jax.Array]:
        sites = constrain(z)
        return function(case, sites), sites["sigma"]

    def step(state: Any, key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        state, accepted = after(kernel.sample(state, case.call, {}), key)
        z = getattr(state, kernel.sample_field)
        found = dict(zip(("function", "sigma"), jax.vmap(kept)(z), strict=True))
        if OUTPUT[0] not in z:
            found["potential"] = jax.vmap(
                lambda one: case.potential(ravel_pytree(one)[0])
            )(z)
        if isinstance(kernel, infer.ParallelTempering):
            found["replicas"] = jax.vmap(jax.vmap(kept))(state.base.z)[0]
        return state, {**found, "accepted": jnp.broadcast_to(accepted, args.num_chains)}

    run = (
        jax.jit(partial(lax.scan, step))
        .lower(state, random.split(random.key(1), length))
        .compile()
    )
    clock, parts, i = Clock(), [], 0
    while clock.seconds < args.seconds or len(parts) < 2:
        state, found = clock(
            run, state, random.split(random.fold_in(random.key(args.seed), i), length)
        )
        i += 1
        if i * length > warmup:
            parts.append(jax.device_get(found))
    draws = {
        name: np.concatenate([part[name] for part in parts]).swapaxes(0, 1)
        for name in parts[0]
    }
    return (
        draws,
        state,
        {"seconds": clock.seconds, "transitions": i * length, "warmup": warmup},
    )


def gradients_of(state: Any) -> int:
    return int(np.sum(jax.device_get(state.num_gradients)))


def microcanonical(
    case: Case, model: Callable, args: argparse.Namespace, **options: Any
) -> tuple[Any, float]:
    """MCLMC, and predicted seconds of a transition."""
    gradient = case.seconds["plain gradient" if model is case.plain else "gradient"]
    return infer.MCLMC(
        model, steps_per_draw=args.steps, **options
    ), 2 * args.steps * gradient


def plain(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    draws, state, spent = chains(case, *microcanonical(case, case.plain, args), args)
    return {"draws": draws, "gradients": gradients_of(state), **spent}


def collapsed(
    case: Case, args: argparse.Namespace, temperature: float = 1.0
) -> dict[str, Any]:
    draws, state, spent = chains(
        case, *microcanonical(case, case.collapsed, args, temperature=temperature), args
    )
    flat = jax.vmap(lambda z: ravel_pytree(z)[0])(state.z)
    return {
        "draws": draws,
        "gradients": gradients_of(state),
        **spent,
        "barriers": barriers(case, flat),
    }


def units(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    inner, cost = microcanonical(case, case.collapsed, args)
    kernel = infer.UnitMoves(inner, {KERNEL: 1, BIAS: 0}, num_moves=args.moves)
    draws, state, spent = chains(
        case,
        kernel,
        cost + args.moves * case.seconds["value"],
        args,
        lambda s, _: (s, s.unit_accept_prob),
    )
    accepted = float(draws["accepted"].mean())
    return {
        "draws": draws,
        "gradients": gradients_of(state.base),
        "accept_prob": accepted,
        **spent,
    }


def exchange(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """A unit of one chain is exchanged for one of another; the proposal is symmetric in
    the product of the chains.
    """
    kernel, cost = microcanonical(case, case.collapsed, args)
    moves = args.moves // 2  # each evaluates two chains

    def after(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        z, accepted = exchange_units(case, state.z, key, moves)
        warm = state.i[0] >= kernel.plan.warm_up.end
        z = jax.tree.map(partial(jnp.where, warm), z, state.z)
        return kernel.refresh(state._replace(z=z), case.call, {}), accepted

    draws, state, spent = chains(
        case,
        kernel,
        cost + 2 * moves * case.seconds["value"] / args.num_chains,
        args,
        after,
    )
    accepted = float(draws["accepted"].mean())
    return {
        "draws": draws,
        "gradients": gradients_of(state),
        "accept_prob": accepted,
        **spent,
    }


def exchange_units(
    case: Case, z: dict, key: jax.Array, moves: int
) -> tuple[dict, jax.Array]:
    """Metropolis steps on the values (C, ...) of all chains; also the mean acceptance
    probability.
    """
    potential = jax.vmap(lambda one: case.potential(ravel_pytree(one)[0]))
    size, width = z[BIAS].shape

    def one(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        z, energy = carry
        keys = random.split(key, 3)
        pair = random.permutation(keys[0], size)[:2]
        places = random.randint(keys[1], (2,), 0, width)
        both = jax.tree.map(lambda leaf: leaf[pair], z)
        kernel, bias = (
            both[KERNEL][jnp.arange(2), :, places],
            both[BIAS][jnp.arange(2), places],
        )
        both = both | {
            KERNEL: both[KERNEL].at[jnp.arange(2), :, places].set(kernel[::-1])
        }
        both = both | {BIAS: both[BIAS].at[jnp.arange(2), places].set(bias[::-1])}
        new = potential(both)
        prob = jnp.nan_to_num(jnp.exp(jnp.minimum(jnp.sum(energy[pair] - new), 0.0)))
        moved = jax.tree.map(
            lambda leaf, some: leaf.at[pair].set(some), (z, energy), (both, new)
        )
        taken = random.uniform(keys[2]) < prob
        return jax.tree.map(partial(jnp.where, taken), moved, carry), prob

    (z, _), probs = lax.scan(one, (z, potential(z)), random.split(key, moves))
    return z, probs.mean()


def tempering(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    inner = HMC(case.collapsed, num_steps=args.leapfrogs, trajectory_length=None)
    kernel = infer.ParallelTempering(inner, args.replicas, lowest=args.lowest)
    cost = args.replicas * (args.leapfrogs + 1) * case.seconds["gradient"]
    draws, state, spent = chains(case, kernel, cost, args)
    replicas = np.moveaxis(draws.pop("replicas"), 2, 0)
    betas = np.asarray(state.inverse_temperatures)
    cells = args.num_chains * args.replicas * (args.leapfrogs + 1)
    return {
        "draws": draws,
        "gradients": cells * spent["transitions"],
        **spent,
        "round_trips": np.asarray(state.round_trips).tolist(),
        "swap_accept_prob": float(np.mean(state.swap_accept_prob)),
        "inverse_temperatures": np.exp(np.log(betas).mean(0)).tolist(),
        "rhat_by_temperature": [float(np.median(rhat_of(one))) for one in replicas],
    }


# --------------------------------------------------------------------------------------
# sequential Monte Carlo


def smc(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    shape = args.num_chains, args.particles

    def draw(key: jax.Array) -> jax.Array:
        sites = handlers.trace(handlers.seed(_hidden(case.plain), key)).get_trace(
            case.call[0]
        )
        return ravel_pytree(
            {
                n: biject_to(sites[n]["fn"].support).inv(sites[n]["value"])
                for n in case.names
            }
        )[0]

    def functions(q: jax.Array) -> tuple[jax.Array, ...]:
        sites = constrain(case.unravel(q))
        return function(case, sites), sites["sigma"], case.potential(q)

    constrain = infer.MCLMC(case.collapsed)
    constrain.init(random.key(0), 20, model_args=case.call, model_kwargs={})
    constrain = constrain.postprocess_fn(case.call, {})
    q = jax.jit(jax.vmap(jax.vmap(draw)))(random.split(random.key(args.seed), shape))
    clock, parts = Clock(), []
    now, mutate = anneal(np.asarray(q), case.potential, case.prior, args, clock)
    annealed, evidence = clock.seconds, now.log_evidence
    keep = jax.jit(jax.vmap(jax.vmap(functions)))
    while clock.seconds < args.seconds or len(parts) < 4:
        now = mutate(now)
        parts.append(jax.device_get(keep(now.q)))
    # A population after the other: the halves that R-hat compares are of different
    # particles.
    draws = {
        n: np.stack([part[k] for part in parts], 2)
        for k, n in enumerate(("function", "sigma", "potential"))
    }
    draws = {n: v.reshape(args.num_chains, -1, *v.shape[3:]) for n, v in draws.items()}
    each = args.mutations * args.leapfrogs + 1
    return {
        "draws": draws,
        "gradients": each * shape[0] * shape[1] * now.transitions,
        "seconds": clock.seconds,
        "transitions": now.transitions,
        "seconds to anneal": annealed,
        "log_evidence": evidence.tolist(),
        "ancestors": [len(set(one)) for one in now.root],
    }


# --------------------------------------------------------------------------------------
# results


def barriers(case: Case, flat: jax.Array) -> list[float]:
    """How far the potential rises above the higher end, on lines between pairs of
    chains with matched units.
    """
    line = jax.jit(
        jax.vmap(lambda t, a, b: case.potential((1 - t) * a + t * b), (0, None, None))
    )
    found = []
    for a, b in combinations(flat, 2):
        first, second = (case.unravel(q) for q in (a, b))
        rows = [np.vstack([z[KERNEL], z[BIAS][None]]) for z in (first, second)]
        cost = np.sum((rows[0][:, :, None] - rows[1][:, None, :]) ** 2, 0)
        order = linear_sum_assignment(cost)[1]
        second = second | {KERNEL: second[KERNEL][:, order], BIAS: second[BIAS][order]}
        energy = np.asarray(line(jnp.linspace(0, 1, 41), a, ravel_pytree(second)[0]))
        found.append(float(energy.max() - max(energy[0], energy[-1])))
    return found


def rhat_of(draws: np.ndarray) -> np.ndarray:
    return metrics.function_space(np.asarray(draws, float)).rhat


def judged(case: Case, run: dict[str, Any]) -> dict[str, Any]:
    """Figures of the function (C, S, N), which take the place of the draws."""
    draws = run.pop("draws")
    f, sigma = (np.asarray(draws[name], float) for name in ("function", "sigma"))
    mixing = metrics.function_space(f)
    within = sum(metrics.function_space(chain[None]).ess_bulk for chain in f)
    sd = float(case.data.y_scaler.scale_factor)
    error = (np.asarray(case.data.y_test) - f) / sigma[..., None]
    log_density = (
        -0.5 * error**2 - np.log(sd * sigma)[..., None] - 0.5 * np.log(2 * np.pi)
    )
    energy = draws.get("potential")
    found = {
        "max_rhat": float(mixing.rhat.max()),
        "median_rhat": float(np.median(mixing.rhat)),
        "share_above": float(np.mean(mixing.rhat > 1.05)),
        "median_ess": float(np.median(mixing.ess_bulk)),
        "median_ess_within": float(np.median(within)),
        "log_likelihood": metrics.lppd(log_density).value,
        "log_likelihood_by_chain": [metrics.lppd(one).value for one in log_density],
        "noise_by_chain": (sd * sigma.mean(1)).tolist(),
        "mean": f.mean((0, 1)).tolist(),
        "sd": f.std((0, 1)).tolist(),
        "mcse": (f.std((0, 1)) / np.sqrt(mixing.ess_bulk)).tolist(),
    }
    if energy is not None:
        found["potential_by_chain"] = energy.mean(1).tolist()
        found["sd_of_potential"] = float(energy.std(1).mean())
    return run | found


def table(rows: list[dict[str, Any]]) -> str:
    heads = [
        "posterior",
        "way",
        "R-hat, largest",
        "median",
        "rows above 1.05",
        "ESS, median",
        "within chains",
    ]
    heads += [
        "test log likelihood",
        "by chain",
        "noise by chain",
        "potential by chain",
        "seconds",
        "1000 gradients",
    ]
    lines = []
    for row in rows:
        cells = [
            row["set"],
            row["way"],
            f"{row['max_rhat']:.2f}",
            f"{row['median_rhat']:.2f}",
        ]
        cells += [
            f"{row['share_above']:.0%}",
            f"{row['median_ess']:.0f}",
            f"{row['median_ess_within']:.0f}",
        ]
        cells.append(f"{row['log_likelihood']:.3f}")
        cells.append(
            ", ".join(f"{value:.2f}" for value in row["log_likelihood_by_chain"])
        )
        cells.append(", ".join(f"{value:.3g}" for value in row["noise_by_chain"]))
        energies = ", ".join(
            f"{value:.0f}" for value in row.get("potential_by_chain", [])
        )
        cells.append(
            energies + (f" (sd {row['sd_of_potential']:.0f})" if energies else "")
        )
        lines.append(
            [*cells, f"{row['seconds']:.0f}", f"{row['gradients'] / 1000:.0f}"]
        )
    return markdown(heads, lines)


def agreement(rows: list[dict[str, Any]]) -> str:
    """Means and standard deviations of the function, with all weights sampled and with
    some integrated out.
    """
    heads = [
        "posterior",
        "difference of means (sd), median",
        "largest",
        "MCSE of the difference (sd), median",
    ]
    heads += ["root mean square of difference / MCSE", "ratio of sds, median"]
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        both = [
            row
            for row in rows
            if row["set"] == name and row["way"] in ("plain", "collapsed")
        ]
        if len(both) == 2:
            (mean, sd, error), (mean2, sd2, error2) = (
                [np.array(row[part]) for part in ("mean", "sd", "mcse")] for row in both
            )
            gap, mcse = np.abs(mean - mean2), np.hypot(error, error2)
            cells = [np.median(gap / sd), np.max(gap / sd), np.median(mcse / sd)]
            cells += [np.sqrt(np.mean((gap / mcse) ** 2)), np.median(sd2 / sd)]
            lines.append([name, *(f"{value:.2f}" for value in cells)])
    return markdown(heads, lines)


def tables(report: dict[str, Any]) -> dict[str, str]:
    return {
        "mixing": table(report["rows"]),
        "mixing_agreement": agreement(report["rows"]),
    }


WAYS: dict[str, Callable] = {
    "plain": plain,
    "collapsed": collapsed,
    "tempering": tempering,
    "units": units,
}
WAYS |= {
    "exchange": exchange,
    "smc": smc,
    "T=3": partial(collapsed, temperature=3.0),
    "T=10": partial(collapsed, temperature=10.0),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.mixing",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=list(SETS), help="data sets"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="ways to sample"
    )
    parser.add_argument(
        "--seconds", type=int, default=60, help="of the processor, for each way"
    )
    parser.add_argument(
        "--num-chains", type=int, default=4, help="chains, or populations"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        help="steps of MCLMC per draw, of two gradients each",
    )
    parser.add_argument("--moves", type=int, default=60, help="moves of units per draw")
    parser.add_argument("--replicas", type=int, default=6, help="temperatures")
    parser.add_argument(
        "--lowest", type=float, default=0.4, help="the last inverse temperature"
    )
    parser.add_argument(
        "--leapfrogs", type=int, default=10, help="of HMC, beneath tempering and smc"
    )
    parser.add_argument("--particles", type=int, default=8, help="of a population")
    parser.add_argument(
        "--mutations",
        type=int,
        default=8,
        help="HMC transitions of each particle per temperature",
    )
    parser.add_argument(
        "--effective",
        type=float,
        default=0.8,
        help="share of the particles that sets a temperature",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the samplers")
    parser.add_argument(
        "--data", type=Path, default=None, help="folder of the UCI sets"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/mixing.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose tables show the figures")
    args = parser.parse_args(argv)
    at_least(parser, args, ("seconds", "steps", "leapfrogs", "mutations"))
    at_least(parser, args, ("num_chains", "moves", "replicas"), 2)
    at_least(parser, args, ("particles",), 4)
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    options = options_of(args)
    text = args.output.read_text()
    old = json.loads(text)["rows"] if text else []
    same = [name for name in options if name not in ("sets", "ways", "data", "docs")]
    rows = [
        row
        for row in old
        if all(row["options"][name] == options[name] for name in same)
    ]
    done = {(row["set"], row["way"]) for row in rows}
    report: dict[str, Any] = {"rows": rows, **environment([]), "options": options}
    for name in args.sets:
        left = [way for way in args.ways if (name, way) not in done]
        case = case_of(name, args) if left else None
        for way in left:
            print(f"{name}, {way}", flush=True)
            rows.append(
                {
                    "set": name,
                    "way": way,
                    **judged(case, WAYS[way](case, args)),
                    "options": options,
                }
            )
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            write_report(args.output, report)
    order = list(product(SETS, WAYS))
    rows.sort(key=lambda row: order.index((row["set"], row["way"])))
    report["options"] = options | {
        name + "s": list(dict.fromkeys(row[name] for row in rows))
        for name in ("set", "way")
    }
    write_report(args.output, report)
    for name, shown in tables(report).items():
        put_table(args.docs, name, shown, report)
    return report


if __name__ == "__main__":
    main()
