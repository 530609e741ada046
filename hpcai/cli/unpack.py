"""``hpcai environment unpack FILE.tar TARGET``: what hpcai/dist/relay.py does where no hpcai is installed."""

from collections.abc import Sequence

from hpcai.dist import relay


def main(argv: Sequence[str]) -> int:
    return relay.main(argv, "hpcai environment unpack")
