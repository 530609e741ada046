"""A flat LCDM universe on a mesh: linear spectrum, growth, Gaussian field, 2LPT, particle counts, measured spectrum.

Conventions: k in h/Mpc, P(k) in (Mpc/h)^3, lengths in Mpc/h; growth is 1 at redshift 0. With N^3 cells of volume v and the
unnormalised forward FFT, P(k) = |FFT(delta)|^2 v / N^3. The growth neglects radiation, neutrinos are massless.

N cells per side   Z redshifts   K = N/2 + 1 (half spectrum of a real field)"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Field = NDArray[np.float32]

T_CMB = 2.7255                                  # K, Fixsen 2009
MAX_COUNT = np.iinfo(np.int16).max

# Lagrangian positions inside a cell, in cells from its corner: cubic, body-centred, face-centred, cubic of half the spacing.
# They avoid the cell's corner, where the cloud-in-cell kernel has a kink and responds to a small displacement by its modulus.
LATTICES: dict[int, tuple[tuple[float, float, float], ...]] = {
    1: ((0.5, 0.5, 0.5),),
    2: ((0.25, 0.25, 0.25), (0.75, 0.75, 0.75)),
    4: ((0.25, 0.25, 0.25), (0.25, 0.75, 0.75), (0.75, 0.25, 0.75), (0.75, 0.75, 0.25)),
    8: tuple((x, y, z) for x in (0.25, 0.75) for y in (0.25, 0.75) for z in (0.25, 0.75)),
}


@dataclass(frozen=True)
class Cosmology:
    """Matter and baryon densities today in units of the critical one, sigma_8, the tilt n_s and H_0 in km/s/Mpc."""

    omega_m: float
    sigma_8: float
    n_s: float
    hubble: float
    omega_b: float = 0.045

    @property
    def h(self) -> float:
        return self.hubble / 100


def transfer(k: Array, cosmology: Cosmology) -> Array:
    """Return the matter transfer function with baryon acoustic oscillations, 1 for k to 0, by Eisenstein & Hu 1998, ApJ 496, 605;
    their equation numbers are in comments. Its error is a few per cent against a Boltzmann code."""
    matter, baryon = cosmology.omega_m * cosmology.h**2, cosmology.omega_b * cosmology.h**2
    fraction, theta = baryon / matter, T_CMB / 2.7
    k = np.asarray(k, np.float64) * cosmology.h                                       # 1/Mpc: the paper's unit
    k_eq = 7.46e-2 * matter * theta**-2                                               # (3)
    q = k / (13.41 * k_eq)                                                            # (10)
    s, r_drag, z_eq, z_drag = _sound_horizon(matter, baryon, theta, k_eq)
    k_silk = 1.6 * baryon**0.52 * matter**0.73 * (1 + (10.4 * matter) ** -0.95)       # (7)

    a1 = (46.9 * matter) ** 0.670 * (1 + (32.1 * matter) ** -0.532)                   # (11)
    a2 = (12.0 * matter) ** 0.424 * (1 + (45.0 * matter) ** -0.582)
    alpha_c = a1**-fraction * a2 ** -(fraction**3)
    b1 = 0.944 / (1 + (458 * matter) ** -0.708)                                       # (12)
    b2 = (0.395 * matter) ** -0.0266
    beta_c = 1 / (1 + b1 * ((1 - fraction) ** b2 - 1))
    split = 1 / (1 + (k * s / 5.4) ** 4)                                              # (18)
    cold = split * _pressureless(q, 1.0, beta_c) + (1 - split) * _pressureless(q, alpha_c, beta_c)   # (17)

    y = (1 + z_eq) / (1 + z_drag)
    root = np.sqrt(1 + y)
    g = y * (-6 * root + (2 + 3 * y) * np.log((root + 1) / (root - 1)))               # (15)
    alpha_b = 2.07 * k_eq * s * (1 + r_drag) ** -0.75 * g                             # (14)
    beta_b = 0.5 + fraction + (3 - 2 * fraction) * np.sqrt((17.2 * matter) ** 2 + 1)  # (24)
    node = 8.41 * matter**0.435                                                       # (23)
    ks = np.maximum(k * s, 1e-12)
    shifted = ks / np.cbrt(1 + (node / ks) ** 3)                                      # (22) times k
    damped = alpha_b / (1 + (beta_b / ks) ** 3) * np.exp(-((k / k_silk) ** 1.4))
    baryons = (_pressureless(q, 1.0, 1.0) / (1 + (ks / 5.2) ** 2) + damped) * np.sinc(shifted / np.pi)   # (21)
    return fraction * baryons + (1 - fraction) * cold                                 # (16)


def _sound_horizon(matter: float, baryon: float, theta: float, k_eq: float) -> tuple[float, float, float, float]:
    """Return the sound horizon at the drag epoch in Mpc, the baryon-to-photon momentum ratio at it, and the two redshifts;
    equations 2 to 6."""
    z_eq = 2.50e4 * matter * theta**-4
    b1 = 0.313 * matter**-0.419 * (1 + 0.607 * matter**0.674)
    b2 = 0.238 * matter**0.223
    z_drag = 1291 * matter**0.251 / (1 + 0.659 * matter**0.828) * (1 + b1 * baryon**b2)
    r_eq, r_drag = (31.5 * baryon * theta**-4 * 1e3 / z for z in (z_eq, z_drag))
    arc = np.log((np.sqrt(1 + r_drag) + np.sqrt(r_drag + r_eq)) / (1 + np.sqrt(r_eq)))
    return float(2 / (3 * k_eq) * np.sqrt(6 / r_eq) * arc), r_drag, z_eq, z_drag


def _pressureless(q: Array, alpha: float, beta: float) -> Array:
    """Return the transfer function of matter without pressure, equations 19 and 20."""
    log = np.log(np.e + 1.8 * beta * q)
    return log / (log + (14.2 / alpha + 386 / (1 + 69.9 * q**1.08)) * q**2)


class Spectrum:
    """The linear matter spectrum P(k) at redshift 0, normalised so that the variance in spheres of 8 Mpc/h is sigma_8^2."""

    def __init__(self, cosmology: Cosmology) -> None:
        self.cosmology = cosmology
        self.amplitude = 1.0
        self.amplitude = (cosmology.sigma_8 / self.sigma(8.0)) ** 2

    def __call__(self, k: Array) -> Array:
        """Return P [(Mpc/h)^3] at k [h/Mpc]; 0 at k = 0."""
        k = np.asarray(k, np.float64)
        safe = np.where(k > 0, k, 1.0)
        return np.where(k > 0, self.amplitude * safe**self.cosmology.n_s * transfer(safe, self.cosmology) ** 2, 0.0)

    def sigma(self, radius: float) -> float:
        """Return the standard deviation of the density contrast in spheres of this radius [Mpc/h]."""
        k = np.geomspace(1e-5, 200 / radius, 8192)
        x = k * radius
        window = 3 * (np.sin(x) - x * np.cos(x)) / x**3
        window[x < 1e-2] = 1 - x[x < 1e-2] ** 2 / 10
        return float(np.sqrt(np.trapezoid(self(k) * window**2 * k**3 / (2 * np.pi**2), np.log(k))))


def growth(redshift: float, omega_m: float) -> float:
    """Return the linear growth D1, 1 today: the integral of Heath 1977, D1 ~ H(a) * integral of da / (a H)^3, for a flat
    universe."""
    return _growth_from_start(1 / (1 + redshift), omega_m) / _growth_from_start(1.0, omega_m)


def _growth_from_start(a: float, omega_m: float) -> float:
    """Return D1 normalised to a in the matter era. The substitution a' = a t^2 makes the integrand smooth for the Gauss rule."""
    node, weight = np.polynomial.legendre.leggauss(48)
    t, weight = (node + 1) / 2, weight / 2
    x = a * t**2
    integrand = (x / (omega_m + (1 - omega_m) * x**3)) ** 1.5 * 2 * a * t
    hubble = np.sqrt(omega_m / a**3 + 1 - omega_m)
    return float(2.5 * omega_m * hubble * np.sum(weight * integrand))


