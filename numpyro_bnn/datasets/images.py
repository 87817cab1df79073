"""Grayscale images read from a folder, in the layout that convolutions take."""

import os
from pathlib import Path

import numpy as np

from numpyro_bnn._checks import argument_error, check_labels, check_rank, check_same_length, unknown_name
from numpyro_bnn.datasets.dataset import Dataset
from numpyro_bnn.datasets.files import data_file, read_npz

__all__ = ["load_images"]

# Name -> (file, parts it holds). KMNIST serves as out-of-distribution test data only.
_SETS = {
    "mnist": ("image/mnist.npz", ("train", "test")),
    "fashion_mnist": ("image/fashion_mnist.npz", ("train", "test")),
    "kmnist": ("image/kmnist_test.npz", ("test",)),
}
_NUM_CLASSES = 10


def _part(path: Path, images: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Check one part; bytes become float32 (N, H, W, 1) in [0, 1] and int32 labels."""
    check_rank("load_images", f"{path.name}[x]", images, 3, "(N, H, W)")
    check_rank("load_images", f"{path.name}[y]", classes, 1, "(N,)")
    check_same_length("load_images", x=images, y=classes)
    if images.dtype != np.uint8:
        raise argument_error(
            "load_images", f"{path.name}[x]", f"dtype {images.dtype}", "Store pixels as uint8 from 0 to 255."
        )
    if images.size == 0:
        raise argument_error(
            "load_images", f"{path.name}[x]", f"shape {images.shape}", "Store at least one image."
        )
    check_labels("load_images", f"{path.name}[y]", classes, _NUM_CLASSES)
    return (images.astype(np.float32) / np.float32(255))[..., None], classes.astype(np.int32)


def load_images(name: str, folder: str | os.PathLike | None = None) -> Dataset:
    """Load MNIST, Fashion-MNIST or the test part of KMNIST, in the canonical order and division.

    The file ``image/<name>.npz`` (``image/kmnist_test.npz``) holds ``x_train``, ``x_test`` (N, 28, 28) uint8
    and ``y_train``, ``y_test`` (N,).

    :param name: ``"mnist"``, ``"fashion_mnist"`` or ``"kmnist"``, which has test rows only: its training
        part is empty.
    :param folder: the data folder; by default the environment variable ``NUMPYRO_BNN_DATA``.
    :return: a :class:`Dataset`; images (N, 28, 28, 1) float32 in [0, 1], int32 labels (N,) with K = 10.
    :raises ValueError: for an unknown name, or an absent or damaged file.

    **Example**

    >>> import os, tempfile
    >>> import numpy as np
    >>> from numpyro_bnn.datasets import load_images
    >>> with tempfile.TemporaryDirectory() as folder:      # a file of two images in place of the real one
    ...     os.mkdir(f"{folder}/image")
    ...     images = np.full((2, 28, 28), 255, np.uint8)
    ...     np.savez(f"{folder}/image/kmnist_test.npz", x_test=images, y_test=np.array([3, 7]))
    ...     load_images("kmnist", folder)
    Dataset('kmnist', x_train=(0, 28, 28, 1), y_train=(0,) int32, x_test=(2, 28, 28, 1), y_test=(2,) int32)
    """
    if name not in _SETS:
        raise unknown_name("load_images", "name", name, _SETS)
    file, parts = _SETS[name]
    path = data_file("load_images", folder, file, [known for known, _ in _SETS.values()])
    arrays = read_npz("load_images", path, [f"{axis}_{part}" for part in parts for axis in "xy"])
    x_test, y_test = _part(path, arrays["x_test"], arrays["y_test"])
    if "train" in parts:
        x_train, y_train = _part(path, arrays["x_train"], arrays["y_train"])
    else:
        x_train, y_train = x_test[:0], y_test[:0]
    return Dataset(x_train, y_train, x_test, y_test, name)
