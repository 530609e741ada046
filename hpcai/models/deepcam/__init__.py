"""DeepCAM: tropical cyclones and atmospheric rivers in maps of the weather."""

from hpcai.lazy import lazy
from hpcai.models.deepcam.config import CLASSES, STRIDE, UNITS, VARIABLES, DeepCamConfig

__getattr__, _names = lazy(
    __name__,
    {
        "DeepCam": ".model",
        "Batch": ".objective",
        "loss": ".objective",
        "score": ".objective",
        "maps": ".objective",
        "parallelize": ".parallel",
        "cut_of": ".parallel",
        "load_weights": ".load",
        "save_weights": ".load",
    },
)
__all__ = ["CLASSES", "STRIDE", "UNITS", "VARIABLES", "DeepCamConfig", *_names]
