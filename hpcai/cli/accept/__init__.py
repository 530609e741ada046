"""`hpcai accept`: the acceptance of a machine."""