def second_growth(redshift: float, omega_m: float) -> float:
    """Return D2 of 2LPT, with D1 = 1 today: -3/7 D1^2 Omega_m(a)^(-1/143), Bouchet et al. 1995, for a flat universe."""
    a = 1 / (1 + redshift)
    omega = omega_m / (omega_m + (1 - omega_m) * a**3)
    return -3 / 7 * growth(redshift, omega_m) ** 2 * omega ** (-1 / 143)


class Mesh:
    """A periodic cube of N^3 cells of this width [Mpc/h], and its wave numbers."""

    def __init__(self, cells: int, width: float) -> None:
        self.cells, self.width = cells, width
        full = 2 * np.pi * np.fft.fftfreq(cells, width)
        half = 2 * np.pi * np.fft.rfftfreq(cells, width)
        self.k = tuple(axis.astype(np.float32) for axis in (full[:, None, None], full[None, :, None], half[None, None, :]))
        self.k2 = self.k[0] ** 2 + self.k[1] ** 2 + self.k[2] ** 2                    # [N, N, K]
        inside = [np.abs(axis) < 0.999 * self.nyquist for axis in self.k]
        # A mode on a Nyquist plane is its own mirror image: it has no derivative and cannot be shifted, and is excluded.
        self.modes = inside[0] & inside[1] & inside[2] & (self.k2 > 0)                # [N, N, K]

    @property
    def nyquist(self) -> float:
        return float(np.pi / self.width)

    def inverse_fft(self, modes: NDArray[np.complex64]) -> Field:
        side = (self.cells,) * 3
        return np.fft.irfftn(modes, s=side, axes=(0, 1, 2)).astype(np.float32, copy=False)


