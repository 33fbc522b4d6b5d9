"""Names of serving engines that the integrations rely on, in the releases that are supported.

    python -m tools.engines            download each supported release (300 MB), compare with what is recorded
    python -m tools.engines --record   and record what they have: tests/integrations/engines.json
    python -m tools.engines --newest   the newest releases: is anything that the integrations rely on gone?

Exits with 1 if an integration wouldn't run in one of them, or if a record isn't what a wheel has.
"""

import argparse
import sys

from tools.engines.facts import RELEASES, facts_of, problems, record, recorded


def main() -> int:
    """Check the releases; print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tools.engines", description=str(__doc__).splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write tests/integrations/engines.json")
    parser.add_argument("--newest", action="store_true", help="the newest releases instead of those supported")
    args = parser.parse_args()
    wanted = [(x, None) for x in RELEASES] if args.newest else [(x, y) for x, all_ in RELEASES.items() for y in all_]
    known, found, failed = recorded() if not (args.record or args.newest) else {}, {}, False
    for engine, release in wanted:
        version, facts = facts_of(engine, release)
        why = problems(engine, facts)
        if known and known.get(f"{engine} {version}") != facts:
            why.append("what is recorded differs: run python -m tools.engines --record")
        print(f"{engine} {version}: {'; '.join(why) or f'all {len(facts)} names are as they were'}", flush=True)
        found[f"{engine} {version}"] = facts
        failed = failed or bool(why)
    if args.record:
        record(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
