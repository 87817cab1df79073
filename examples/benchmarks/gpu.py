"""One GPU in eight minutes: steps by number of chains and width, splits of a table in
one program, and chains on images.

Each measurement is a cell that is written when it is done. A later call goes on with
the others, and none is begun after --minutes. Without the data sets it uses generated
rows and the digits of scikit-learn. On a machine without a network, copy this
repository, NumPyro, ArviZ and BlackJAX beside each other (pip install --target DIR
--no-deps) and run

    PYTHONPATH=DIR:. python3 -m examples.benchmarks.gpu --data FOLDER
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp
from numpyro.infer import NUTS, init_to_sample

import numpyro_bnn as bnn
from examples import image_chains, loaders
from examples.benchmarks.shared import environment, options_of, write_report
from examples.image_classification import load_data
from examples.shared import at_least, writable_file
from numpyro_bnn import infer, models, nn
from numpyro_bnn.program import Posterior

CHUNK = 1000  # images of a prediction
FEATURES = 8
PARTS = ("steps", "splits", "images")
TREE_DEPTH = 5
LARGEST = 2**28  # positions of all chains together, in numbers


# --------------------------------------------------------------------------------------
# steps


def regression(width: int) -> Callable:
    return models.regression(nn.MLP([width, 1], "tanh"))


def table(rows: int) -> tuple[jax.Array, jax.Array]:
    x = random.normal(random.key(0), (rows, FEATURES))
    return x, jnp.sin(x[:, 0]) + 0.1 * random.normal(random.key(1), (rows,))


FIXED: dict[str, Any] = {"warm_start": 0.0, "preconditioner": "identity"}
# Each kernel with one step per transition, and whether it takes minibatches.
KERNELS: dict[str, tuple[Callable, bool]] = {
    "SGLD": (partial(infer.SGLD, step_size=1e-6, steps_per_draw=1, **FIXED), True),
    "SGNHT": (partial(infer.SGNHT, step_size=1e-6, steps_per_draw=1, **FIXED), True),
    "MCLMC": (
        partial(
            infer.MCLMC,
            step_size=1e-3,
            decoherence_length=1.0,
            steps_per_draw=1,
            **FIXED,
        ),
        False,
    ),
    "NUTS": (
        partial(
            NUTS,
            step_size=1e-3,
            adapt_step_size=False,
            adapt_mass_matrix=False,
            max_tree_depth=TREE_DEPTH,
        ),
        False,
    ),
}


def own_steps(
    name: str, width: int, chains: int, args: argparse.Namespace
) -> tuple[Callable, Any]:
    """A transition of all chains, and a state to start from."""
    make, by_batches = KERNELS[name]
    data = table(args.rows)
    kwargs = {"batch_size": args.batch_size} if by_batches else {}
    kernel = make(regression(width))
    state = kernel.init(random.split(random.key(2), chains), 0, None, data, kwargs)
    return lambda state, _: kernel.sample(state, data, kwargs), state


def blackjax_steps(
    name: str, width: int, chains: int, args: argparse.Namespace
) -> tuple[Callable, Any]:
    """The same step by BlackJAX, on the same density."""
    import blackjax

    posterior = Posterior(regression(width), table(args.rows))
    start = posterior.initial(random.key(3))
    flat, unravel = ravel_pytree(start)

    def log_density(position: jax.Array) -> jax.Array:
        return -posterior.potential(unravel(position))

    keys = random.split(random.key(2), chains)
    if name == "NUTS":
        scales = jnp.ones(len(flat))
        sampler = blackjax.nuts(log_density, 1e-3, scales, max_num_doublings=TREE_DEPTH)
        state = jax.vmap(lambda _: sampler.init(flat))(keys)
    elif name == "MCLMC":
        sampler = blackjax.mclmc(log_density, L=1.0, step_size=1e-3)
        state = jax.vmap(lambda key: sampler.init(flat, key))(keys)
    else:
        minibatch = Posterior(
            regression(width),
            table(args.rows),
            {"batch_size": args.batch_size},
            full=False,
        )

        def gradient(position: jax.Array, indices: jax.Array) -> jax.Array:
            def potential(q: jax.Array) -> jax.Array:
                return minibatch.potential(unravel(q), {"data": indices})

            return -jax.grad(potential)(position)

        sgld = blackjax.sgld(gradient)

        def sgld_step(position: jax.Array, key: jax.Array) -> jax.Array:
            batch_key, noise_key = random.split(key)
            shape = (args.batch_size,)
            indices = random.randint(batch_key, shape, 0, args.rows)
            return sgld.step(noise_key, position, indices, 5e-7)

        return over_keys(sgld_step, chains), jnp.tile(flat, (chains, 1))

    def step(state: Any, key: jax.Array) -> Any:
        return sampler.step(key, state)[0]

    return over_keys(step, chains), state


def over_keys(step: Callable, chains: int) -> Callable:
    return lambda state, key: jax.vmap(step)(state, random.split(key, chains))


BLACKJAX = ("SGLD", "MCLMC", "NUTS")


def step_cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    """Small ones first."""
    ways: list[tuple[str, Callable, str]] = []
    for name in KERNELS:
        ways.append((name, own_steps, name))
    for name in BLACKJAX:
        ways.append((f"BlackJAX {name}", blackjax_steps, name))
    sizes = [(width, chains) for width in args.widths for chains in args.chains]
    for width, chains in sorted(sizes, key=lambda size: size[0] * size[1]):
        for label, build, name in ways:
            cell = f"{label}, width {width}, chains {chains}"
            yield cell, partial(timed_steps, build, name, width, chains, args)


def timed_steps(
    build: Callable, name: str, width: int, chains: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of a transition of all chains, the median over rounds."""
    size = (FEATURES + 2) * width * chains
    if size > LARGEST:
        return {"left_out": f"{size} numbers"}
    step, state = build(name, width, chains, args)
    number = args.transitions

    def run(state: Any, key: jax.Array) -> Any:
        keys = random.split(key, number)
        return lax.scan(lambda s, k: (step(s, k), None), state, keys)[0]

    begun = time.perf_counter()
    program = jax.jit(run).lower(state, random.key(4)).compile()
    compiled = time.perf_counter() - begun
    jax.block_until_ready(program(state, random.key(4)))
    times = []
    for _ in range(args.rounds):
        begun = time.perf_counter()
        end = jax.block_until_ready(program(state, random.key(5)))
        times.append(time.perf_counter() - begun)
    found = {
        "ms": 1e3 * float(np.median(times)) / number,
        "seconds_to_compile": compiled,
        **memory(),
    }
    if hasattr(end, "num_steps"):  # gradients of the last transition of NUTS
        found["num_steps"] = float(jnp.mean(end.num_steps))
    return found