def linear_modes(mesh: Mesh, spectrum: Spectrum, noise: Field) -> NDArray[np.complex64]:
    """Return the Fourier modes [N, N, K] of the linear density contrast at redshift 0, from real white noise [N, N, N] of variance
    1: real in space, hence Hermitian, by construction."""
    k = np.geomspace(float(mesh.k2[0, 0, 1]) ** 0.5 / 2, np.sqrt(3.0) * mesh.nyquist * 1.01, 4096)
    root = np.exp(np.interp(0.5 * np.log(np.maximum(mesh.k2, k[0] ** 2)), np.log(k), 0.5 * np.log(spectrum(k) / mesh.width**3)))
    return np.fft.rfftn(noise) * (root * mesh.modes).astype(np.float32)


def displacements(mesh: Mesh, modes: NDArray[np.complex64]) -> tuple[NDArray[np.complex64], NDArray[np.complex64]]:
    """Return the Fourier modes of two potentials (psi1, psi2) [N, N, K] whose gradients move the particles at redshift z: x = q +
    D1 grad psi1 + D2 grad psi2, with laplacian psi1 = -delta and laplacian psi2 = sum over i < j of (phi_ii phi_jj - phi_ij^2), phi
    = -psi1. Bouchet et al. 1995; Scoccimarro 1998, appendix D."""
    inverse = np.divide(mesh.modes, mesh.k2, out=np.zeros_like(mesh.k2), where=mesh.modes)
    potential = modes * -inverse                                                      # phi: laplacian phi = delta
    k = mesh.k
    xx, yy, zz = (mesh.inverse_fft(potential * -(axis * axis)) for axis in k)
    source = xx * yy + yy * zz + zz * xx
    for first, second in ((0, 1), (1, 2), (2, 0)):
        source -= mesh.inverse_fft(potential * -(k[first] * k[second])) ** 2
    return -potential, np.fft.rfftn(source) * -inverse


def gradient(mesh: Mesh, potential: NDArray[np.complex64], offset: tuple[float, float, float]) -> list[Field]:
    """Return the three components [N, N, N] of the gradient, at the points (cell index + offset) * width."""
    phase = [np.exp(1j * axis * (mesh.width * shift)).astype(np.complex64) for axis, shift in zip(mesh.k, offset)]
    shifted = potential * (phase[0] * phase[1]) * phase[2]
    return [mesh.inverse_fft(shifted * (1j * axis)) for axis in mesh.k]


