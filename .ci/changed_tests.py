"""Print the test files of the rooms that differ from a base commit: python
.ci/changed_tests.py origin/main

A room is a folder or file of the package; the table says which tests are about it. If
the base is missing or is this commit, nothing is printed.
`tests/use/test_repository.py` checks that the table is complete.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Room -> patterns of test files. Pages, examples and tasks are about all rooms, and run
# where they change themselves.
TESTS: dict[str, tuple[str, ...]] = {
    "_jaxprs": (
        "theory/test_collapse.py",
        "theory/test_elbo*.py",
        "theory/test_laplace_rows.py",
        "theory/test_moments.py",
        "theory/test_precision_gibbs.py",
        "theory/test_programs.py",
        "theory/test_random_models.py",
        "use/test_category_codes.py",
        "use/test_counted_rows.py",
    ),
    "datasets": ("theory/test_scaler.py",),
    "estimators": ("contracts/test_estimator*.py", "borders/test_sk*.py"),
    "guides": (
        "contracts/test_guides.py",
        "theory/test_elbo*.py",
        "theory/test_evidence.py",
        "theory/test_flows.py",
        "theory/test_gaussian_guides.py",
        "borders/test_svi.py",
    ),
    "guides/adf": (
        "contracts/test_adf_guide.py",
        "theory/test_adf*.py",
        "theory/test_left_out.py",
    ),
    "guides/laplace": (
        "theory/test_laplace*.py",
        "theory/test_left_out.py",
        "theory/test_random_models.py",
    ),
    "infer": (
        "contracts/test_ensemble.py",
        "contracts/test_kernels.py",
        "contracts/test_wrappers.py",
        "theory/test_collapse.py",
        "theory/test_kernel_posteriors.py",
        "theory/test_local_sites.py",
        "theory/test_microcanonical_chains.py",
        "theory/test_orbit_*.py",
        "theory/test_precision_gibbs.py",
        "theory/test_surviving_chains.py",
        "theory/test_tempering.py",
        "theory/test_unit_moves.py",
        "theory/test_warm_up.py",
        "borders/test_blackjax.py",
        "borders/test_mcmc.py",
        "use/test_kernel_refusals.py",
    ),
    "infinite": ("contracts/test_pretrained.py", "theory/test_infinite_*.py"),
    "metrics": (
        "theory/test_health.py",
        "theory/test_metrics.py",
        "use/test_marked_chains.py",
    ),
    "models": ("contracts/test_networks.py",),
    "moments": ("contracts/test_moment_rules.py", "theory/test_moments.py"),
    "networks": ("contracts/test_networks.py", "borders/test_modules.py"),
    "nn": ("contracts/test_layers.py",),
    "plots": ("use/test_plots.py",),
    "priors": (
        "contracts/test_pretrained.py",
        "contracts/test_priors.py",
        "theory/test_priors.py",
    ),
    "program": (
        "borders/test_arguments.py",
        "contracts/test_zoo.py",
        "theory/test_evidence.py",
        "theory/test_posterior.py",
        "theory/test_programs.py",
        "theory/test_random_models.py",
        "theory/test_truth.py",
        "use/test_category_codes.py",
        "use/test_export_refusals.py",
        "use/test_counted_rows.py",
    ),
    "results": (
        "borders/test_arguments.py",
        "borders/test_svi.py",
        "contracts/test_exports.py",
        "theory/test_health.py",
        "theory/test_infinite_processes.py",
        "theory/test_random_models.py",
        "use/test_export_refusals.py",
    ),
    "runs": (
        "borders/test_batches.py",
        "borders/test_disk*.py",
        "borders/test_processes.py",
    ),
    "sgmcmc": ("theory/test_sgmcmc_*.py",),
    "symmetry": (
        "contracts/test_symmetries.py",
        "theory/test_canonical.py",
        "theory/test_gig.py",
        "theory/test_orbit_*.py",
    ),
}


def changed_files(base: str) -> list[str]:
    """Files that differ between the base and this commit, since they diverged."""
    command = ["git", "diff", "--name-only", f"{base}...HEAD"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return listed.stdout.splitlines() if listed.returncode == 0 else []


def room_of(path: str) -> str:
    """The longest room of the table that holds a file of the package."""
    inside = path.removeprefix("numpyro_bnn/").removesuffix(".py")
    return max(
        (room for room in TESTS if inside == room or inside.startswith(f"{room}/")),
        key=len,
        default="",
    )


def tests_of(path: str) -> set[str]:
    """Test files that a change of this file concerns."""
    if path.startswith("tests/") and Path(path).name.startswith("test_"):
        return {path}
    if not path.startswith("numpyro_bnn/"):
        return set()
    files = (
        file
        for pattern in TESTS.get(room_of(path), ())
        for file in (ROOT / "tests").glob(pattern)
    )
    return {str(file.relative_to(ROOT)) for file in files}


def main() -> None:
    """Print the files, in order."""
    names = set().union(*map(tests_of, changed_files(sys.argv[1])))
    print(" ".join(name for name in sorted(names) if (ROOT / name).is_file()))


if __name__ == "__main__":
    main()
