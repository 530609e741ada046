"""Training of DeepCAM on maps of the weather."""
