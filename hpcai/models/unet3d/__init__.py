"""3D U-Net: kidneys and their tumours in computed tomography."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["UNet3DConfig"],
        ".model": ["UNet3D"],
        ".objective": ["Batch", "loss", "score", "dice", "slices"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
        ".windows": ["SlidingWindow", "plan_windows"],
    },
)