def deposit(mass: NDArray[np.float64], displacement: list[Field], offset: tuple[float, float, float]) -> None:
    """Add one particle per cell to mass [N, N, N], by periodic cloud-in-cell. ``displacement``: in cells, per axis [N, N, N]."""
    cells = mass.shape[0]
    flat = mass.reshape(-1)
    slab = max(1, 2**16 // cells**2)                                                  # particles that fit the cache
    for start in range(0, cells, slab):
        stop = min(start + slab, cells)
        index, weight = [], []
        for axis, (shift, part) in enumerate(zip(displacement, offset)):
            position = shift[start:stop] + np.float32(part)
            corner = np.floor(position)
            grid = np.arange(cells) if axis else np.arange(start, stop)
            low = corner.astype(np.intp) + grid.reshape([-1 if i == axis else 1 for i in range(3)])
            low -= cells * (low // cells)
            high = low + 1
            high[high == cells] = 0
            stride = cells ** (2 - axis)
            position -= corner
            index.append((low * stride, high * stride))
            weight.append((1 - position, position))
        for x in (0, 1):
            for y in (0, 1):
                plane, plane_weight = index[0][x] + index[1][y], weight[0][x] * weight[1][y]
                for z in (0, 1):
                    np.add.at(flat, (plane + index[2][z]).reshape(-1), (plane_weight * weight[2][z]).reshape(-1).astype(np.float64))


def density(mesh: Mesh, modes: NDArray[np.complex64], omega_m: float, redshifts: tuple[float, ...], particles: int) -> Array:
    """Return the matter per cell in units of the mean, [Z, N, N, N]: the same particles, moved from the same phases to each
    redshift."""
    first, second = displacements(mesh, modes)
    mass = np.zeros((len(redshifts),) + (mesh.cells,) * 3)
    steps = [(growth(z, omega_m) / mesh.width, second_growth(z, omega_m) / mesh.width) for z in redshifts]
    for offset in LATTICES[particles]:
        gradient_1, gradient_2 = gradient(mesh, first, offset), gradient(mesh, second, offset)
        for channel, (d1, d2) in zip(mass, steps):
            deposit(channel, [np.float32(d1) * a + np.float32(d2) * b for a, b in zip(gradient_1, gradient_2)], offset)
    return mass / particles


def round_counts(mass: Array, mean: float, generator: np.random.Generator) -> tuple[NDArray[np.int16], Array]:
    """Return integer counts [Z, N, N, N] whose expectation is mean * mass, and the variance that the rounding adds [Z].

    A fraction f is rounded up with probability f. Rounding to the nearest would empty the voids (0.4 becomes 0) and so tilt the
    spectrum; stochastic rounding only adds white noise, of the known variance f (1 - f). Raises OverflowError above int16."""
    counts, variance = np.empty(mass.shape, np.int16), np.empty(len(mass))
    for channel, exact in enumerate(mass):
        exact = exact * mean
        if exact.max() >= MAX_COUNT:
            raise OverflowError(f"a cell holds {exact.max():.0f} counts")
        down = np.floor(exact)
        fraction = exact - down
        counts[channel] = down + (generator.random(exact.shape) < fraction)
        variance[channel] = (fraction * (1 - fraction)).mean()
    return counts, variance


def power_spectrum(mesh: Mesh, counts: NDArray[np.generic], variance: float) -> NDArray[np.float32]:
    """Return P [(Mpc/h)^3] of every mode [N, N, K] of counts [N, N, N]: subtract the white noise of this variance, then divide by
    the cloud-in-cell window (product of sinc^2 over the axes, Hockney & Eastwood 1981). Shot noise is not subtracted: particles
    that start on a lattice have none on large scales."""
    field = counts.astype(np.float32)
    mean = field.mean(dtype=np.float64)
    modes = np.fft.rfftn(field / np.float32(mean) - 1)
    window = np.ones_like(mesh.k2)
    for axis in mesh.k:
        window *= np.sinc(axis * np.float32(mesh.width / (2 * np.pi))) ** 2
    square = modes.real**2 + modes.imag**2
    noise = mesh.width**3 * variance / mean**2
    return (square * np.float32(mesh.width**3 / mesh.cells**3) - np.float32(noise)) / window**2
