"""Diffusion models and flow matching: denoising networks, samplers, scores, and autoencoders for latent diffusion."""

from hpcai.lazy import attach
from hpcai.models.diffusion.config import (
    DiffusionConfig,
    FieldsConfig,
    LatentsConfig,
    ObjectiveConfig,
    SamplerConfig,
    UNetConfig,
    VAEConfig,
)

__getattr__, _names = attach(
    __name__,
    {
        ".condition": ["UNCONDITIONAL", "Condition"],
        ".ensembles": ["ensemble_scores"],
        ".load": ["load_deferred", "load_network", "read_folder", "save_folder"],
        ".model": ["Diffusion"],
        ".objective": ["Batch", "draw_ensemble", "loss", "score"],
        ".prediction": ["Objective"],
        ".parallel": ["Slabs", "parallelize"],
        ".samplers": ["draw_samples", "sample"],
        ".unet": ["UNet"],
        ".vae": ["VAE", "Latents"],
    },
)
__all__ = [
    "DiffusionConfig", "FieldsConfig", "LatentsConfig", "ObjectiveConfig", "SamplerConfig", "UNetConfig", "VAEConfig", *_names,
]  # fmt: skip
