"""Options of public functions and classes, as their annotations declare them: ``units:
Annotated[int, Count()]``.
"""

import importlib
import inspect
from types import ModuleType

from numpyro_bnn._options import declared_option

ROOMS = (
    "numpyro_bnn",
    *(
        "datasets",
        "estimators",
        "guides",
        "infer",
        "infinite",
        "metrics",
        "models",
        "moments",
        "nn",
        "plots",
    ),
    *("priors", "program", "results", "runs", "sgmcmc", "sgmcmc.schedules", "symmetry"),
)


def ours(value):
    return value.__module__.split(".")[0] == "numpyro_bnn"


def calls(room):
    """What users call: (name, owner, function) of public functions, classes and
    methods; a method has an owner.

    Methods that a public class inherits from another one are listed there only.
    """
    module = importlib.import_module(
        "numpyro_bnn" if room == "numpyro_bnn" else f"numpyro_bnn.{room}"
    )
    public = [(name, getattr(module, name)) for name in module.__all__]
    public = [
        (name, value)
        for name, value in public
        if callable(value) and not isinstance(value, ModuleType)
    ]
    for name, value in public:
        yield name, None, value
        parents = inspect.getmro(value) if isinstance(value, type) else ()
        for parent in [
            p
            for p in parents
            if ours(p) and (p is value or p not in dict(public).values())
        ]:
            for method, function in vars(parent).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    yield f"{name}.{method}", value, function


def parameters(call):
    """Parameters by name, also those passed on to a base class as ``**options``."""
    try:
        found = dict(inspect.signature(call).parameters)
    except ValueError:  # a class of C
        return {}
    if isinstance(call, type) and any(p.kind is p.VAR_KEYWORD for p in found.values()):
        for parent in inspect.getmro(call)[1:]:
            if ours(parent) and "__init__" in vars(parent):
                found = {**inspect.signature(parent).parameters, **found}
    return found


def declared(call):
    """Argument -> (option, classes whose instances pass as well)."""
    found = {
        name: declared_option(parameter.annotation)
        for name, parameter in parameters(call).items()
    }
    return {name: option[::-1] for name, option in found.items() if option is not None}
