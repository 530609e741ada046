"""3D U-Net: kidneys and their tumours in computed tomography."""

from hpcai.lazy import attach
from hpcai.models.unet3d.config import UNet3DConfig

__getattr__, _names = attach(
    __name__,
    {
        ".model": ["UNet3D"],
        ".objective": ["Batch", "loss", "score", "dice", "slices"],
        ".parallel": ["parallelize", "spatial_cut"],
        ".load": ["load_weights"],
        ".windows": ["SlidingWindow", "sliding_window_inference", "plan_windows"],
    },
)
__all__ = ["UNet3DConfig", *_names]
