"""Helpers of the benchmarks: interleaved timing, and the machine and versions behind
the figures.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
from jax import lax
from numpyro.infer.mcmc import MCMCKernel

from examples.shared import between_marks, writable_file

__all__ = [
    "PBP",
    "environment",
    "interleave",
    "mean_and_error",
    "median_ratio",
    "one_device_per_core",
    "options_of",
    "provenance",
    "put_table",
    "repeated",
    "sample_chain",
    "wall_clock",
    "write_report",
]

# Probabilistic backpropagation on the standard splits of the UCI sets, 50 hidden units
# (100 for protein): test RMSE and log likelihood with standard errors, from the C code
# of its authors (protein: their paper).
PBP = {
    "boston": ((2.971, 0.169), (-2.555, 0.082)),
    "concrete": ((5.679, 0.100), (-3.164, 0.021)),
    "energy": ((1.804, 0.050), (-2.042, 0.020)),
    "kin8nm": ((0.0983, 0.0006), (0.896, 0.006)),
    "naval": ((0.0057, 0.0000), (3.733, 0.006)),
    "power": ((4.120, 0.032), (-2.836, 0.008)),
    "protein": ((4.73, 0.01), (-2.97, 0.01)),
    "wine": ((0.635, 0.008), (-0.968, 0.014)),
    "yacht": ((1.028, 0.065), (-1.647, 0.022)),
}


def seconds(call: Callable) -> tuple[float, float]:
    """Wall-clock and processor seconds of one call."""
    wall, processor = time.perf_counter(), time.process_time()
    jax.block_until_ready(call())
    return time.perf_counter() - wall, time.process_time() - processor


def interleave(
    calls: Mapping[Any, tuple[Callable, int]], rounds: int
) -> dict[Any, list[tuple[float, float]]]:
    """Microseconds per step, wall-clock and processor, of each call (with its number of
    steps) in each round.
    """
    found: dict[Any, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, steps) in calls.items():
            wall, processor = seconds(call)
            found[name].append((1e6 * wall / steps, 1e6 * processor / steps))
    return found


def wall_clock(
    times: Mapping[Any, list[tuple[float, float]]],
) -> dict[Any, list[float]]:
    """The wall-clock part of what :func:`interleave` found."""
    return {name: [wall for wall, _ in pairs] for name, pairs in times.items()}


def median_ratio(
    times: Mapping[Any, list[float]], name: Hashable, base: Hashable
) -> float:
    """Median over rounds of the time of one contender over that of another in the same
    round.
    """
    return statistics.median(
        a / b for a, b in zip(times[name], times[base], strict=True)
    )


def repeated(step: Callable, state: Any, number: int) -> Callable:
    """A call that makes a short step several times, so that the clock's own cost does
    not matter.
    """

    def call() -> Any:
        for _ in range(number):
            result = step(state)
        return result

    return call


def sample_chain(
    kernel: MCMCKernel,
    call: tuple[tuple, dict[str, Any]],
    key: Any,
    lengths: tuple[int, int],
    keep: Callable,
    start: Any = None,
) -> tuple[Any, dict[str, float]]:
    """One chain: values kept of its draws, and seconds of both phases without
    compilation.

    :param call: arguments of the model, positional and by keyword.
    :param lengths: transitions of warm-up, and of sampling.
    :param keep: ``keep(state, draw)``, with the constrained values of the draw.
    :param start: initial values, as ``init_params`` of a kernel.
    """
    state = kernel.init(
        key, lengths[0], start, model_args=call[0], model_kwargs=call[1]
    )
    constrain = kernel.postprocess_fn(*call)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = kernel.sample(state, *call)
        return state, keep(state, constrain(state.z))

    seconds: dict[str, float] = {}
    kept = None
    for phase, length in zip(("warmup", "sampling"), lengths, strict=True):
        run = (
            jax.jit(partial(lax.scan, step, xs=None, length=length))
            .lower(state)
            .compile()
        )
        start = time.perf_counter()
        state, kept = jax.block_until_ready(run(state))
        seconds[phase] = time.perf_counter() - start
    return kept, seconds


def one_device_per_core() -> None:
    """Must be called before JAX is first used; later it has no effect."""
    numpyro.set_host_device_count(os.cpu_count() or 1)


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a run, without paths, which mean nothing on another machine."""
    return {
        name: value for name, value in vars(args).items() if not isinstance(value, Path)
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write everything measured so far, so that it is not lost if a later case is
    interrupted.
    """
    path.write_text(json.dumps(report, indent=2, default=str) + "\n")


def continued_report(args: argparse.Namespace, varied: Sequence[str]) -> dict[str, Any]:
    """The report of a script that leaves out what the file ``args.output`` already has:
    its rows so far, and the machine and options of this run.

    :param varied: options in which runs of one file may differ.
    """
    text = writable_file(args.output).read_text()
    options = {
        name: value for name, value in options_of(args).items() if name not in varied
    }
    rows = json.loads(text)["rows"] if text.strip() else []
    return {"rows": rows, **environment([]), "options": options}


def environment(packages: Sequence[str]) -> dict[str, Any]:
    """The machine, and versions of JAX, NumPyro, this package and ``packages``
    (``None`` where absent).
    """
    versions: dict[str, str | None] = {}
    for package in ("jax", "jaxlib", "numpyro", "numpyro_bnn", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    machine = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
    }
    return {"machine": machine, "versions": versions}


def provenance(reports: Iterable[Mapping[str, Any]]) -> str:
    """The text below a table: machines, versions and options of its figures."""
    kept = list(reports)
    machines = {
        f"{report['machine']['cores']} cores, {report['machine']['device']}"
        for report in kept
    }
    versions = {
        ", ".join(
            f"{name} {found or 'absent'}" for name, found in report["versions"].items()
        )
        for report in kept
    }
    text = f"Machine: {'; '.join(sorted(machines))}. {'; '.join(sorted(versions))}."
    options = dict.fromkeys(
        _as_typed(report["options"]) for report in kept if "options" in report
    )
    return text + (f" Options: {'; '.join(options)}." if options else "")


def _as_typed(options: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """Options of one run, or of several."""
    if not isinstance(options, Mapping):
        return "; ".join(map(_as_typed, options))
    words = []
    for name, value in options.items():
        if value is not None:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return f"`{shlex.join(words)}`"


def put_table(
    page: Path | None, name: str, text: str, report: Mapping[str, Any]
) -> None:
    """Put a table into a page (if there is one), with its machine, versions and options
    below.
    """
    if page is not None:
        between_marks(page, f"{text}\n\n{provenance([report])}", name)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean over splits and its standard error."""
    return float(np.mean(values)), float(
        np.std(values, ddof=min(1, len(values) - 1)) / len(values) ** 0.5
    )
