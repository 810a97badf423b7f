"""Gaussian noise on a grid, from the randomness of the operating system."""

import os

import numpy as np

# Steps of the grid in one standard deviation of the noise.
_FINE = 2.0**16


def grid_of(deviation: float) -> float:
    """The distance between two numbers that can leave a client, for noise of this size."""
    return deviation / _FINE


def noisy(change: np.ndarray, clip: float, grid: float, deviation: float) -> np.ndarray:
    """The change cut to the length `clip`, with noise, in whole steps of the grid.

    Entries are rounded towards zero first, so that no change gets longer than `clip`, and the noise
    is rounded to the same grid. So what leaves is a whole number of steps whatever the change was:
    the gaps between floating-point numbers tell nothing (Mironov, CCS 2012). A change that is not
    finite counts as none.
    """
    length = np.linalg.norm(change)
    usable = np.isfinite(length) and length > 0
    shorter = change * min(1.0, clip / length) if usable else np.zeros_like(change)
    return np.trunc(shorter / grid) + np.rint(_normal(change.size) * (deviation / grid))


def _normal(count: int) -> np.ndarray:
    """Standard normal numbers, by Box and Muller's transform; never the same ones again."""
    half = -(-count // 2)
    bits = np.frombuffer(os.urandom(16 * half), np.uint64).reshape(2, half)
    uniform = ((bits >> np.uint64(11)).astype(float) + 1) * 2.0**-53  # in (0, 1]
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * np.pi * uniform[1]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