def memory() -> dict[str, int]:
    """Largest memory in use since the process began, where the device counts it."""
    counted = jax.devices()[0].memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    return {} if peak is None else {"peak_bytes": peak}


# --------------------------------------------------------------------------------------
# all splits of a table in one program


def split_cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    for name in args.sets:
        yield f"{name}, {args.splits} splits", partial(splits, name, args)


def one_split(name: str, split: int, args: argparse.Namespace) -> loaders.Dataset:
    """Standardized; generated rows if there is no folder of data."""
    if args.data is not None and name != "generated":
        return loaders.standardize(loaders.load_uci(name, split, args.data))
    random_state = np.random.default_rng(split)
    x = random_state.normal(size=(60, FEATURES))
    y = np.sin(x[:, 0]) + 0.1 * random_state.normal(size=60)
    columns = tuple(f"x{k}" for k in range(FEATURES))
    rows = loaders.Dataset(x[:50], y[:50], x[50:], y[50:], name, columns)
    return loaders.standardize(rows)


def splits(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The recipe of `infer.ensemble`, all chains of all splits side by side; the test
    log likelihood and RMSE, in the units of the data, by split.
    """
    begun = time.perf_counter()
    data = [one_split(name, split, args) for split in range(args.splits)]
    model = models.regression(
        nn.MLP([args.width, 1], "relu"), bnn.priors.Hierarchical()
    )
    mcmc = infer.ensemble(
        model,
        args.gradients,
        num_chains=args.members,
        num_samples=args.draws,
        chain_method="vectorized",
        progress_bar=False,
    )
    kernel, lengths = mcmc.sampler, (mcmc.num_warmup, mcmc.num_samples)
    x, y, x_test, y_test = (
        jnp.asarray(np.stack([getattr(part, field) for part in data]), jnp.float32)
        for field in ("x_train", "y_train", "x_test", "y_test")
    )
    states = []
    for split in range(args.splits):
        keys = random.split(random.fold_in(random.key(args.seed), split), args.members)
        given = (x[split], y[split]), {}
        states.append(kernel.init(keys, lengths[0], None, *given))
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    # All chains are at the same transition, so that its phase is a branch, not a mask.
    state = state._replace(i=state.i[0])
    axes = jax.tree.map(lambda _: 0, state)._replace(i=None)

    def sample(state: Any, x: jax.Array, y: jax.Array) -> Any:
        return kernel.sample(state, (x, y), {})

    each = jax.vmap(sample, in_axes=(axes, 0, 0), out_axes=axes)
    posterior = Posterior(model, (x_test[0], y_test[0]))

    def judged(z: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        at = posterior.with_arguments((x, y), {})
        mean = at.outputs(z)["y"].mean
        return at.log_likelihood(z)["y"], mean

    of_chains = jax.vmap(jax.vmap(judged, (0, None, None)))

    def warm_up(state: Any, _: None) -> tuple[Any, None]:
        return each(state, x, y), None

    def draw(state: Any, _: None) -> tuple[Any, Any]:
        state = each(state, x, y)
        return state, of_chains(state.z, x_test, y_test)

    state, _ = jax.jit(partial(lax.scan, warm_up, xs=None, length=lengths[0]))(state)
    state, (log_p, mean) = jax.jit(partial(lax.scan, draw, xs=None, length=lengths[1]))(
        state
    )
    log_p, mean = jax.device_get((log_p, mean))  # (draws, splits, chains, rows)
    count = log_p.shape[0] * log_p.shape[2]
    scales = np.array([part.y_scaler.scale for part in data], float)
    log_mean = logsumexp(log_p, axis=(0, 2)) - np.log(count)
    errors = mean.mean((0, 2)) - np.asarray(y_test)
    return {
        "seconds": time.perf_counter() - begun,
        "log_likelihood": (log_mean.mean(-1) - np.log(scales)).tolist(),
        "rmse": ((errors**2).mean(-1) ** 0.5 * scales).tolist(),
        "chains": args.splits * args.members,
        **memory(),
    }


# --------------------------------------------------------------------------------------
# images


def image_cells(args: argparse.Namespace) -> Iterator[tuple[str, Callable]]:
    for name, run in (("ensemble", trained), ("MCLMC", sampled)):
        yield name, partial(images, run, args)


def images(run: Callable, args: argparse.Namespace) -> dict[str, Any]:
    """Test log loss and error of as many networks as chains, at equal gradients."""
    begun = time.perf_counter()
    data = load_data(args)
    net = image_chains.lenet(data.num_classes, data.x.shape[1])
    model = models.classification(net, data.num_classes, bnn.priors.Normal(2**0.5))
    draws = run(model, (jnp.asarray(data.x), jnp.asarray(data.y)), args)
    sampled_in = time.perf_counter() - begun
    parts = []
    for start in range(0, len(data.x_test), CHUNK):
        part = jnp.asarray(data.x_test[start : start + CHUNK])
        parts.append(averaged(model, draws, part))
    log_probability = np.concatenate(parts)
    labels = np.asarray(data.y_test)
    right = log_probability[np.arange(len(labels)), labels]
    return {
        "log_loss": float(-right.mean()),
        "error": float((log_probability.argmax(-1) != labels).mean()),
        "seconds": time.perf_counter() - begun,
        "seconds_to_sample": sampled_in,
        "networks": len(jax.tree.leaves(draws)[0]),
        **memory(),
    }


def averaged(model: Callable, draws: Any, x: jax.Array) -> np.ndarray:
    """Log probabilities of classes (N, K), of the mean over draws."""
    labels = jnp.zeros(len(x), int)

    def summed(reading: Posterior, draws: Any) -> jax.Array:
        def log_probabilities(z: Any) -> jax.Array:
            return jax.nn.log_softmax(reading.outputs(z)["y"].logits)

        def add(total: jax.Array, z: Any) -> tuple[jax.Array, None]:
            return jnp.logaddexp(total, log_probabilities(z)), None

        shape = jax.eval_shape(log_probabilities, jax.tree.map(first, draws))
        return lax.scan(add, jnp.full(shape.shape, -jnp.inf), draws)[0]

    total = Posterior(model, (x, labels)).run(summed, draws, runs_rarely=False)
    return np.asarray(total - np.log(len(jax.tree.leaves(draws)[0])))


def first(leaf: jax.Array) -> jax.Array:
    return leaf[0]


def trained(
    model: Callable, data: tuple[jax.Array, jax.Array], args: argparse.Namespace
) -> Any:
    """Networks from Adam with a cosine schedule, from different starts."""
    size = args.image_batch
    posterior = Posterior(model, data, {"batch_size": size}, full=False)
    steps, number = args.image_gradients, len(data[0])
    optimizer = optax.adam(optax.cosine_decay_schedule(args.learning_rate, steps))

    def potentials(reading: Posterior, start: Any, key: jax.Array) -> Any:
        def loss(z: Any, indices: jax.Array) -> jax.Array:
            return reading.potential(z, {"data": indices}) / number

        def step(carry: Any, key: jax.Array) -> Any:
            z, memory = carry
            gradient = jax.grad(loss)(z, random.randint(key, (size,), 0, number))
            updates, memory = optimizer.update(gradient, memory)
            return (optax.apply_updates(z, updates), memory), None

        def train(z: Any, key: jax.Array) -> Any:
            begin = z, optimizer.init(z)
            return lax.scan(step, begin, random.split(key, steps))[0][0]

        return jax.vmap(train)(start, random.split(key, args.members))

    start_key, key = random.split(random.key(args.seed))
    start = posterior.initial(random.split(start_key, args.members), init_to_sample)
    return posterior.run(potentials, start, key, runs_rarely=False)


def sampled(
    model: Callable, data: tuple[jax.Array, jax.Array], args: argparse.Namespace
) -> Any:
    """Draws of minibatch chains; half of the gradients go into their warm start."""
    steps, draws = args.image_gradients // 2, args.image_draws
    warmup = 2 * draws  # of which half are the warm start
    each = max(1, steps // (2 * draws) // 2)  # a step takes two gradients
    warm = infer.WarmStart(
        0.5,
        num_steps=steps,
        optimizer=optax.adam(optax.cosine_decay_schedule(args.learning_rate, steps)),
    )
    options = {"warm_start": warm, "init_strategy": init_to_sample}
    kernel = infer.MCLMC(model, steps_per_draw=each, **options)
    keys = random.split(random.key(args.seed), args.members)
    kwargs = {"batch_size": args.image_batch}
    state = kernel.init(keys, warmup, None, data, kwargs)

    def step(state: Any, data: Any) -> Any:
        return kernel.sample(state, data, kwargs)

    def run(state: Any, data: Any) -> Any:
        state = lax.fori_loop(0, warmup, lambda _, state: step(state, data), state)

        def draw(state: Any, _: None) -> Any:
            state = step(state, data)
            return state, state.z

        return lax.scan(draw, state, None, draws)[1]

    kept = jax.jit(run)(state, data)
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), kept)


# --------------------------------------------------------------------------------------
# all


CELLS = {"steps": step_cells, "splits": split_cells, "images": image_cells}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = os.environ.get("NUMPYRO_BNN_DATA")
    numbers = {
        "rounds": (5, "rounds in which steps are timed"),
        "transitions": (20, "transitions in one"),
        "rows": (1000, "rows of the regression whose steps are timed"),
        "batch_size": (100, "rows of its minibatches"),
        "splits": (20, "splits of a table, all in one program"),
        "gradients": (60_000, "gradients of a chain of a split"),
        "draws": (250, "draws of such a chain"),
        "width": (50, "hidden units of their networks"),
        "members": (8, "chains of a split, chains on images, networks of an ensemble"),
        "image_gradients": (4000, "gradients of a chain on images, or of a network"),
        "image_batch": (512, "images of a minibatch"),
        "image_draws": (20, "draws of a chain on images"),
        "test_images": (10_000, "images to predict"),
        "seed": (0, "seed of starts and draws"),
    }
    for name, (value, text) in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=text
        )
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of Adam")
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 16, 128, 1024])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 400, 2000])
    parser.add_argument("--sets", nargs="+", default=["boston", "yacht"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="after which no cell is begun"
    )
    parser.add_argument("--data", type=Path, default=folder and Path(folder))
    parser.add_argument("--output", type=Path, default=Path("output/gpu.json"))
    args = parser.parse_args(argv)
    at_least(parser, args, [name for name in numbers if name != "seed"])
    at_least(parser, args, ("chains", "widths"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    begun, output = time.perf_counter(), writable_file(args.output)
    text = output.read_text()
    options = {
        n: v for n, v in options_of(args).items() if n not in ("minutes", "parts")
    }
    about = json.loads(json.dumps({**environment(["blackjax"]), "options": options}))
    report = {**about, "cells": {}}
    if text.strip():
        report = json.loads(text)
        if {name: report[name] for name in about} != about:
            sys.exit(f"--output: {output} is of another machine or other options.")
    for part in args.parts:
        for name, measure in CELLS[part](args):
            cell = f"{part}: {name}"
            late = time.perf_counter() - begun > 60 * args.minutes
            if cell in report["cells"] or late:
                continue
            try:
                found = measure()
            except ImportError as error:
                found = {"left_out": str(error)}
            except jax.errors.JaxRuntimeError as error:  # such as no memory
                found = {"failed": str(error).splitlines()[0]}
            report["cells"][cell] = found
            print(cell, found, flush=True)
            write_report(output, report)
    return report


if __name__ == "__main__":
    main()
