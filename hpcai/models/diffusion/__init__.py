"""Diffusion models and flow matching: denoising networks, samplers, scores, and autoencoders for latent diffusion."""

from hpcai.lazy import attach

__getattr__, __all__ = attach(
    __name__,
    {
        ".config": [
            "DiffusionConfig", "DiffusionLoRAConfig", "FieldsConfig", "LatentsConfig", "ObjectiveConfig", "SamplerConfig",
            "UNetConfig", "VAEConfig",
        ],
        ".condition": ["UNCONDITIONAL", "Condition"],
        ".ensembles": ["ensemble_scores"],
        ".load": ["load_deferred", "load_network", "read_folder", "save_folder"],
        ".lora": ["adapt", "load_adapter", "merge", "save_adapter"],
        ".model": ["Diffusion"],
        ".objective": ["Batch", "draw_ensemble", "loss", "score"],
        ".prediction": ["Objective"],
        ".parallel": ["Slabs", "parallelize"],
        ".samplers": ["draw_samples", "sample"],
        ".unet": ["UNet"],
        ".vae": ["VAE", "Latents"],
    },
)  # fmt: skip
