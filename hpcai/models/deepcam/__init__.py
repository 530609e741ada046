"""DeepCAM: tropical cyclones and atmospheric rivers in maps of the weather."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["CLASSES", "STRIDE", "UNITS", "VARIABLES", "DeepCamConfig"],
        ".model": ["DeepCam"],
        ".objective": ["Batch", "loss", "score", "maps"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
    },
)
