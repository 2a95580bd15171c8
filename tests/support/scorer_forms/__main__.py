"""The error rates of the scorers on the cases of `scorer_forms`, per part and kind."""

from __future__ import annotations

import argparse
import sys

from tests.support.scorer_forms import PARTS, SOURCES, cases

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("scorers", nargs="*", default=list(SOURCES))
parser.add_argument("--part", choices=PARTS, default=None, help="this part only")
parser.add_argument("--show", action="store_true", help="the cases that are judged wrongly")
args = parser.parse_args()

write = sys.stdout.write
for scorer in args.scorers:
    made = cases(scorer)
    write(f"{scorer}: {len(made)} cases of {len({case.form.template for case in made})} forms\n")
    for part in PARTS if args.part is None else [args.part]:
        for right in (False, True):
            asked = [case for case in made if case.part == part and case.right is right]
            missed = [case for case in asked if not case.is_judged_well()]
            share = 100 * len(missed) / len(asked)
            write(
                f"  {part:10} false {'wrong' if right else 'right'} {len(missed):4} of {len(asked):4} ({share:.1f} %)\n"
            )
            for case in missed if args.show else []:
                write(f"      {case.text!r} for {case.truth!r}\n")
