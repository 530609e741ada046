"""Detection of tropical cyclones and atmospheric rivers in a weather map, by a rule on its fields alone.

Tropical cyclone, after Vitart et al. (1997, J. Climate 10, 745), Zhao et al. (2009, J. Climate 22, 6653) and the TECA detector of
Prabhat et al. (2012, Procedia Comp. Sci. 9, 866): a minimum of sea-level pressure within 3 degrees, equatorward of 40, that is 4
hPa or more below the mean of the ring at 5 to 7 degrees; with vorticity at 850 hPa of at least 3.5e-5 /s (cyclonic) and wind of at
least 17 m/s within 3 degrees; and a warm core: the mean of T500 and T200 within 1.5 degrees is 0.8 K above that of the ring, and
T500 alone 0.4 K. Its mask is the component, connected with the centre, of cells within 5 degrees whose wind at 850 hPa exceeds 15
m/s, and of its eye (all cells up to the radius of the maximum wind).

Atmospheric river, after Rutz et al. (2014, Mon. Wea. Rev. 142, 905), Guan and Waliser (2015, JGR Atmos. 120, 12514) and Ralph et
al. (2004, Mon. Wea. Rev. 132, 1721): vapour transport is approximated by IVT = 0.8 TMQ |V850|, as the moist layer holds most of the
water. It is a connected component of cells with at least 250 kg/m/s and 1.7 times the median of their latitude, with at least 20
kg/m2 of water, poleward of 20 degrees and more than 6 degrees from a tropical cyclone. An object counts if its length (great
circle, between its ends along its main axis) is at least 2000 km and twice its width (area / length), and its mean poleward
transport is 50 kg/m/s or more.

H, W rows (south to north) and columns (eastward)   C the 16 variables"""

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.atmosphere import VARIABLES
from data_prep.sphere import DEGREE, RADIUS, Array, Grid, polar_coordinates
from hpcai.lazy import import_optional

CYCLONE, RIVER = 1, 2

TROPICS = 40.0                                                    # degrees
MINIMUM_RADIUS = 3.0                                              # degrees without a lower pressure
MIN_DEFICIT = 400.0                                               # Pa
RING = (5.0, 7.0)                                                 # degrees
MIN_VORTICITY = 3.5e-5                                            # /s
MIN_WIND = 17.0                                                   # m/s
MIN_WARMTH, MIN_WARMTH_500 = 0.8, 0.4                             # K
MASK_WIND, MASK_RADIUS = 15.0, 5.0                                # m/s, degrees

MIN_TRANSPORT, MOIST_LAYER = 250.0, 0.8                           # kg/m/s; share of the water that moves with the wind at 850 hPa
MIN_RELATIVE, MIN_WATER = 1.7, 20.0                               # times the median of the latitude; kg/m2
SUBTROPICS = 20.0                                                 # degrees
CYCLONE_DISTANCE = 6.0                                            # degrees
MIN_LENGTH, MIN_ASPECT_RATIO, MIN_POLEWARD = 2.0e6, 2.0, 50.0     # m, 1, kg/m/s

_ndimage = partial(import_optional, "scipy.ndimage", "finding cyclones and rivers needs", "deepcam")


