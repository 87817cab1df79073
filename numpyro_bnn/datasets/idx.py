"""IDX files, the format MNIST and its relatives are distributed in."""

import gzip
import os
import zlib
from pathlib import Path

import numpy as np

from numpyro_bnn._checks import argument_error, check_finite

__all__ = ["load_idx"]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"


def _refuse(path: Path, what: str) -> Exception:
    return argument_error(
        "load_idx", "path", f"{str(path)!r}: {what}", "Pass an intact IDX file, gzipped or not."
    )


def _content(path: Path) -> bytes:
    """The bytes of the file, unpacked where they start like gzip, whatever the file is called."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == _GZIP_MAGIC else content
    except (OSError, EOFError, zlib.error) as error:
        raise _refuse(path, f"it cannot be read ({error})") from error


def load_idx(path: str | os.PathLike) -> np.ndarray:
    """Read one IDX file, gzipped or not, into an array of the shape and type that its header states.

    The header is two zero bytes, a type code, the number of axes, and one big-endian 32-bit size per axis.

    :param path: the file, e.g. ``train-images-idx3-ubyte.gz``.
    :return: the array in native byte order; images come as uint8 (N, H, W), labels as uint8 (N,).
    :raises ValueError: for an absent file, a wrong magic number, too few or too many bytes, NaN or infinity.

    **Example**

    >>> import pathlib, tempfile
    >>> from numpyro_bnn.datasets import load_idx
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "labels-idx1-ubyte")
    ...     _ = path.write_bytes(bytes([0, 0, 0x08, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     load_idx(path)
    array([7, 2, 1], dtype=uint8)
    """
    path = Path(path)
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or content[3] == 0:
        raise _refuse(
            path, f"the magic number {content[:4].hex(' ') or '(no bytes)'} is not that of an IDX file"
        )
    dtype, rank = np.dtype(_TYPES[content[2]]), content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise _refuse(path, f"the header of {rank} axes is cut off after {len(content)} bytes")
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank))
    expected = dtype.itemsize
    for size in shape:  # Python integers: a corrupt header cannot overflow them
        expected *= size
    if len(content) - start != expected:
        raise _refuse(path, f"shape {shape} takes {expected} bytes of data, {len(content) - start} are there")
    array = np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))
    if array.dtype.kind == "f" and array.size:
        check_finite("load_idx", "path", array)
    return array
