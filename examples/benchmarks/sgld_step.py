"""Time of an SGLD step: bare loops, the engine, BlackJAX, and a whole run of
``MCMC(SGLD(model))``.

An 8-50-1 tanh network, minibatches of 32, float32. Steps are interleaved in one run, so
that load on the machine affects all alike; ratios are medians of the ratios within a
round. The script also measures how time grows with the number of data points, and how
memory grows with the number of steps. Writes JSON.

    python -m examples.benchmarks.sgld_step --output output/sgld_step.json
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from examples.benchmarks.shared import (
    environment,
    interleave,
    options_of,
    put_table,
    write_report,
)
from examples.shared import at_least, markdown, writable_file
from numpyro_bnn import infer, sgmcmc

FEATURES, WIDTH, BATCH, STEP_SIZE = 8, 50, 32, 1e-6


def model(x, y, batch_size):
    shapes = {
        "kernel0": (FEATURES, WIDTH),
        "bias0": (WIDTH,),
        "kernel1": (WIDTH, 1),
        "bias1": (1,),
    }
    prior = dist.Normal(0.0, 1.0)
    w = {
        name: numpyro.sample(name, prior.expand(s).to_event(len(s)))
        for name, s in shapes.items()
    }
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        hidden = jnp.tanh(x[i] @ w["kernel0"] * FEATURES**-0.5 + w["bias0"])
        f = hidden @ w["kernel1"] * WIDTH**-0.5 + w["bias1"]
        numpyro.sample("y", dist.Normal(f[:, 0], sigma), obs=y[i])


def make_data(num_data: int) -> tuple[jax.Array, jax.Array]:
    x = random.normal(random.key(0), (num_data, FEATURES))
    return x, jnp.sin(x[:, 0])


def start() -> dict[str, jax.Array]:
    shapes = {
        "kernel0": (FEATURES, WIDTH),
        "bias0": (WIDTH,),
        "kernel1": (WIDTH, 1),
        "bias1": (1,),
        "sigma": (),
    }
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def potential(x: jax.Array, y: jax.Array, z: Any, indices: jax.Array) -> jax.Array:
    """The minibatch potential that every contender differentiates."""
    fixed = handlers.substitute(model, {"data": indices})
    return potential_energy(fixed, (x, y, BATCH), {}, z)


# --------------------------------------------------------------------------------------
# contenders


def scan_over_keys(step: Callable, num_steps: int) -> Callable:
    """``step(z, key) -> z`` in a bare loop."""

    def run(z, key):
        return lax.scan(
            lambda z, k: (step(z, k), None), z, random.split(key, num_steps)
        )[0]

    return run


def bare_sgd(x: jax.Array, y: jax.Array, num_steps: int) -> Callable:
    def step(z, key):
        gradient = jax.grad(partial(potential, x, y))(
            z, random.randint(key, (BATCH,), 0, x.shape[0])
        )
        return jax.tree.map(lambda p, g: p - 0.5 * STEP_SIZE * g, z, gradient)

    return scan_over_keys(step, num_steps)


def leafwise_sgld(x: jax.Array, y: jax.Array, num_steps: int) -> Callable:
    """Straightforward SGLD: a key and a threefry draw for every parameter array."""

    def step(z, key):
        batch_key, *keys = random.split(key, 1 + len(z))
        gradient = jax.grad(partial(potential, x, y))(
            z, random.randint(batch_key, (BATCH,), 0, x.shape[0])
        )
        return {
            name: p
            - 0.5 * STEP_SIZE * gradient[name]
            + STEP_SIZE**0.5 * random.normal(k, p.shape)
            for (name, p), k in zip(z.items(), keys, strict=True)
        }

    return scan_over_keys(step, num_steps)


def blackjax_sgld(x: jax.Array, y: jax.Array, num_steps: int) -> Callable:
    import blackjax

    gradient = jax.grad(partial(potential, x, y))
    sampler = blackjax.sgld(
        lambda z, indices: jax.tree.map(jnp.negative, gradient(z, indices))
    )

    def step(z, key):
        batch_key, noise_key = random.split(key)
        indices = random.randint(batch_key, (BATCH,), 0, x.shape[0])
        return sampler.step(noise_key, z, indices, 0.5 * STEP_SIZE)

    return scan_over_keys(step, num_steps)


def engine(
    x: jax.Array, y: jax.Array, minibatches: Callable = sgmcmc.WithReplacement
) -> sgmcmc.Sampler:
    unravel = ravel_pytree(start())[1]
    gradient = sgmcmc.Minibatch(
        lambda q, indices: potential(x, y, unravel(q), indices),
        minibatches(x.shape[0], BATCH),
    )
    return sgmcmc.build(gradient, sgmcmc.Overdamped(), schedule=STEP_SIZE)


def engine_loop(sampler: sgmcmc.Sampler, num_steps: int) -> tuple[Callable, Any]:
    """The compiled loop of the engine, and a state to start from."""
    state = sampler.init(ravel_pytree(start())[0], random.key(1))
    return jax.jit(sampler.run, static_argnums=1).lower(
        state, num_steps
    ).compile(), state


def sampler_run(
    x: jax.Array, y: jax.Array, num_steps: int, steps_per_draw: int
) -> Callable:
    """A run of ``MCMC`` with its progress bar, already compiled; each call makes
    ``num_steps`` steps.
    """
    kernel = infer.SGLD(model, STEP_SIZE, steps_per_draw=steps_per_draw)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=num_steps // steps_per_draw)

    def resume() -> Any:
        mcmc.run(random.key(2), x, y, BATCH)
        mcmc.post_warmup_state = mcmc.last_state
        return mcmc.last_state

    resume()
    resume()
    return resume


# --------------------------------------------------------------------------------------
# measures


def summary(
    times: dict[str, list[tuple[float, float]]], pairs: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """Medians of times, and medians of the ratios within a round."""
    report: dict[str, Any] = {}
    for clock, name in enumerate(("wall", "processor")):
        report[f"{name}_us"] = {
            who: statistics.median(t[clock] for t in ts) for who, ts in times.items()
        }
        report[f"{name}_ratio"] = {
            f"{p} / {q}": statistics.median(
                a[clock] / b[clock] for a, b in zip(times[p], times[q], strict=True)
            )
            for p, q in pairs
            if p in times and q in times
        }
    return report


def compare_steps(rounds: int, num_steps: int) -> dict[str, Any]:
    x, y = make_data(10_000)
    contenders = {
        "bare SGD": bare_sgd,
        "leafwise SGLD": leafwise_sgld,
        "BlackJAX SGLD": blackjax_sgld,
    }
    calls: dict[str, tuple[Callable, int]] = {}
    for name, build in contenders.items():
        try:
            compiled = (
                jax.jit(build(x, y, num_steps)).lower(start(), random.key(3)).compile()
            )
        except ImportError:
            print(
                f"{name}: left out, not installed; pip install "
                f'"numpyro_bnn[benchmarks]"'
            )
            continue
        calls[name] = partial(compiled, start(), random.key(3)), num_steps
    loop, state = engine_loop(engine(x, y), num_steps)
    calls["engine"] = partial(loop, state), num_steps
    return summary(interleave(calls, rounds), [("engine", name) for name in contenders])


def compare_run(rounds: int, num_steps: int, steps_per_draw: int) -> dict[str, Any]:
    """A whole run with progress bar, compared with the same steps in one bare loop."""
    x, y = make_data(10_000)
    loop, state = engine_loop(engine(x, y), num_steps)
    calls = {
        "engine": (partial(loop, state), num_steps),
        "MCMC(SGLD)": (sampler_run(x, y, num_steps, steps_per_draw), num_steps),
    }
    return summary(interleave(calls, rounds), [("MCMC(SGLD)", "engine")])


def compare_sizes(
    rounds: int, num_steps: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """Time per step as the data grow."""
    calls, pairs = {}, []
    for label, stream in (("", sgmcmc.WithReplacement), (" epochs", sgmcmc.Epochs)):
        for size in sizes:
            loop, state = engine_loop(engine(*make_data(size), stream), num_steps)
            calls[f"N={size}{label}"] = partial(loop, state), num_steps
            pairs.append((f"N={size}{label}", f"N={sizes[0]}{label}"))
    return summary(interleave(calls, rounds), pairs)


def measure_memory(num_steps: int) -> dict[str, Any]:
    """Working memory of the compiled loop by its number of steps, and bytes alive after
    runs of ``MCMC``.
    """
    x, y = make_data(10_000)
    temporary = {}
    for steps in (num_steps, 10 * num_steps, 100 * num_steps):
        loop, _ = engine_loop(engine(x, y), steps)
        temporary[str(steps)] = loop.memory_analysis().temp_size_in_bytes
    alive = {}
    for draws, steps_per_draw in ((100, 10), (100, 100), (200, 10)):
        kernel = infer.SGLD(model, STEP_SIZE, steps_per_draw=steps_per_draw)
        mcmc = MCMC(kernel, num_warmup=0, num_samples=draws, progress_bar=False)
        mcmc.run(random.key(2), x, y, BATCH)
        kept = jax.tree.leaves((mcmc._states, mcmc.last_state))
        alive[f"{draws} draws of {steps_per_draw} steps"] = sum(
            leaf.nbytes for leaf in kept
        )
    return {"temporary_bytes_by_steps": temporary, "kept_bytes": alive}


# --------------------------------------------------------------------------------------
# script


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.sgld_step",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/sgld_step.json"), help="JSON file"
    )
    parser.add_argument(
        "--rounds", type=int, default=31, help="interleaved repeats; the median counts"
    )
    parser.add_argument(
        "--steps", type=int, default=10_000, help="steps per repeat of a bare loop"
    )
    parser.add_argument(
        "--run-rounds", type=int, default=9, help="repeats of the whole run"
    )
    parser.add_argument(
        "--run-steps", type=int, default=100_000, help="steps of the whole run"
    )
    parser.add_argument(
        "--steps-per-draw",
        type=int,
        default=100,
        help="steps per draw of the whole run",
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="numbers of data points",
    )
    parser.add_argument(
        "--docs", type=Path, help="page whose tables are to be replaced"
    )
    args = parser.parse_args(argv)
    at_least(
        parser, args, ("rounds", "steps", "run_rounds", "run_steps", "steps_per_draw")
    )
    if args.run_steps < args.steps_per_draw:
        parser.error("--run-steps must be at least --steps-per-draw")
    if min(args.sizes) < BATCH:
        parser.error(f"--sizes must be at least the minibatch, {BATCH}")
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    network = {
        "features": FEATURES,
        "width": WIDTH,
        "batch": BATCH,
        "step_size": STEP_SIZE,
    }
    bar = not (
        "CI" in os.environ or "PYTEST_XDIST_WORKER" in os.environ
    )  # NumPyro hides it there
    return {
        **environment(["blackjax"]),
        "network": network,
        "progress_bar": bar,
        "options": options_of(args),
    }


def print_report(report: dict[str, Any]) -> None:
    for part in ("steps", "run", "sizes"):
        print(f"\n{part}: microseconds per step (wall clock, processor)")
        for name, wall in report[part]["wall_us"].items():
            print(f"  {name:24}{wall:8.1f}{report[part]['processor_us'][name]:8.1f}")
        for name, wall in report[part]["wall_ratio"].items():
            print(f"  {name:24}{wall:8.2f}{report[part]['processor_ratio'][name]:8.2f}")
    print("\nmemory")
    for part in report["memory"].values():
        for name, size in part.items():
            print(f"  {name:28}{size:12,d} bytes")


def tables(report: dict[str, Any]) -> dict[str, str]:
    """Markdown tables by name: a step compared with others, and as the data grow."""
    rows = []
    for part in (report["steps"], report["run"]):
        for pair, ratio in part["wall_ratio"].items():
            times = (f"{part['wall_us'][name]:.1f}" for name in pair.split(" / "))
            rows.append((pair, *times, f"{ratio:.2f}"))
    times = report["sizes"]["wall_us"]
    sizes = [
        (
            f"{int(name[2:]):,d}",
            *(f"{times[name + order]:.1f}" for order in ("", " epochs")),
        )
        for name in times
        if f"{name} epochs" in times
    ]
    return {
        "sgld_step": markdown(
            ("one step", "microseconds", "of the other", "ratio"), rows
        ),
        "sgld_sizes": markdown(
            ("rows of data", "microseconds, drawn with replacement", "in epochs"), sizes
        ),
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    writable_file(args.output)
    report = {
        "steps": compare_steps(args.rounds, args.steps),
        "run": compare_run(args.run_rounds, args.run_steps, args.steps_per_draw),
        "sizes": compare_sizes(args.rounds, args.steps, tuple(args.sizes)),
        "memory": measure_memory(args.steps),
        **settings(args),
    }
    print_report(report)
    write_report(args.output, report)
    for name, text in tables(report).items():
        put_table(args.docs, name, text, report)
    return report


if __name__ == "__main__":
    main()
