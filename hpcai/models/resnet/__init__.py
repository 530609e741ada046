"""ResNet: classes of images, such as the morphology of galaxies, with calibrated probabilities."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": ["MEAN", "STD", "ResNetConfig"],
        ".model": ["ResNet"],
        ".objective": ["Batch", "loss", "score", "predictions"],
        "hpcai.nn.calibration": ["calibration_error", "fit_temperature"],
        ".images": ["classify"],
        ".parallel": ["parallelize"],
        ".load": ["load_weights"],
    },
)