def detect(grid: Grid, fields: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the mask of a map: 0 nothing, 1 tropical cyclone, 2 atmospheric river.   [H, W, C] -> [H, W]"""
    field = {name: fields[..., channel].astype(np.float64) for channel, name in enumerate(VARIABLES)
             if name in ("TMQ", "U850", "V850", "PSL", "T200", "T500")}  # fmt: skip
    mask = np.zeros(fields.shape[:2], np.uint8)
    centres = _mark_cyclones(grid, field, mask)
    _mark_rivers(grid, field, mask, centres)
    return mask


def _mark_cyclones(grid: Grid, field: dict[str, Array], mask: NDArray[np.uint8]) -> list[tuple[float, float]]:
    """Mark cyclones in ``mask``, and return latitude and longitude of their centres."""
    ndimage = _ndimage()
    spacing = np.abs(np.array((grid.latitude[1] - grid.latitude[0], grid.longitude[1] - grid.longitude[0])))
    size = 2 * np.maximum(np.round(MINIMUM_RADIUS / 2 / spacing), 1).astype(int) + 1
    pressure, wind = field["PSL"], np.hypot(field["U850"], field["V850"])
    lowest = pressure == ndimage.minimum_filter(pressure, size, mode=("nearest", "wrap" if grid.periodic else "nearest"))
    lowest &= np.abs(grid.latitude)[:, None] <= TROPICS
    vorticity = grid.gradient(field["V850"])[0] - grid.gradient(field["U850"])[1]
    vorticity *= np.sign(grid.latitude)[:, None]
    mean_temperature = (field["T500"] + field["T200"]) / 2
    centres = []
    for row, column in np.argwhere(lowest):
        centre = float(grid.latitude[row]), float(grid.longitude[column])
        rows, columns = grid.nearby(*centre, RING[1] * DEGREE)
        columns = columns[np.argsort((grid.longitude[columns] - centre[1] + 180) % 360)]        # contiguous eastward
        box, distance = np.ix_(rows, columns), polar_coordinates(grid, rows, columns, *centre)[0] / DEGREE      # degrees
        ring, near, core = (distance >= RING[0]), distance <= 3.0, distance <= max(1.5, float(spacing.max()))
        ring &= distance <= RING[1]
        if not ring.any() or (pressure[box][distance <= MINIMUM_RADIUS] < pressure[row, column]).any():
            continue
        first = np.unravel_index(np.where(distance <= MINIMUM_RADIUS, pressure[box], np.inf).argmin(), distance.shape)
        if distance[first] > distance.min():    # two cells of the same pressure are one minimum
            continue
        warmth, middle = (float(t[box][core].mean() - t[box][ring].mean()) for t in (mean_temperature, field["T500"]))
        max_wind = float(wind[box][near].max())
        if (pressure[box][ring].mean() - pressure[row, column] < MIN_DEFICIT or vorticity[box][near].max() < MIN_VORTICITY
                or max_wind < MIN_WIND or warmth < MIN_WARMTH or middle < MIN_WARMTH_500):  # fmt: skip
            continue
        eye = float(distance[near & (wind[box] == max_wind)].min())
        inside = ((wind[box] > MASK_WIND) | (distance <= eye)) & (distance <= MASK_RADIUS)
        labels, _ = ndimage.label(inside, np.ones((3, 3)))
        connected = labels == labels[np.unravel_index(distance.argmin(), distance.shape)]
        local_mask = mask[box]
        local_mask[connected] = CYCLONE
        mask[box] = local_mask
        centres.append(centre)
    return centres


def _mark_rivers(grid: Grid, field: dict[str, Array], mask: NDArray[np.uint8], cyclones: list[tuple[float, float]]) -> None:
    ndimage = _ndimage()
    east, north = (MOIST_LAYER * field["TMQ"] * field[wind] for wind in ("U850", "V850"))  # kg/m/s
    flow = np.hypot(east, north)
    rows_of_4_degrees = max(1, round(4 / float(grid.latitude[1] - grid.latitude[0])))
    zonal_median = ndimage.uniform_filter1d(np.median(flow, axis=1), rows_of_4_degrees, mode="nearest")
    strong = (flow >= np.maximum(MIN_TRANSPORT, MIN_RELATIVE * zonal_median[:, None])) & (field["TMQ"] >= MIN_WATER)
    strong &= np.abs(grid.latitude)[:, None] >= SUBTROPICS
    for centre in cyclones:
        rows, columns = grid.nearby(*centre, CYCLONE_DISTANCE * DEGREE)
        distance = polar_coordinates(grid, rows, columns, *centre)[0]
        strong[np.ix_(rows, columns)] &= distance > CYCLONE_DISTANCE * DEGREE
    labels, count = ndimage.label(strong, np.ones((3, 3)))
    if grid.periodic:
        _merge_across_seam(labels)
    area = (DEGREE**2 * np.cos(grid.phi) * np.diff(grid.latitude[:2]) * np.diff(grid.longitude[:2])).clip(0) * np.ones(flow.shape)
    sizes = np.bincount(labels.ravel(), area.ravel(), count + 1)
    for label in 1 + np.flatnonzero(sizes[1:] > MIN_LENGTH**2 / 50):        # smaller: thinner than a fiftieth of its length
        cells = np.nonzero(labels == label)
        length = _length(grid, cells, area[cells])
        width = float(sizes[label]) / max(length, 1.0)
        poleward = np.average(north[cells] * np.sign(grid.latitude[cells[0]]), weights=area[cells])
        if length >= MIN_LENGTH and length >= MIN_ASPECT_RATIO * width and poleward >= MIN_POLEWARD:
            mask[cells] = np.where(mask[cells] == CYCLONE, CYCLONE, RIVER)


def _merge_across_seam(labels: NDArray[Any]) -> None:
    """Merge labels that touch across the first and last column, corners included."""
    height = len(labels)
    for row in range(height):
        for other in range(max(row - 1, 0), min(row + 2, height)):
            a, b = labels[row, 0], labels[other, -1]
            if a and b and a != b:
                labels[labels == b] = a


def _length(grid: Grid, cells: tuple[NDArray[Any], ...], area: Array) -> float:
    """Return the great-circle distance between the ends of the main axis of some cells."""
    phi, lam = grid.phi[cells[0], 0], grid.lam[0, cells[1]]
    point = np.stack((np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)), axis=1)       # [cells, 3]
    centre = (area[:, None] * point).sum(0)
    centre /= np.linalg.norm(centre)
    flat = point - (point * centre).sum(1, keepdims=True) * centre
    spread = np.einsum("n,ni,nj->ij", area, flat, flat)
    axis = np.linalg.eigh(spread)[1][:, -1]
    along = (flat * axis).sum(1)
    first, last = point[along.argmin()], point[along.argmax()]
    return RADIUS * float(np.arctan2(np.linalg.norm(np.cross(first, last)), first @ last))
