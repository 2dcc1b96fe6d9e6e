"""``python -m tests.fuzz --seed 12 --ranks 2``: the case of a seed as a list, and what differs, in a smaller case."""

import argparse
import sys
import tempfile
import time

from tests.fuzz.draw import Case, draw, smaller
from tests.fuzz.run import run
from tests.harness.pool import PatientPool, RankFailure, RankPool

TIME_LIMIT = 40.0


def difference(pool: RankPool, case: Case) -> str:
    """What a case shows on the ranks of the pool, or ""."""
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        try:
            answers = pool.run(run, case, folder, time_limit=TIME_LIMIT)
        except RankFailure as error:
            return str(error)
    if told := sorted({text for text, _ in answers if text}):
        return "; ".join(told)
    first = answers[0][1]
    other = {name for _, sums in answers for name in sums.keys() & first.keys() if sums[name] != first[name]}
    return f"ranks hold other bits of {sorted(other)}" if other else ""


def kind(text: str) -> str:
    """What smaller cases must show, too."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "---", "..."))]
    errors = [line.split(":")[0] for line in lines if "Error" in line.split(":")[0]]
    return errors[-1] if errors else "hung" if "hung" in text else "difference"


def shrunk(pool: RankPool, case: Case, shown: str, *, seconds: float) -> tuple[Case, str]:
    """The smallest case found that shows a difference of the same kind."""
    end, wanted, more = time.monotonic() + seconds, kind(shown), True
    while more:
        more = False
        for candidate in smaller(case):
            if time.monotonic() > end:
                return case, shown
            text = difference(pool, candidate)
            if text and kind(text) == wanted:
                case, shown, more = candidate, text, True
                break
    return case, shown


def main() -> int:
    """Run cases; 1 where one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="so many seeds from there")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after that")
    parser.add_argument("--shrink", type=float, default=90, help="seconds for a smaller case, 0 for none")
    options = parser.parse_args()
    end, bad = time.monotonic() + 60 * options.minutes, 0
    with PatientPool(options.ranks) as pool:
        for seed in range(options.seed, options.seed + options.count):
            if time.monotonic() > end:
                print(f"time is over before seed {seed}")
                break
            case = draw(seed, options.ranks)
            text = difference(pool, case)
            if options.count == 1 or text:
                print(f"seed {seed} on {options.ranks} ranks", *case.lines(), text or "no difference", sep="\n")
            if text:
                bad += 1
                if options.shrink:
                    least, text = shrunk(pool, case, text, seconds=options.shrink)
                    print("smaller:", *least.lines(), text, sep="\n")
            sys.stdout.flush()
    print(f"{bad} cases differ")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
