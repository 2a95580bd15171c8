"""Print the error rates of the scorers on the cases of `scorer_forms`, by part and label."""

from __future__ import annotations

import argparse
import sys

from tests.support.scorer_forms import PARTS, SOURCES, cases

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("scorers", nargs="*", default=list(SOURCES))
parser.add_argument("--part", choices=PARTS, default=None, help="only this part")
parser.add_argument("--show", action="store_true", help="print the cases that are scored wrongly")
args = parser.parse_args()

write = sys.stdout.write
for scorer in args.scorers:
    all_cases = cases(scorer)
    write(f"{scorer}: {len(all_cases)} cases of {len({case.form.template for case in all_cases})} forms\n")
    for part in PARTS if args.part is None else [args.part]:
        for is_correct in (False, True):
            selected = [case for case in all_cases if case.part == part and case.is_correct is is_correct]
            errors = [case for case in selected if not case.is_scored_correctly()]
            percent = 100 * len(errors) / len(selected)
            scored_as = "wrong" if is_correct else "correct"
            write(f"  {part:10} false {scored_as} {len(errors):4} of {len(selected):4} ({percent:.1f} %)\n")
            for case in errors if args.show else []:
                write(f"      {case.text!r} for {case.truth!r}\n")
