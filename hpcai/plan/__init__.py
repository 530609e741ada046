"""What a training will take on a machine that is not here: steps on paper, their price, the way to a target."""
