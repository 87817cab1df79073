"""Where the data folder is, and npz archives read with every failure explained."""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from numpyro_bnn._checks import argument_error, check_finite

__all__ = ["FOLDER_VARIABLE", "data_file", "read_npz"]

FOLDER_VARIABLE = "NUMPYRO_BNN_DATA"


def data_file(call: str, folder: str | os.PathLike | None, relative: str, siblings: Iterable[str]) -> Path:
    """Find ``relative`` in the data folder.

    :param folder: as the user gave it; ``None`` reads the environment variable.
    :param siblings: the relative paths the loader knows, to list those present when ``relative`` is absent.
    """
    given = os.environ.get(FOLDER_VARIABLE) if folder is None else folder
    if not given:
        raise argument_error(
            call, "folder", folder, f"Pass the folder of the data, or set the variable {FOLDER_VARIABLE}."
        )
    root = Path(given)
    if not root.is_dir():
        raise argument_error(
            call, "folder", repr(str(root)), "No such folder: pass the one that holds the data."
        )
    path = root / relative
    if not path.is_file():
        present = [name for name in siblings if (root / name).is_file()]
        raise argument_error(
            call,
            "folder",
            repr(str(root)),
            f"It holds no file {relative!r}. Present: {', '.join(present) or 'no file known here'}.",
        )
    return path


def read_npz(call: str, path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read the arrays ``names``; a damaged, foreign or pickled file, NaN and infinity are errors."""
    try:
        # Opened here, because NumPy leaves the file open when the archive is damaged; allow_pickle stays False,
        # because a data file must not be able to run code.
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array, not an npz archive")
            with archive:
                arrays = {name: archive[name] for name in names}
    except KeyError as error:
        raise argument_error(
            call, "folder", f"{str(path)!r} ({error})", f"It must hold {sorted(names)}."
        ) from error
    except (ValueError, OSError, EOFError, BadZipFile, zlib.error, NotImplementedError) as error:
        raise argument_error(
            call,
            "folder",
            f"{str(path)!r}, which cannot be read ({error})",
            "Replace it by an intact npz file.",
        ) from error
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.inexact):
            check_finite(call, f"{path.name}[{name}]", array)
    return arrays
