"""Plants the fault of a trial in processes that its tests start."""

import os

if fault := os.environ.get("NUMPYRO_BNN_FAULT"):
    import importlib.util
    from pathlib import Path

    path = Path(__file__).resolve().parent.parent / "planting.py"
    spec = importlib.util.spec_from_file_location("_planting", path)
    planting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planting)
    planting.install(*fault.split("="))
