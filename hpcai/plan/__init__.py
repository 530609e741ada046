"""What a run would take, computed before it is started."""
