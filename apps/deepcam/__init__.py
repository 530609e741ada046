"""Train DeepCAM on maps of the weather."""
