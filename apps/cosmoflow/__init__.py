"""Training of CosmoFlow on simulated universes."""
