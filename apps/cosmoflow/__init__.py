"""Train CosmoFlow on simulated universes."""
