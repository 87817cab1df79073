"""Processor seconds and compiled programs before the first result: the import, first
draws, other data, the export.

Each way to a posterior is a separate process without JAX's cache on disk, so nothing is
shared. An 8-50-1 ReLU network with a hierarchical prior; samplers make four transitions
of warm-up and four draws, AutoADF one epoch, AutoMeanField twenty steps, and their
exports have four draws. BlackJAX samples the same density in a loop written by hand,
with a given step size. Ratios are to NUTS of the same run of this script. Writes JSON.

    python -m examples.benchmarks.first_draw --output output/first_draw.json
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.infer.autoguide
from jax import lax, random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.util import potential_energy

from examples.benchmarks.shared import environment, options_of, put_table, write_report
from examples.shared import at_least, markdown, writable_file

FEATURES, TRANSITIONS, TREE_DEPTH, STEP_SIZE, EPOCHS, STEPS = 8, 4, 2, 1e-6, 1, 20
COMPILED = "/jax/core/compile/backend_compile_duration"
# In the order of the table; the first one is what the others are compared with.
BASE = "NUTS"
SAMPLERS = (BASE, "SGLD, step size given", "SGLD", "MCLMC", "OrbitMoves(NUTS)")
GUIDES = ("AutoMeanField", "AutoADF")
BY_HAND = ("BlackJAX NUTS", "BlackJAX MCLMC")
WAYS = (*SAMPLERS, *GUIDES, *BY_HAND)
PHASES = ("import", "first", "other_data", "export", "export_again")


# --------------------------------------------------------------------------------------
# ways


def make_data(seed: int, num_data: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(num_data, FEATURES)).astype(np.float32)
    return x, np.sin(x[:, 0])


def sampler_run(
    way: str, bnn: Any, model: Callable, key: jax.Array, x: np.ndarray, y: np.ndarray
) -> MCMC:
    nuts = partial(NUTS, model, max_tree_depth=TREE_DEPTH)
    kernels = {
        BASE: nuts,
        "SGLD, step size given": lambda: bnn.infer.SGLD(
            model, STEP_SIZE, steps_per_draw=2
        ),
        "SGLD": lambda: bnn.infer.SGLD(model, steps_per_draw=2),
        "MCLMC": lambda: bnn.infer.MCLMC(model, steps_per_draw=2),
        "OrbitMoves(NUTS)": lambda: bnn.infer.OrbitMoves(
            nuts(), bnn.symmetry.find(model, x, y)
        ),
    }
    mcmc = MCMC(
        kernels[way](),
        num_warmup=TRANSITIONS,
        num_samples=TRANSITIONS,
        progress_bar=False,
    )
    mcmc.run(key, x, y)
    jax.block_until_ready(mcmc.get_samples())
    return mcmc


def guide_run(
    way: str, bnn: Any, model: Callable, key: jax.Array, x: np.ndarray, y: np.ndarray
) -> Any:
    if way == "AutoADF":
        guide = bnn.guides.AutoADF(model)
        found = guide.run(key, x, y, num_epochs=EPOCHS, progress_bar=False)
    else:
        guide = bnn.guides.AutoMeanField(model)
        svi = SVI(model, guide, numpyro.optim.Adam(0.01), Trace_ELBO())
        found = bnn.guides.fit(svi, key, STEPS, x, y, progress_bar=False)
    jax.block_until_ready(found.params)
    return found, {"guide": guide, "args": (x, y), "num_samples": TRANSITIONS}


def start(
    model: Callable, key: jax.Array, x: np.ndarray, y: np.ndarray
) -> dict[str, jax.Array]:
    """A small normal number for each latent number of the model, in unconstrained
    space.
    """
    sites: dict[str, Any] = {}
    jax.eval_shape(
        lambda: sites.update(handlers.trace(handlers.seed(model, key)).get_trace(x, y))
    )
    latent = [
        (n, s)
        for n, s in sites.items()
        if s["type"] == "sample" and not s["is_observed"]
    ]
    keys = random.split(key, len(latent))
    return {
        n: 0.1 * random.normal(k, jnp.shape(s["value"]))
        for k, (n, s) in zip(keys, latent, strict=True)
    }


def blackjax_run(
    way: str, model: Callable, key: jax.Array, x: np.ndarray, y: np.ndarray
) -> Any:
    """Transitions in one compiled scan, of the density that the kernels
    of NumPyro see.
    """
    import blackjax

    def log_density(z: dict[str, jax.Array]) -> jax.Array:
        return -potential_energy(model, (x, y), {}, z)

    position = start(model, key, x, y)
    start_key, run_key = random.split(key)
    if way == "BlackJAX NUTS":
        size = sum(leaf.size for leaf in position.values())
        scale = jnp.ones(size)
        sampler = blackjax.nuts(log_density, 1e-3, scale, max_num_doublings=TREE_DEPTH)
        state = sampler.init(position)
    else:
        sampler = blackjax.mclmc(log_density, L=1.0, step_size=1e-3)
        state = sampler.init(position, start_key)

    def step(state: Any, key: jax.Array) -> tuple[Any, Any]:
        state = sampler.step(key, state)[0]
        return state, state.position

    run = jax.jit(lambda state, keys: lax.scan(step, state, keys)[1])
    return jax.block_until_ready(run(state, random.split(run_key, 2 * TRANSITIONS)))


# --------------------------------------------------------------------------------------
# measures


def measure_here(way: str, rows: int, width: int) -> dict[str, list[float]]:
    """Processor seconds and number of compiled programs of each phase, in
    this process.
    """
    programs: list[str] = []

    def note(event: str, seconds: float, **labels: Any) -> None:
        if event == COMPILED:
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    found: dict[str, list[float]] = {}

    def timed(phase: str, call: Callable) -> Any:
        before, started = len(programs), time.process_time()
        result = call()
        found[phase] = [time.process_time() - started, len(programs) - before]
        return result

    bnn = timed("import", lambda: importlib.import_module("numpyro_bnn"))
    model = bnn.models.regression(
        bnn.nn.MLP([width, 1], "relu"), bnn.priors.Hierarchical()
    )
    by_hand = partial(blackjax_run, way)
    run = (
        by_hand
        if way in BY_HAND
        else partial(sampler_run if way in SAMPLERS else guide_run, way, bnn)
    )
    # Data and keys are made before the clock starts.
    calls = [
        partial(run, model, random.key(seed), *make_data(seed, rows)) for seed in (0, 1)
    ]
    results = [
        timed(phase, call)
        for phase, call in zip(("first", "other_data"), calls, strict=True)
    ]
    if way not in BY_HAND:
        for phase, result in zip(("export", "export_again"), results, strict=True):
            source, options = (result, {}) if way in SAMPLERS else result
            timed(phase, partial(bnn.to_inference_data, source, **options))
    return found


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    words = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "examples.benchmarks.first_draw",
        "--job",
        way,
    ]
    words += ["--rows", str(args.rows), "--width", str(args.width)]
    variables = {
        name: value
        for name, value in os.environ.items()
        if name != "JAX_COMPILATION_CACHE_DIR"
    }
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    done = subprocess.run(
        words, env=variables, check=True, stdout=subprocess.PIPE, text=True
    )
    phases = json.loads(done.stdout.splitlines()[-1])
    return {"way": way, **{phase: phases.get(phase) for phase in PHASES}}


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds, programs and the ratio of the first seconds to those of NUTS as a
    Markdown table.
    """
    heads = (
        "way",
        "import",
        "first result",
        "of NUTS",
        "other data",
        "export",
        "export again",
    )
    base = next((row["first"][0] for row in rows if row["way"] == BASE), None)

    def shown(phase: list[float] | None) -> str:
        return "" if phase is None else f"{phase[0]:.2f} ({phase[1]:.0f})"

    cells = []
    for row in rows:
        ratio = "" if base is None else f"{row['first'][0] / base:.2f}"
        of_import = "" if row["way"] in BY_HAND else f"{row['import'][0]:.2f}"
        later = (shown(row[phase]) for phase in PHASES[2:])
        cells.append((row["way"], of_import, shown(row["first"]), ratio, *later))
    return markdown(heads, cells)


