"""Training of diffusion and flow matching models on fields and latents."""
