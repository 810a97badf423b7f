"""The map of a road network."""

from typing import TYPE_CHECKING, Any

import numpy as np

from aipod.experiments.tasks.roads import Roads

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_roads(
    figure: "Figure", roads: Roads, before: np.ndarray, after: np.ndarray, tolls: np.ndarray
) -> None:
    """Draws the flows without and with tolls, coloured by how full the links are, and the tolls."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    fullest, dearest = 2.7, float(np.abs(tolls).max()) or 1.0
    fullness: Any = ScalarMappable(Normalize(0, fullest), "YlOrRd")
    prices: Any = ScalarMappable(Normalize(-dearest, dearest), "RdBu_r")
    maps = (
        ("without tolls", before, before / roads.capacity, fullness),
        ("with tolls", after, after / roads.capacity, fullness),
        ("tolls", np.full_like(before, 9.0), tolls, prices),
    )
    places = figure.subplots(1, 3)
    for place, (title, widths, values, colours) in zip(places, maps, strict=True):
        for k in np.argsort(values):
            ends = roads.places[[roads.senders[k], roads.receivers[k]]]
            along = ends[1] - ends[0]
            # Draw the two directions of a road side by side.
            beside = 0.0022 * np.array([along[1], -along[0]]) / np.linalg.norm(along)
            place.plot(
                *(ends + beside).T,
                color=colours.to_rgba(values[k]),
                linewidth=0.4 + 0.22 * widths[k],
                solid_capstyle="round",
            )
        place.scatter(*roads.places.T, s=9, color="#333333", zorder=3)
        place.set_title(title)
        place.set_aspect(1 / np.cos(np.deg2rad(roads.places[:, 1].mean())))
        place.axis("off")
    look: dict[str, Any] = {"orientation": "horizontal", "shrink": 0.7, "pad": 0.02}
    figure.colorbar(fullness, ax=places[:2], label="flow / capacity", aspect=40, **look)
    figure.colorbar(prices, ax=places[2], label="toll, in units of time", **look)