# --------------------------------------------------------------------------------------
# script


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="examples.benchmarks.first_draw",
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        help="samplers and guides",
    )
    parser.add_argument("--rows", type=int, default=500, help="data points")
    parser.add_argument("--width", type=int, default=50, help="hidden units")
    parser.add_argument(
        "--job", choices=WAYS, help=argparse.SUPPRESS
    )  # the work of a separate process
    parser.add_argument(
        "--output", type=Path, default=Path("output/first_draw.json"), help="JSON file"
    )
    parser.add_argument("--docs", type=Path, help="page whose table is to be replaced")
    args = parser.parse_args(argv)
    at_least(parser, args, ("rows", "width"))
    return args


def main(argv: list[str] | None = None) -> dict[str, Any] | None:
    args = parse(argv)
    if args.job is not None:
        print(json.dumps(measure_here(args.job, args.rows, args.width)))
        return None
    writable_file(args.output)
    rows: list[dict[str, Any]] = []
    report = {"rows": rows, **environment(["blackjax"]), "options": options_of(args)}
    for way in args.ways:
        if way in BY_HAND and importlib.util.find_spec("blackjax") is None:
            print(
                f'{way}: left out, not installed; pip install "numpyro_bnn[benchmarks]"'
            )
            continue
        rows.append(measure(way, args))
        print(table(rows).splitlines()[-1], flush=True)
        write_report(args.output, report)
    put_table(args.docs, "first_draw", table(rows), report)
    return report


if __name__ == "__main__":
    main()
