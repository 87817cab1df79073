"""The demo shows the model that it fits; tables of pages are those of their files."""

import importlib
import inspect
import json
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
DOCS = FOLDER.parent / "docs"
# modules that several benchmarks import
PARTS = {"__main__", "annealing", "boosting", "peers", "shared", "uci_gap", "uci_table"}


@pytest.fixture(autouse=True)
def without_data_folder(monkeypatch):
    """Scripts may find one there."""
    monkeypatch.delenv("NUMPYRO_BNN_DATA", raising=False)


def test_demo_prints_the_model_that_its_estimator_fits(monkeypatch):
    """Both have the same sites, and at random values the same log densities, of which
    rows of padding are no part.
    """
    from examples import demo
    from numpyro_bnn.estimators import methods
    from numpyro_bnn.program import Posterior

    class ReadError(Exception):
        """Stops the fit, with what its method is given."""

    def read(task):
        raise ReadError(task)

    monkeypatch.setitem(methods.METHODS, "ensemble", read)
    with pytest.raises(ReadError) as stopped:
        demo.network(demo.load(0, 114), demo.parse([]))
    task = stopped.value.args[0]
    x, y, is_data = task.data
    fitted = Posterior(task.model, task.data)
    shown = Posterior(demo.model, (x[is_data], y[is_data]))
    z = shown.initial(jax.random.key(0))

    @partial(jax.jit, static_argnums=0)
    def densities(posterior, z):
        rows = posterior.log_likelihood(z)["y"]
        return rows, posterior.log_prior(z), posterior.log_jacobian(z)

    rows, *by_site = densities(fitted, z)
    expected, *by_site_shown = densities(shown, z)
    for found, wanted in zip(by_site, by_site_shown, strict=True):
        assert found == pytest.approx(jax.tree.map(float, wanted), rel=1e-5)
    rows = np.asarray(rows)
    np.testing.assert_allclose(rows[~is_data], 0)
    np.testing.assert_allclose(rows[is_data], expected, rtol=1e-5, atol=1e-5)


def test_one_door_to_all_measurements(capsys, tmp_path):
    """Every benchmark has a name there, and every option is one of its script."""
    from examples.benchmarks.__main__ import MEASUREMENTS, command, main

    modules = {row.module for row in MEASUREMENTS.values()}
    scripts = {path.stem for path in (FOLDER / "benchmarks").glob("*.py")}
    assert {f"benchmarks.{name}" for name in scripts - PARTS} <= modules
    for name, row in MEASUREMENTS.items():
        words = command(name, tmp_path, str(tmp_path))
        assert words[2] == f"examples.{row.module}"
        importlib.import_module(words[2]).parse(words[3:])
    assert main([]) == 0
    assert set(MEASUREMENTS) <= set(capsys.readouterr().out.split())
    assert main(["no-such"]) == 2
    assert "there are" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["uci", "--splits", "0"])
    assert stopped.value.code == 2


# Where the figures of a page lie, and what writes its tables; others are of files too
# large to be kept.
KEPT = {
    "blackjax_ess": "tables/microcanonical.md",
    "adf_speed": "tables/adf.md",
    "adf_uci": "tables/adf.md",
    "classification": "tables/estimators.md",
    "coupling_step": "speed.md",
    "estimators": "tables/estimators.md",
    "estimators_rows": "tables/estimators.md",
    "function_agreement": "tables/microcanonical.md",
    "compilation": "speed.md",
    "first_draw": "speed.md",
    "gauntlet": "choosing.md",
    "gradient_cost": "speed.md",
    "hierarchical_hmc": "tables/hierarchical.md",
    "image_chains": "tables/images.md",
    "infinite_kernel": "tables/infinite.md",
    "infinite_uci": "tables/infinite.md",
    "laplace_uci": "tables/guides.md",
    "minibatch_defaults": "tables/minibatches.md",
    "minibatches": "tables/minibatches.md",
    "microcanonical": "tables/microcanonical.md",
    "microcanonical_cost": "tables/microcanonical.md",
    "mixing": "tables/hierarchical.md",
    "orbit_moves": "speed.md",
    "sgld_step": "speed.md",
    "sources": "scale.md",
    "tables": "tables/real_tables.md",
    "uci": "tables/uci.md",
    "variational_uci": "tables/guides.md",
}


SCRIPT_OF = {
    "microcanonical_cost": "benchmarks.microcanonical",
    "estimators_rows": "benchmarks.estimators",
    "image_chains": "image_chains",
}


@pytest.mark.parametrize("name", KEPT)
def test_tables_of_pages_are_those_of_their_files(name):
    """Nothing is typed: file, table function and page agree."""
    from examples.benchmarks.shared import provenance

    script = SCRIPT_OF.get(name, f"benchmarks.{name}")
    module = importlib.import_module(f"examples.{script}")
    if name == "uci":
        made = module.tables(module.lines_of(DOCS / "uci.jsonl"))
    else:
        report = json.loads((DOCS / f"{name}.json").read_text())
        if hasattr(module, "tables"):
            made = module.tables(report)
        else:
            first = next(iter(inspect.signature(module.table).parameters))
            more = []
            if name == "infinite_uci":
                more = [module.nuts_of(DOCS / "variational_uci.json")]
            made = {name: module.table(report.get(first, report), *more)}
        if name != "laplace_uci":  # its rows are of several runs, and say so themselves
            end = f"\n\n{provenance([report])}"
            made = {table: text + end for table, text in made.items()}
    if "microcanonical" in name:  # one script, two runs
        made = {name: made[name]}
    page = (DOCS / KEPT[name]).read_text()
    for table, text in made.items():
        begin, end = (f"<!-- table of {table}: {word} -->" for word in ("begin", "end"))
        assert f"{begin}\n{text}\n{end}" in page
