"""DeepCAM: tropical cyclones and atmospheric rivers in maps of the weather."""

from hpcai.lazy import attach
from hpcai.models.deepcam.config import CLASSES, STRIDE, UNITS, VARIABLES, DeepCamConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["DeepCam"],
        ".objective": ["Batch", "loss", "score", "maps"],
        ".parallel": ["parallelize", "spatial_cut"],
        ".load": ["load_weights"],
    },
)
__all__ = ["CLASSES", "STRIDE", "UNITS", "VARIABLES", "DeepCamConfig", *_names]
