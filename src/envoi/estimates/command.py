"""Implementation of `envoi estimate`."""

import argparse
import json
import sys

from envoi.check import expect_int, expect_picture
from envoi.estimates.layer import MAX_HOSTS, MoeLayer
from envoi.estimates.network import Network
from envoi.estimates.report import draw, encodable, to_text
from envoi.estimates.total import estimate


def run(args: argparse.Namespace) -> int:
    """Print the estimate of a layer; return 0. Raises ValueError for an invalid layer or picture."""
    picture = expect_picture("--png", args.png) if args.png is not None else None
    if picture:
        import matplotlib  # noqa: F401  # fails before the work is done if it is missing
    sizes = args.hidden, args.inter, args.experts, args.topk, args.tokens, args.gpus, args.format
    layer = MoeLayer(*sizes, expect_int("--hosts", args.hosts, 1, MAX_HOSTS))
    given = {"gb_per_s": args.network, "collective_us": args.collective}
    given = {name: value for name, value in given.items() if value is not None}
    if args.hosts == 1 and (given or args.presum):
        option = "--presum" if not given else "--network" if args.network is not None else "--collective"
        raise ValueError(f"{option}: expected it only beside --hosts 2 or more")
    found = estimate(layer, args.arch, args.max_tokens, Network(**given), True if args.presum else None)
    print(json.dumps(found.to_dict(), indent=2) if args.json else encodable(to_text(found), sys.stdout))
    if picture:
        draw(picture, found)
    return 0
