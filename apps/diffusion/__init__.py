"""Train diffusion and flow matching on fields."""
