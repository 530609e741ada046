"""Simulated CT scans of abdomens: a trunk with its organs, two kidneys, tumours in them, and the artefacts of a scanner.

Anatomy is laid out in mm relative to a point between the kidneys, for a cavity of 125 x 85 mm (half of the width and of the depth
of the body within its wall), and is scaled, bent and painted in Hounsfield units with soft edges, later organs over earlier ones.
Sizes, positions and attenuations are approximate values from radiology textbooks; nothing is fitted to data.

    contrast    35 + enhancement in HU, of three phases: late arterial (cortex and aorta bright), venous (kidneys even), none
    tumours     0 to 3, in 92 % of the cases at least one; diameters 20 to 100 mm, log-uniform; many leave the kidney's outline
    look-alikes liver, spleen, bowel with contrast and vessels overlap kidneys and tumours in HU; cysts count as kidney

D slices from head to feet (z, mm)   H rows from front to back (y)   W columns from the patient's right to the left (x)"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.patient import Array, Patient, Point, rotation_matrix, trunk_radius
from hpcai.lazy import import_optional

FAT, GAS, LUNG = -105.0, -860.0, -840.0
LEFT, RIGHT = 1, -1                                                 # of the patient: x grows to the left
# HU that each phase adds at full strength: late arterial, venous, none.
ENHANCEMENT = {
    "aorta": (250, 110, 0), "cava": (50, 105, 0), "renal vein": (130, 110, 0), "portal": (50, 120, 0), "cortex": (145, 125, 0),
    "medulla": (50, 115, 0), "liver": (18, 55, 0), "spleen": (75, 65, 0), "pancreas": (65, 50, 0), "bowel": (40, 45, 0),
    "muscle": (8, 14, 0), "clear cell": (95, 65, 0), "papillary": (22, 36, 0), "oncocytic": (120, 90, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Scan:
    image: Array                                                    # HU, integers
    label: NDArray[np.uint8]                                        # 0 background, 1 kidney, 2 tumour
    spacing_mm: tuple[float, float, float]


# ---- the trunk


def _paint_trunk(patient: Patient, fat: float, wall: float) -> None:
    """Paint skin, fat, the muscles of the wall with ribs, and inner fat, slice by slice because they fill the full slice."""
    random, (sy, sx) = patient.random, patient.scale
    half_y, half_x = 85 * sy, 125 * sx
    muscle, slope, first = patient.hu("muscle", 52), random.uniform(0.5, 0.8), random.uniform(0, 27)
    table = half_y + fat + wall + random.uniform(2, 8)
    for d in range(patient.z.size):
        box = (slice(d, d + 1), slice(None), slice(None))
        z, y, x = patient.coordinates(box)
        depth = (1 - trunk_radius(y / np.float32(half_y), x / np.float32(half_x))) * np.float32(half_y)      # 0 within the wall
        bed = np.float32(table) - y + x * x / np.float32(900)
        patient.paint(box, patient.partial_volume(4 - np.abs(bed + 14)) * (np.abs(x) < 210), -300.0)
        thickness = np.float32(fat) * (1 + np.float32(0.25) * np.sin(x / 70 + 1) - np.float32(0.3) * y / np.float32(half_y))
        patient.paint(box, patient.partial_volume(depth + wall + thickness + 2), 20.0)
        patient.paint(box, patient.partial_volume(depth + wall + thickness), FAT)
        patient.paint(box, patient.partial_volume(depth + wall), muscle)
        patient.paint(box, patient.partial_volume(depth - 1), FAT + 5)
        # Ribs slope down from the spine to the front, and end at the margin of the chest.
        front = np.clip(0.5 - y / np.float32(2 * half_y), 0, 1)
        turn = (z - np.float32(slope * 120) * front + np.float32(first)) / 27
        band = 6 - np.abs(turn - np.round(turn)) * 27
        ring = np.minimum(4 - np.abs(depth + 5), np.minimum(band, (-20 - 90 * front - z) / 4))
        ring = np.where(np.abs(x) > 22, ring, np.float32(-9))
        patient.paint(box, patient.partial_volume(ring), np.where(ring > 1.6, np.float32(230), np.float32(620)))


def _paint_spine(patient: Patient, middle: float) -> None:
    random = patient.random
    marrow, shell, first = random.uniform(130, 230), random.uniform(450, 750), random.uniform(0, 34)
    disc_hu = random.uniform(70, 100)
    box = patient.box((-999, middle - 30, -60), (999, middle + 75, 60))
    assert box is not None
    z, y, x = patient.coordinates(box)
    y = y - np.float32(middle)
    turn = (z + np.float32(first)) / 34
    from_disc = np.abs(turn - np.round(turn)) * 34                  # mm
    waist = 1 - np.float32(0.12) * np.clip(from_disc / 17, 0, 1)
    body = (1 - np.sqrt((x / (23 * waist)) ** 2 + (y / (17 * waist)) ** 2)) * 17
    canal = 9 - np.sqrt((x / np.float32(1.2)) ** 2 + (y - 26) ** 2)
    bone = np.maximum(body, np.minimum(canal + 6, from_disc - 6))   # the arch leaves gaps between vertebrae
    bone = np.maximum(bone, np.minimum(4 - np.abs(x), np.minimum(from_disc - 8, np.minimum(y - 30, 62 - y))))       # spinous
    across = np.minimum(4 - np.abs(y - 20 + np.abs(x) / 8), np.minimum(from_disc - 11, 37 - np.abs(x)))
    bone = np.maximum(bone, across)                                 # transverse processes
    disc = np.minimum(body, 4.5 - from_disc)
    value = np.where(np.minimum(bone, from_disc - 5) > 2.2, np.float32(marrow), np.float32(shell))
    value = np.where(disc > 0, np.float32(disc_hu), value)
    patient.paint(box, patient.partial_volume(bone), value)
    patient.paint(box, patient.partial_volume(canal), np.float32(30))


def _paint_muscles(patient: Patient, middle: float) -> None:
    muscle = patient.hu("muscle", 54)
    for side in (LEFT, RIGHT):
        axes = rotation_matrix((0, 1, 0), side * 6)
        patient.paint_ellipsoid((105, middle - 4, side * 36), (100, 18, 15), muscle, axes=axes, lobes=0.04)
        patient.paint_ellipsoid((20, middle + 42, side * 34), (400, 22, 27), muscle, margin=-9, lobes=0.03)


# ---- organs


def _paint_organs(patient: Patient) -> None:
    random, sy, sx = patient.random, *patient.scale

    def organ(tissue: str, position: Point, radii: Point, base: float = 45, lobes: float = 0.08, tilt: float = 15) -> None:
        """Paint an organ with a small random shift, scale and tilt."""
        centre = patient.scale_point(np.array(position) + random.normal(0, 5, 3))
        size = np.array(radii) * (1, sy, sx) * random.uniform(0.9, 1.1, 3)
        axes = rotation_matrix(random.normal(size=3), random.normal(0, tilt))
        value = patient.hu(tissue, base) if tissue in ENHANCEMENT else base
        patient.paint_ellipsoid(centre, size, value, axes=axes, lobes=lobes, margin=2)

    for side in (LEFT, RIGHT):
        organ("lung", (-190, 20, side * 66), (90, 72, 58), LUNG, 0.03, 5)
    liver = random.normal(57, 6)
    organ("liver", (-72, -8, -60), (80, 74, 72), liver, 0.06, 8)
    organ("liver", (-92, -42, 8), (38, 36, 64), liver)
    organ("liver", (-8, 2, -88), (55, 50, 30), liver)
    for _ in range(7):
        start = np.array((-75, -12, -30))
        end = start + random.normal(0, 1, 3) * (25, 22, 12) - (0, 0, 45)
        patient.paint_tube(start, end, random.uniform(2, 4), patient.hu("portal", 40))
    organ("spleen", (-65, 34, 92), (random.uniform(38, 58), 38, 22), 48, tilt=10)
    organ("pancreas", (-8, -10, 25), (15, 10, 62), 42, 0.12)
    if random.random() < 0.85:
        organ("bile", (-12, -46, -50), (27, 13, 14), random.uniform(2, 18), 0.03)
    paint_bowel(patient, (-70, -40, 58), (46, 34, 40), random.choice(("fluid", "food")))
    for first, step, count in (((-2, 8, -100), (22, 0, 1), 8), ((-55, 12, 104), (26, 1, -1), 9), ((-5, -58, -82), (1, 0, 21), 9)):
        for i in range(count):                                      # colon: up, down and across
            paint_bowel(patient, np.array(first) + np.array(step) * i + random.normal(0, 4, 3), random.uniform(15, 24, 3), "colon")
    oral = random.random() < 0.4
    for _ in range(int(random.integers(26, 44))):
        angle, out = random.uniform(0, 2 * np.pi), np.sqrt(random.uniform(0, 1))
        at = (random.uniform(-15, 185), -34 + 34 * out * np.sin(angle), 82 * out * np.cos(angle))
        content = random.choice(("fluid", "collapsed", "contrast" if oral else "food", "gas"), p=(0.4, 0.3, 0.2, 0.1))
        paint_bowel(patient, at, random.uniform(8, 17, 3) * (1, 1, random.uniform(1, 2.2)), content)


def paint_bowel(patient: Patient, position: Point, radii: Any, content: str) -> None:
    """Paint a piece of bowel or the stomach: a wall around its contents. Gas is at the front, since the patient lies on the
    back."""
    random = patient.random
    axes = rotation_matrix(random.normal(size=3), random.uniform(0, 50))
    contents = {"fluid": random.uniform(5, 35), "food": random.uniform(15, 60), "contrast": random.uniform(120, 320), "gas": GAS,
             "collapsed": patient.hu("bowel", 38), "colon": random.uniform(10, 70)}[content]  # fmt: skip
    centre = patient.scale_point(position)
    painted = patient.paint_ellipsoid(centre, radii, patient.hu("bowel", 38), axes=axes, lobes=0.12, margin=2)
    if painted is None or not painted[1].size:
        return
    box, depth, parts = painted
    value: Any = np.float32(contents)
    if content == "colon":
        value = value + 120 * np.minimum(patient.random_field(parts, 12), 0)
    level = random.uniform(-0.4, 0.9) if content in ("fluid", "colon", "food") and random.random() < 0.6 else 2
    y = patient.coordinates(box)[1] - np.float32(centre[1])
    value = np.where(y < -np.float32(level * min(radii)), np.float32(GAS), value)
    patient.paint(box, patient.partial_volume(depth - np.float32(2.5)), value)


def _paint_vessels(patient: Patient, kidneys: Sequence["Kidney"]) -> None:
    random, aorta, cava = patient.random, patient.hu("aorta", 42), patient.hu("cava", 42)
    width, split = random.uniform(8, 12), random.uniform(60, 95)
    patient.paint_tube((-300, 6, 8), (split, 8, 5), width, aorta)
    patient.paint_tube((-300, 0, -22), (-60, 2, -22), width, cava)
    patient.paint_tube((-60, 2, -22), (split + 8, 8, -20), random.uniform(8, 12), cava)
    for side in (LEFT, RIGHT):
        patient.paint_tube((split, 8, 5), (split + 110, 30, 5 + side * 40), 6, aorta)
        patient.paint_tube((split + 8, 9, -19), (split + 110, 36, -16 + side * 42), 7, cava)
    patient.paint_tube((-25, -2, 6), (120, -26, 2), 3.5, aorta)
    patient.paint_tube((-28, -14, -2), (120, -28, -8), 5, patient.hu("portal", 42))
    for kidney in kidneys:
        z, y, x = kidney.hilum / (1, *patient.scale)
        patient.paint_tube((z - 8, 6, 8), (z, y, x), 2.8, aorta)
        patient.paint_tube((z - 2, 0, -20 if kidney.side == RIGHT else -14), (z + 4, y - 4, x), 4.5, patient.hu("renal vein", 42))


# ---- kidneys


@dataclass(frozen=True)
class Kidney:
    side: int
    centre: NDArray[np.float64]
    radii: NDArray[np.float64]                                      # along the length, front to back, side to side
    axes: NDArray[np.float64]                                       # downward, across, toward the hilum

    @property
    def hilum(self) -> NDArray[np.float64]:
        return self.centre + 0.9 * self.radii[2] * self.axes[2]

    def point(self, random: np.random.Generator, out: float) -> NDArray[np.float64]:
        """Return a point at ``out`` of the way to the surface, in a random direction other than that of the hilum."""
        direction = random.normal(size=3)
        direction /= np.linalg.norm(direction)
        direction[2] = -abs(direction[2]) if direction[2] > 0.3 else direction[2]
        point: NDArray[np.float64] = self.centre + (direction * self.radii * out) @ self.axes
        return point


def _draw_kidneys(random: np.random.Generator, scale: tuple[float, float], middle: float) -> list[Kidney]:
    sizes = [1.0, 1.0]
    if (odd := random.random()) < 0.12:                             # one is missing or small, the other enlarged
        sizes = [1.12, 0.0 if odd < 0.05 else random.uniform(0.55, 0.75)]
        random.shuffle(sizes)
    kidneys = []
    for side, size in zip((LEFT, RIGHT), sizes):
        if not size:
            continue
        z, y = random.normal(2 if side == LEFT else 18, 10), middle - 6 + random.normal(0, 4)
        x = side * max(58.0, 65 * scale[1] + random.normal(0, 4))
        down = np.array((1, -math.tan(math.radians(random.normal(10, 6))), side * math.tan(math.radians(random.normal(14, 6)))))
        down /= np.linalg.norm(down)
        open_to = math.radians(random.normal(35, 12))
        inward = np.array((0, -math.sin(open_to), -side * math.cos(open_to)))
        inward -= (inward @ down) * down
        inward /= np.linalg.norm(inward)
        radii = np.array((random.uniform(48, 60), random.uniform(22, 28), random.uniform(25, 31))) * size
        kidneys.append(Kidney(side, np.array((z, y, x)), radii, np.array((down, np.cross(down, inward), inward))))
    return kidneys


def _paint_kidney(patient: Patient, kidney: Kidney) -> None:
    """Paint a bean in fat with a pelvis, its cortex brighter than the pyramids."""
    random, (a, b, c) = patient.random, kidney.radii.astype(np.float32)
    patient.paint_ellipsoid(kidney.centre, kidney.radii + random.uniform(4, 12), FAT, axes=kidney.axes, margin=-1)
    box = patient.bounding_box(kidney.centre, kidney.radii * 1.35, kidney.axes)
    if box is None:
        return
    u, v, w = patient.local_coordinates(box, kidney.centre, kidney.axes)
    bent = w - np.float32(0.28) * c * (u / a) ** 2
    r = np.sqrt((u / a) ** 2 + (v / b) ** 2 + (bent / c) ** 2) - np.float32(0.05) * patient.random_field((u, v, w), 40)
    depth = np.minimum((1 - r) * b, patient.cavity_depth(box) - 3)

    def hollow(centre: float, long: float, deep: float, wide: float) -> Array:
        inside = 1 - np.sqrt((u / (long * a)) ** 2 + (v / (deep * b)) ** 2 + ((w - centre * c) / (wide * c)) ** 2)
        return inside * np.float32(deep) * b

    depth = np.minimum(depth, -hollow(0.98, 0.34, 0.5, 0.42))
    pyramids = np.sin(u * np.float32(4 * np.pi) / a + np.float32(random.uniform(0, 7))) + np.cos(3 * np.arctan2(v, bent))
    zone = patient.partial_volume((depth / b - np.float32(0.24)) * b)
    cortex, medulla = patient.hu("cortex"), patient.hu("medulla", 33)
    value = cortex + (medulla - cortex) * zone * np.clip(pyramids * 2 + 1.2, 0, 1)
    sinus = hollow(0.45, random.uniform(0.4, 0.58), random.uniform(0.3, 0.46), 0.52) + 2 * patient.random_field((u, v, w), 18)
    value = value + patient.partial_volume(sinus) * (np.float32(random.uniform(-95, -50)) - value)
    pelvis = hollow(0.6, random.uniform(0.12, 0.24), 0.2, 0.5) + 1.5 * patient.random_field((u, v, w), 15)
    value = value + patient.partial_volume(pelvis) * (np.float32(random.uniform(5, 40)) - value)
    patient.paint(box, patient.partial_volume(depth), value, 1)


def _paint_lesions(patient: Patient, kidneys: Sequence[Kidney]) -> None:
    random = patient.random
    for _ in range(int(random.choice(4, p=(0.5, 0.28, 0.15, 0.07)))):           # simple cysts: water without contrast
        kidney, radius = kidneys[int(random.integers(len(kidneys)))], math.exp(random.uniform(math.log(4), math.log(20)))
        centre = kidney.point(random, random.uniform(0.6, 1.05))
        patient.paint_ellipsoid(centre, np.full(3, radius), random.uniform(-2, 18), 1, lobes=0.04, margin=2)
    for _ in range(int(random.choice(4, p=(0.08, 0.74, 0.13, 0.05)))):
        kidney, radius = kidneys[int(random.integers(len(kidneys)))], 0.5 * math.exp(random.uniform(math.log(20), math.log(100)))
        centre = kidney.point(random, random.uniform(0.55, 1.1) if radius < 20 else random.uniform(0.75, 1.2))
        tissue = str(random.choice(("clear cell", "papillary", "oncocytic"), p=(0.7, 0.18, 0.12)))
        value = patient.hu(tissue, random.normal(33, 4)) * random.uniform(0.75, 1.2)
        axes = rotation_matrix(random.normal(size=3), random.uniform(0, 90))
        radii, lobes = radius * random.uniform(0.85, 1.15, 3), random.uniform(0.04, 0.16)
        painted = patient.paint_ellipsoid(centre, radii, None, axes=axes, lobes=lobes, margin=2)
        if painted is None:
            continue
        box, depth, parts = painted
        texture = value + np.float32(random.uniform(8, 26)) * patient.random_field(parts, max(8.0, 0.8 * radius), 6)
        if radius > 14 and random.random() < 0.45:                  # a necrotic core
            core = (depth - np.float32(radius * random.uniform(0.3, 0.6))
                    + np.float32(0.25 * radius) * patient.random_field(parts, radius))  # fmt: skip
            texture = texture + patient.partial_volume(core / 2) * (np.float32(random.uniform(10, 26)) - texture)
        patient.paint(box, patient.partial_volume(depth), texture, 2)


# ---- the scanner


def _blur_and_noise(patient: Patient, sigma: float) -> Array:
    """Add noise that is correlated as by a reconstruction kernel and a slow bias of beam hardening, and round to whole HU."""
    ndimage = import_optional("scipy.ndimage", "the noise of a scanner needs", "unet3d")
    random = patient.random
    noise = random.standard_normal(patient.image.shape, np.float32)
    blur = random.uniform(0.5, 0.9)
    noise = ndimage.gaussian_filter(noise, (0.3, blur, blur), truncate=2.5)
    noise *= np.float32(sigma) / noise[:: max(1, noise.shape[0] // 8)].std()
    cup, lean = random.uniform(2, 10), random.uniform(-6, 6, 2)
    y, x = patient.y[:, None] / np.float32(120), patient.x[None, :] / np.float32(170)
    bias = np.float32(cup) * (y * y + x * x - 1).clip(-1, 1) + np.float32(lean[0]) * y + np.float32(lean[1]) * x
    body = patient.image > -300
    noise *= np.where(body, np.float32(1), np.float32(0.4))
    image = patient.image + noise + np.where(body, bias[None], 0)
    return np.clip(np.rint(image), -1024, 3071)


def simulate_scan(random: np.random.Generator, target_mm: Sequence[float], extent_mm: float | None = None) -> Scan:
    """Simulate a scan of a patient. For a coarse target the scanner is coarse too, with half the spacing of the target or less."""
    slices = max(random.uniform(1.5, 5), target_mm[0] / 2)
    pixel = max(random.uniform(0.6, 0.95), 0.45 * max(target_mm[1:]))
    spacing = (float(np.float32(slices)), float(np.float32(pixel)), float(np.float32(pixel)))    # precision of a NIfTI header
    extent = extent_mm or random.uniform(220, 320)
    fat, wall = float(np.clip(random.lognormal(math.log(15), 0.4), 6, 36)), random.uniform(9, 14)
    scale = (random.uniform(0.9, 1.08), random.uniform(0.9, 1.1))
    width = 125 * scale[1] + (fat + wall) * 125 / 85
    field_of_view = 2 * width * random.uniform(0.97, 1.1)
    top = random.uniform(-0.57, -0.45) * extent
    rows, count = math.ceil(field_of_view / spacing[1]), math.ceil(extent / spacing[0])
    y, x = (np.arange(rows) - rows / 2) * spacing[1] + random.normal(0, 4, (2, 1))
    phase, strength = int(random.choice(3, p=(0.62, 0.3, 0.08))), random.uniform(0.75, 1.2)
    z, y, x = (axis.astype(np.float32) for axis in (top + np.arange(count) * spacing[0], y, x))
    enhancement = {tissue: strength * phases[phase] for tissue, phases in ENHANCEMENT.items()}
    patient = Patient(random, z, y, x, enhancement, edge=math.sqrt(spacing[0] * spacing[1]), scale=scale)
    middle = 36 * scale[0]
    kidneys = _draw_kidneys(random, scale, middle)
    _paint_trunk(patient, fat, wall)
    _paint_organs(patient)
    for kidney in kidneys:
        _paint_kidney(patient, kidney)
    _paint_vessels(patient, kidneys)
    _paint_lesions(patient, kidneys)
    _paint_muscles(patient, middle)
    _paint_spine(patient, middle)
    return Scan(_blur_and_noise(patient, random.uniform(8, 30)), patient.label, spacing)
