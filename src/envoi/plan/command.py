"""Implementation of `envoi plan`."""

import argparse
import json

from envoi.check import expect_picture
from envoi.plan.api import plan_moe
from envoi.plan.layer import MoeLayer
from envoi.plan.report import draw, to_text


def run(args: argparse.Namespace) -> int:
    """Print the plan of a layer; return 0. Raises ValueError for an invalid layer, or if the picture can't be drawn."""
    picture = expect_picture("--png", args.png) if args.png is not None else None
    if picture:
        import matplotlib  # noqa: F401  # fails before the work is done if it is missing
    layer = MoeLayer(args.hidden, args.inter, args.experts, args.topk, args.tokens, args.gpus, args.format)
    plan = plan_moe(layer, args.arch, args.max_tokens)
    print(json.dumps(plan.to_dict(), indent=2) if args.json else to_text(plan))
    if picture:
        draw(picture, plan)
    return 0
