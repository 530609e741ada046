"""3D U-Net: kidneys and their tumours in computed tomography."""

from hpcai.lazy import lazy
from hpcai.models.unet3d.config import UNet3DConfig

__getattr__, _names = lazy(
    __name__,
    {
        "UNet3D": ".model",
        "Batch": ".objective",
        "loss": ".objective",
        "score": ".objective",
        "dice": ".objective",
        "slices": ".objective",
        "parallelize": ".parallel",
        "cut_of": ".parallel",
        "load_weights": ".load",
        "save_weights": ".load",
        "Windows": ".windows",
        "sliding_window": ".windows",
        "place": ".windows",
    },
)
__all__ = ["UNet3DConfig", *_names]
