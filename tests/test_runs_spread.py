"""Runs over a mesh of devices and over several processes: the draws are those of one device."""

import os
import re
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from signal import SIGKILL, SIGSTOP

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, runs
from numpyro_bnn.runs import folder
from numpyro_bnn.runs.spread import Spread

KEY = jax.random.key(1)
ROWS = 23  # odd: the last device has fewer
X = np.asarray(jax.random.normal(jax.random.key(0), (ROWS, 2)))
Y = np.tanh(X @ np.array([1.0, -2.0], "f4")) + 0.1 * np.asarray(jax.random.normal(jax.random.key(2), (ROWS,)))
NETWORK = models.regression(nn.MLP([3, 1], "tanh"))


def indexed(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i] @ w), 0.3), obs=y[i])


def masked(x, y=None):
    """Missing observations, nested plates, a value for each group and one for each row."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal())
    with numpyro.plate("data", len(x)):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        mean = jnp.tanh(numpyro.subsample(x, event_dim=1) @ w) + effect[jnp.arange(len(x)) % 3]
        with numpyro.handlers.mask(mask=x[:, 0] > -0.5):
            numpyro.sample("y", dist.Normal(mean, 0.3 * scale), obs=y)


CASES = {
    "SGHMC": (lambda: infer.SGHMC(NETWORK, 1e-3, steps_per_draw=2), {}),
    "SGLD on minibatches": (lambda: infer.SGLD(NETWORK, 1e-3, steps_per_draw=2), {"batch_size": 6}),
    "MCLMC": (lambda: infer.MCLMC(NETWORK, 0.1, steps_per_draw=2), {}),
    "NUTS": (lambda: NUTS(NETWORK, max_tree_depth=3), {}),
    "NUTS of another model": (lambda: NUTS(masked, max_tree_depth=3), {}),
}


def start(path, case, shape=None, chains=2, samples=5, **options):
    kernel, given = CASES[case]
    mesh = shape and jax.make_mesh(shape, ("chain", "data"))
    mcmc = MCMC(kernel(), num_warmup=3, num_samples=samples, num_chains=chains, chain_method="vectorized")
    options = {"block_seconds": 1e-3, "progress_bar": False, "extra_fields": FIELDS.get(case, ()), **options}
    return runs.start(path, mcmc, KEY, X, Y, mesh=mesh, **options, **given)


FIELDS = {"NUTS": ("potential_energy",), "NUTS of another model": ("potential_energy",)}


def draws_of(run):
    return {**run.get_samples(True), **{f"field {n}": v for n, v in run.get_extra_fields(True).items()}}


def close(found, expected):
    """Equal but for the rounding of sums in another order, which the transitions carry on."""
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


# ------------------------------------------------------------------------------------------ one process


@pytest.mark.core
@pytest.mark.parametrize("case", CASES)
def test_rows_over_two_devices(tmp_path, case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spread = start(tmp_path / "spread", case, (1, 2))
    assert len(jax.tree.leaves(spread.last_state)[0].sharding.device_set) == 2
    close(draws_of(spread), draws_of(start(tmp_path / "one", case)))


def test_one_chain_over_two_devices(tmp_path):
    close(
        draws_of(start(tmp_path / "spread", "MCLMC", (1, 2), chains=1)),
        draws_of(start(tmp_path / "one", "MCLMC", chains=1)),
    )


def test_chains_and_rows_over_four_devices(tmp_path):
    """In another process, as this one has two devices; chains take their own numbers of steps."""
    worker(tmp_path / "spread", "NUTS", (2, 2), devices=4).check()
    found = bnn.to_inference_data(tmp_path / "spread")["posterior"]
    expected = bnn.to_inference_data(start(tmp_path / "one", "NUTS", chains=4))["posterior"]
    close({name: value.to_numpy() for name, value in found.data_vars.items()}, expected)


def program_of(monkeypatch, path, case, shape, **options):
    """The text of the compiled program of a run."""
    texts = []
    original = Spread.compiled

    def compiled(self, *given):
        program = original(self, *given)
        texts.append(program.as_text())
        return program

    with monkeypatch.context() as patch:
        patch.setattr(Spread, "compiled", compiled)
        start(path, case, shape, **options)
    return texts[0]


COLLECTIVE = re.compile(r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute)\(")


@pytest.mark.core
def test_what_devices_send_each_other(tmp_path, monkeypatch):
    """Nothing between chains; between the parts of the data, sums for the gradient and no rows."""
    assert not COLLECTIVE.findall(program_of(monkeypatch, tmp_path / "chains", "NUTS", (2, 1)))
    sent = COLLECTIVE.findall(program_of(monkeypatch, tmp_path / "rows", "NUTS", (1, 2)))
    assert sent
    sizes = [
        int(np.prod([int(n) for n in s.split(",")])) for shapes in sent for s in re.findall(r"\[([\d,]+)\]", shapes)
    ]
    assert max(sizes) <= 2 * 3 * 2  # the largest site, for two chains


def test_rows_that_must_be_sent_around_are_noticed(tmp_path):
    def run(path, model):
        mcmc = MCMC(infer.SGHMC(model, 1e-3), num_warmup=1, num_samples=1, progress_bar=False)
        mesh = jax.make_mesh((1, 2), ("chain", "data"))
        return runs.start(path, mcmc, KEY, X, Y, mesh=mesh, progress_bar=False)

    with pytest.warns(UserWarning, match="every step sends all rows.*numpyro.subsample") as seen:
        run(tmp_path / "indexed", indexed)
    assert seen[0].filename == __file__


def test_a_run_goes_on_with_other_devices(tmp_path):
    whole = draws_of(start(tmp_path / "whole", "MCLMC"))
    start(tmp_path / "run", "MCLMC", samples=2)
    found = draws_of(start(tmp_path / "run", "MCLMC", (1, 2)))
    np.testing.assert_array_equal(found["sigma"][:, :2], whole["sigma"][:, :2])
    close(found, whole)


def shaped(x, y=None):
    """The number of clusters is a value of the data."""
    with numpyro.plate("clusters", len(np.unique(x)) + 1):
        numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(), obs=y)


def mesh_of(*shape, names=("chain", "data")):
    return jax.make_mesh(shape, names)


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": 2}, TypeError, "make_mesh"),
        ({"mesh": lambda: mesh_of(2, names=("rows",))}, ValueError, "Name its axes"),
        ({"mesh": lambda: mesh_of(2, 1), "chains": 3}, ValueError, '2 devices along "chain" for 3 chains'),
        ({"mesh": lambda: mesh_of(1, 2), "method": "sequential"}, ValueError, "sequential"),
        ({"mesh": lambda: mesh_of(1, 2), "x": runs.Rows(X)}, ValueError, "not split over devices"),
        ({"mesh": lambda: mesh_of(1, 2), "x": X[:, 0] * 0, "model": shaped}, ValueError, "shaped by the values"),
        ({"mesh": lambda: mesh_of(1, 2), "model": lambda x, y: indexed(x[:9], y[:9])}, ValueError, "as many rows"),
    ],
)
def test_a_mesh_that_cannot_be_used(tmp_path, options, error, message):
    mesh = options["mesh"]() if callable(options["mesh"]) else options["mesh"]
    kernel = NUTS(options.get("model", indexed))
    method = options.get("method", "vectorized")
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, num_chains=options.get("chains", 2), chain_method=method)
    with pytest.raises(error, match=message):
        runs.start(tmp_path / "run", mcmc, KEY, options.get("x", X), Y, mesh=mesh, progress_bar=False)
    assert not folder.state_numbers(tmp_path / "run")


# ------------------------------------------------------------------------------------ several processes


class worker:
    """Processes that make one run together."""

    def __init__(self, path, case, shape, processes=1, devices=1, samples=5, chains=4, pause=0.0):
        port = free_port()
        flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
        root = Path(__file__).parent
        env = os.environ | {"PYTHONPATH": f"{root.parent}:{root}", "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}

        def begun(index):
            joined = f"'127.0.0.1:{port}', {processes}, {index}, heartbeat_timeout_seconds=10"
            first = f"import jax; jax.distributed.initialize({joined})" if processes > 1 else ""
            then = f"t.work({str(path)!r}, {case!r}, {shape}, {samples}, {chains}, {index}, {pause})"
            program = [sys.executable, "-c", f"{first}\nimport test_runs_spread as t\n{then}"]
            return subprocess.Popen(program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

        self.processes = [begun(index) for index in range(processes)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()

    def ended(self):
        """Exit code and output of each."""
        with self:
            outputs = [process.communicate(timeout=240)[0] for process in self.processes]
            return [(process.returncode, text) for process, text in zip(self.processes, outputs, strict=True)]

    def check(self):
        for code, text in self.ended():
            assert code == 0, text


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def work(path, case, shape, samples, chains, index, pause):
    if pause:
        original = Spread.whole

        def slow(self, tree):
            time.sleep(pause)
            return original(self, tree)

        Spread.whole = slow
    run = start(path, case, shape, chains=chains, samples=samples)
    assert run.complete
    if index:
        with pytest.raises(RuntimeError, match="the first process has the draws"):
            run.get_samples()


def values_of(path):
    found = bnn.to_inference_data(path)
    return {name: value.to_numpy() for group in found for name, value in found[group].data_vars.items()}


@pytest.mark.slow
def test_chains_over_two_processes(tmp_path):
    """Bit for bit those of one process with as many devices; a run that ends goes on, in one process too."""
    worker(tmp_path / "one", "NUTS", (2, 1), devices=2).check()
    worker(tmp_path / "run", "NUTS", (2, 1), processes=2, samples=2).check()
    worker(tmp_path / "run", "NUTS", (2, 1), processes=2).check()
    worker(tmp_path / "both", "NUTS", (2, 1), processes=2, samples=2).check()
    worker(tmp_path / "both", "NUTS", (2, 1), devices=2).check()
    expected = values_of(tmp_path / "one")
    for other in ("run", "both"):
        for name, value in values_of(tmp_path / other).items():
            np.testing.assert_array_equal(value, expected[name], err_msg=f"{other} {name}")


def test_rows_over_two_processes(tmp_path):
    worker(tmp_path / "two", "MCLMC", (1, 2), processes=2, chains=2).check()
    worker(tmp_path / "one", "MCLMC", (1, 2), devices=2, chains=2).check()
    close(values_of(tmp_path / "two"), values_of(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("signal", [SIGKILL, SIGSTOP])
def test_a_process_that_is_gone_ends_the_others(tmp_path, signal):
    """The run then goes on from its last block."""
    with worker(tmp_path / "run", "MCLMC", (1, 2), processes=2, samples=4000, pause=0.02) as run:
        left, gone = run.processes
        while not folder.last_notes(tmp_path / "run").get("draws"):
            time.sleep(0.05)
            assert left.poll() is None, left.communicate()[0]
        gone.send_signal(signal)
        text = left.communicate(timeout=120)[0]
    assert left.returncode != 0
    assert "another process of this run may have ended" in text or "heartbeat" in text.lower(), text
    done = folder.last_notes(tmp_path / "run")["draws"]
    worker(tmp_path / "run", "MCLMC", (1, 2), devices=2, samples=done + 2, chains=4).check()
    assert values_of(tmp_path / "run")["sigma"].shape == (4, done + 2)


def test_an_error_of_the_first_process_ends_all(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    first, second = worker(tmp_path / "run", "MCLMC", (1, 2), processes=2).ended()
    assert first[0] != 0
    assert "which holds other files" in first[1]
    assert second[0] != 0
    assert "the first process has stopped" in second[1]
