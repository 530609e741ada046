"""Prediction of training times on other machines: traces of steps, their cost, and the loader and pipeline of a run."""
