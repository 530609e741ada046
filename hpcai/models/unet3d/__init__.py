"""3D U-Net: kidneys and their tumours in computed tomography."""

from hpcai.lazy import attach
from hpcai.models.unet3d.config import UNet3DConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["UNet3D"],
        ".objective": ["Batch", "loss", "score", "dice", "slices"],
        ".parallel": ["parallelize", "cut_of"],
        ".load": ["load_weights"],
        ".windows": ["Windows", "sliding_window", "place"],
    },
)
__all__ = ["UNet3DConfig", *_names]
