"""Implementation of `envoi plan`."""

import argparse
import json
import sys

from envoi.check import expect_int, expect_picture
from envoi.plan.api import plan_moe
from envoi.plan.layer import MAX_HOSTS, MoeLayer
from envoi.plan.network import Network
from envoi.plan.report import draw, encodable, to_text


def run(args: argparse.Namespace) -> int:
    """Print the plan of a layer; return 0. Raises ValueError for an invalid layer, or if the picture can't be drawn."""
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
    plan = plan_moe(layer, args.arch, args.max_tokens, Network(**given), True if args.presum else None)
    print(json.dumps(plan.to_dict(), indent=2) if args.json else encodable(to_text(plan), sys.stdout))
    if picture:
        draw(picture, plan)
    return 0
