"""For all tests: the same examples every time, no time limit on one example, nothing written beside the tests."""

from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")
